"""Speed against plain from pairs."""

from __future__ import annotations

import numpy as np
import pytest

from specproxy.strategies.paired import ENOUGH, Pair, gain


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_long_requests_count_for_more() -> None:
    """The speed is one of sums: a long loss outweighs a short gain."""
    found = gain([Pair(1.0, 0.5, "a"), Pair(10.0, 12.5, "b")], rng())
    assert found is not None
    assert found.speed == pytest.approx(11 / 13)
    assert found.saved_s == pytest.approx(-2.0)


def test_few_clusters_give_no_interval() -> None:
    """However many pairs share them."""
    few = [Pair(1.0, 0.5, str(i % (ENOUGH - 1))) for i in range(100)]
    found = gain(few, rng())
    assert found is not None
    assert (found.low, found.high, found.sure) == (None, None, None)
    assert (found.pairs, found.clusters) == (100, ENOUGH - 1)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Over many made-up benches of 40 prompts whose true speed is known; 95%, give or take."""
    truth, held = 1.25, 0
    for seed in range(200):
        r = rng(seed)
        base = r.lognormal(0, 0.8, 40)
        pairs = [Pair(b, b / truth * r.lognormal(-0.02, 0.2), str(i)) for i, b in enumerate(base)]
        found = gain(pairs, r, draws=300)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        held += found.low <= truth <= found.high
    assert 174 <= held <= 199


def test_pairs_of_a_cluster_do_not_pass_for_more_evidence() -> None:
    """The same pairs told ten times over leave the interval as wide as it was."""
    r = rng(3)
    once = [Pair(1.0, float(r.lognormal(0, 0.3)), str(i)) for i in range(30)]
    one, ten = gain(once, rng(1)), gain(once * 10, rng(1))
    assert one is not None
    assert ten is not None
    assert (one.low, one.high) == (pytest.approx(ten.low), pytest.approx(ten.high))


@pytest.mark.parametrize(("other", "sure"), [(0.5, 1.0), (1.0, 0.5), (2.0, 0.0)])
def test_how_sure_it_is(other: float, sure: float) -> None:
    """Certain of a gain, undecided, certain of a loss."""
    found = gain([Pair(1.0, other, str(i)) for i in range(20)], rng())
    assert found is not None
    assert found.sure == sure


def test_nothing_to_compare() -> None:
    """No pairs, or no time, is no gain."""
    assert gain([], rng()) is None
    assert gain([Pair(1.0, 0.0, "a")], rng()) is None
