"""Which lanes may be drawn, and when one that is out of use is tried again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specproxy.records import Control, Decision, Health, LaneStatus, Situation, TempBucket, Workload
from specproxy.strategies.learner import Learner, LearnerSettings
from specproxy.strategies.target import LastRun, TargetModel
from tests.strategies.world import lane, observe, ready

CODE = Workload("code", TempBucket.COOL)


def play(truth: Callable[[int], float], requests: int, seed: int = 0, **settings: float) -> list[Decision]:
    """Requests of one kind on plain and a lane whose ratio depends on how often it ran before."""
    rng, noise = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    learner, found, runs = Learner(LearnerSettings(**settings)), [], 0  # type: ignore[arg-type]  # all are floats
    for t in range(requests):
        decision = learner.choose(Situation(CODE, ready("plain", "mtp"), at=4.0 * t, request_id=str(t)), rng)
        ratio = 1.0
        if decision.lane.id == "mtp":
            ratio, runs = truth(runs), runs + 1
        tpt = 0.02 * ratio * float(np.exp(0.08 * noise.standard_normal()))
        learner.learn_one(observe(decision, CODE, tpt=tpt, at=4.0 * t + 3.0, request_id=str(t)))
        found.append(decision)
    return found


def unlucky(runs: int) -> float:
    """Three times as slow as plain at first, by whatever went on then; a clear gain ever after."""
    return 3.0 if runs < 2 else 0.6


@pytest.mark.parametrize("seed", range(3))
def test_bad_first_tries_are_not_the_last_word(seed: int) -> None:
    """A lane that they have shut out is tested again before long, and used once the tests are good."""
    found = [decision.lane.id for decision in play(unlucky, 800, seed)]
    assert found[-100:].count("mtp") >= 90


def test_the_first_test_comes_sooner_than_later_ones() -> None:
    """Where it has to be paid from the share of all later ones, the same lane stays out of use."""
    found = [decision.lane.id for decision in play(unlucky, 800, retest_first=1.0)]
    assert found[-100:].count("mtp") == 0


@pytest.mark.parametrize("ratio", [1.4, 2.0])
def test_a_loser_is_tested_ever_more_rarely(ratio: float) -> None:
    """Tests go on, since lanes change; with the first tries they cost less than 0.75% of plain's time."""
    found = play(lambda _: ratio, 1500)
    tests = [t for t, decision in enumerate(found) if "due for a test" in decision.reason]
    lost = (ratio - 1.0) * sum(decision.lane.id == "mtp" for decision in found)
    assert tests
    assert lost <= 0.0075 * 1500
    gaps = np.diff([0, *(t for t in tests if found[t].lane.id == "mtp"), 1500])
    assert gaps[-2:].max() > 2 * gaps[0]


def test_tests_are_made_on_requests_that_are_not_long() -> None:
    """A long request is a dear test."""
    learner, rng = Learner(), np.random.default_rng(0)
    for t in range(400):
        for name, tpt in (("plain", 0.02), ("mtp", 0.06)):
            if name == "plain" or t < 3:
                learner.learn_one(observe(ready(name)[0].lane, CODE, tpt=tpt, at=float(t)))
    long, short = (
        learner.choose(Situation(CODE, ready("plain", "mtp"), at=900.0, max_tokens=limit), rng)
        for limit in (4000, 100)
    )
    assert (long.lane.id, short.lane.id) == ("plain", "mtp")
    assert "due for a test" in short.reason


def test_state_without_counts_of_lost_runs_is_read() -> None:
    """As it was written before they were counted."""
    model = TargetModel.new(LearnerSettings(), {})
    model.note_run("code/cool", "fp/mtp", 3.0, lost=True)
    model.note_run("code/cool", "fp/mtp", 5.0, lost=True)
    state = model.dump()
    assert state["tested"] == [["code/cool", "fp/mtp", 5.0, 2]]
    again = TargetModel.new(LearnerSettings(), {})
    again.restore(state)
    assert again.tested == model.tested
    again.restore(state | {"tested": [["code/cool", "fp/mtp", 5.0]]})
    assert again.tested == {("code/cool", "fp/mtp"): LastRun(5.0, 0)}
    again.note_run("code/cool", "fp/mtp", 6.0, lost=False)
    assert again.tested == {("code/cool", "fp/mtp"): LastRun(6.0, 0)}


def beside_auto(
    truth: dict[str, float], requests: int, *, control: Control = Control.REQUEST, backend: str = "b"
) -> list[Decision]:
    """Requests on an engine with plain and auto, and a fixed strategy under this control on this backend."""
    rng, noise = np.random.default_rng(3), np.random.default_rng(4)
    lanes = tuple(
        LaneStatus(replace(lane(name), control=Control.REQUEST), Health.READY) for name in ("plain", "auto")
    )
    lanes += (LaneStatus(replace(lane("mtp"), control=control, backend=backend), Health.READY),)
    learner, found = Learner(), []
    for t in range(requests):
        decision = learner.choose(Situation(CODE, lanes, at=4.0 * t, request_id=str(t)), rng)
        tpt = 0.02 * truth[decision.lane.id] * float(np.exp(0.05 * noise.standard_normal()))
        learner.learn_one(observe(decision, CODE, tpt=tpt, at=4.0 * t + 3.0, request_id=str(t)))
        found.append(decision)
    return found


def used(found: list[Decision], name: str) -> int:
    """How many of the latter half of requests a lane got."""
    return [decision.lane.id for decision in found[len(found) // 2 :]].count(name)


def note(decision: Decision, name: str) -> str:
    """Why a lane could not be drawn."""
    return next(c.note for c in decision.candidates if c.lane == name)


def test_fixed_strategies_beside_auto_are_a_small_control_group() -> None:
    """About as good as the engine's own choice they get a few requests, so that it can be held against them."""
    found = beside_auto({"plain": 1.0, "auto": 0.6, "mtp": 0.6}, 400)
    assert used(found, "auto") >= 190
    assert note(found[-1], "mtp") == "left to the engine's own choice (auto)"
    control = [decision.lane.id for decision in found].count("mtp")
    assert 1 <= control <= 20


def test_a_fixed_strategy_that_is_clearly_better_than_auto_is_used() -> None:
    found = beside_auto({"plain": 1.0, "auto": 0.8, "mtp": 0.5}, 400)
    assert used(found, "mtp") >= 180


@pytest.mark.parametrize(
    "elsewhere", [{"backend": "another"}, {"control": Control.INSTANCE}], ids=["backend", "process"]
)
def test_what_auto_does_not_choose_from_is_not_left_to_it(elsewhere: dict[str, Any]) -> None:
    """Lanes of another server, or processes of their own, are held against it like any other."""
    found = beside_auto({"plain": 1.0, "auto": 0.6, "mtp": 0.6}, 100, **elsewhere)
    assert "left to" not in " ".join(note(decision, "mtp") for decision in found)
