"""`specproxy verify`: do all lanes say what plain decoding says?"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import click

from specproxy.cli.lane_client import LaneClient, Prompt, Said
from specproxy.cli.options import ask, base_of, config_option, json_option, token_headers, url_option
from specproxy.cli.prompts import BUILT_IN, read_prompts
from specproxy.config import load
from specproxy.errors import BackendError, ConfigError, SpecproxyError
from specproxy.strategies.verify import (
    TIE_GAP,
    Fork,
    LaneReport,
    Position,
    Verdict,
    first_difference,
    judge,
    smallest_rate,
)

__all__ = ["LaneUnderTest", "run", "verify"]

MAX_TOKENS = 96


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
    """A lane, and the name under which its model is asked for."""

    id: str
    strategy: str
    target: str
    model: str


@click.command()
@click.option(
    "--prompts",
    "file",
    type=click.Path(path_type=Path, allow_dash=True),
    metavar="FILE.jsonl",
    help="One prompt a line: a JSON string, or an object with prompt or messages. Default: built-in ones.",
)
@click.option(
    "--lane", "only", multiple=True, metavar="ID", help="Lane or strategy to verify; repeatable. Default: all."
)
@click.option(
    "--tokens", "max_tokens", type=click.IntRange(1), default=MAX_TOKENS, show_default=True, metavar="N",
    help="Longest answer to compare, in tokens.",
)  # fmt: skip
@click.option(
    "--tie", "tie_gap", type=click.FloatRange(0), default=TIE_GAP, show_default=True, metavar="NATS",
    help="Log-probability gap (nats) up to which two tokens count as tied.",
)  # fmt: skip
@url_option
@config_option
@json_option
def verify(
    file: Path | None,
    only: tuple[str, ...],
    max_tokens: int,
    tie_gap: float,
    url: str | None,
    config_path: Path | None,
    as_json: bool,
) -> int:
    """Check that every lane says what plain decoding says.

    Each prompt goes twice to each lane of the running proxy, greedily, one request at a time. Where a text
    first differs from plain's, plain is asked for its log-probabilities: if it was nearly undecided there,
    rounding explains the difference; if not, the lane is at fault.

    Exit code: 0 if no lane is at fault, 1 if one is, or if a lane could not be judged.
    """
    prompts = read_prompts(file) if file is not None else BUILT_IN
    settings = load(config_path)
    data = ask(url, config_path, "/specproxy/api/status")
    groups = list(_groups(data["lanes"], only))
    if not groups:
        raise SpecproxyError(
            "no lane is ready that could be compared with a plain one", hint="specproxy status"
        )
    client = LaneClient(base_of(url, settings), token_headers(settings), max_tokens)
    reports = [report for lanes in groups for report in run(client, lanes, prompts, tie_gap)]
    busy = int(data["requests"].get("in_flight") or 0)
    result = _result(reports, tie_gap, len(prompts), busy)
    if as_json:
        click.echo(json.dumps(result, indent=2))
    else:
        from specproxy.cli.verify_table import print_result

        print_result(result)
    return 0 if all(r.verdict in (Verdict.SAME, Verdict.TIES) for r in reports) else 1


def _groups(rows: Sequence[dict[str, Any]], only: Sequence[str]) -> Iterator[list[LaneUnderTest]]:
    """Of each target that has a ready plain lane: that lane first, then those to be verified.

    Raises:
        ConfigError: `only` names a lane that is not ready.
    """
    ready = [row for row in rows if row["health"] == "ready"]
    names = {row["id"] for row in ready} | {row["strategy"] for row in ready}
    if unknown := sorted(set(only) - names):
        raise ConfigError(
            f"no ready lane is called {unknown[0]}", hint=f"there are: {', '.join(sorted(names))}"
        )
    by_target: dict[str, list[LaneUnderTest]] = {}
    for row in ready:
        model = (row.get("models") or [row["target"]])[0]
        lane = LaneUnderTest(row["id"], row["strategy"], row["target"], model)
        by_target.setdefault(lane.target, []).append(lane)
    for lanes in by_target.values():
        plain = next((lane for lane in lanes if lane.strategy == "plain"), None)
        if plain is not None:
            others = [lane for lane in lanes if lane is not plain]
            wanted = [lane for lane in others if not only or lane.id in only or lane.strategy in only]
            yield [plain, *wanted]


@dataclass(slots=True)
class _Seen:
    """What was seen of a lane so far."""

    texts: int = 0
    tokens: int = 0
    unsteady: int = 0
    forks: list[Fork] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Lanes of one target beside its plain lane, which is the first of them."""

    speaker: Speaker
    lanes: Sequence[LaneUnderTest]
    tie_gap: float
    seen: dict[str, _Seen]

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
        positions = self._positions(number, prompt) if differ else ()
        for lane_id, (first, second) in answers.items():
            into = self.seen[lane_id]
            into.unsteady += first.text != second.text
            for said in {first.text: first, second.text: second}.values():
                fork = judge(number, truth.text, said.text, positions, self.tie_gap)
                into.texts += 1
                into.tokens += _compared(truth, said)
                into.forks += [fork] if fork is not None else []

    def _say(self, lane: LaneUnderTest, prompt: Prompt) -> Said:
        return self.speaker.say(lane.id, lane.model, prompt)

    def _positions(self, number: int, prompt: Prompt) -> tuple[Position, ...]:
        """Plain's tokens with log-probabilities; none if it does not tell them."""
        plain = self.lanes[0]
        try:
            return self.speaker.say(plain.id, plain.model, prompt, logprobs=True).positions
        except BackendError as error:
            self.seen[plain.id].failures.append(f"prompt {number + 1}, log-probabilities: {error.message}")
            return ()


def run(
    speaker: Speaker, lanes: Sequence[LaneUnderTest], prompts: Sequence[Prompt], tie_gap: float = TIE_GAP
) -> list[LaneReport]:
    """Compare lanes of one target with the first of them, which decodes plainly.

    Blocks until all answers are there. A lane that fails is reported, not raised.
    """
    trial = _Trial(speaker, lanes, tie_gap, {lane.id: _Seen() for lane in lanes})
    with _progress(prompts) as bar:
        for number, prompt in enumerate(bar):
            trial.one(number, prompt)
    return [_report(lane, trial.seen[lane.id]) for lane in lanes]


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


def _report(lane: LaneUnderTest, seen: _Seen) -> LaneReport:
    report = LaneReport(lane.id, lane.strategy, seen.texts, seen.tokens, seen.unsteady)
    return replace(report, forks=tuple(seen.forks), failures=tuple(seen.failures))


def _result(reports: Sequence[LaneReport], tie_gap: float, prompts: int, busy: int) -> dict[str, Any]:
    """The outcome as JSON-serialisable data."""
    return {
        "ok": all(report.verdict in (Verdict.SAME, Verdict.TIES) for report in reports),
        "prompts": prompts,
        "tie_gap": tie_gap,
        "in_flight": busy,
        "lanes": [
            {
                "lane": report.lane,
                "strategy": report.strategy,
                "verdict": str(report.verdict),
                "texts": report.texts,
                "tokens": report.tokens,
                "unsteady": report.unsteady,
                "smallest_rate": smallest_rate(report.tokens),
                "forks": [_fork(fork) for fork in report.forks],
                "failures": list(report.failures),
            }
            for report in reports
        ],
    }


def _fork(fork: Fork) -> dict[str, Any]:
    return {
        "prompt": fork.prompt + 1,
        "byte": fork.byte,
        "token": fork.token,
        "judgement": str(fork.judgement),
        "gap": fork.gap,
        "at_least": fork.at_least,
        "why": fork.why,
    }
