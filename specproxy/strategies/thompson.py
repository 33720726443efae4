"""Thompson sampling by its choice probabilities, and what exploring is worth.

Instead of one draw per lane, the probability that each lane is the cheapest under the posterior is computed,
and the lane is drawn from these. So the propensity of every decision is known, logged decisions can be
evaluated off-policy, and lanes that are not worth exploring can be taken out exactly.

The probabilities are in proportion to the product of a lane's chances against each other lane, which is exact
for two and keeps order for more, and costs microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

__all__ = ["Offer", "choice_probabilities", "drawn", "raised", "worth_exploring"]

_MOST_VARIANCE = (
    0.25  # of a logarithm: beyond it a log-normal mean says more about the tail than about the lane
)
_HOPELESS = -4.5  # standard deviations behind the best: below a millionth of one to be gained
_SQRT2 = math.sqrt(2.0)
_DENSITY = 1.0 / math.sqrt(2.0 * math.pi)


class Offer(Protocol):
    """Cost of a lane in seconds: posterior mean, median, and standard deviation to first order."""

    @property
    def expected(self) -> float: ...
    @property
    def central(self) -> float: ...
    @property
    def spread(self) -> float: ...


def raised(variance: float) -> float:
    """Mean of e^X, X ~ N(0, variance), for variances that are not all tail."""
    return math.exp(0.5 * (variance if variance < _MOST_VARIANCE else _MOST_VARIANCE))


def choice_probabilities(offers: Sequence[Offer]) -> list[float]:
    """Probability that each offer is drawn; sums to 1."""
    n = len(offers)
    if n == 1:
        return [1.0]
    found = [1.0] * n
    for i in range(n - 1):
        mine, spread = offers[i].central, offers[i].spread
        for j in range(i + 1, n):
            other = offers[j].spread
            width = math.sqrt(spread * spread + other * other) * _SQRT2
            gap = mine - offers[j].central
            chance = 0.5 * math.erfc(gap / width) if width > 0.0 else 0.5 - 0.5 * _sign(gap)
            found[i] *= chance
            found[j] *= 1.0 - chance
    whole = sum(found)
    if whole <= 0.0:
        best = min(range(n), key=lambda i: offers[i].central)
        return [1.0 if i == best else 0.0 for i in range(n)]
    return [p / whole for p in found]


class _HasChance(Protocol):
    @property
    def chance(self) -> float: ...


T = TypeVar("T", bound=_HasChance)


def drawn(offers: Sequence[T], draw: float) -> T:
    """The offer that a uniform draw in [0, 1) falls on."""
    for offer in offers:
        if draw < offer.chance:
            return offer
        draw -= offer.chance
    return max(offers, key=lambda offer: offer.chance)


def worth_exploring(offered: Offer, best: Offer, remaining: float) -> bool:
    """Whether trying this offer once can pay over the remaining requests of its workload.

    Trying costs its expected excess over the best now. It gains, over what remains, at most the expected amount
    by which it turns out cheaper (expected improvement; Frazier et al. 2008, knowledge gradient, with perfect
    information as the bound). Both sides are normal approximations.
    """
    gap = offered.expected - best.expected
    if gap <= 0.0:
        return True
    sd = math.sqrt(offered.spread * offered.spread + best.spread * best.spread)
    if sd <= 0.0:
        return False
    z = (best.central - offered.central) / sd
    if z < _HOPELESS:
        return False
    improvement = sd * (_DENSITY * math.exp(-0.5 * z * z) + z * 0.5 * math.erfc(-z / _SQRT2))
    return remaining * improvement > gap


def _sign(x: float) -> float:
    return float(x > 0.0) - float(x < 0.0)
