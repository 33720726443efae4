"""Thompson sampling by its choice probabilities, and what exploring is worth.

Instead of one draw per lane, the probability that each lane is the cheapest under the posterior is computed,
and the lane is drawn from these. That is the same distribution over lanes, but the propensity of every decision
is known, so that logged decisions can be evaluated off-policy, and lanes that are not worth exploring can be
taken out exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Offer", "choice_probabilities", "worth_exploring"]


@dataclass(frozen=True, slots=True)
class Offer:
    """Cost of a lane in units of the request's decode time at the level: ``fixed + e^X``, X ~ N(mean, sd²)."""

    fixed: float
    mean: float
    sd: float

    @property
    def expected(self) -> float:
        """Posterior mean of the cost (log-normal mean; capped, as a wide posterior has a heavy tail)."""
        return self.fixed + math.exp(self.mean + 0.5 * min(self.sd * self.sd, 0.25))

    @property
    def central(self) -> float:
        """Cost at the posterior's median."""
        return self.fixed + math.exp(self.mean)


# Gauss-Hermite nodes and weights for N(0, 1), nine points.
_NODES = (0.0, 1.0232556637891326, 2.0768479786778302, 3.2054290028564703, 4.5127458633997826)
_WEIGHTS = (
    0.40634920634920635,
    0.2440975028949394,
    0.04991640676521787,
    0.002789141321231769,
    2.2345844007746580e-05,
)
_POINTS = tuple((-z, w) for z, w in zip(_NODES[1:], _WEIGHTS[1:], strict=True)) + tuple(
    zip(_NODES, _WEIGHTS, strict=True)
)
_SQRT2 = math.sqrt(2.0)


def choice_probabilities(offers: Sequence[Offer]) -> list[float]:
    """Probability that each offer is the cheapest, by nine-point quadrature; sums to 1."""
    if len(offers) == 1:
        return [1.0]
    found = []
    for i, offer in enumerate(offers):
        others = [o for j, o in enumerate(offers) if j != i]
        total = 0.0
        for z, weight in _POINTS:
            cost = offer.fixed + math.exp(offer.mean + offer.sd * z)
            for other in others:
                weight *= _chance_above(other, cost)
            total += weight
        found.append(total)
    whole = sum(found)
    if whole <= 0.0:
        best = min(range(len(offers)), key=lambda i: offers[i].central)
        return [1.0 if i == best else 0.0 for i in range(len(offers))]
    return [p / whole for p in found]


def worth_exploring(offer: Offer, best: Offer, remaining: float) -> bool:
    """Whether trying this offer once can pay over the remaining requests of its workload.

    Trying costs its expected excess over the best now. It gains, over what remains, at most the expected amount
    by which it turns out cheaper (expected improvement; Frazier et al. 2008, knowledge gradient, with perfect
    information as the bound). Both sides are normal approximations in cost units.
    """
    gap = offer.expected - best.expected
    if gap <= 0.0:
        return True
    sd = math.hypot(math.exp(offer.mean) * offer.sd, math.exp(best.mean) * best.sd)
    if sd <= 0.0:
        return False
    z = (best.central - offer.central) / sd
    density = math.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    improvement = sd * (density + z * 0.5 * math.erfc(-z / _SQRT2))
    return remaining * improvement > gap


def _chance_above(offer: Offer, cost: float) -> float:
    if cost <= offer.fixed:
        return 1.0
    z = (math.log(cost - offer.fixed) - offer.mean) / max(offer.sd, 1e-9)
    return 0.5 * math.erfc(z / _SQRT2)
