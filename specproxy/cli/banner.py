"""What `specproxy start` says on a terminal once it listens."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from specproxy.cli.text import size, survey_lines, upstream_line

__all__ = ["banner"]

COMMAND = " " * 6


def banner(status: dict[str, Any], width: int) -> Iterator[str]:
    """Lines from the service's status: where it listens and what it runs on.

    They have at most `width` columns, apart from commands, which stand on a line of their own.
    """
    for line in _sentences(status):
        if line.startswith(COMMAND):
            yield line
            continue
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        wrapper = textwrap.TextWrapper(
            max(width, 40), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        yield from wrapper.wrap(line)


def _sentences(status: dict[str, Any]) -> Iterator[str]:
    """Address, upstreams, rung and why, lanes, and what to do next."""
    yield f"specproxy {status['version']} listens at {status['listen']}"
    yield from (f"  {line}" for line in survey_lines(status))
    for upstream in status["upstreams"]:
        yield f"  {upstream_line(upstream)}"
        yield from _rung(upstream.get("rung"))
    if status["rung"] not in [upstream.get("rung") for upstream in status["upstreams"]]:
        yield from _rung(status["rung"])
    for lane in status["lanes"]:
        note = f", {lane['note']}" if lane["note"] else ""
        memory = f", {size(lane['memory_bytes'])}" if lane["memory_bytes"] else ""
        yield f"  Lane {lane['id']} ({lane['strategy']}): {lane['health']}{memory}{note}"
    url = status["listen"]
    yield f"  Point your client at {url} (OpenAI: {url}/v1); what it learns is at {url}/specproxy/"


def _rung(rung: dict[str, Any] | None) -> Iterator[str]:
    """The rung and why, and advice; commands are indented by `COMMAND`."""
    if rung is None:
        return
    yield f"  Rung {rung['number']}, {rung['name']}: {rung['why']}"
    for item in rung["advice"]:
        text, _, command = item.partition("\n")
        yield f"    {text}"
        if command:
            yield f"{COMMAND}{command}"
