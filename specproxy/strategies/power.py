"""What `verify` would have seen: its power by the size of a fault.

Two sizes count. A lane that gets single tokens wrong shows by their share among the tokens compared; the
hardest to see is one that takes the runner-up, since where plain was nearly undecided that is no fault. A model
that is another one a little (requantised, say) shifts the log-odds of every token by some nats, and shows where
the shift is larger than plain's lead. How sure plain was of its own words tells both beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specproxy.strategies.verify import Position

__all__ = ["chance_of_shift", "leads", "share_sure", "smallest_rate", "smallest_shift"]

_SMALLEST, _LARGEST = 1e-3, 64.0  # nats: shifts that are looked at
_STEPS = 40  # of halving between them


def leads(positions: Sequence[Position], plain: bytes) -> tuple[float, ...]:
    """By how many nats plain's own token led the runner-up, for each token of its text that it told of."""
    found, begin = [], 0
    for position in positions:
        if begin >= len(plain):
            break
        others = [value for text, value in position.top if text != position.text]
        if others and math.isfinite(position.logprob):
            found.append(position.logprob - max(others))
        begin += len(position.text)
    return tuple(found)


def share_sure(texts: Sequence[Sequence[float]], tie_gap: float) -> float | None:
    """The share of tokens at which taking the runner-up would be a fault; None without any token."""
    every = [lead for text in texts for lead in text]
    return sum(lead > tie_gap for lead in every) / len(every) if every else None


def smallest_rate(tokens: float, sure: float = 0.95) -> float:
    """The share of wrong tokens from which on at least one shows in `tokens` tokens, `sure` of the time."""
    return 1.0 if tokens <= 0 else 1 - (1 - sure) ** (1 / tokens)


def chance_of_shift(texts: Sequence[Sequence[float]], tie_gap: float, shift: float) -> float:
    """The chance that at least one text's first difference is a fault.

    The log-odds of plain's token against the runner-up are taken to be off by N(0, shift²) at each token. A
    text ends with its first difference, which is a fault only where plain led by more than `tie_gap`.
    """
    missed = 1.0
    for text in texts:
        same, fault = 1.0, 0.0
        for lead in text:
            turned = 0.5 * math.erfc(lead / (shift * math.sqrt(2.0)))
            fault += same * turned if lead > tie_gap else 0.0
            same *= 1.0 - turned
        missed *= 1.0 - fault
    return 1.0 - missed


def smallest_shift(texts: Sequence[Sequence[float]], tie_gap: float, sure: float = 0.95) -> float | None:
    """The shift (nats) that shows with this chance; None where none does."""
    step = math.log(_LARGEST / _SMALLEST) / _STEPS
    grid = [_SMALLEST * math.exp(k * step) for k in range(_STEPS + 1)]
    found = next((k for k, shift in enumerate(grid) if chance_of_shift(texts, tie_gap, shift) >= sure), None)
    if not found:
        return None if found is None else grid[0]
    low, high = grid[found - 1], grid[found]
    for _ in range(20):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if chance_of_shift(texts, tie_gap, middle) >= sure else (middle, high)
    return high
