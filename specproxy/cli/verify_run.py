"""The comparing behind `specproxy verify`: every lane of a target against its plain one, prompt by prompt."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import click

from specproxy.cli.lane_client import Prompt, Said
from specproxy.errors import BackendError
from specproxy.strategies.power import leads
from specproxy.strategies.verify import (
    TIE_GAP,
    Fork,
    LaneReport,
    Position,
    calibrated,
    first_difference,
    judge,
    rejudged,
)

__all__ = ["LaneUnderTest", "Round", "Speaker", "run"]


class Speaker(Protocol):
    """Asks one lane for greedy text; a `LaneClient` in real life."""

    def say(self, lane: str, model: str, prompt: Prompt, *, logprobs: bool = False) -> Said:
        """The lane's answer.

        Raises:
            BackendError: there is none.
        """
        ...


@dataclass(frozen=True, slots=True)
class LaneUnderTest:
    """A lane, and the name under which its model is asked for. `held` says that it is in quarantine now."""

    id: str
    strategy: str
    target: str
    model: str
    fingerprint: str = ""
    held: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """What came of comparing lanes of one target, in their order; the first one is plain.

    `tie_gap` (nats) is what counted as a tie once plain's own noise was known. `leads` holds, for each text of
    plain's, by how many nats each of its tokens led the runner-up; empty where it does not tell.
    """

    lanes: tuple[LaneUnderTest, ...]
    reports: tuple[LaneReport, ...]
    tie_gap: float
    leads: tuple[tuple[float, ...], ...] = ()


@dataclass(slots=True)
class _Seen:
    """What was seen of a lane so far."""

    texts: int = 0
    tokens: int = 0
    unsteady: int = 0
    noise: float | None = None
    forks: list[Fork] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Lanes of one target beside its plain lane, which is the first of them."""

    speaker: Speaker
    lanes: Sequence[LaneUnderTest]
    tie_gap: float
    seen: dict[str, _Seen]
    leads: list[tuple[float, ...]] = field(default_factory=list)

    def one(self, number: int, prompt: Prompt) -> None:
        """Try a prompt twice on every lane, and judge each answer by plain's first one."""
        plain = self.lanes[0]
        answers: dict[str, tuple[Said, Said]] = {}
        for lane in self.lanes:
            try:
                answers[lane.id] = (self._say(lane, prompt), self._say(lane, prompt))
            except BackendError as error:
                self.seen[lane.id].failures.append(f"prompt {number + 1}: {error.message}")
        if plain.id not in answers:
            for lane_id in answers:
                self.seen[lane_id].failures.append(f"prompt {number + 1}: plain gave nothing to compare with")
            return
        truth = answers[plain.id][0]
        differ = any(said.text != truth.text for pair in answers.values() for said in pair)
        positions = self._positions(number, prompt, needed=differ)
        self.leads.append(leads(positions, truth.text))
        for lane_id, pair in answers.items():
            self._judge(self.seen[lane_id], number, truth, pair, positions)

    def _judge(
        self, into: _Seen, number: int, truth: Said, pair: tuple[Said, Said], positions: Sequence[Position]
    ) -> None:
        first, second = pair
        unsteady = first.text != second.text
        into.unsteady += unsteady
        for said in {first.text: first, second.text: second}.values():
            fork = judge(number, truth.text, said.text, positions, self.tie_gap)
            into.texts += 1
            into.tokens += _compared(truth, said)
            into.forks += [fork] if fork is not None else []
            if (
                fork is not None
                and fork.gap is not None
                and unsteady
                and truth.text in (first.text, second.text)
            ):
                into.noise = max(into.noise or 0.0, fork.gap)

    def _say(self, lane: LaneUnderTest, prompt: Prompt) -> Said:
        return self.speaker.say(lane.id, lane.model, prompt)

    def _positions(self, number: int, prompt: Prompt, *, needed: bool) -> tuple[Position, ...]:
        """Plain's tokens with log-probabilities; none if it tells none, which is a failure if needed."""
        plain = self.lanes[0]
        try:
            return self.speaker.say(plain.id, plain.model, prompt, logprobs=True).positions
        except BackendError as error:
            if needed:
                message = f"prompt {number + 1}, log-probabilities: {error.message}"
                self.seen[plain.id].failures.append(message)
            return ()


def run(
    speaker: Speaker, lanes: Sequence[LaneUnderTest], prompts: Sequence[Prompt], tie_gap: float = TIE_GAP
) -> Round:
    """Compare lanes of one target with the first of them, which decodes plainly.

    Blocks until all answers are there. A lane that fails is reported, not raised.
    """
    trial = _Trial(speaker, lanes, tie_gap, {lane.id: _Seen() for lane in lanes})
    with _progress(prompts) as bar:
        for number, prompt in enumerate(bar):
            trial.one(number, prompt)
    tie_gap = calibrated(tie_gap, trial.seen[lanes[0].id].noise)
    reports = tuple(_report(lane, trial.seen[lane.id], tie_gap) for lane in lanes)
    return Round(tuple(lanes), reports, tie_gap, tuple(trial.leads))


def _progress(prompts: Sequence[Prompt]) -> AbstractContextManager[Iterable[Prompt]]:
    """The prompts, with a bar on stderr where that is a terminal."""
    if not sys.stderr.isatty():
        return nullcontext(prompts)
    return click.progressbar(prompts, label="Comparing", file=sys.stderr)


def _compared(truth: Said, said: Said) -> int:
    """Tokens up to the first difference, by the share of bytes."""
    at = first_difference(truth.text, said.text)
    if at is None or not truth.text:
        return truth.tokens
    return round(truth.tokens * at / len(truth.text))


def _report(lane: LaneUnderTest, seen: _Seen, tie_gap: float) -> LaneReport:
    return LaneReport(
        lane.id,
        lane.strategy,
        seen.texts,
        seen.tokens,
        seen.unsteady,
        forks=tuple(rejudged(fork, tie_gap) for fork in seen.forks),
        failures=tuple(seen.failures),
        noise=seen.noise,
    )
