"""How much faster than plain, from pairs: the same request both ways, or a request and one like it on plain.

Times are sums over pairs, so a long request counts for more than a short one, as it does for whoever waits.
Intervals are bootstrap intervals that draw whole clusters: pairs that share something (the prompt, or the plain
request that several are compared with) stand or fall together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["ENOUGH", "Gain", "Pair", "gain"]

DRAWS = 2000
ENOUGH = 5  # clusters below which no interval is given
LEVEL = 0.95
AT_ONCE = 1 << 20  # drawn numbers that are held in memory at a time


@dataclass(frozen=True, slots=True)
class Pair:
    """Seconds that plain takes, and seconds that the other takes, for the same work."""

    plain_s: float
    other_s: float
    cluster: str


@dataclass(frozen=True, slots=True)
class Gain:
    """Plain's time over the other's: above 1 is faster than plain.

    `low` and `high` bound the 95% interval; `sure` is the share of draws in which the other was faster. These
    are None where there are too few clusters to tell. `saved_s` is plain's time less the other's.
    """

    speed: float
    pairs: int
    clusters: int
    saved_s: float
    low: float | None = None
    high: float | None = None
    sure: float | None = None
    saved_low_s: float | None = None
    saved_high_s: float | None = None


def gain(pairs: Sequence[Pair], rng: np.random.Generator, draws: int = DRAWS) -> Gain | None:
    """What the pairs show; None without pairs, or where the other took no time."""
    plain, other = _by_cluster(pairs)
    if not pairs or other.sum() <= 0:
        return None
    speed, saved = float(plain.sum() / other.sum()), float(plain.sum() - other.sum())
    count = len(plain)
    if count < ENOUGH:
        return Gain(speed, len(pairs), count, saved)
    sums = []
    for start in range(0, draws, max(1, AT_ONCE // count)):
        drawn = rng.integers(count, size=(min(draws - start, max(1, AT_ONCE // count)), count))
        sums.append((plain[drawn].sum(axis=1), other[drawn].sum(axis=1)))
    plains, others = (np.concatenate(part) for part in zip(*sums, strict=True))
    ratios, savings = plains / others, plains - others
    ends = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    low, high = (float(end) for end in np.quantile(ratios, ends))
    least, most = (float(end) for end in np.quantile(savings, ends))
    sure = float((ratios > 1).mean() + (ratios == 1).mean() / 2)
    return Gain(speed, len(pairs), count, saved, low, high, sure, least, most)


def _by_cluster(pairs: Sequence[Pair]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    sums: dict[str, list[float]] = {}
    for pair in pairs:
        both = sums.setdefault(pair.cluster, [0.0, 0.0])
        both[0] += pair.plain_s
        both[1] += pair.other_s
    table = np.array(list(sums.values()), dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
