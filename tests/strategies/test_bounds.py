"""Damaged states: no single number that nothing can have led to gets into decisions, or ends them."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specproxy.records import Control, Health, LaneStatus, Situation, TempBucket, Workload
from specproxy.strategies.bounds import amount, between, covariance, logarithm, running_mean, whole
from specproxy.strategies.learner import Learner
from tests.strategies.test_learner import replayed
from tests.strategies.world import lane, observe, ready

WORKLOADS = [Workload("code", TempBucket.COOL), Workload("prose", TempBucket.HOT)]
ABSURD = [1e308, -1e308, 1e300, -1e300, 1e29, -1e29, 1e17, -1e17, 5e-324, -1.0, -0.3, 0.0, 1e-30, 700, -700]
Path = tuple[str | int, ...]


def lanes() -> tuple[LaneStatus, ...]:
    """Lanes of every sort, two of them under reload control."""
    moved = [
        LaneStatus(
            replace(lane(name), control=Control.RELOAD, backend="b", load_s=2.0),
            Health.READY,
            resident=name == "mtp",
        )
        for name in ("mtp", "draft:3")
    ]
    return (*ready("plain", "ngram"), *moved)


def live(learner: Learner, start: int, requests: int) -> None:
    """Let it choose and learn, with replays; every number that it tells is one."""
    rng, offered = np.random.default_rng(start), lanes()
    for t in range(start, start + requests):
        workload = WORKLOADS[t % 5 == 4]
        situation = Situation(
            workload,
            offered,
            10.0 * t,
            300,
            400,
            in_flight=1 + t % 3,
            request_id=str(t),
            prefix_hits={"plain": 9},
        )
        decision = learner.choose(situation, rng)
        assert 0.0 < decision.propensity <= 1.0
        for told in decision.candidates:
            assert math.isfinite(told.expected_s), told
            assert told.expected_s >= 0.0
            assert 0.0 < told.ratio_lo <= told.ratio <= told.ratio_hi < math.inf
        seen = observe(
            decision, workload, tpt=0.02 * float(np.exp(0.1 * rng.standard_normal())), at=10.0 * t + 5.0,
            request_id=str(t), draft_tokens=90, accepted_tokens=60, prefill_s=0.2,
        )  # fmt: skip
        learner.learn_one(seen)
        learner.learn_replay(offered[1].lane, seen, replayed(99, 39), "tokens")
        learner.idle_switch(offered, 10.0 * t + 9.0)
    learner.curves()
    json.dumps(learner.dump(), allow_nan=False)


@cache
def sound() -> str:
    """The state of a learner that has seen everything that there is to see."""
    learner = Learner()
    live(learner, 0, 60)
    return json.dumps(learner.dump())


def numbers(state: Any, path: Path = ()) -> Iterator[Path]:
    """Where the numbers of a state are."""
    if isinstance(state, dict | list):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        for key, value in items:
            yield from numbers(value, (*path, key))
    elif isinstance(state, int | float) and not isinstance(state, bool):
        yield path


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(ABSURD) | st.floats(allow_nan=False, allow_infinity=False))
def test_one_absurd_number_is_refused_or_harmless(data: st.DataObject, number: float) -> None:
    """Whichever number of a state it replaces: the state is refused as a whole, and the learner stays as it
    was, or it goes on to decide and to learn with numbers that make sense."""
    state = json.loads(sound())
    path = data.draw(st.sampled_from(sorted(numbers(state), key=str)))
    damaged: Any = copy.deepcopy(state)
    place = damaged
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = number
    learner = Learner()
    try:
        learner.load(damaged)
    except ValueError:
        assert learner.dump() == Learner().dump()
        return
    live(learner, 60, 12)


def test_no_absurd_number_tells_that_a_lane_takes_no_time() -> None:
    """Of those numbers that beliefs about speed are made of, each on its own."""
    state = json.loads(sound())
    [target] = state["targets"].values()
    refused = 0
    for path in numbers(target["speed"]["arms"], ("targets", "t", "speed", "arms")):
        for number in (1e308, -1e29):
            damaged = json.loads(sound())
            place = damaged
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = number
            with pytest.raises(ValueError, match="damaged"):
                Learner().load(damaged)
            refused += 1
    assert refused > 100


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(1e-9, 1e9), min_size=4, max_size=30))
def test_what_a_learner_wrote_it_reads(times: list[float]) -> None:
    """However odd what it was told: bounds are far from anything that can be learned."""
    learner, offered = Learner(), lanes()
    rng = np.random.default_rng(1)
    for t, tpt in enumerate(times):
        situation = Situation(WORKLOADS[t % 2], offered, 1e9 + t, 10**6, None, request_id=str(t))
        decision = learner.choose(situation, rng)
        seen = observe(decision, WORKLOADS[t % 2], tpt=tpt, at=1e9 + t, request_id=str(t), prefill_s=tpt)
        learner.learn_one(seen)
        learner.learn_replay(offered[1].lane, seen, replayed(99, 39))
    Learner().load(json.loads(json.dumps(learner.dump())))


def test_the_bounds() -> None:
    """Each refuses what it should, names it, and lets through what it should."""
    assert (between(1, 0, 2), amount(0), whole(3.0), logarithm(-49.9)) == (1.0, 0.0, 3, -49.9)
    assert running_mean(2.0, -99.0) == (2.0, -99.0)
    assert covariance([[1.0, 0.5], [0.5, 1.0]]) == [[1.0, 0.5], [0.5, 1.0]]
    assert covariance([[0.0, 0.0], [0.0, 0.0]]) == [[0.0, 0.0], [0.0, 0.0]]
    for refused in (
        lambda: amount(-1e-6),
        lambda: amount(math.nan),
        lambda: amount(None),
        lambda: amount("7"),
        lambda: amount(10**400),
        lambda: logarithm(51.0),
        lambda: whole(0, 1),
        lambda: running_mean(0.0, 1e-6),
        lambda: covariance([[1.0, 2.0], [2.0, 1.0]]),
        lambda: covariance([[1.0, 0.5], [0.4, 1.0]]),
        lambda: covariance([[-1.0, 0.0], [0.0, 1.0]]),
        lambda: covariance([[1.0], [0.0, 1.0]]),
    ):
        with pytest.raises(ValueError, match="damaged state"):
            refused()
