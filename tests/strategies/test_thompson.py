"""Choice probabilities and what exploring is worth."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.strategies.thompson import choice_probabilities, raised, worth_exploring


class Offer(NamedTuple):
    """A cost: mean, median, standard deviation."""

    expected: float
    central: float
    spread: float


def drawn(offers: list[tuple[float, float]], n: int = 200_000) -> list[float]:
    """Shares of draws in which each normal cost is the least."""
    rng = np.random.default_rng(3)
    draws = np.array([rng.normal(mean, sd, n) for mean, sd in offers])
    return [float(share) for share in np.bincount(draws.argmin(axis=0), minlength=len(offers)) / n]


@pytest.mark.parametrize("gap", [0.0, 0.5, 2.0])
def test_two_lanes_are_exact(gap: float) -> None:
    """The chance of a normal cost to be the lesser of two."""
    found = choice_probabilities([Offer(3.0, 3.0, 0.4), Offer(3.0 + gap, 3.0 + gap, 0.3)])
    assert found == pytest.approx(drawn([(3.0, 0.4), (3.0 + gap, 0.3)]), abs=0.01)


def test_several_lanes_are_close() -> None:
    """Within a few points of real draws, in the same order."""
    costs = [(3.0, 0.4), (3.2, 0.4), (3.1, 0.8), (4.5, 0.3)]
    found, true = choice_probabilities([Offer(m, m, s) for m, s in costs]), drawn(costs)
    assert found == pytest.approx(true, abs=0.08)
    assert sorted(range(4), key=lambda i: found[i]) == sorted(range(4), key=lambda i: true[i])


@given(st.lists(st.tuples(st.floats(0.01, 100.0), st.floats(0.0, 50.0)), min_size=1, max_size=6))
def test_probabilities_sum_to_one(costs: list[tuple[float, float]]) -> None:
    """Whatever the offers, the widest and the surest included."""
    found = choice_probabilities([Offer(m, m, s) for m, s in costs])
    assert math.isclose(sum(found), 1.0, rel_tol=1e-9)
    assert all(0.0 <= p <= 1.0 for p in found)


def test_sure_lanes_need_no_draw() -> None:
    """Without spread the cheaper one is taken."""
    assert choice_probabilities([Offer(2.0, 2.0, 0.0), Offer(1.0, 1.0, 0.0)]) == [0.0, 1.0]


def test_exploring_pays_over_many_requests_only() -> None:
    """A lane that may turn out better is worth a try, if enough requests are to come; a hopeless one never."""
    best, unsure, hopeless = Offer(3.0, 3.0, 0.05), Offer(3.6, 3.5, 0.8), Offer(9.0, 9.0, 0.2)
    assert worth_exploring(unsure, best, 20.0)
    assert not worth_exploring(unsure, best, 1.0)
    assert not worth_exploring(hopeless, best, 1000.0)
    assert worth_exploring(Offer(2.9, 2.9, 0.0), best, 1.0)
    assert not worth_exploring(Offer(3.1, 3.1, 0.0), Offer(3.0, 3.0, 0.0), 1000.0)


def test_means_are_above_medians() -> None:
    """By half the variance of the logarithm; a belief that is all tail is not taken at its word."""
    assert raised(0.0) == 1.0
    assert raised(0.09) == pytest.approx(math.exp(0.045))
    assert raised(9.0) == pytest.approx(math.exp(0.125))
