"""What `specproxy start` says on a terminal once it listens."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from specproxy.cli.text import size, upstream_line

__all__ = ["banner"]


def banner(status: dict[str, Any], width: int) -> Iterator[str]:
    """Lines of at most `width` columns from the service's status: where it listens and what it runs on."""
    for line in _sentences(status):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        wrapper = textwrap.TextWrapper(
            max(width, 40), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        yield from wrapper.wrap(line)


def _sentences(status: dict[str, Any]) -> Iterator[str]:
    """Address, upstreams, rung and why, lanes, and what to do next."""
    yield f"specproxy {status['version']} listens at {status['listen']}"
    for upstream in status["upstreams"]:
        yield f"  {upstream_line(upstream)}"
    rung = status["rung"]
    if rung:
        yield f"  Rung {rung['number']}, {rung['name']}: {rung['why']}"
        yield from (f"    {line}" for line in rung["advice"])
    for lane in status["lanes"]:
        note = f", {lane['note']}" if lane["note"] else ""
        memory = f", {size(lane['memory_bytes'])}" if lane["memory_bytes"] else ""
        yield f"  Lane {lane['id']} ({lane['strategy']}): {lane['health']}{memory}{note}"
    url = status["listen"]
    yield f"  Point your client at {url} (OpenAI: {url}/v1); what it learns is at {url}/specproxy/"
