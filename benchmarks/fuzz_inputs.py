"""How inputs are made from well-formed ones, and the rounds of hypothesis that try them."""

from __future__ import annotations

import base64
import json
import random
import time
from typing import Any

import hypothesis
from hypothesis import strategies as st

from benchmarks.fuzz_targets import SEEDS, Target

__all__ = ["reshaped", "rounds"]

EXAMPLES = 150  # of one round
TOKENS = (
    b"null",
    b"-1",
    b"1e999",
    b"{}",
    b"[]",
    b'"',
    b"\\u0000",
    b"\xff",
    b"\r\n\r\n",
    b"data: ",
    b"0",
    b"true",
)
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 2**63, 10**40, 1e308, float("nan"), float("inf"), -0.0, "", "x", "\ud800", "\0",
    "9" * 5000, [], {}, [[]], [{}], {"": None}, [0, 0], ["x"],
)  # fmt: skip
"""What stands in a JSON text in another's place."""


def reshaped(data: bytes, rng: random.Random) -> bytes:
    """A JSON text with some values replaced, left out, doubled or nested; `data` itself if it is none."""
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):
        return data
    for _ in range(rng.randint(1, 3)):
        whole = _changed(whole, rng)
    return json.dumps(whole).encode("utf-8", "replace")


def _changed(value: Any, rng: random.Random) -> Any:
    """`value` with one place of it changed; deep ones are as likely as shallow ones."""
    if isinstance(value, dict | list) and value and rng.random() < 0.8:
        key: Any = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        changed = dict(value) if isinstance(value, dict) else list(value)
        if rng.random() < 0.1:
            del changed[key]
        else:
            changed[key] = _changed(value[key], rng)
        return changed
    nested = [value] if rng.random() < 0.5 else {"x": value}
    return rng.choice([*VALUES, nested])


@st.composite
def mutated(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A well-formed input with some places cut out, doubled, or replaced."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 40)))
        piece = draw(st.one_of(st.sampled_from(TOKENS), st.binary(max_size=8), st.just(data[start:end] * 2)))
        data = data[:start] + piece + data[end:]
    return data


@st.composite
def remade(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A well-formed input that is still JSON, but of another shape."""
    return reshaped(draw(st.sampled_from(seeds)), random.Random(draw(st.integers(0, 2**32))))


def rounds(name: str, target: Target, seconds: float, seed: int, examples: int = EXAMPLES) -> tuple[int, str]:
    """Fuzz one target for so long; returns how many inputs it got, and what failed."""
    tried = 0
    inputs = st.one_of(st.binary(max_size=400), mutated(SEEDS[name]), mutated(SEEDS[name]), remade(SEEDS[name]))
    until = time.monotonic() + seconds
    number = 0
    while number == 0 or time.monotonic() < until:

        @hypothesis.seed(seed * 100_000 + number)
        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            database=None,
            print_blob=False,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(inputs)
        def check(data: bytes) -> None:
            nonlocal tried
            tried += 1
            try:
                target(data)
            except BaseException as error:
                error.add_note(f"input (base64): {base64.b64encode(data).decode()}")
                raise

        try:
            check()
        except Exception as error:
            notes = "; ".join(note for note in getattr(error, "__notes__", ()) if note.startswith("input"))
            return tried, f"{name}: {error!r}; {notes}"
        number += 1
    return tried, ""
