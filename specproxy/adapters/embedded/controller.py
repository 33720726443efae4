"""Which drafter proposes at a step, and how many tokens: decided anew at every step, without side effects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["Controller", "FixedController", "Plan", "StepOutcome", "StepView"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Who drafts, and how many tokens at most. Length 0 is a plain step."""

    drafter: str = "plain"
    length: int = 0


PLAIN = Plan()


@dataclass(frozen=True, slots=True)
class StepView:
    """What a sequence looks like before a step.

    `ready` are the drafters that could propose now, `match_length` is how many tokens the best earlier place
    agrees over (0: no place, or no n-gram drafter), `limits` the longest draft of each drafter, `room` the most
    draft tokens that can be used, `streams` the sequences that decode in the same step.
    """

    ready: tuple[str, ...]
    match_length: int
    limits: dict[str, int]
    room: int
    position: int
    streams: int = 1


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What became of a plan. `seconds` is the whole step's time, None where other sequences shared it.

    `copied` is how many tokens of the n-gram drafter's proposal this step has shown to be right or wrong,
    whoever drafted, and `agreed` how many of those were right from the first one on. `late` is how many tokens
    the drafter had to catch up with before it could guess.
    """

    plan: Plan
    match_length: int
    drafted: int
    accepted: int
    seconds: float | None = None
    draft_seconds: float = 0.0
    copied: int = 0
    agreed: int = 0
    late: int = 0


class Controller(Protocol):
    """Plans the steps of one sequence."""

    def plan(self, view: StepView) -> Plan:
        """What to do at this step. Asking twice gives the same answer."""
        ...

    def learn(self, outcome: StepOutcome) -> None:
        """Take in how a step went."""
        ...


class FixedController:
    """Drafters in order of precedence: the first that is ready proposes its longest draft.

    The n-gram drafter is ready where it has found a match, so ``ngram+mtp`` copies where it can and guesses
    elsewhere.
    """

    def plan(self, view: StepView) -> Plan:
        """See `Controller`."""
        for name in view.ready:
            if name != "ngram" or view.match_length:
                length = min(view.limits[name], view.room)
                return Plan(name, length) if length > 0 else PLAIN
        return PLAIN

    def learn(self, outcome: StepOutcome) -> None:
        """A fixed strategy learns nothing."""
