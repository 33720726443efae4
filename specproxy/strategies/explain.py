"""Decisions in words and numbers: why this lane, and what was expected of each."""

from __future__ import annotations

import math

from specproxy.records import Candidate
from specproxy.strategies.pricing import Pricing, View

__all__ = ["candidates", "claim", "reason"]

_Z90 = 1.6449  # intervals are 90%


def candidates(pricing: Pricing) -> tuple[Candidate, ...]:
    """All lanes that were priced, for the decision's record."""
    found = []
    for view in pricing.by_lane.values():
        reach, ratio, belief = math.exp(_Z90 * view.sd), view.ratio, view.belief
        found.append(
            Candidate(
                view.status.lane.id,
                view.name,
                ratio,
                ratio / reach,
                ratio * reach,
                belief.n,
                view.expected_s,
                view.allowed,
                view.note,
            )
        )
    return tuple(found)


def reason(pricing: Pricing, chosen: View, leader: View) -> tuple[str, str]:
    """Name of the branch that decided, and the reason in a sentence."""
    if chosen is not leader:
        return "explore", f"{claim(chosen)}, which is worth finding out"
    if chosen is pricing.plain:
        best = min(pricing.views, key=_expected)
        if best is not chosen:
            return "gate", f"{best.name} may be faster, but: {best.note}"
        if all(not v.allowed for v in pricing.views if v is not chosen):
            return "disabled", "every other lane loses to plain on this workload"
    return "exploit", f"{claim(chosen)}, the least of all lanes"


def claim(view: View) -> str:
    """What is expected of a lane, in words."""
    if view.is_plain:
        return "plain is expected to be fastest"
    reach = math.exp(_Z90 * view.sd)
    evidence = f"{view.belief.n:.0f} requests"
    if view.belief.replayed >= 0.5:
        evidence += f" and {view.belief.replayed:.0f} replays"
    return (
        f"{view.name} is expected to take {view.ratio:.2f} of plain's time per token "
        f"({view.ratio / reach:.2f} to {view.ratio * reach:.2f}, {evidence})"
    )


def _expected(view: View) -> float:
    return view.offer.expected
