"""A short, fixed run of `make fuzz`, and that it finds what it looks for."""

from __future__ import annotations

import json
import random

import pytest

from benchmarks import fuzz_files  # noqa: F401 - adds targets
from benchmarks.fuzz_inputs import reshaped, rounds
from benchmarks.fuzz_targets import SEEDS, TARGETS


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_no_input_raises_anything_but_errors_of_ours(name: str) -> None:
    """One round of every target."""
    tried, failure = rounds(name, TARGETS[name], 0.0, seed=7, examples=40)
    assert failure == ""
    assert tried >= 20


def test_a_failure_is_found_and_shown() -> None:
    """A parser that cannot stand one byte: the input that shows it comes with the failure."""

    def weak(data: bytes) -> None:
        if b"\xff" in data:
            raise ZeroDivisionError

    tried, failure = rounds("splitters", weak, 5.0, seed=1)
    assert tried > 0
    assert "ZeroDivisionError" in failure
    assert "input (base64)" in failure


def test_seeds_are_read_well() -> None:
    """What variants are made from is what the targets are for."""
    assert set(SEEDS) == set(TARGETS)
    for name, seeds in SEEDS.items():
        for seed in seeds:
            TARGETS[name](seed)


def test_a_reshaped_text_is_still_json_and_another() -> None:
    """So that what lies behind the reading of JSON is reached."""
    seed = b'{"a": [1, {"b": "c"}], "d": null}'
    made = {reshaped(seed, random.Random(i)) for i in range(50)}
    assert len(made) > 25
    assert all(json.loads(text) is not ... for text in made)
    assert reshaped(b"no JSON", random.Random(1)) == b"no JSON"
