"""How the outcome of `specproxy verify` looks on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specproxy.cli.tables import NARROW

__all__ = ["print_result"]

STYLES = {"same": "green", "ties": "green", "fault": "bold red", "unknown": "yellow", "not run": "yellow"}
SHOWN = 5  # faults and failures of a lane that are told one by one


def print_result(result: dict[str, Any]) -> None:
    """Print what `specproxy verify --json` prints, for people."""
    console = Console(highlight=False)
    if result["in_flight"]:
        note = f"{result['in_flight']} other requests were in flight at the start: rounding may differ more."
        console.print(Text(note, style="yellow"))
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    narrow = console.width < NARROW
    for name in ("Lane", "Verdict", *(() if narrow else ("Tokens",)), "Ties", "Faults", "Unsteady"):
        table.add_column(name, justify="left" if name in ("Lane", "Verdict") else "right", overflow="fold")
    for lane in result["lanes"]:
        count = {kind: sum(f["judgement"] == kind for f in lane["forks"]) for kind in ("tie", "fault")}
        verdict = Text(lane["verdict"], style=STYLES.get(lane["verdict"], ""))
        tokens = [] if narrow else [lane["tokens"]]
        numbers = [*tokens, count["tie"], count["fault"], lane["unsteady"]]
        table.add_row(Text(lane["lane"]), verdict, *map(str, numbers))
    console.print(table)
    for lane in result["lanes"]:
        _details(console, lane)
    _legend(console, result)


def _details(console: Console, lane: dict[str, Any]) -> None:
    bad = [fork for fork in lane["forks"] if fork["judgement"] != "tie"]
    lines = [_sentence(fork) for fork in bad] + list(lane["failures"])
    for line in lines[:SHOWN]:
        console.print(Text(f"{lane['lane']}: {line}", style="red" if bad else "yellow"))
    if len(lines) > SHOWN:
        console.print(Text(f"{lane['lane']}: and {len(lines) - SHOWN} more"))


def _sentence(fork: dict[str, Any]) -> str:
    where = f"prompt {fork['prompt']}, " + (
        f"byte {fork['byte']}" if fork["token"] is None else f"token {fork['token'] + 1}"
    )
    if fork["judgement"] == "unknown":
        return f"{where}: differs from plain, and {fork['why']}"
    least = "more than " if fork["at_least"] else ""
    return f"{where}: plain's own token was {least}{fork['gap']:.2f} nats likelier"


def _legend(console: Console, result: dict[str, Any]) -> None:
    judged = [lane for lane in result["lanes"] if lane["tokens"]]
    if judged:
        console.print(Text(" ".join(_power(result, judged)), style="dim"))
    for lane in result["lanes"]:
        if lane["quarantine"] or lane["verdict"] == "fault":
            console.print(Text(_sentence_on(lane), style="green" if lane["quarantine"] == "lifted" else "red"))


def _power(result: dict[str, Any], judged: list[dict[str, Any]]) -> Iterator[str]:
    """What was done, and the smallest faults that would have shown."""
    tie = max(lane["tie_gap"] for lane in judged)
    yield f"{result['prompts']} prompts, twice on each lane. Tie: plain held both tokens for equally likely"
    wider = (
        f", more than {result['tie_gap']:g}, since plain differed from itself"
        if tie > result["tie_gap"]
        else ""
    )
    yield f"within {tie:.2g} nats{wider}. With 95% certainty a lane shows"
    runner_up = [lane["runner_up_rate"] for lane in judged]
    if None not in runner_up:
        yield f"that takes the runner-up at {max(runner_up):.2%} of its tokens,"
    shifts = [lane["smallest_shift"] for lane in judged]
    if None not in shifts:
        yield f"or whose model is off by {max(shifts):.2g} nats (standard deviation of log-odds),"
    yield f"or that gets {max(lane['smallest_rate'] for lane in judged):.2%} of its tokens clearly wrong."


def _sentence_on(lane: dict[str, Any]) -> str:
    """What became of a lane at fault, or of one in quarantine."""
    name = lane["lane"]
    if lane["quarantine"] == "put":
        return (
            f"{name} is in quarantine now, until verify finds it clean, it changes, or "
            f"`specproxy quarantine lift {name}`."
        )
    if lane["quarantine"] == "lifted":
        return f"{name} is out of quarantine."
    if lane["quarantine"] == "stays":
        return f"{name} stays in quarantine: this run was not clean, or too short to tell."
    if lane["strategy"] == "plain":
        return f"{name} differs from itself by more than rounding: nothing can be said of the others."
    return f"{name} goes on serving: `specproxy quarantine add {name}` takes it out of service."
