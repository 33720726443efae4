"""Requests for calibrated models: ordinary by their words, each ending in a marker that selects its text."""

from __future__ import annotations

import random
from typing import Any

from benchmarks.live import Row
from tests.support.calibrated import STARTS, CalibratedPair

__all__ = ["KINDS", "build"]

WORDS = ("customer", "order", "record", "report", "city", "value", "field", "name", "function", "story")

# kind → region, temperature, further fields, phrasing
KINDS: dict[str, tuple[str, float, dict[str, Any], str]] = {
    "json": (
        "json",
        0.0,
        {"response_format": {"type": "json_object"}},
        "describe the {a} of this {b} in JSON only",
    ),
    "code": ("code", 0.2, {}, "Write a Python function that gives the {a} for each {b}"),
    "code_edit": (
        "edit",
        0.0,
        {},
        "Rename the parameter {a} to {b} in this function:\n```python\ndef f({a}):\n    return {a}\n```\n",
    ),
    "prose": ("prose", 0.7, {}, "Explain in a few sentences how the {a} and the {b} came about"),
    "creative": ("creative", 1.0, {}, "Write a short story about the {a} and the {b}"),
}


def build(pair: CalibratedPair, n: int, rng: random.Random, *, max_tokens: int = 40) -> list[Row]:
    """`n` requests in equal shares of KINDS, shuffled. Their texts start at random words of their regions.

    The json region's words need no closing brace to be what was asked for here: how fast a given text comes.
    """
    rows = []
    for i in range(n):
        kind = list(KINDS)[i % len(KINDS)]
        region, temperature, fields, phrasing = KINDS[kind]
        a, b = rng.sample(WORDS, 2)
        text = (
            f"{phrasing.format(a=a, b=b)} {rng.randrange(10**6)} {pair.marker(region, rng.randrange(STARTS))}"
        )
        request = {
            "messages": [{"role": "user", "content": text}],
            "temperature": temperature,
            "max_tokens": max_tokens,
            **fields,
        }
        rows.append(Row(kind, request))
    rng.shuffle(rows)
    return rows
