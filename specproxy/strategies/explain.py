"""Decisions in words and numbers: why this lane, and what was expected of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, overload

from specproxy.records import Candidate, Decision
from specproxy.strategies.pricing import LOSES, Pricing, View

__all__ = ["Candidates", "claim", "explained", "reason"]

_Z90 = 1.6449  # intervals are 90%


class Candidates(Sequence[Candidate]):
    """All lanes that were priced, for the decision's record; worked out when they are first looked at.

    Nobody looks at those of most requests. What they are worked out from doesn't change after the decision.
    """

    __slots__ = ("_found", "_pricing")

    def __init__(self, pricing: Pricing) -> None:
        self._pricing = pricing
        self._found: tuple[Candidate, ...] | None = None

    def _all(self) -> tuple[Candidate, ...]:
        if self._found is None:
            self._found = tuple([_candidate(view) for view in self._pricing.priced])
        return self._found

    @overload
    def __getitem__(self, index: int) -> Candidate: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...

    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._pricing.priced)

    def __eq__(self, other: object) -> bool:
        return self._all() == tuple(other) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())


def explained(decision: Decision) -> dict[str, Any]:
    """A decision as JSON-serialisable data.

    Of each candidate: the ratio to plain's time per token with its 90% interval, what it was `prior` to any
    evidence, the weight of that evidence (`n` requests that ran there, `replays` of others, `profiled` runs of
    our own), the expected seconds of the whole request with their interval and the `fixed_s` before the first
    token, whether it was `allowed`, a `note` that says why not, and the `propensity` with which it was drawn.
    """
    return {
        "lane": decision.lane.id,
        "strategy": decision.lane.strategy.name,
        "target": decision.lane.target,
        "workload": decision.workload.key,
        "flags": sorted(decision.workload.flags),
        "signals": list(decision.workload.signals),
        "rule": decision.rule,
        "reason": decision.reason,
        "propensity": decision.propensity,
        "repeat": decision.repeat,
        "candidates": [_candidate_data(candidate) for candidate in decision.candidates],
    }


def reason(pricing: Pricing, chosen: View, leader: View) -> tuple[str, str]:
    """Name of the branch that decided, and the reason in a sentence."""
    if chosen is not leader:
        hope = f"plain may be faster than {leader.name}" if chosen.is_plain else claim(chosen)
        return "explore", f"{hope}, which is worth finding out"
    if chosen is pricing.plain:
        best = min(pricing.views, key=attrgetter("expected"))
        if best is not chosen:
            return "gate", f"{best.name} may be faster, but: {best.note}"
        if all(v.note == LOSES for v in pricing.views if v is not chosen):
            return "disabled", "every other lane loses to plain on this workload"
    if chosen.is_plain:
        return "exploit", claim(chosen)
    link = "and" if chosen.ratio < 1 else "but"  # with less to wait for, to load or to read before
    return "exploit", f"{claim(chosen)}, {link} the whole request the least of all lanes"


def claim(view: View) -> str:
    """What is expected of a lane, in words."""
    if view.is_plain:
        return "plain is expected to be fastest"
    reach = math.exp(_Z90 * view.sd)
    evidence = _counted(view.belief.n, "request")
    if view.belief.profiled >= 0.5:
        evidence += f", {_counted(view.belief.profiled, 'run')} of our own"
    if view.belief.replayed >= 0.5:
        evidence += f" and {_counted(view.belief.replayed, 'replay')}"
    return (
        f"{view.name} is expected to take {view.ratio:.2f} of plain's time per token "
        f"({view.ratio / reach:.2f} to {view.ratio * reach:.2f}, {evidence})"
    )


def _counted(n: float, noun: str) -> str:
    number = f"{n:.0f}"
    return f"{number} {noun}" if number == "1" else f"{number} {noun}s"


def _candidate(view: View) -> Candidate:
    reach, belief = math.exp(_Z90 * view.sd), view.belief
    return Candidate(
        view.status.lane.id,
        view.name,
        view.ratio,
        view.ratio / reach,
        view.ratio * reach,
        belief.n,
        view.expected_s,
        view.allowed,
        view.note,
        prior=math.exp(belief.prior),
        replays=belief.replayed,
        fixed_s=view.fixed_s,
        propensity=view.chance,
        profiled=belief.profiled,
    )


def _candidate_data(c: Candidate) -> dict[str, Any]:
    decode = None if c.expected_s is None else c.expected_s - c.fixed_s
    return {
        "lane": c.lane,
        "strategy": c.strategy,
        "ratio": c.ratio,
        "ratio_lo": c.ratio_lo,
        "ratio_hi": c.ratio_hi,
        "prior": c.prior,
        "n": c.n,
        "replays": c.replays,
        "profiled": c.profiled,
        "expected_s": c.expected_s,
        "expected_lo_s": None if decode is None else c.fixed_s + decode * c.ratio_lo / c.ratio,
        "expected_hi_s": None if decode is None else c.fixed_s + decode * c.ratio_hi / c.ratio,
        "fixed_s": c.fixed_s,
        "allowed": c.allowed,
        "note": c.note,
        "propensity": c.propensity,
    }
