"""Baselines: each does what its name says, obeys the hard rules, and survives a dump."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from specproxy.errors import LaneUnavailable
from specproxy.records import (
    Control,
    Health,
    Lane,
    LaneStatus,
    Observation,
    Outcome,
    Situation,
    Strategy,
    Workload,
)
from specproxy.records import TempBucket as Temp
from specproxy.strategies.base import Policy
from specproxy.strategies.baselines import (
    AlwaysPlain,
    EpsilonGreedy,
    FixedLane,
    Oracle,
    RulesOnly,
    ThompsonOnly,
    Ucb1,
)

CODE = Workload("code", Temp.GREEDY)
LEARNING: list[Callable[[], Policy]] = [EpsilonGreedy, Ucb1, ThompsonOnly]
ALL: list[Callable[[], Policy]] = [
    AlwaysPlain,
    lambda: FixedLane("draft"),
    lambda: Oracle({}),
    RulesOnly,
    *LEARNING,
]


def lanes(*names: str) -> tuple[LaneStatus, ...]:
    return tuple(
        LaneStatus(Lane(n, "b", "t", Strategy.parse(n), Control.INSTANCE, f"fp-{n}"), Health.READY)
        for n in names
    )


THREE = lanes("plain", "ngram", "draft")


def seen(lane: str, seconds: float, workload: Workload = CODE, **more: object) -> Observation:
    """A complete observation of 101 tokens at `seconds` a token."""
    fields: dict[str, object] = {
        "request_id": "",
        "at": 0.0,
        "workload": workload,
        "lane": lane,
        "strategy": lane,
        "fingerprint": f"fp-{lane}",
        "target": "t",
        "outcome": Outcome.COMPLETE,
        "output_tokens": 101,
        "decode_s": 100.0 * seconds,
    }
    return Observation(**{**fields, **more})  # type: ignore[arg-type]  # fields are checked by the record


def play(policy: Policy, truth: dict[str, float], requests: int, seed: int) -> list[str]:
    """Lanes chosen against a world of known times per token with 20% noise."""
    rng, noise = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    chosen = []
    for i in range(requests):
        decision = policy.choose(Situation(CODE, THREE, at=float(i)), rng)
        chosen.append(decision.lane.id)
        policy.learn_one(seen(decision.lane.id, truth[decision.lane.id] * float(noise.lognormal(0.0, 0.2))))
    return chosen


@pytest.mark.parametrize("make", ALL)
def test_is_a_policy(make: Callable[[], Policy]) -> None:
    """Each implements the protocol, chooses a ready lane, and gives a reason."""
    policy = make()
    assert isinstance(policy, Policy)
    sick = LaneStatus(THREE[1].lane, Health.UNHEALTHY)
    rng = np.random.default_rng(0)
    for _ in range(20):
        decision = policy.choose(Situation(CODE, (THREE[0], sick, THREE[2]), at=0.0), rng)
        assert decision.lane.id in ("plain", "draft")
        assert decision.reason


@pytest.mark.parametrize("make", ALL)
def test_obeys_hard_rules(make: Callable[[], Policy]) -> None:
    """Hazards go to plain, pins to their lane, and without a ready lane there is none."""
    policy, rng = make(), np.random.default_rng(0)
    hazard = Workload("code", Temp.GREEDY, frozenset({"logprobs"}))
    assert policy.choose(Situation(hazard, THREE, at=0.0), rng).lane.id == "plain"
    assert policy.choose(Situation(CODE, THREE, at=0.0, pin="ngram"), rng).lane.id == "ngram"
    with pytest.raises(LaneUnavailable):
        policy.choose(Situation(CODE, (), at=0.0), rng)


@pytest.mark.parametrize("make", LEARNING)
def test_finds_the_fastest(make: Callable[[], Policy]) -> None:
    """After a hundred requests the fastest lane has most of the traffic."""
    chosen = play(make(), {"plain": 0.02, "ngram": 0.022, "draft": 0.012}, 200, seed=4)
    assert chosen[100:].count("draft") >= 80
    assert set(chosen[:3]) == {"plain", "ngram", "draft"}


def test_epsilon_goes_on_exploring() -> None:
    """Some tenth of the requests is drawn at random for ever."""
    chosen = play(EpsilonGreedy(0.3), {"plain": 0.02, "ngram": 0.03, "draft": 0.012}, 600, seed=1)
    assert 60 <= 600 - chosen.count("draft") <= 180


def test_workloads_are_apart() -> None:
    """What is learned on one workload says nothing about another."""
    policy = EpsilonGreedy(0.0)
    for lane, seconds in (("plain", 0.02), ("ngram", 0.05), ("draft", 0.05)):
        policy.learn_one(seen(lane, seconds))
    rng = np.random.default_rng(0)
    assert policy.choose(Situation(CODE, THREE, at=0.0), rng).lane.id == "plain"
    prose = policy.choose(Situation(Workload("prose", Temp.HOT), THREE[1:], at=0.0), rng)
    assert "not tried" in prose.reason


def test_what_teaches_nothing() -> None:
    """Incomplete requests and those with a load leave the table empty; a new fingerprint starts a new cell."""
    policy = EpsilonGreedy(0.0)
    policy.learn_one(seen("plain", 0.02, outcome=Outcome.TRUNCATED))
    policy.learn_one(seen("plain", 0.02, load_s=3.0))
    policy.learn_one(seen("plain", 0.02, output_tokens=1))
    assert policy.dump()["cells"] == []
    policy.learn_one(seen("plain", 0.02))
    policy.learn_one(seen("plain", 0.02))
    policy.learn_one(seen("plain", 0.04, fingerprint="new"))
    assert policy.dump()["cells"][0][2:4] == ["new", 1.0]


@pytest.mark.parametrize("make", LEARNING)
def test_dump_gives_the_same_decisions(make: Callable[[], Policy]) -> None:
    """Through JSON and back, every later choice is the same."""
    truth = {"plain": 0.02, "ngram": 0.021, "draft": 0.019}
    policy, other = make(), make()
    play(policy, truth, 40, seed=2)
    other.load(json.loads(json.dumps(policy.dump())))
    assert play(policy, truth, 60, seed=3) == play(other, truth, 60, seed=3)


@pytest.mark.parametrize("make", ALL)
def test_foreign_state_is_refused(make: Callable[[], Policy]) -> None:
    """State of another policy, a newer format or damaged rows are a ValueError."""
    policy = make()
    for state in ({}, {"format": "other"}, {"format": policy.name, "version": 99, "cells": []}):
        with pytest.raises(ValueError, match=r"state|policy"):
            policy.load(state)


def test_damaged_cells_are_refused() -> None:
    """Rows that are not rows are a ValueError."""
    with pytest.raises(ValueError, match="damaged"):
        Ucb1().load({"format": "ucb1", "version": 1, "cells": [3]})


def test_fixed_and_plain() -> None:
    """A fixed lane is used where it is ready, plain otherwise, and always-plain needs no plain lane to work."""
    rng = np.random.default_rng(0)
    fixed = FixedLane("draft")
    assert fixed.choose(Situation(CODE, THREE, at=0.0), rng).lane.id == "draft"
    assert fixed.choose(Situation(CODE, THREE[:2], at=0.0), rng).lane.id == "plain"
    assert AlwaysPlain().choose(Situation(CODE, THREE[1:], at=0.0), rng).lane.id == "ngram"


def test_oracle_and_rules() -> None:
    """The oracle follows its means; rules of thumb send structured text to a drafter, and hot text to plain."""
    rng = np.random.default_rng(0)
    oracle = Oracle({("code/greedy", "ngram"): 0.7, ("code/greedy", "draft"): 0.8})
    assert oracle.choose(Situation(CODE, THREE, at=0.0), rng).lane.id == "ngram"
    assert oracle.choose(Situation(Workload("prose", Temp.HOT), THREE, at=0.0), rng).lane.id == "plain"
    rules = RulesOnly()
    json_schema = Situation(Workload("json_schema", Temp.GREEDY), THREE, at=0.0)
    assert rules.choose(json_schema, rng).lane.id != "plain"
    assert rules.choose(Situation(Workload("creative", Temp.HOT), THREE, at=0.0), rng).lane.id == "plain"
