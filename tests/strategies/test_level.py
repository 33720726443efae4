"""What a token costs on plain now, and what load does to the others."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specproxy.strategies.level import Level, LoadEffect, features


@pytest.mark.parametrize("slope", [0.0, 0.12, 0.3])
def test_load_is_learned_in_either_shape(slope: float) -> None:
    """Time that grows exponentially with the requests in flight is predicted at every load within 6%."""
    rng, level = np.random.default_rng(1), Level()
    for _ in range(400):
        n = int(rng.choice([1, 2, 4, 8]))
        value = math.log(0.02) + slope * (n - 1) + 0.06 * float(rng.standard_normal())
        level.learn(features(300.0, n), value, 0.06**2)
    for n in (1, 2, 4, 8):
        found = level.expect(features(300.0, n))
        assert found == pytest.approx(math.log(0.02) + slope * (n - 1), abs=0.06)
        assert found == level.predict(features(300.0, n))[0]


def test_a_lane_that_suffers_under_load() -> None:
    """Its effect is learned at all loads, and none is left where nothing else runs."""
    rng, effect = np.random.default_rng(2), LoadEffect()
    for _ in range(300):
        n = int(rng.choice([1, 2, 4, 8]))
        x = features(0.0, n)
        before = effect.variance(x)
        effect.learn(x, 0.12 * (n - 1) + 0.1 * float(rng.standard_normal()), 0.1**2)
        assert effect.variance(x) <= before
    assert effect.expect(features(0.0, 8)) == pytest.approx(0.84, abs=0.08)
    assert effect.expect(features(0.0, 2)) == pytest.approx(0.12, abs=0.05)
    assert effect.expect(features(0.0, 1)) == 0.0
    assert LoadEffect(*effect.numbers()) == effect


def test_one_stall_moves_little_and_a_slower_machine_all() -> None:
    """A hundredfold time counts as an outlier; three requests that agree are a jump."""
    level, x = Level(), features(0.0, 1)
    for _ in range(50):
        level.learn(x, math.log(0.02), 0.01)
    assert not level.learn(x, math.log(2.0), 0.01)
    assert level.expect(x) == pytest.approx(math.log(0.02), abs=0.1)
    for _ in range(5):
        level.learn(x, math.log(0.02), 0.01)
    jumps = [level.learn(x, math.log(0.04), 0.01) for _ in range(4)]
    assert any(jumps)
    assert level.expect(x) == pytest.approx(math.log(0.04), abs=0.1)


def test_agreeing_errors_of_one_unknown_lane_are_no_jump() -> None:
    """Five requests in a row on a lane that is hardly known tell about the lane, not about the machine."""
    known, unknown, x = Level(), Level(), features(0.0, 1)
    for level in (known, unknown):
        for _ in range(50):
            level.learn(x, math.log(0.02), 0.01)
    assert any(known.learn(x, math.log(0.02) + 0.9, 0.01) for _ in range(5))
    assert not any(unknown.learn(x, math.log(0.02) + 0.9, 0.01, doubt=0.15) for _ in range(5))
