"""Numbers and facts as people read them, in plain text."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

__all__ = [
    "columns",
    "counted",
    "duration",
    "number",
    "percent",
    "size",
    "survey_lines",
    "upstream_line",
    "wrapped",
]


def survey_lines(status: dict[str, Any]) -> Iterator[str]:
    """What was found at each of the usual URLs, and which models are merely passed through."""
    if found := status.get("survey"):
        yield "Looked at " + ", ".join(f"{url} ({kind or 'nobody'})" for url, kind in found.items())
    for upstream in status["upstreams"]:
        if passed := upstream.get("passed_through"):
            names = "; ".join(f"{name}, as {why}" for name, why in passed.items())
            yield f"Passed through unrouted: {names}"


def upstream_line(upstream: dict[str, Any]) -> str:
    """``Upstream http://… : ollama 0.33, qwen3:8b (loaded) and 4 more``, or that it is away."""
    if not upstream["reachable"]:
        return f"Upstream {upstream['url']}: not reachable"
    if upstream.get("loading"):
        return f"Upstream {upstream['url']}: {upstream['kind']}, loading its model"
    version = f" {upstream['version']}" if upstream["version"] else ""
    models = upstream["models"]
    loaded = upstream.get("loaded") or []
    some = [f"{name} (loaded)" if name in loaded and len(models) > 1 else name for name in models[:3]]
    named = ", ".join(some) + (f" and {len(models) - 3} more" if len(models) > 3 else "")
    return f"Upstream {upstream['url']}: {upstream['kind']}{version}" + (f", {named}" if models else "")


def columns() -> int | None:
    """How wide the terminal is that standard output goes to; None where it goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def wrapped(line: str, columns: int) -> list[str]:
    """A line cut between words where it is longer than `columns`; what follows is indented by two more.

    A word that is longer by itself (a path, a URL) stays whole.
    """
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(
        line.lstrip(),
        max(20, columns),
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


def counted(n: int, noun: str) -> str:
    """A number of things: ``1 request``, ``2 requests``."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def percent(value: float | None) -> str:
    """A share as whole percent."""
    return "–" if value is None else f"{value:.0%}"


def number(value: float | None) -> str:
    """One decimal."""
    return "–" if value is None else f"{value:.1f}"


def size(value: int) -> str:
    """Bytes as MiB or GiB."""
    if value <= 0:
        return "–"
    return f"{value / 1024**3:.1f} GiB" if value >= 1024**3 else f"{value / 1024**2:.0f} MiB"


def duration(seconds: float) -> str:
    """Seconds, minutes, hours or days."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.0f} days"
