"""One picture of a running proxy that fits the terminal: lanes, kinds of request, and the latest requests."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from specproxy.cli.tables import NARROW, WIDE, lanes_table, legend, workloads_table
from specproxy.cli.text import counted, duration, number, percent

__all__ = ["TopView"]

Row = dict[str, Any]


class TopView:
    """What is shown: a status, the latest requests (newest first), and what went wrong since, if anything.

    `height` lines at most are drawn; the latest requests fill what is left. None draws them all.
    """

    def __init__(
        self,
        status: Row,
        recent: list[Row],
        *,
        trouble: str = "",
        height: int | None = None,
        keys: bool = False,
    ) -> None:
        self._status, self._recent, self._trouble = status, recent, trouble
        self._height, self._keys = height, keys

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it, cut to the height."""
        width = options.max_width
        parts: list[RenderableType] = [self._head(), Text()]
        if self._status["lanes"]:
            parts += [lanes_table(self._status["lanes"], width), Text()]
        if self._status["kinds"]:
            parts += [
                workloads_table(self._status["kinds"], width),
                Text(legend(self._status), style="dim"),
                Text(),
            ]
        parts += [Text(_sentence(event), style="yellow") for event in self._events()]
        if self._recent:
            parts.append(_recent_table(self._recent, width))
        else:
            parts.append(Text("No request yet."))
        lines = [line for part in parts for line in console.render_lines(part, options, pad=False)]
        for line in lines[: self._height]:
            yield from line
            yield Segment.line()

    def _head(self) -> Text:
        data = self._status
        text = Text.assemble(
            (f"specproxy {data['version']}", "bold"),
            f" at {data['listen']}, up {duration(data['uptime_s'])}, "
            f"{counted(data['requests']['total'], 'request')}, "
            f"{data['requests'].get('in_flight', 0)} in flight",
        )
        if self._trouble:
            text.append(f"\n{self._trouble}; trying again", style="bold red")
        if self._keys:
            text.append("  (q quits)", style="dim")
        return text

    def _events(self) -> list[Row]:
        events: list[Row] = self._status.get("events") or []
        return sorted(events, key=lambda event: -event["at"])[:2]


def _sentence(event: Row) -> str:
    what = f"{event['kind']} {event['subject']}".strip()
    return f"{what}: {event['message']}" if event["message"] else what


def _recent_table(rows: list[Row], width: int) -> Table:
    """The latest requests; the reason of each decision where there is room."""
    wide, timed = width >= WIDE, width >= NARROW
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    if timed:
        table.add_column("When", no_wrap=True, min_width=8)
    for name, field in (("Workload", "workload"), ("Lane", "lane")):
        longest = max(len(row[field] or "") for row in rows)  # else a long reason would squeeze it
        table.add_column(name, no_wrap=True, overflow="ellipsis", min_width=max(5, min(longest, width // 5)))
    for name in ("Tokens", "tok/s", *(("Accept",) if wide else ())):
        table.add_column(name, justify="right", no_wrap=True, min_width=6)
    table.add_column("Why" if wide else "Outcome", no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows:
        outcome = "" if row["outcome"] == "complete" else row["outcome"]
        table.add_row(
            *([Text(datetime.fromtimestamp(row["at"]).strftime("%H:%M:%S"), style="dim")] if timed else []),
            Text(row["workload"]),
            Text(row["lane"] or "–"),
            str(row["output_tokens"]),
            number(row["tok_s"]),
            *([percent(row["acceptance"])] if wide else []),
            Text(outcome, style="red")
            if outcome or not wide
            else Text(row["reason"] or row["rule"], style="dim"),
        )
    return table
