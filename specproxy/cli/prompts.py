"""Prompts to try lanes with: built-in ones, or the lines of a JSONL file."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from specproxy.cli.lane_client import Prompt
from specproxy.errors import ConfigError

__all__ = ["BUILT_IN", "read_prompts"]

CHAT, RAW = "/v1/chat/completions", "/v1/completions"
NAMED = 5  # broken lines that are named one by one

_ASKED = (
    "List the planets of the solar system as a JSON array of objects with the keys name and moons.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Rename the variable x to total, and print the whole code again:\n```python\nx = 0\nfor n in range(10):\n"
    "    x = x + n\n    print(n, x)\nprint(x)\n```",
    "Answer from the text only. Text: The ferry leaves Harwich at 9:15 and arrives in Hoek at 17:20. On "
    "Sundays it leaves an hour later. Question: When does it leave on Sundays?",
    "Translate into French: The weather was fine, so we walked along the river until the evening.",
    "A train goes 120 km in 90 minutes. How fast is it in km/h? Show each step.",
    "Write the opening of a story about a lighthouse keeper who collects echoes.",
    "Explain to a child why the sky is blue.",
    "Write an SQL query that counts orders per customer in 2025, most first.",
    "Summarise in two sentences what a proxy server does.",
    "Give me a YAML file for a service called web with two replicas and port 8080.",
    "Count from one to thirty in words, separated by commas.",
)
BUILT_IN = tuple(Prompt(CHAT, {"messages": [{"role": "user", "content": text}]}) for text in _ASKED)
"""One of each kind of request that lanes are good or bad at."""


def read_prompts(file: Path) -> tuple[Prompt, ...]:
    """One prompt a line: a JSON string, or an object with `prompt` (as it is) or `messages` (as a chat).

    What was captured has `path` and `body`: a request as it came.

    Other fields of an object go along, but for those that verifying sets itself. Empty lines are left out;
    ``-`` is standard input.

    Raises:
        ConfigError: it cannot be read, holds no prompt, or has lines that are none; they are named.
    """
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{file} cannot be read: {reason}") from error
    found, broken = [], []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            found.append(replace(_prompt(json.loads(line)), line=number))
        except ValueError as error:
            broken.append(f"{file}, line {number}: {error}")
    if len(broken) > NAMED:
        broken[NAMED:] = [f"{file}: {len(broken) - NAMED} more lines are broken"]
    if broken:
        raise ConfigError("\n".join(broken))
    if not found:
        raise ConfigError(f"{file} holds no prompt")
    return tuple(found)


def _prompt(value: Any) -> Prompt:
    """Raises ValueError: this is no prompt."""
    if isinstance(value, str):
        return Prompt(RAW, {"prompt": value})
    if not isinstance(value, dict):
        raise ValueError("should be a string or an object")
    path, body = value.get("path"), value.get("body")
    if isinstance(path, str) and path.startswith("/") and isinstance(body, dict):
        return Prompt(path, body)
    if isinstance(value.get("prompt"), str):
        return Prompt(RAW, value)
    messages = value.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        return Prompt(CHAT, value)
    raise ValueError("has neither a `prompt` (text) nor `messages` (a list of objects)")
