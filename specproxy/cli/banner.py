"""What `specproxy start` says on a terminal once it listens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specproxy.cli.tables import size, upstream_line

__all__ = ["banner"]


def banner(status: dict[str, Any]) -> Iterator[str]:
    """Lines of text from the service's status: address, upstreams, rung and why, lanes, and what to do next."""
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
