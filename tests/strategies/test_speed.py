"""Speeds of a target's lanes: what is the machine's, what is the lane's, and what is the text's."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from specproxy.records import Observation, TempBucket, Workload
from specproxy.strategies.level import features
from specproxy.strategies.posterior import Scales
from specproxy.strategies.speed import SpeedModel, arm_key, cell_of
from tests.strategies.world import lane, observe

CODE, POEM = Workload("code", TempBucket.COOL), Workload("creative", TempBucket.HOT)
PLAIN, MTP = lane("plain"), lane("mtp:3")
ALONE = features(75, 1.0)
TOKENS = 150


Taught = tuple[SpeedModel, np.random.Generator]


def drafted(seen: Observation, per_step: float) -> Observation:
    """The same with the counts of a lane that got so many tokens a step from drafts of three."""
    steps = round((TOKENS - 1) / per_step)
    return replace(seen, draft_tokens=3 * steps, accepted_tokens=TOKENS - 1 - steps)


def teach(
    taught: Taught, t: int, machine: float = 1.0, per_step: float = 2.8, workload: Workload = CODE
) -> None:
    """One request: of even numbers on plain at 20 ms a token, else on MTP, whose steps take 1.7 plain ones."""
    model, rng = taught
    noise = machine * float(np.exp(0.03 * rng.standard_normal()))
    if t % 2:
        seen = observe(MTP, workload, tpt=0.034 / per_step * noise, tokens=TOKENS, at=4.0 * t)
        model.learn(drafted(seen, per_step))
    else:
        model.learn(observe(PLAIN, workload, tpt=0.02 * noise, tokens=TOKENS, at=4.0 * t))


def begun(per_step: float = 2.8) -> Taught:
    """Thirty requests on each lane."""
    taught = SpeedModel(Scales(), 200.0, {}), np.random.default_rng(7)
    for t in range(60):
        teach(taught, t, per_step=per_step)
    return taught


def ratio(model: SpeedModel, workload: Workload = CODE) -> float:
    return math.exp(model.belief(MTP, cell_of(workload)).mean)


def test_level_and_ratio_are_told_apart() -> None:
    model, _ = begun()
    assert math.exp(model.level.expect(ALONE)) == pytest.approx(0.02, rel=0.05)
    assert ratio(model) == pytest.approx(1.7 / 2.8, rel=0.05)
    assert model.belief(PLAIN, cell_of(CODE)).mean == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize("machine", [0.6, 1.6])
def test_a_slower_machine_is_not_held_against_a_lane(machine: float) -> None:
    """Seen on the lane alone, by its steps: they take longer, and bring as many tokens."""
    model, _ = taught = begun()
    for t in range(61, 91, 2):
        teach(taught, t, machine=machine)
    assert math.exp(model.level.expect(ALONE)) == pytest.approx(0.02 * machine, rel=0.1)
    assert ratio(model) == pytest.approx(1.7 / 2.8, rel=0.1)


def test_a_harder_text_is_not_held_against_the_machine() -> None:
    """Steps that take as long and bring fewer tokens."""
    model, _ = taught = begun()
    for t in range(61, 101, 2):
        teach(taught, t, per_step=1.3, workload=POEM)
    assert math.exp(model.level.expect(ALONE)) == pytest.approx(0.02, rel=0.05)
    assert ratio(model, POEM) == pytest.approx(1.7 / 1.3, rel=0.07)
    assert ratio(model) == pytest.approx(1.7 / 2.8, rel=0.05)


def test_the_first_plain_is_the_reference_and_a_new_build_is_measured_against_it() -> None:
    model, _ = begun()
    newer = lane("plain", "fp-newer")
    for t in range(100, 130):
        model.learn(observe(newer, CODE, tpt=0.016, tokens=TOKENS, at=4.0 * t))
    assert model.belief(newer, cell_of(CODE)).mean == pytest.approx(math.log(0.8), abs=0.08)


def test_a_single_stall_is_an_outlier_and_teaches_little() -> None:
    model, _ = begun()
    before = ratio(model)
    sample = model.learn(drafted(observe(MTP, CODE, tpt=0.4, tokens=TOKENS, at=400.0), 2.8))
    assert sample.outlier or sample.log_ratio is None
    assert ratio(model) == pytest.approx(before, rel=0.1)


def test_what_a_lane_shows_on_one_kind_speaks_for_others() -> None:
    """Less surely than for that kind, and the more the likelier it is from the start."""
    fast, slow = (begun(per_step)[0] for per_step in (3.4, 1.2))
    assert ratio(fast, POEM) < ratio(slow, POEM)
    for model in (fast, slow):
        assert model.belief(MTP, cell_of(POEM)).variance > 2.0 * model.belief(MTP, cell_of(CODE)).variance


def test_after_an_alarm_what_came_since_is_the_beginning() -> None:
    """Of that kind, and plain is measured again, since it may be the machine that has changed."""
    model, _ = taught = begun()
    for t in range(61, 73, 2):
        teach(taught, t, per_step=1.3)
    robust = ratio(model)
    assert robust == pytest.approx(1.7 / 2.8, rel=0.1), "a few odd ones are outliers"
    model.start_over(arm_key(MTP.fingerprint, "mtp"), "code", 6)
    assert ratio(model) > 1.1 * robust
    assert model.plain_checks > 0
    for t in range(73, 93, 2):
        teach(taught, t, per_step=1.3)
    assert ratio(model) == pytest.approx(1.7 / 1.3, rel=0.1)


def test_old_builds_are_forgotten_at_last() -> None:
    """Not the plain that others are held against."""
    model, _ = begun()
    for i in range(80):
        old = lane("mtp:3", f"fp-{i}")
        model.learn(observe(old, CODE, tpt=0.01, tokens=TOKENS, at=500.0 + i))
    assert len(model.arms) <= 64
    assert arm_key(PLAIN.fingerprint, "plain") in model.arms
    assert arm_key("fp-0", "mtp") not in model.arms


def test_state_survives() -> None:
    model, _ = begun()
    again = SpeedModel(Scales(), 200.0, {})
    again.restore(json.loads(json.dumps(model.dump())))
    for workload in (CODE, POEM):
        assert again.belief(MTP, cell_of(workload)) == model.belief(MTP, cell_of(workload))
    assert again.dump() == model.dump()
