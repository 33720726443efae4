"""What a request's steps did: counts for its reply, and the report to the learner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specproxy.adapters.embedded.controller import PLAIN, Controller, Plan, StepOutcome
from specproxy.adapters.embedded.types import GenerateRequest
from specproxy.records import DrafterReport, EngineReport
from specproxy.strategies.drafters.ngram import NgramDrafter

__all__ = ["Tally"]

LONGEST_MATCH = NgramDrafter().max_n  # tokens; longer ones are not told apart


@dataclass(slots=True)
class Tally:
    """Counts of one request, as llama-server and the learner want them."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    widths: dict[int, list[float]] = field(default_factory=dict)  # width → [steps, seconds]
    by_drafter: dict[str, _DrafterTally] = field(default_factory=dict)
    plans: dict[str, int] = field(default_factory=dict)  # steps by plan
    stopped: str = ""  # which drafter cannot go on, and why

    def add(self, outcome: StepOutcome) -> None:
        """Count one step."""
        self.drafted += outcome.drafted
        self.accepted += outcome.accepted
        self._add_step(1 + outcome.drafted, outcome.seconds, outcome.plan)
        plan = outcome.plan
        if outcome.copied:
            self._of("ngram").copied(outcome)
        lead = min(plan.lead_length, outcome.drafted)
        if lead:
            self._of(plan.lead).add(lead, min(outcome.accepted, lead), lead)
        if outcome.proposed > lead:
            tally = self._of(plan.drafter)
            tally.add(
                outcome.drafted - lead,
                max(0, outcome.accepted - lead),
                outcome.proposed - lead if outcome.accepted >= lead else 0,
            )
            tally.seconds += outcome.draft_seconds

    def _of(self, drafter: str) -> _DrafterTally:
        tally = self.by_drafter.get(drafter)
        if tally is None:
            tally = self.by_drafter[drafter] = _DrafterTally()
        return tally

    def add_plain(self, seconds: float | None) -> None:
        """Count a step of a sequence that has no drafters; seconds as in `StepOutcome`."""
        self._add_step(1, seconds, PLAIN)

    def _add_step(self, width: int, seconds: float | None, plan: Plan) -> None:
        self.steps += 1
        self.plans[plan.label] = self.plans.get(plan.label, 0) + 1
        if seconds is not None:
            total = self.widths.get(width)
            if total is None:
                total = self.widths[width] = [0, 0.0]
            total[0] += 1
            total[1] += seconds

    def report(
        self, request: GenerateRequest, controller: Controller, output: Sequence[int], shortest: int
    ) -> EngineReport:
        """For the learner; `shortest` is the n-gram drafter's shortest match in tokens, 0 without one."""
        levels = controller.levels()
        return EngineReport(
            request_id=request.request_id,
            strategy=request.strategy.name,
            steps=self.steps,
            drafters=tuple(
                tally.report(name, shortest, levels.get(name, ())) for name, tally in self.by_drafter.items()
            ),
            widths={width: (int(steps), seconds) for width, (steps, seconds) in self.widths.items()},
            prompt_ids=request.prompt,
            output_ids=tuple(output),
            stopped_drafting="; ".join(filter(None, (self.stopped, controller.explain()))),
            plans=tuple(self.plans.items()),
        )


@dataclass(slots=True)
class _DrafterTally:
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    positions: list[list[int]] = field(default_factory=list)  # [accepted, tried]
    matches: list[list[int]] = field(default_factory=list)

    def add(self, drafted: int, accepted: int, proposed: int) -> None:
        """Count this drafter's part of a step; of `proposed` tokens the grammar has left `drafted`."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        tried = min(proposed, accepted + 1)  # what comes after a rejected token was not tried
        _count(self.positions, accepted, tried)

    def copied(self, outcome: StepOutcome) -> None:
        """Count what a step has shown of the copy that was at hand, used or not: every right token makes the
        match longer."""
        for i in range(min(outcome.copied, outcome.agreed + 1)):
            length = min(outcome.match_length + i, max(LONGEST_MATCH, outcome.match_length))
            while len(self.matches) <= length:
                self.matches.append([0, 0])
            self.matches[length][0] += i < outcome.agreed
            self.matches[length][1] += 1

    def report(self, name: str, shortest: int, levels: tuple[float, ...]) -> DrafterReport:
        return DrafterReport(
            drafter=name,
            steps=self.steps,
            drafted=self.drafted,
            accepted=self.accepted,
            by_position=tuple((hit, tried) for hit, tried in self.positions),
            by_match=tuple((hit, tried) for hit, tried in self.matches[shortest:]),
            draft_s=self.seconds,
            levels=levels,
        )


def _count(positions: list[list[int]], accepted: int, tried: int) -> None:
    while len(positions) < tried:
        positions.append([0, 0])
    for i in range(tried):
        positions[i][0] += i < accepted
        positions[i][1] += 1
