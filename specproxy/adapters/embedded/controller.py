"""Which drafter proposes at a step, and how many tokens: decided anew at every step, without side effects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol

__all__ = ["Controller", "FixedController", "Plan", "StepOutcome", "StepView"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Who drafts, and how many tokens at most. Length 0 is a plain step.

    In a chain, `lead_length` tokens of a drafter that costs nothing (`lead`) come first, and `drafter` goes on
    behind them. `expected` is how many tokens the step is expected to give.
    """

    drafter: str = "plain"
    length: int = 0
    lead: str = ""
    lead_length: int = 0
    expected: float = field(default=1.0, compare=False)

    @property
    def total(self) -> int:
        """Tokens drafted, at most."""
        return self.lead_length + self.length

    @property
    def label(self) -> str:
        """For people and reports: ``plain``, ``mtp:3``, ``forced:4>mtp:2``."""
        if not self.length:
            return self.drafter
        lead = f"{self.lead}:{self.lead_length}>" if self.lead_length else ""
        return f"{lead}{self.drafter}:{self.length}"


PLAIN = Plan()


class StepView(NamedTuple):  # one a step and sequence, as `StepOutcome`: dataclasses take longer to make
    """What a sequence looks like before a step.

    `ready` are the drafters that could propose now, `match_length` is how many tokens the best earlier place
    agrees over (0: no place, or no n-gram drafter), `limits` the longest draft of each drafter, `room` the most
    draft tokens that can be used, `streams` the sequences that decode in the same step. `forced` is how many
    tokens the grammar leaves no choice about, `context` how many tokens came before. The other sequences feed
    `others_width` tokens in this step, which are expected to give `others_tokens` (None: one each). `late` is
    how many tokens each drafter would have to catch up with before it could guess.
    """

    ready: tuple[str, ...]
    match_length: int
    limits: dict[str, int]
    room: int
    position: int
    streams: int = 1
    forced: int = 0
    context: int = 0
    others_width: int | None = None
    others_tokens: float | None = None
    late: Mapping[str, int] = MappingProxyType({})


class StepOutcome(NamedTuple):
    """What became of a plan. `seconds` is the whole step's time, None where other sequences shared it.

    `copied` is how many tokens of the n-gram drafter's proposal this step has shown to be right or wrong,
    whoever drafted, and `agreed` how many of those were right from the first one on; `forced`, `shown` and
    `followed` are the same of the grammar's forced tokens: how many there were, were shown, and were right.
    `late` is how many tokens the drafter had to catch up with before it could guess. `proposed` counts the
    draft before the grammar cut it at its first illegal token.
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
    proposed: int = 0
    forced: int = 0
    shown: int = 0
    followed: int = 0


class Controller(Protocol):
    """Plans the steps of one sequence."""

    def rests(self, streams: int) -> bool:
        """Whether this step, of so many sequences, is a plain one if there is nothing to copy and nothing
        forced: then there is no need to ask."""
        ...

    def plan(self, view: StepView) -> Plan:
        """What to do at this step. Asking twice gives the same answer."""
        ...

    def learn(self, outcome: StepOutcome) -> None:
        """Take in how a step went."""
        ...

    def levels(self) -> dict[str, tuple[float, ...]]:
        """Guesses by level of their chance (`regimes.LEVELS`), by drafter; for the learner."""
        ...

    def keeps(self, drafter: str) -> bool:
        """Whether to keep a drafter's cache in step, even while it is not used."""
        ...

    def explain(self) -> str:
        """Why nothing is drafted any more; empty while something is, and where no choice is made."""
        ...


class FixedController:
    """Drafters in order of precedence: the first that is ready proposes its longest draft.

    The n-gram drafter is ready where it has found a match, so ``ngram+mtp`` copies where it can and guesses
    elsewhere.
    """

    def rests(self, streams: int) -> bool:  # noqa: ARG002  # auto's need
        """See `Controller`."""
        return False

    def plan(self, view: StepView) -> Plan:
        """See `Controller`."""
        for name in view.ready:
            if name != "ngram" or view.match_length:
                length = min(view.limits[name], view.room)
                return Plan(name, length) if length > 0 else PLAIN
        return PLAIN

    def learn(self, outcome: StepOutcome) -> None:
        """A fixed strategy learns nothing."""

    def levels(self) -> dict[str, tuple[float, ...]]:
        """See `Controller`."""
        return {}

    def keeps(self, drafter: str) -> bool:  # noqa: ARG002  # auto's need
        """See `Controller`."""
        return True

    def explain(self) -> str:
        """See `Controller`."""
        return ""
