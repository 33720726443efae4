"""The losslessness ladder: is a text that differs from plain's a matter of rounding, or a fault?

Greedy text of one model may differ between two ways of decoding it, since kernels round differently by batch
width. Where it first does, the model must have held both continuations for nearly equally likely: a difference
that rounding can turn is a *tie*, anything else a *fault*. Only the first difference in a text is judged, as
what comes behind it has another beginning.

Everything here is in bytes: tokens may end in the middle of a character.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

__all__ = [
    "TIE_GAP",
    "Fork",
    "Judgement",
    "LaneReport",
    "Position",
    "Verdict",
    "calibrated",
    "first_difference",
    "judge",
    "rejudged",
    "verdict_of",
]

TIE_GAP = 0.5
"""Log-probability gap (nats) up to which two continuations count as tied, unless another is asked for."""

WIDEST = 2.0
"""How far plain's own noise may widen that gap, as a factor: what is beyond is a fault of plain itself."""
MARGIN = 1.5  # the noise that was seen is a sample: the next may be larger


class Judgement(StrEnum):
    """What a first difference is."""

    TIE = "tie"
    FAULT = "fault"
    UNKNOWN = "unknown"


class Verdict(StrEnum):
    """What is said of a lane."""

    SAME = "same"  # every text is plain's, byte for byte
    TIES = "ties"  # texts differ from plain's only where it was nearly undecided
    FAULT = "fault"  # it said something that plain would not have said
    UNKNOWN = "unknown"  # some difference could not be judged
    NOT_RUN = "not run"  # no text was had from it


@dataclass(frozen=True, slots=True)
class Position:
    """One token of plain's text, its log-probability, and the likeliest tokens there with theirs (nats)."""

    text: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Fork:
    """The first difference of a text from plain's: at which byte and token, and what it is.

    `gap` is how much likelier plain's token was than the other one, in nats; with `at_least` the other one was
    not among those that were told, and the gap is larger than this.
    """

    prompt: int
    byte: int
    token: int | None
    judgement: Judgement
    gap: float | None = None
    at_least: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class LaneReport:
    """What was seen of a lane: `texts` that were compared, `tokens` of them up to the first difference,
    `unsteady` prompts that it answered differently the second time, and `failures` in words.

    `noise` is the largest gap (nats) at which it differed from itself, where that could be told.
    """

    lane: str
    strategy: str
    texts: int = 0
    tokens: int = 0
    unsteady: int = 0
    forks: tuple[Fork, ...] = ()
    failures: tuple[str, ...] = ()
    noise: float | None = None

    @property
    def verdict(self) -> Verdict:
        """What is said of the lane."""
        return verdict_of(self.texts, self.forks, self.failures)


def first_difference(ours: bytes, theirs: bytes) -> int | None:
    """The first byte in which two texts differ; where one begins with the other, its length. None: equal."""
    if ours == theirs:
        return None
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return index
    return min(len(ours), len(theirs))


def judge(
    prompt: int, plain: bytes, other: bytes, positions: Sequence[Position], tie_gap: float = TIE_GAP
) -> Fork | None:
    """The first difference of `other` from `plain`, judged by plain's log-probabilities; None if there is none.

    `positions` are the tokens of plain's text, and may go on behind its end: a stop token has empty text, or
    one that is not in `plain`. Fewer than are needed make the judgement UNKNOWN.
    """
    at = first_difference(plain, other)
    if at is None:
        return None
    spoken = b"".join(position.text for position in positions)
    start = spoken.find(plain)
    if start < 0 and spoken.startswith(plain[: at + 1]) and at < len(plain):
        start = 0  # it went another way later on, which is of no matter here
    if start < 0:
        return Fork(prompt, at, None, Judgement.UNKNOWN, why="plain's log-probabilities belong to another text")
    begin = -start  # where the token begins, in bytes of `plain`
    for index, position in enumerate(positions):
        end = begin + len(position.text)
        if end > at or (at == len(plain) and begin >= at):
            return _at(prompt, at, index, position, other[max(begin, 0) :], tie_gap)
        begin = end
    return Fork(
        prompt, at, None, Judgement.UNKNOWN, why="no log-probabilities were told for where plain stopped"
    )


def _at(prompt: int, at: int, index: int, position: Position, rest: bytes, tie_gap: float) -> Fork:
    """Compare plain's token with the one that `rest`, the other text from there on, begins with."""
    others = [(text, value) for text, value in position.top if text != position.text]
    if not others or not all(math.isfinite(value) for _, value in (*others, ("", position.logprob))):
        return Fork(prompt, at, index, Judgement.UNKNOWN, why="plain told no usable log-probabilities")
    if rest:
        fitting = [value for text, value in others if text and rest.startswith(text)]
    else:
        fitting = [max(value for _, value in others)]  # it stopped: which token that was is not told
    if fitting:
        gap = position.logprob - max(fitting)
        found = Judgement.TIE if gap <= tie_gap else Judgement.FAULT
        return Fork(prompt, at, index, found, gap)
    gap = position.logprob - min(value for _, value in others)
    if gap > tie_gap:
        return Fork(prompt, at, index, Judgement.FAULT, gap, at_least=True)
    why = "what it said is not among the tokens that plain told"
    return Fork(prompt, at, index, Judgement.UNKNOWN, gap, at_least=True, why=why)


def rejudged(fork: Fork, tie_gap: float) -> Fork:
    """The same difference by another gap; one without a gap stays as it is."""
    if fork.gap is None:
        return fork
    if fork.gap > tie_gap:
        return replace(fork, judgement=Judgement.FAULT)
    return replace(fork, judgement=Judgement.UNKNOWN if fork.at_least else Judgement.TIE)


def calibrated(tie_gap: float, noise: float | None) -> float:
    """The gap that counts as a tie, given the largest one (nats) at which plain differed from itself."""
    if noise is None or noise > WIDEST * tie_gap:
        return tie_gap
    return max(tie_gap, min(MARGIN * noise, WIDEST * tie_gap))


def verdict_of(texts: int, forks: Iterable[Fork], failures: Sequence[str] = ()) -> Verdict:
    """The verdict on a lane of which `texts` texts were had: its worst fork counts."""
    found = {fork.judgement for fork in forks}
    if Judgement.FAULT in found:
        return Verdict.FAULT
    if not texts:
        return Verdict.NOT_RUN
    if failures or Judgement.UNKNOWN in found:
        return Verdict.UNKNOWN
    return Verdict.TIES if Judgement.TIE in found else Verdict.SAME
