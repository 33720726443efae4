"""How `make bench-auto` compares: luck of the contenders must not count for either side."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.auto_contest import AUTO, Contest

ARMS = [f"arm {i}" for i in range(6)]


def contest(seconds: dict[str, float], seed: int, rounds: int = 8) -> Contest:
    """Rounds with noise of 8% in every answer."""
    rng = np.random.default_rng(seed)
    drawn = {name: (each * np.exp(rng.normal(0, 0.08, rounds))).tolist() for name, each in seconds.items()}
    return Contest(lambda kind, number: f"{kind} {number}", seconds={"k": drawn})


def test_the_best_of_equals_is_not_faster_than_they_are() -> None:
    """Whoever was lucky looks faster by some percent if it is chosen by the rounds that it is measured in."""
    equal = dict.fromkeys([*ARMS, AUTO], 1.0)
    fair, naive = [], []
    for seed in range(150):
        each = contest(equal, seed)
        fair.append(each.against_best("k", ARMS)[0].median)
        naive.append(each.ratio("k", each.best("k", ARMS)).median)
    assert np.mean(fair) == pytest.approx(1, abs=0.015)
    assert np.mean(naive) < 0.98


def test_the_best_is_found_where_there_is_one() -> None:
    """It is named, and auto is compared with it, not with the others."""
    ratio, best = contest(dict.fromkeys(ARMS, 1.3) | {"arm 4": 0.9, AUTO: 1.0}, 1, 30).against_best("k", ARMS)
    assert best == "arm 4"
    assert ratio.low < 0.9 < ratio.high
