"""One request on the decode thread: its tokens, its text, its counters."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specproxy.adapters.embedded.controller import PLAIN, Controller, Plan, StepOutcome
from specproxy.adapters.embedded.forced import ForcedDrafter
from specproxy.adapters.embedded.prefix_cache import Slot
from specproxy.adapters.embedded.sampler import Sampler
from specproxy.adapters.embedded.text import TextStream
from specproxy.adapters.embedded.types import Finished, GenerateRequest, TokenEvent, TokenLogprob
from specproxy.adapters.embedded.vocabulary import Vocabulary
from specproxy.records import DrafterReport, EngineReport
from specproxy.strategies.drafters.ngram import NgramDrafter

__all__ = ["HiddenRows", "Sequence", "Sink", "Tally"]

Floats = npt.NDArray[np.float32]

LONGEST_MATCH = NgramDrafter().max_n  # tokens; longer ones are not told apart


class Sink(Protocol):
    """Where the events of a request go."""

    @property
    def full(self) -> bool:
        """Whether the reader is behind: the sequence pauses until it has caught up."""
        ...


class HiddenRows:
    """Hidden rows of the target that the MTP head has not been fed yet, oldest first."""

    def __init__(self, width: int) -> None:
        self._rows = np.zeros((32, width), np.float32)
        self.n = 0

    def push(self, rows: Floats) -> None:
        """Append copies of rows, shape (k, width)."""
        end = self.n + len(rows)
        if end > len(self._rows):
            grown = np.zeros((2 * end, self._rows.shape[1]), np.float32)
            grown[: self.n] = self._rows[: self.n]
            self._rows = grown
        self._rows[self.n : end] = rows
        self.n = end

    def reset(self, *, start: bool) -> None:
        """Empty it; with `start`, put in the zero row that stands before position 0."""
        self.n = 0
        if start:
            self.push(np.zeros((1, self._rows.shape[1]), np.float32))

    def newest(self) -> Floats:
        """The last row, shape (1, width), valid until the next call; those before it are removed."""
        self.take(self.n - 1)
        return self._rows[:1]

    def take(self, count: int) -> Floats:
        """The first `count` rows, removed."""
        taken = self._rows[:count].copy()
        self._rows[: self.n - count] = self._rows[count : self.n]
        self.n -= count
        return taken


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

    def report(self, sequence: Sequence) -> EngineReport:
        """For the learner."""
        levels = sequence.controller.levels()
        shortest = sequence.ngram.min_n if sequence.ngram is not None else 0
        return EngineReport(
            request_id=sequence.request.request_id,
            strategy=sequence.request.strategy.name,
            steps=self.steps,
            drafters=tuple(
                tally.report(name, shortest, levels.get(name, ())) for name, tally in self.by_drafter.items()
            ),
            widths={width: (int(steps), seconds) for width, (steps, seconds) in self.widths.items()},
            prompt_ids=sequence.request.prompt,
            output_ids=tuple(sequence.tokens[sequence.n_prompt :]),
            stopped_drafting="; ".join(filter(None, (self.stopped, sequence.controller.explain()))),
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


class Sequence:
    """A request that is being generated.

    While it decodes, the target's cache holds all its tokens but the last one, which every step feeds together
    with the draft: ``len(tokens) == slot.n + 1``.
    """

    def __init__(
        self,
        request: GenerateRequest,
        sink: Sink,
        sampler: Sampler,
        vocabulary: Vocabulary,
        controller: Controller,
        limit: int,
    ) -> None:
        self.request = request
        self.sink = sink
        self.sampler = sampler
        self.controller = controller
        self.tokens = list(request.prompt)
        self.n_prompt = len(self.tokens)
        self.limit = limit  # most output tokens
        self.slot = Slot(-1)
        self.tally = Tally()
        self.cached = 0
        self.drafters: tuple[str, ...] = ()
        self.limits: dict[str, int] = {}
        self.ngram: NgramDrafter | None = None
        self.hidden: HiddenRows | None = None  # with the MTP cache kept in step
        self.plan = PLAIN
        self.draft: list[int] = []
        self.proposed = 0  # tokens of the draft before the grammar cut it
        self.forced: ForcedDrafter | None = None
        self.draft_seconds = 0.0
        self.copied: list[int] = []  # what the n-gram drafter proposes, whoever drafts
        self.match_length = 0
        self.run: list[int] = []  # what the grammar forces from here on
        self.late = 0  # tokens that the drafter lacked before this step
        self.load_ms = 0.0
        self._vocabulary = vocabulary
        self._ends = vocabulary.end_tokens().union(request.sampling.stop_tokens)
        self._text = TextStream(request.sampling.stop)
        self._pieces = ""
        self._unsent: list[int] = []
        self._unsent_logprobs: list[TokenLogprob] = []
        self._started = self._first = 0.0

    @property
    def prefilling(self) -> bool:
        """Whether part of the prompt is still to be processed."""
        return len(self.tokens) == self.n_prompt

    @property
    def n_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.n_prompt

    def begin(self) -> None:
        """The prompt is going to be processed now."""
        self._started = time.perf_counter()

    def take(self, token: int, row: Floats) -> str:
        """Settle on a token, drawn from `row`; returns why the sequence ends with it, or an empty text."""
        request, text = self.request, self._text
        if self.prefilling:
            self._first = time.perf_counter()
        self.tokens.append(token)
        if token in self._ends:
            return "stop"
        self._pieces += text.push(self._vocabulary.piece(token, special=token in request.render_tokens))
        self._unsent.append(token)
        if request.sampling.logprobs is not None:
            self._unsent_logprobs.append(self._logprob(token, row, request.sampling.logprobs))
        if text.stopped_by:
            return "stop"
        return "length" if self.n_output >= self.limit else ""

    def event(self) -> TokenEvent | None:
        """What became final since the last call, if anything."""
        if not self._pieces:
            return None
        event = TokenEvent(self._pieces, tuple(self._unsent), tuple(self._unsent_logprobs))
        self._pieces = ""
        self._unsent.clear()
        self._unsent_logprobs.clear()
        return event

    def finish(self, reason: str) -> tuple[TokenEvent | None, Finished]:
        """The last text, held back until now, and the totals."""
        now = time.perf_counter()
        self._pieces += self._text.finish()
        first = self._first or now
        end = Finished(
            reason=reason,
            stop_text=self._text.stopped_by,
            prompt_n=self.n_prompt - self.cached,
            cached_n=self.cached,
            prompt_ms=1000 * (first - self._started) if self._started else 0.0,
            predicted_n=self.n_output,
            predicted_ms=1000 * (now - first),
            draft_n=self.tally.drafted,
            draft_n_accepted=self.tally.accepted,
            load_ms=self.load_ms,
            report=self.tally.report(self),
        )
        return self.event(), end

    def draft_nothing(self) -> None:
        """The next step is a plain one, unless it is planned otherwise."""
        self.plan, self.draft, self.proposed, self.draft_seconds = PLAIN, [], 0, 0.0
        self.copied, self.match_length, self.run, self.late = [], 0, [], 0

    def disable(self, drafter: str, reason: str) -> None:
        """Go on without a drafter."""
        self.drafters = tuple(name for name in self.drafters if name != drafter)
        self.tally.stopped = f"{drafter}: {reason}"
        self.draft_nothing()
        if drafter == "mtp":
            self.hidden = None

    def outcome(self, accepted: int, new: Seq[int], seconds: float | None) -> StepOutcome:
        """This step, for the controller and the report; `new` are the tokens that it gave."""
        plan = self.plan if self.proposed else Plan()
        return StepOutcome(
            plan,
            self.match_length,
            len(self.draft),
            accepted,
            seconds,
            self.draft_seconds,
            copied=min(len(self.copied), len(new)),
            agreed=_agreement(self.copied, new),
            late=self.late,
            proposed=self.proposed,
            forced=len(self.run),
            shown=min(len(self.run), len(new)),
            followed=_agreement(self.run, new),
        )

    def _logprob(self, token: int, row: Floats, alternatives: int) -> TokenLogprob:
        """Log probabilities before any sampling stage, as llama-server gives them."""
        highest = row.max()
        total = float(highest) + float(np.log(np.exp(row - highest).sum(dtype=np.float64)))
        top: Seq[int] = ()
        if alternatives:
            k = min(alternatives, len(row))
            ids = np.argpartition(row, len(row) - k)[-k:]
            top = ids[np.argsort(-row[ids], kind="stable")].tolist()
        piece = self._vocabulary.piece
        return TokenLogprob(
            token,
            piece(token, special=True),
            float(row[token]) - total,
            tuple((i, piece(i, special=True), float(row[i]) - total) for i in top),
        )


def _agreement(guesses: Seq[int], tokens: Seq[int]) -> int:
    """How many guesses are right, from the first one on."""
    pairs = enumerate(zip(guesses, tokens, strict=False))
    return next((i for i, (guess, token) in pairs if guess != token), min(len(guesses), len(tokens)))
