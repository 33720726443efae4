"""How figures against plain look: on a terminal, as Markdown, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specproxy.cli.text import number, percent
from specproxy.plot import Interval, write_intervals

__all__ = ["HEAD", "cells", "draw", "markdown", "print_table", "speed_text"]

HEAD = ("Kind", "Arm", "Speculation", "n", "tok/s", "First token", "Accepted", "Decode", "End to end", "Cap")
LEGEND = (
    "Decode and end to end: speed against plain with its 95% interval (paired bootstrap); above 1 is faster. "
    "Cap: the end-to-end speed that decoding in no time at all would give, since prompt and waiting stay."
)
SHOWN = 10  # messages of failures

Row = dict[str, Any]


def speed_text(gain: Row | None) -> str:
    """``1.25x (1.10–1.41)``; a dash where nothing can be compared."""
    if gain is None:
        return "–"
    ends = "" if gain["low"] is None else f" ({gain['low']:.2f}–{gain['high']:.2f})"
    return f"{gain['speed']:.2f}x{ends}"


def cells(row: Row) -> tuple[str, ...]:
    """One arm's figures in the order of `HEAD`."""
    share = row["before_decoding"]
    return (
        row.get("kind", "all"),
        row["arm"],
        row["speculation"],
        str(row["prompts"]),
        number(row["tok_s"]),
        "–" if row["ttft_ms"] is None else f"{row['ttft_ms']:.0f} ms",
        percent(row["acceptance"]),
        speed_text(row["decode"]),
        speed_text(row["end_to_end"]),
        "–" if not share or share <= 0 else f"{1 / share:.1f}x",
    )


def print_table(rows: Sequence[Row], notes: Sequence[str]) -> None:
    """Print figures and what goes with them."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for index, name in enumerate(HEAD):
        table.add_column(name, justify="left" if index < 3 else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, cells(row)))
    console.print(table)
    for note in (LEGEND, *notes):
        console.print(Text(note, style="dim"))


def markdown(
    title: str, rows: Sequence[Row], notes: Sequence[str], setup: Sequence[str], picture: str = ""
) -> str:
    """The same as a Markdown page."""
    return "\n".join(_page(title, rows, notes, setup, picture)) + "\n"


def _page(
    title: str, rows: Sequence[Row], notes: Sequence[str], setup: Sequence[str], picture: str
) -> Iterator[str]:
    yield from (f"# {title}", "")
    yield "| " + " | ".join(HEAD) + " |"
    yield "|" + "---|" * 3 + "---:|" * (len(HEAD) - 3)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row)) + " |"
    yield from ("", LEGEND, "")
    if picture:
        yield from (f"![speed against plain]({picture})", "")
    yield from (f"- {note}" for note in notes)
    yield from ("", "## Measured on", "")
    yield from (f"- {line}" for line in setup)


def draw(path: Path, title: str, rows: Sequence[Row]) -> bool:
    """Write a picture of all speeds against plain; False, and no file, where there is none."""
    found = [
        Interval(f"{row.get('kind', 'all')} {row['arm']}", name, gain["speed"], gain["low"], gain["high"])
        for row in rows
        for name, gain in (("decode", row["decode"]), ("end to end", row["end_to_end"]))
        if gain is not None
    ]
    if found:
        write_intervals(path, title, found)
    return bool(found)
