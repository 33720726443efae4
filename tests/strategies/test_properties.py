"""What holds of the learner whatever comes: availability, the gate's bound, order, and state."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specproxy.errors import LaneUnavailable
from specproxy.records import Control, Health, LaneStatus, Outcome, Situation, TempBucket, Workload
from specproxy.strategies.classify import KINDS
from specproxy.strategies.learner import Learner, LearnerSettings
from tests.strategies.world import lane, observe, ready

CODE = Workload("code", TempBucket.COOL)
PLAIN_S = 0.02 * 149  # what `observe` makes a request take on plain

workloads = st.builds(
    Workload,
    st.sampled_from(KINDS),
    st.sampled_from(list(TempBucket)),
    st.frozensets(st.sampled_from(["logprobs", "images", "many", "thinking"]), max_size=1),
)
statuses = st.lists(
    st.builds(
        LaneStatus,
        st.builds(
            lambda name, control, load: replace(lane(name), control=control, load_s=load),
            st.sampled_from(["plain", "ngram:8", "draft:3", "mtp", "auto"]),
            st.sampled_from(list(Control)),
            st.sampled_from([0.0, 0.5, 6.0]),
        ),
        st.sampled_from(list(Health)),
        in_flight=st.integers(0, 4),
        resident=st.booleans(),
    ),
    max_size=5,
    unique_by=lambda s: s.lane.id,
)
events = st.tuples(
    workloads,
    statuses,
    st.floats(0.05, 50.0),  # time per token against plain's
    st.sampled_from(list(Outcome)),
    st.sampled_from([None, None, "mtp", "ngram", "auto"]),
)


@settings(max_examples=60)
@given(st.lists(events, max_size=25), st.integers(0, 2**32 - 1))
def test_only_ready_lanes_are_chosen(
    history: list[tuple[Workload, list[LaneStatus], float, Outcome, str | None]], seed: int
) -> None:
    """After any history, a lane comes back that is ready and among those asked about, or LaneUnavailable."""
    rng, learner = np.random.default_rng(seed), Learner()
    for t, (workload, lanes, ratio, outcome, pin) in enumerate(history):
        situation = Situation(workload, tuple(lanes), at=float(t), pin=pin, request_id=str(t))
        ready_ids = {s.lane.id for s in lanes if s.health is Health.READY}
        try:
            decision = learner.choose(situation, rng)
        except LaneUnavailable:
            assert not ready_ids or pin is not None
            continue
        assert decision.lane.id in ready_ids
        assert 0.0 < decision.propensity <= 1.0
        assert {c.lane for c in decision.candidates} == ready_ids
        seen = observe(decision, workload, tpt=0.02 * ratio, at=t + 0.5, request_id=str(t))
        learner.learn_one(replace(seen, outcome=outcome))


def good_then_bad(t: int, runs: int, rng: np.random.Generator) -> float:
    """Wins until it is trusted, then loses for good."""
    return 0.5 if runs < 40 else 1.9


def alternating(t: int, runs: int, rng: np.random.Generator) -> float:
    """A win, then a loss that is greater."""
    return 0.5 if runs % 2 == 0 else 2.2


def always_bad(t: int, runs: int, rng: np.random.Generator) -> float:
    """Loses from the first request."""
    return 1.8


def slightly_bad(t: int, runs: int, rng: np.random.Generator) -> float:
    """Loses five percent, with noise that hides it."""
    return 1.05 * float(np.exp(0.3 * rng.standard_normal() - 0.045))


def stalls(t: int, runs: int, rng: np.random.Generator) -> float:
    """Wins a little, but takes forty times as long now and then."""
    return 40.0 if runs % 15 == 7 else 0.95


ADVERSARIES = [good_then_bad, alternating, always_bad, slightly_bad, stalls]


@pytest.mark.parametrize("adversary", ADVERSARIES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("seed", range(2))
def test_the_gate_bounds_the_loss(adversary: object, seed: int) -> None:
    """Whatever the lanes do, the loss stays within the allowance, 2% of plain's time, and twice what a single
    request took beyond what was believed. One that comes alone counts as a plain request at most."""
    assert callable(adversary)
    rng, learner, chosen = np.random.default_rng(seed), Learner(), LearnerSettings()
    lost = plain_s = worst = 0.0
    runs = 0
    for t in range(600):
        situation = Situation(CODE, ready("plain", "mtp"), at=4.0 * t, request_id=str(t))
        decision = learner.choose(situation, rng)
        ratio = 1.0
        if decision.lane.id == "mtp":
            ratio, runs = adversary(t, runs, rng), runs + 1
        excess = min(ratio - 1.0, 1.0) * PLAIN_S
        lost, plain_s, worst = lost + excess, plain_s + PLAIN_S, max(worst, excess)
        bound = chosen.allowance_requests * PLAIN_S + chosen.allowance_share * plain_s + 2.0 * worst
        assert lost <= bound, t
        seen = observe(decision, CODE, tpt=0.02 * ratio, at=4.0 * t + 3.0, request_id=str(t))
        learner.learn_one(seen)


@pytest.mark.parametrize("seed", range(4))
def test_simultaneous_observations_may_come_in_any_order(seed: int) -> None:
    """Four requests that end at one instant leave the same beliefs, within a fifth of their intervals."""
    rng, learner = np.random.default_rng(seed), Learner()
    lanes = ready("plain", "ngram", "mtp")
    for t in range(40):
        decision = learner.choose(Situation(CODE, lanes, at=4.0 * t, request_id=str(t)), rng)
        tpt = 0.02 * float(np.exp(0.08 * rng.standard_normal()))
        learner.learn_one(observe(decision, CODE, tpt=tpt, at=4.0 * t + 3.0, request_id=str(t)))
    ended = [
        observe(status.lane, CODE, tpt=0.02 * float(np.exp(0.1 * rng.standard_normal())), at=500.0)
        for status in (*lanes, lanes[2])
    ]
    state = json.dumps(learner.dump())
    found = []
    for order in itertools.permutations(ended):
        again = Learner()
        again.load(json.loads(state))
        for seen in order:
            again.learn_one(seen)
        decision = again.choose(Situation(CODE, lanes, at=501.0), np.random.default_rng(1))
        found.append([(c.ratio, c.ratio_hi / c.ratio) for c in decision.candidates])
    for candidates in zip(*found, strict=True):
        ratios = np.log([ratio for ratio, _ in candidates])
        assert float(np.ptp(ratios)) <= 0.2 * float(np.log(candidates[0][1])) + 0.002


@settings(max_examples=25)
@given(st.lists(events, min_size=3, max_size=30), st.integers(0, 2**32 - 1))
def test_a_loaded_learner_decides_alike(
    history: list[tuple[Workload, list[LaneStatus], float, Outcome, str | None]], seed: int
) -> None:
    """After any history, state that went through JSON gives the same decisions from there on."""
    rng, learner, twin = np.random.default_rng(seed), Learner(), Learner()
    half = len(history) // 2
    for t, (workload, lanes, ratio, outcome, pin) in enumerate(history):
        if t == half:
            twin.load(json.loads(json.dumps(learner.dump())))
        situation = Situation(workload, tuple(lanes), at=float(t), pin=pin, request_id=str(t))
        draw = int(rng.integers(2**31))
        try:
            decision = learner.choose(situation, np.random.default_rng(draw))
        except LaneUnavailable:
            continue
        seen = observe(decision, workload, tpt=0.02 * ratio, at=t + 0.5, request_id=str(t))
        if t >= half:
            assert twin.choose(situation, np.random.default_rng(draw)) == decision
            twin.learn_one(replace(seen, outcome=outcome))
        learner.learn_one(replace(seen, outcome=outcome))
