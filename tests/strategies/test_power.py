"""Power by the size of a fault, against faults that are drawn."""

from __future__ import annotations

import numpy as np
import pytest

from specproxy.strategies.power import chance_of_shift, leads, share_sure, smallest_rate, smallest_shift
from specproxy.strategies.verify import Position

TIE = 0.5


def test_the_rule_of_three() -> None:
    """3 in n, 95% sure."""
    assert smallest_rate(1000) == pytest.approx(0.003, rel=0.01)
    assert smallest_rate(0) == 1.0


def test_leads_are_plains_over_the_runner_up() -> None:
    """Of the tokens of its text only; a token that was told alone says nothing."""
    positions = (
        Position(b"a", -0.1, ((b"a", -0.1), (b"b", -2.1), (b"c", -3.0))),
        Position(b"b", -0.1, ((b"b", -0.1),)),
        Position(b"c", -0.5, ((b"d", -0.6), (b"c", -0.5))),
        Position(b"", -0.1, ((b"", -0.1), (b"x", -9.0))),
    )
    assert leads(positions, b"abc") == pytest.approx((2.0, 0.1))
    assert leads((), b"abc") == ()


def test_where_plain_was_sure() -> None:
    """A runner-up taken elsewhere cannot be told from rounding."""
    assert share_sure([(0.1, 3.0), (0.6, 0.5)], TIE) == 0.5
    assert share_sure([(), ()], TIE) is None


def texts(seed: int, count: int = 8) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [list(rng.exponential(3.0, 32)) for _ in range(count)]


@pytest.mark.parametrize("shift", [0.2, 0.5, 1.5])
def test_the_chance_is_that_of_drawn_shifts(shift: float) -> None:
    """5,000 models that are off by as much: how often verify would have called a fault."""
    rng, given, found = np.random.default_rng(5), texts(1), 0
    for _ in range(5000):
        faults = 0
        for text in given:
            turned = np.flatnonzero(rng.normal(0.0, shift, len(text)) > text)
            faults += turned.size > 0 and text[turned[0]] > TIE
        found += faults > 0
    assert chance_of_shift(given, TIE, shift) == pytest.approx(found / 5000, abs=0.03)


def test_the_smallest_shift_is_found_95_times_in_100() -> None:
    """Not one that is less, and less with more texts."""
    shift = smallest_shift(texts(1), TIE)
    assert shift is not None
    assert chance_of_shift(texts(1), TIE, shift) == pytest.approx(0.95, abs=0.001)
    more = smallest_shift(texts(1, 60), TIE)
    assert more is not None
    assert more < shift


def test_without_log_probabilities_nothing_can_be_promised() -> None:
    """Nor where plain was never sure."""
    assert smallest_shift([], TIE) is None
    assert smallest_shift([(0.1, 0.2)], TIE) is None
