"""`specproxy verify`: do all lanes say what plain decoding says?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from specproxy.cli.lane_client import LaneClient
from specproxy.cli.options import (
    ask,
    base_of,
    config_option,
    json_option,
    prompts_option,
    token_headers,
    url_option,
)
from specproxy.cli.prompts import BUILT_IN, read_prompts
from specproxy.cli.quarantine import settle
from specproxy.cli.verify_run import LaneUnderTest, Round, run
from specproxy.config import load
from specproxy.errors import ConfigError, SpecproxyError
from specproxy.strategies.power import share_sure, smallest_rate, smallest_shift
from specproxy.strategies.verify import TIE_GAP, Fork, LaneReport, Verdict

__all__ = ["verify"]

MAX_TOKENS = 96


@click.command()
@prompts_option
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
@click.option(
    "--quarantine/--no-quarantine", "sentence", default=True, show_default=True,
    help="Take lanes at fault out of service, and put those found clean back.",
)  # fmt: skip
@url_option
@config_option
@json_option
def verify(
    file: Path | None,
    only: tuple[str, ...],
    max_tokens: int,
    tie_gap: float,
    sentence: bool,
    url: str | None,
    config_path: Path | None,
    as_json: bool,
) -> int:
    """Check that every lane says what plain decoding says.

    Each prompt goes twice to each lane of the running proxy, greedily, one request at a time. Where a text
    first differs from plain's, plain is asked for its log-probabilities: if it was nearly undecided there,
    rounding explains the difference; if not, the lane is at fault, and is taken out of service.

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
    rounds = [run(client, lanes, prompts, tie_gap) for lanes in groups]

    def post(name: str, body: dict[str, str]) -> None:
        ask(url, config_path, f"/specproxy/api/{name}", json.dumps(body).encode())

    settled = {lane: what for found in rounds if sentence for lane, what in settle(found, post).items()}
    busy = int(data["requests"].get("in_flight") or 0)
    result = _result(rounds, settled, tie_gap, len(prompts), busy)
    if as_json:
        click.echo(json.dumps(result, indent=2))
    else:
        from specproxy.cli.verify_table import print_result

        print_result(result)
    return 0 if result["ok"] else 1


def _groups(rows: Sequence[dict[str, Any]], only: Sequence[str]) -> Iterator[list[LaneUnderTest]]:
    """Of each target that has a ready plain lane: that lane first, then those to be verified.

    Raises:
        ConfigError: `only` names a lane that is not ready.
    """
    ready = [row for row in rows if row["health"] in ("ready", "quarantined")]
    names = {row["id"] for row in ready} | {row["strategy"] for row in ready}
    if unknown := sorted(set(only) - names):
        raise ConfigError(
            f"no ready lane is called {unknown[0]}", hint=f"there are: {', '.join(sorted(names))}"
        )
    by_target: dict[str, list[LaneUnderTest]] = {}
    for row in ready:
        model = (row.get("models") or [row["target"]])[0]
        held = row["health"] == "quarantined"
        lane = LaneUnderTest(row["id"], row["strategy"], row["target"], model, row["fingerprint"], held)
        by_target.setdefault(lane.target, []).append(lane)
    for lanes in by_target.values():
        plain = next((lane for lane in lanes if lane.strategy == "plain" and not lane.held), None)
        if plain is not None:
            others = [lane for lane in lanes if lane is not plain]
            wanted = [lane for lane in others if not only or lane.id in only or lane.strategy in only]
            yield [plain, *wanted]


def _result(
    rounds: Sequence[Round], settled: dict[str, str], tie_gap: float, prompts: int, busy: int
) -> dict[str, Any]:
    """The outcome as JSON-serialisable data."""
    lanes = [(report, found) for found in rounds for report in found.reports]
    return {
        "ok": all(report.verdict in (Verdict.SAME, Verdict.TIES) for report, _ in lanes),
        "prompts": prompts,
        "tie_gap": tie_gap,
        "in_flight": busy,
        "lanes": [_lane(report, found, settled.get(report.lane)) for report, found in lanes],
    }


def _lane(report: LaneReport, found: Round, settled: str | None) -> dict[str, Any]:
    """One lane; the rates and the shift are the smallest faults that would have shown with 95% certainty."""
    sure = share_sure(found.leads, found.tie_gap)
    return {
        "lane": report.lane,
        "strategy": report.strategy,
        "verdict": str(report.verdict),
        "texts": report.texts,
        "tokens": report.tokens,
        "unsteady": report.unsteady,
        "noise": report.noise,
        "tie_gap": found.tie_gap,
        "smallest_rate": smallest_rate(report.tokens),
        "runner_up_rate": smallest_rate(report.tokens * sure) if sure is not None else None,
        "smallest_shift": smallest_shift(found.leads, found.tie_gap),
        "quarantine": settled,
        "forks": [_fork(fork) for fork in report.forks],
        "failures": list(report.failures),
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
