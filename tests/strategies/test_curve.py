"""The learning curve."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from specproxy.records import Situation, TempBucket, Workload
from specproxy.strategies.curve import Curve
from specproxy.strategies.learner import Learner
from tests.strategies.world import MIXED, observe, ready, simulate


def test_gains_are_cumulative() -> None:
    """One request at plain's time, then one in half of it: 4 s instead of 3."""
    curve = Curve()
    assert curve.gains() == []
    curve.note(2.0, 2.0)
    curve.note(1.0, 2.0)
    assert curve.gains() == [(1, 0.0), (2, pytest.approx(1.0 / 3.0))]


def test_points_are_bounded_and_the_last_is_now() -> None:
    """After many requests fewer points are kept, evenly spread; the state survives JSON."""
    curve = Curve()
    for _ in range(10_001):
        curve.note(1.0, 2.0)
    found = curve.gains()
    assert 60 <= len(found) <= 130
    assert found[-1] == (10_001, 1.0)
    steps = {b[0] - a[0] for a, b in itertools.pairwise(found[:-1])}
    assert steps == {curve.stride}
    assert Curve.restored(json.loads(json.dumps(curve.dump()))) == curve


def test_a_learner_keeps_one_for_each_target() -> None:
    """It agrees with what the simulation charged, within the noise of its measurements."""
    learner = Learner()
    run = simulate(learner, lambda _: MIXED, 400, 2)
    requests, gain = learner.curves()["t"][-1]
    assert requests == 400
    assert gain == pytest.approx(sum(run.plain) / sum(run.chosen) - 1.0, abs=0.05)
    again = Learner()
    again.load(json.loads(json.dumps(learner.dump())))
    assert again.curves() == learner.curves()


def test_nothing_is_gained_over_what_was_never_measured() -> None:
    """Requests that are pinned to a lane say nothing about plain; the first one on plain begins the curve."""
    learner = Learner()
    rng = np.random.default_rng(1)
    code = Workload("code", TempBucket.COOL)
    pinned = Situation(code, ready("plain", "mtp"), at=0.0, pin="mtp")
    for _ in range(5):
        learner.learn_one(observe(learner.choose(pinned, rng), code))
    assert learner.curves() == {"t": []}
    learner.learn_one(observe(learner.choose(replace(pinned, pin="plain"), rng), code, tpt=0.04))
    assert learner.curves()["t"] == [(1, 0.0)]
    learner.learn_one(observe(learner.choose(pinned, rng), code))
    assert learner.curves()["t"][-1][1] > 0.0
