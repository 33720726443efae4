"""Expected lengths of answers: learned by workload, bounded by the request's limit."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.strategies.lengths import Lengths, expected_min

CODE, POEM = ("code", "cool"), ("creative", "hot")


@given(st.floats(0.0, 8.0), st.floats(0.0, 4.0), st.integers(1, 10_000))
def test_a_limit_bounds_the_expectation(mean: float, variance: float, limit: int) -> None:
    """And a higher one never makes it shorter."""
    bounded = expected_min(mean, variance, limit)
    assert 1.0 <= bounded <= max(1.0, limit) + 1e-9
    assert (
        bounded <= expected_min(mean, variance, 2 * limit) + 1e-9 <= expected_min(mean, variance, None) + 1e-6
    )


@pytest.mark.parametrize("limit", [50, 200, 1000])
def test_the_formula_is_that_of_the_log_normal(limit: int) -> None:
    draws = np.random.default_rng(1).lognormal(5.0, 0.8, 200_000)
    assert expected_min(5.0, 0.64, limit) == pytest.approx(float(np.minimum(draws, limit).mean()), rel=0.01)


def test_lengths_are_learned_by_workload() -> None:
    """A workload that was never seen takes after the others, and before that there is a prior."""
    lengths = Lengths()
    first = lengths.expect(CODE, None)
    for _ in range(50):
        lengths.learn(CODE, 40)
        lengths.learn(POEM, 900)
    assert lengths.expect(CODE, None) == pytest.approx(40, rel=0.25)
    assert lengths.expect(POEM, None) == pytest.approx(900, rel=0.25)
    assert lengths.expect(POEM, 100) == pytest.approx(100, rel=0.02)
    unseen = lengths.expect(("math", "cool"), None)
    assert lengths.expect(CODE, None) < unseen < 900
    assert unseen != first


def test_old_lengths_are_forgotten() -> None:
    lengths = Lengths(half_life=20.0)
    for _ in range(100):
        lengths.learn(CODE, 1000)
    for _ in range(100):
        lengths.learn(CODE, 50)
    assert lengths.expect(CODE, None) < 120


def test_an_answer_without_tokens_teaches_nothing() -> None:
    lengths = Lengths()
    before = lengths.dump()
    lengths.learn(CODE, 0)
    assert lengths.dump() == before


def test_state_survives() -> None:
    lengths, again = Lengths(), Lengths()
    for tokens in (10, 100, 1000):
        lengths.learn(CODE, tokens)
    again.restore(json.loads(json.dumps(lengths.dump())))
    assert again.expect(CODE, 300) == lengths.expect(CODE, 300)
