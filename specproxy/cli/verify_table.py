"""How the outcome of `specproxy verify` looks on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

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
    for name in ("Lane", "Verdict", "Tokens", "Ties", "Faults", "Unsteady"):
        table.add_column(name, justify="left" if name in ("Lane", "Verdict") else "right")
    for lane in result["lanes"]:
        count = {kind: sum(f["judgement"] == kind for f in lane["forks"]) for kind in ("tie", "fault")}
        verdict = Text(lane["verdict"], style=STYLES.get(lane["verdict"], ""))
        numbers = [lane["tokens"], count["tie"], count["fault"], lane["unsteady"]]
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
        rate = max(lane["smallest_rate"] for lane in judged)
        text = (
            f"{result['prompts']} prompts, twice on each lane. Tie: plain held both tokens for equally likely "
            f"within {result['tie_gap']:g} nats. A lane that gets {rate:.2%} of its tokens wrong, or more, "
            "shows with 95% certainty."
        )
        console.print(Text(text, style="dim"))
    if any(lane["verdict"] == "fault" for lane in result["lanes"]):
        text = "A lane at fault goes on serving: leave its strategy out of `strategies` and restart."
        console.print(Text(text, style="red"))
