"""How status and decisions look on a terminal: readable from 40 columns up, NO_COLOR respected."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from specproxy.cli.text import counted, duration, number, percent, size, survey_lines, upstream_line

__all__ = ["NARROW", "WIDE", "lanes_table", "legend", "print_decision", "print_status", "workloads_table"]

WIDE = 76  # columns from which intervals and notes have room
ROOMY = 110  # columns from which notes stand beside what they are about
NARROW = 56  # columns below which only the most telling figures have
EVENTS = 5  # events that status shows
EXPLAINED = (
    "Intervals are 90%. Evidence: requests that ran there, after forgetting, + replays of others; "
    "p: runs of the profile on this kind. Chance: of being drawn."
)
HEALTH_STYLE = {
    "ready": "green",
    "starting": "yellow",
    "unhealthy": "red",
    "quarantined": "red",
    "dropped": "dim",
}

Row = dict[str, Any]


def print_status(data: Row, *, by_temperature: bool = False) -> None:
    """Print the answer of /specproxy/api/status."""
    console = Console(highlight=False)
    _print_head(console, data)
    if data["lanes"]:
        console.print(lanes_table(data["lanes"], console.width))
        console.print()
    rows = data["workloads"] if by_temperature else data["kinds"]
    if rows:
        console.print(workloads_table(rows, console.width))
        console.print()
        console.print(legend(data), style="dim")
    else:
        console.print("No request has been measured yet.")
    if line := _gate_line(data):
        console.print(Text(line))
    if line := _profile_line(data.get("profile") or {}):
        console.print(Text(line))
    for row in data.get("pairs", ()):
        console.print(Text(_pair_line(row)))
    for row in data.get("media", ()):
        console.print(Text(_media_line(row)))
    for event in _told(data):
        console.print(Text(event, style="yellow"))


def _gate_line(data: Row) -> str:
    """What speculation may lose against plain, and on which workload it has come nearest to that."""
    accounts = [row for row in data.get("gate", ()) if row["allowed_s"] > 0]
    if not accounts:
        return ""
    policy, worst = data["policy"], max(accounts, key=lambda row: row["lost_s"] / row["allowed_s"])
    start, share = policy["allowance_requests"], 100 * policy["allowance_share"]
    allowed = f"{start:g} of its plain requests' time and {share:.3g}% of plain's"
    if worst["lost_s"] <= 0:
        return f"Gate: each workload may lose {allowed}; none has lost anything"
    stands = f"{duration(worst['lost_s'])} of {duration(worst['allowed_s'])}"
    return f"Gate: each workload may lose {allowed}; most of it is lost on {worst['workload']}, {stands}"


def _profile_line(profile: Row) -> str:
    """How far measuring lanes in idle time is; what was found is an event."""
    targets = profile.get("targets", ())
    if not targets or profile["state"] not in ("waiting", "running"):
        return ""
    spent, runs = sum(row["seconds"] for row in targets), sum(row["runs"] for row in targets)
    when = (
        "are measured now" if profile["state"] == "running" else "will be measured while nothing else goes on"
    )
    return f"Lanes {when}: {counted(runs, 'run')} so far, {duration(spent)} of {duration(profile['budget_s'])}"


def _told(data: Row) -> list[str]:
    """The latest events that have something to say, oldest first."""
    told = [event for event in data.get("events") or () if event["message"]]
    lines = []
    for event in sorted(told, key=lambda event: event["at"])[-EVENTS:]:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(event["at"]))
        about = "" if event["kind"] in ("drift", "settled") else f" {event['kind']} {event['subject']}".rstrip()
        lines.append(f"{at}{about}: {event['message']}")
    return lines


def _pair_line(row: Row) -> str:
    """A drafter and its target, since when, and on what evidence."""
    name = f"{row['drafter']} for {row['target']}"
    if row["since"] is None:
        return f"{name}: no request yet"
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["since"]))
    parts = [counted(row["requests"], "request")]
    if row["acceptance"] is not None:
        parts.append(f"{row['accepted']} of {row['drafted']} guesses right ({row['acceptance']:.0%})")
    if row["ratio"] is not None:
        bounds = f" ({1 / row['ratio_hi']:.2f}–{1 / row['ratio_lo']:.2f})" if row["ratio_lo"] else ""
        parts.append(f"{1 / row['ratio']:.2f}x plain's speed{bounds}")
    return f"{name}: since {since}, on {', '.join(parts)}"


def _media_line(row: Row) -> str:
    """What is known of a model's requests with images or audio."""
    most = f"; decoding faster gains {row['most_gain']:.2f}× at most" if row["most_gain"] is not None else ""
    return (
        f"{row['target']}, {counted(row['requests'], 'request')} with {row['media']}: "
        f"{row['prefill_share']:.0%} of their time is the prompt{most}"
    )


def _print_head(console: Console, data: Row) -> None:
    console.print(
        f"[bold]specproxy {data['version']}[/] at {data['listen']}, up {duration(data['uptime_s'])}, "
        f"policy {data['policy']['name']}, {counted(data['requests']['total'], 'request')}"
    )
    for line in survey_lines(data):
        console.print(Text(line))
    for upstream in data["upstreams"]:
        console.print(Text(upstream_line(upstream)))
        _print_rung(console, upstream.get("rung"))
    if data["rung"] not in [upstream.get("rung") for upstream in data["upstreams"]]:
        _print_rung(console, data["rung"])
    console.print()


def _print_rung(console: Console, rung: Row | None) -> None:
    """The rung and why, and advice; a command is not wrapped, so that it can be copied."""
    if rung is None:
        return
    console.print(Text(f"Rung {rung['number']} ({rung['name']}): {rung['why']}"))
    for item in rung["advice"]:
        text, _, command = item.partition("\n")
        console.print(Text(f"  {text}", style="yellow"))
        if command:
            console.print(Text(f"    {command}"), soft_wrap=True)


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name, justify in columns:
        right = justify == "right"
        table.add_column(name, justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table


def lanes_table(lanes: list[Row], width: int) -> RenderableType:
    """Each lane with its health, for a terminal `width` columns wide; notes stand below where it is narrow."""
    wide, narrow = width >= WIDE, width < NARROW
    table = _table(
        ("Lane", "left"),
        *([] if narrow else [("Strategy", "left")]),
        ("Health", "left"),
        *([] if narrow else [("Memory", "right")]),
        ("Now", "right"),
        *([("Note", "left")] if wide else []),
    )
    for lane in lanes:
        length = f":{lane['n_max']}" if lane["n_max"] else ""
        table.add_row(
            Text(lane["id"]),
            *([] if narrow else [Text(f"{lane['strategy']}{length}")]),
            Text(lane["health"], style=HEALTH_STYLE.get(lane["health"], ""), no_wrap=True),
            *([] if narrow else [Text(size(lane["memory_bytes"]))]),
            Text(str(lane["in_flight"])),
            *([Text(lane["note"], style="dim")] if wide else []),
        )
    if wide:
        return table
    notes = [Text(f"{lane['id']}: {lane['note']}", style="dim") for lane in lanes if lane["note"]]
    return Group(table, *notes)


def workloads_table(rows: list[Row], width: int) -> Table:
    """What was measured of each lane on each kind of request, those with most requests first."""
    wide, narrow = width >= WIDE, width < NARROW
    table = _table(
        ("Workload", "left"),
        *([] if narrow else [("Lane", "left")]),
        ("n", "right"),
        *([] if narrow else [("Share", "right"), ("Accept", "right")]),
        ("tok/s", "right"),
        ("Speed vs plain" if wide else "vs plain", "right"),
    )
    grouped: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        grouped[row["workload"]].append(row)
    for workload, members in sorted(grouped.items(), key=lambda item: -sum(r["n"] for r in item[1])):
        if narrow:
            table.add_row(Text(workload, style="bold"))
        for index, row in enumerate(sorted(members, key=lambda r: (r["strategy"] != "plain", -r["n"]))):
            name = (
                [Text(f"  {row['lane']}")]
                if narrow
                else [Text(workload if index == 0 else ""), Text(row["lane"])]
            )
            table.add_row(
                *name,
                str(row["n"]),
                *([] if narrow else [f"{row['share']:.0%}", percent(row["acceptance"])]),
                number(row["tok_s"]),
                _speed(row, wide),
            )
    return table


def _speed(row: Row, wide: bool) -> Text:
    """How many times as fast as plain decoding is, with its 95% interval: the inverse of the time ratio."""
    if row["ratio"] is None:
        return Text("" if row["strategy"] == "plain" else "–", style="dim")
    style = ""
    if row["ratio_lo"] is not None:
        style = "green" if row["ratio_hi"] < 1 else "red" if row["ratio_lo"] > 1 else ""
    text = Text(f"{1 / row['ratio']:.2f}x", style=style)
    if wide and row["ratio_lo"] is not None:
        text.append(f" ({1 / row['ratio_hi']:.2f}–{1 / row['ratio_lo']:.2f})", style="dim")
    return text


def legend(data: Row) -> str:
    """What the speeds mean, and the time that was saved so far."""
    saved = data["saved_s"]
    verb = "saved" if saved >= 0 else "lost"
    return (
        f"Decode speed with 95% interval, from unpaired requests. "
        f"Decoding {verb} about {duration(abs(saved))} against plain so far."
    )


def print_decision(data: Row) -> None:
    """Print the answer of /specproxy/api/explain."""
    console = Console(highlight=False)
    console.print(Text(f"{data['workload']} → {data['lane']}", style="bold"))
    console.print(Text(f"{data['rule']}: {data['reason']}"))
    if data["signals"]:
        signals = ", ".join(signal.replace(":", ": ", 1) for signal in data["signals"])
        console.print(Text(f"read from {signals}", style="dim"))
    if not data["candidates"]:
        return
    wide, narrow, roomy = console.width >= WIDE, console.width < NARROW, console.width >= ROOMY
    table = _table(
        ("Lane", "left"),
        ("Time per token vs plain" if roomy else "vs plain", "right"),
        *([("Prior", "right")] if wide else []),
        *([] if narrow else [("Evidence", "right")]),
        ("Expected", "right"),
        *([("Chance", "right")] if wide else []),
        *([("", "left")] if roomy else []),
    )
    for c in data["candidates"]:
        table.add_row(
            Text(c["lane"]),
            f"{c['ratio']:.2f} ({c['ratio_lo']:.2f}–{c['ratio_hi']:.2f})",
            *([f"{c['prior']:.2f}" if c["prior"] is not None else "–"] if wide else []),
            *([] if narrow else [_evidence(c)]),
            _expected(c, wide),
            *([percent(c["propensity"])] if wide else []),
            *([Text(c["note"], style="dim")] if roomy else []),
        )
    console.print(table)
    for c in data["candidates"]:
        if c["note"] and not roomy:
            console.print(Text(f"{c['lane']}: {c['note']}", style="dim"))
    if wide:
        console.print(Text(EXPLAINED, style="dim"))


def _evidence(candidate: Row) -> str:
    """Requests that ran there, replays of others, and runs of our own."""
    replays = f" + {candidate['replays']:.0f}" if candidate["replays"] >= 0.5 else ""
    own = candidate.get("profiled", 0.0)
    return f"{candidate['n']:.1f}{replays}" + (f", {own:.0f}p" if own >= 0.5 else "")


def _expected(candidate: Row, wide: bool) -> str:
    """Time for the whole request, with its interval where there is room; the unit once where it is one."""
    if candidate["expected_s"] is None:
        return "–"
    keys = ("expected_s", "expected_lo_s", "expected_hi_s") if wide else ("expected_s",)
    texts = [duration(candidate[key]) for key in keys]
    unit = texts[0].partition(" ")[2]
    if all(text.endswith(f" {unit}") for text in texts):
        texts = [text.partition(" ")[0] for text in texts]
    else:
        unit = ""
    spread = f" ({texts[1]}–{texts[2]})" if wide else ""
    return f"{texts[0]}{spread} {unit}".rstrip()
