"""`specproxy quarantine`: lanes that are out of service, and what verify does about them."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import click

from specproxy.cli.groups import Group
from specproxy.cli.options import ask, config_option, json_option, url_option
from specproxy.cli.verify_run import Round
from specproxy.strategies.power import smallest_rate
from specproxy.strategies.verify import Fork, Judgement, LaneReport, Verdict

__all__ = ["quarantine", "settle"]

CLEAN_RATE = 0.01  # a clean run lifts only if this share of wrong tokens would have shown
PUT, LIFTED, STAYS = "put", "lifted", "stays"

Post = Callable[[str, dict[str, str]], object]


@click.group(cls=Group)
def quarantine() -> None:
    """Show, add or lift lanes that are out of service.

    `specproxy verify` adds a lane that says what plain decoding would not have said, and lifts one that it
    finds clean. A lane that changes (another file, build or flag) is free of it by itself.
    """


@quarantine.command(name="list")
@url_option
@config_option
@json_option
def list_lanes(url: str | None, config_path: Path | None, as_json: bool) -> None:
    """Show lanes in quarantine, those that are not running now among them."""
    data = ask(url, config_path, "/specproxy/api/status")
    held = data.get("quarantine") or []
    if as_json:
        click.echo(json.dumps(held, indent=2))
        return
    now = {(row["id"], row["fingerprint"]) for row in data["lanes"]}
    for row in held:
        since = datetime.fromtimestamp(row["at"]).strftime("%Y-%m-%d %H:%M")
        there = "" if (row["lane"], row["fingerprint"]) in now else " (not there now)"
        click.echo(f"{row['lane']}{there}, since {since}: {row['reason']}")
    if not held:
        click.echo("No lane is in quarantine.")


@quarantine.command()
@click.argument("lane")
@click.option("--reason", default="by hand", show_default=True, metavar="TEXT", help="What status will say.")
@url_option
@config_option
def add(lane: str, reason: str, url: str | None, config_path: Path | None) -> None:
    """Take LANE (an id as in `specproxy status`) out of service."""
    ask(url, config_path, "/specproxy/api/quarantine", json.dumps({"lane": lane, "reason": reason}).encode())
    click.echo(f"{lane} is in quarantine.")


@quarantine.command()
@click.argument("lane")
@url_option
@config_option
def lift(lane: str, url: str | None, config_path: Path | None) -> None:
    """Put LANE back into service."""
    ask(url, config_path, "/specproxy/api/lift", json.dumps({"lane": lane}).encode())
    click.echo(f"{lane} serves again.")


def settle(found: Round, post: Post) -> dict[str, str]:
    """Put lanes at fault into quarantine and lift those found clean; `post` sends JSON to a route's name.

    Returns what became of lanes that are, or were, in quarantine: put, lifted or stays. The plain lane that the
    others are compared with is left alone.
    """
    done: dict[str, str] = {}
    for lane, report in list(zip(found.lanes, found.reports, strict=True))[1:]:
        if report.verdict is Verdict.FAULT:
            post("quarantine", {"lane": lane.id, "fingerprint": lane.fingerprint, "reason": _reason(report)})
            done[lane.id] = PUT
        elif lane.held:
            clean = report.verdict in (Verdict.SAME, Verdict.TIES)
            lifted = clean and smallest_rate(report.tokens) <= CLEAN_RATE
            if lifted:
                post("lift", {"lane": lane.id, "reason": f"verify found no fault in {report.tokens} tokens"})
            done[lane.id] = LIFTED if lifted else STAYS
    return done


def _reason(report: LaneReport) -> str:
    """In numbers: how many faults, and the worst of them."""
    faults = [fork for fork in report.forks if fork.judgement is Judgement.FAULT]
    worst: Fork = max(faults, key=lambda fork: fork.gap or 0.0)
    token = "" if worst.token is None else f", token {worst.token + 1}"
    least = "more than " if worst.at_least else ""
    gap = f"{least}{worst.gap or 0.0:.2f} nats likelier"
    found = f"verify: {len(faults)} of {report.texts} texts differ from plain's"
    return f"{found}; at worst (prompt {worst.prompt + 1}{token}) its own token was {gap}"
