"""A client of the engine and of llama-server: one streamed completion, timed from outside.

python -m benchmarks.engine_client PORT PROMPT TOKENS prints the server's own timings of one, on plain.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Reply", "ask", "header"]

STRATEGY_HEADER = "X-Specproxy-Engine-Strategy"


@dataclass(frozen=True, slots=True)
class Reply:
    """One streamed completion: seconds of the whole exchange, its text, and the server's timings."""

    seconds: float
    text: str
    tokens: int
    timings: Mapping[str, Any] = field(default_factory=dict)


def header(strategy: str) -> dict[str, str]:
    """What makes the engine use a strategy."""
    return {STRATEGY_HEADER: strategy}


def ask(
    port: int, prompt: str, tokens: int, headers: Mapping[str, str] | None = None, **fields: object
) -> Reply:
    """Stream one greedy completion; `fields` go into the request's body.

    Raises:
        SystemExit: the server answers with an error.
    """
    body = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    } | fields
    started = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    sent = {"Content-Type": "application/json"} | dict(headers or {})
    connection.request("POST", "/v1/completions", json.dumps(body), sent)
    reply = connection.getresponse()
    raw = reply.read()
    seconds = time.perf_counter() - started
    connection.close()
    if reply.status != 200:
        raise SystemExit(f"status {reply.status}: {raw[:500]!r}")
    events = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: {")]
    text = "".join(choice.get("text", "") for event in events for choice in event.get("choices", ()))
    timings = next((event["timings"] for event in reversed(events) if "timings" in event), {})
    return Reply(seconds, text, tokens, timings)


if __name__ == "__main__":
    print(json.dumps(ask(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), header("plain")).timings))
