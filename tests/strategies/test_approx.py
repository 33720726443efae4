"""Replay over pieces of text: what the pieces keep, and how their bias is learned."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.strategies.approx import Calibration, pieces
from specproxy.strategies.drafters.ngram import NgramDrafter
from specproxy.strategies.replay import replay


@given(st.text(max_size=200), st.text(max_size=200))
def test_nothing_is_lost(one: str, two: str) -> None:
    """Pieces cover a text completely: equal ids mean equal texts, and other texts other ids."""
    a, b, c = pieces(one, two, one)
    assert a == c
    assert (a == b) == (one == two)


def test_pieces_are_about_as_long_as_tokens() -> None:
    """English prose and code come to between three and five characters a piece."""
    prose = (
        "The gardener of the abandoned airport watered every runway twice, and nobody ever complained about it."
    )
    code = "def add(self, first, second):\n    return self.base + first * second  # no check\n"
    for text in (prose, code):
        (ids,) = pieces(text)
        assert 3.0 <= len(text) / len(ids) <= 5.0


def test_copied_text_is_recognised() -> None:
    """A text that repeats its prompt replays as a win, an unrelated one doesn't."""
    source = (
        "def area(width, height):\n    if width < 0:\n        raise ValueError('width')\n    return width\n"
    )
    other = "Once the lighthouse forgot its keeper, gulls began to sign the logbook with enormous care."
    prompt, copied, fresh = pieces(f"Repeat this:\n{source}", source, other)
    assert replay(prompt, copied, NgramDrafter(), 8).tokens_per_step > 3.0
    assert replay(prompt, fresh, NgramDrafter(), 8).tokens_per_step < 1.2


def test_calibration_finds_the_bias() -> None:
    """A constant bias is removed, and the spread that remains is known."""
    rng = np.random.default_rng(1)
    calibration = Calibration()
    assert calibration.correct(-0.3) == -0.3
    assert calibration.sd == pytest.approx(0.1)
    for _ in range(200):
        approximate = float(rng.normal(-0.3, 0.3))
        calibration.learn_one(approximate + 0.1 + float(rng.normal(0.0, 0.03)), approximate)
    assert calibration.correct(-0.3) == pytest.approx(-0.2, abs=0.01)
    assert 0.025 < calibration.sd < 0.05


def test_few_comparisons_change_little() -> None:
    """One comparison moves the correction by a tenth of what it showed."""
    calibration = Calibration()
    calibration.learn_one(0.5, 0.0)
    assert 0.0 < calibration.correct(0.0) < 0.06


def test_state() -> None:
    """State survives JSON; damaged state is refused."""
    calibration, other = Calibration(), Calibration()
    calibration.learn_one(-0.2, -0.3)
    other.load(json.loads(json.dumps(calibration.dump())))
    assert other == calibration
    with pytest.raises(ValueError, match="damaged"):
        other.load({"n": 1})
