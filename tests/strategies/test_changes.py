"""Changes of plain and of single lanes: what is told, and that nothing is told of stalls and swings."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from specproxy.records import Situation, TempBucket, Workload
from specproxy.strategies.changes import ChangeWatch, Suspicion
from specproxy.strategies.learner import Learner
from specproxy.strategies.recovery import Settled
from tests.strategies.world import lane, observe, ready

CODE = Workload("code", TempBucket.COOL)
Speeds = Callable[[int], tuple[float, float]]  # by request: the machine's factor, mtp's ratio to plain


def told(
    speeds: Speeds, requests: int, *, seed: int = 5, lanes: tuple[str, ...] = ("plain", "mtp")
) -> list[str]:
    """Sentences by the end, each with the request after which it was told."""
    learner, rng, found = Learner(), np.random.default_rng(seed), []
    for t in range(requests):
        decision = learner.choose(Situation(CODE, ready(*lanes), at=4.0 * t, request_id=str(t)), rng)
        machine, ratio = speeds(t)
        tpt = 0.02 * machine * (ratio if decision.lane.id == "mtp" else 1.0)
        tpt *= float(np.exp(0.06 * rng.standard_normal())) * (1.6 if rng.random() < 0.01 else 1.0)
        learner.learn_one(observe(decision, CODE, tpt=tpt, at=4.0 * t + 3.0, request_id=str(t)))
        changes = [event for event in learner.take_events() if not isinstance(event, Settled)]
        found += [f"{t} {event.sentence}" for event in changes]
    return found


@pytest.mark.parametrize("lanes", [("plain",), ("plain", "mtp")])
@pytest.mark.parametrize(("factor", "verb"), [(1.7, "rose"), (0.6, "fell")])
@pytest.mark.parametrize("seed", range(3))
def test_plain_that_has_changed_is_told_once(
    lanes: tuple[str, ...], factor: float, verb: str, seed: int
) -> None:
    """Also where another lane is used: plain is measured again, and tells. In milliseconds before and after."""
    events = told(lambda t: (factor if t >= 200 else 1.0, 0.6), 330, seed=seed, lanes=lanes)
    [event] = [e for e in events if "on plain" in e]
    assert f"time per token of t on plain {verb}" in event
    assert 205 <= int(event.split()[0]) <= 260


@pytest.mark.parametrize("seed", range(3))
def test_a_lane_that_has_changed_alone_is_told(seed: int) -> None:
    """Although it is used no longer: what its tests show later confirms it."""
    events = told(lambda t: (1.0, 0.6 if t < 200 else 1.3), 900, seed=seed)
    assert any("of mtp on code rose from 0." in e for e in events)
    assert not any("on plain" in e for e in events)


def test_stalls_and_swings_are_not_told() -> None:
    """Of eight machines that swing by a tenth and stall at times, none is thought to have changed."""
    swing = 0.1 * np.sin(np.arange(600) / 15.0)
    alarms = [e for s in range(8) for e in told(lambda t: (float(np.exp(swing[t])), 0.7), 600, seed=s)]
    assert not [e for e in alarms if " on plain " in e or "while plain" in e]


def test_another_plain_starts_over() -> None:
    """A new build that is slower by half is no change of the old one; and what is usual survives a restart."""
    watch, seen = ChangeWatch(), observe(lane("plain"), CODE)
    for arm, level in [("old", -4.0)] * 120 + [("new", -3.6)] * 120:
        watch = ChangeWatch.restored(watch.dump()) if not watch.off else watch
        assert watch.hear_level(seen, arm, level, level, 0.01) is None
    found = [watch.hear_level(seen, "new", -3.0, -3.0, 0.01) for _ in range(10)]
    assert [f is not None for f in found] == [False] * 9 + [True]


def test_plain_itself_has_to_be_measured() -> None:
    """What other lanes say of the level alone is not told as a change of plain."""
    watch, seen = ChangeWatch(), observe(lane("plain"), CODE)
    for level in [-4.0] * 120 + [-3.0] * 80:
        assert watch.hear_level(seen, "a", level, None, 0.01) is None
    assert [watch.hear_level(seen, "a", -3.0, -3.0, 0.01) is not None for _ in range(2)] == [False, True]


@pytest.mark.parametrize(("n", "tells"), [(7.0, False), (8.0, True)])
def test_of_a_lane_that_was_hardly_known_nothing_is_told(n: float, tells: bool) -> None:
    """What it took before was a guess, so that it has not changed."""
    watch, seen = ChangeWatch(), observe(lane("mtp"), CODE)
    watch.blame(Suspicion("a", "code", -4.0, -0.5, n), -3.4)
    found = [watch.hear_lane(seen, "a", 0.1, 0.01) for _ in range(6)]
    assert (found[1] is not None) is tells
    assert [f for f in found if f is not None] == [found[1]] * tells
    if found[1] is not None:
        assert (
            "of mtp on code rose from 0.61 to 1.11 of plain's, while plain takes what it took"
            in found[1].sentence
        )


def test_a_lane_that_is_as_before_is_not_told() -> None:
    """Further requests speak against the change; then it is forgotten."""
    watch, seen = ChangeWatch(), observe(lane("mtp"), CODE)
    watch.blame(Suspicion("a", "code", -4.0, -0.5, 20.0), -3.4)
    values = [-0.5] * 4 + [0.1] * 4
    assert [watch.hear_lane(seen, "a", value, 0.01) for value in values] == [None] * 8


@pytest.mark.parametrize("counted", [True, False])
def test_a_lane_does_not_get_the_credit_of_the_machine(counted: bool) -> None:
    """Plain was measured while the machine was five times as slow, and the first lane tried after that looks
    four times as fast. Plain is measured again, and the lane, which loses, is not used."""
    learner, rng, used = Learner(), np.random.default_rng(1), []
    for t in range(150):
        lanes = ready("plain", "mtp:3")
        decision = learner.choose(Situation(CODE, lanes, at=4.0 * t, request_id=str(t)), rng)
        used.append(not decision.lane.strategy.is_plain)
        slow = not any(used)  # until something else is tried
        tpt = 0.02 * (5.0 if slow else 1.3 if used[-1] else 1.0) * float(np.exp(0.05 * rng.standard_normal()))
        drafts = {"draft_tokens": 150, "accepted_tokens": 75} if used[-1] and counted else {}
        learner.learn_one(observe(decision, CODE, tpt=tpt, at=4.0 * t + 3.0, request_id=str(t), **drafts))
    assert 1 <= sum(used) <= 15
