"""Loads: made where they pay, and not where they don't."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from specproxy.records import Control, Health, LaneStatus, Situation, TempBucket, Workload
from specproxy.strategies.learner import Learner, LearnerSettings
from tests.strategies.world import lane, observe

JSON = Workload("json_schema", TempBucket.GREEDY)
POEM = Workload("creative", TempBucket.HOT)


class Machine:
    """A plain and an MTP lane that displace each other."""

    def __init__(self, load_s: float, ratios: dict[Workload, float], seed: int = 1) -> None:
        self.load_s, self.ratios = load_s, ratios
        self.rng = np.random.default_rng(seed)
        self.resident = "plain"
        self.t = 0
        self.loads_s = self.lost_s = 0.0
        self.used: set[str] = set()

    def status(self) -> tuple[LaneStatus, ...]:
        lanes = (replace(lane(s), control=Control.RELOAD, load_s=self.load_s) for s in ("plain", "mtp"))
        return tuple(LaneStatus(one, Health.READY, resident=one.id == self.resident) for one in lanes)

    def serve(self, learner: Learner, workload: Workload) -> str:
        """One request of 3 s on plain; returns the rule that decided."""
        self.t += 1
        at, name = 10.0 * self.t, str(self.t)
        situation = Situation(workload, self.status(), at=at, request_id=name)
        decision = learner.choose(situation, self.rng)
        load_s = 0.0 if decision.lane.id == self.resident else self.load_s
        self.resident = decision.lane.id
        self.used.add(self.resident)
        ratio = self.ratios[workload] if self.resident == "mtp" else 1.0
        noise = float(np.exp(0.05 * self.rng.standard_normal()))
        seen = observe(
            decision, workload, tpt=0.02 * ratio * noise, at=at + 5.0, request_id=name, load_s=load_s
        )
        learner.learn_one(seen)
        self.loads_s += load_s
        self.lost_s += load_s + 149 * 0.02 * (ratio - 1.0)
        return decision.rule


@pytest.mark.parametrize("seed", range(3))
def test_a_lane_that_wins_on_all_is_loaded_and_stays(seed: int) -> None:
    """After a few requests it is tried, and nothing is loaded again."""
    machine, learner = Machine(6.0, {JSON: 0.5}, seed), Learner()
    rules = Counter(machine.serve(learner, JSON) for _ in range(60))
    assert machine.resident == "mtp"
    assert rules["reload"] == 1
    assert machine.lost_s < 0.0


@pytest.mark.parametrize("load_s", [2.0, 6.0, 30.0])
def test_where_every_load_loses_little_is_spent(load_s: float) -> None:
    """On a lane that always loses, loads and losses stay within the allowance and 2% of plain's time."""
    machine, learner = Machine(load_s, {JSON: 1.5}), Learner()
    for _ in range(400):
        machine.serve(learner, JSON)
    plain_s = 400 * 149 * 0.02
    assert machine.resident == "plain"
    assert machine.lost_s <= 2.0 * 149 * 0.02 + 0.02 * plain_s + 2 * 149 * 0.02 * 0.5


def test_runs_are_followed_where_they_are_long_enough() -> None:
    """Runs of twelve are worth a load of 4 s each way; runs of one are not."""
    for length, loads in ((12, True), (1, False)):
        machine, learner = Machine(4.0, {JSON: 0.4, POEM: 2.2}), Learner()
        for _ in range(240 // length):
            for _ in range(length):
                machine.serve(learner, JSON)
            for _ in range(length):
                machine.serve(learner, POEM)
        before = machine.loads_s
        for workload in (JSON, POEM) * 2:
            for _ in range(length):
                machine.serve(learner, workload)
        assert (machine.loads_s > before) == loads, length


def test_a_lane_just_loaded_stays_for_a_while() -> None:
    """Minimum dwell: right after a load the other lane is not considered, and the note says so."""
    machine, learner = Machine(1.0, {JSON: 0.3, POEM: 3.0}), Learner()
    while machine.serve(learner, JSON) != "reload":
        assert machine.t < 50
    situation = Situation(POEM, machine.status(), at=10.0 * machine.t + 0.5)
    decision = learner.choose(situation, machine.rng)
    assert decision.lane.id == "mtp"
    assert "short while ago" in next(c.note for c in decision.candidates if c.lane == "plain")


def test_reasons_name_load_and_saving() -> None:
    """A load that doesn't pay says so beside its lane; one that is made says what it is expected to save."""
    machine, learner = Machine(200.0, {JSON: 0.5}), Learner()
    for _ in range(4):
        machine.serve(learner, JSON)
    decision = learner.choose(Situation(JSON, machine.status(), at=999.0), machine.rng)
    assert "a load takes 200.0 s" in next(c.note for c in decision.candidates if c.lane == "mtp")
    machine.load_s = 0.5
    decision = learner.choose(Situation(JSON, machine.status(), at=999.0), machine.rng)
    assert decision.rule == "reload"
    assert "expected to save" in decision.reason


def test_idle_time_is_used_for_a_load_that_is_due() -> None:
    """After traffic that would have gained by MTP, it is loaded while nothing goes on; not the other way."""
    machine, learner = Machine(60.0, {JSON: 0.5}), Learner()
    for _ in range(32):
        machine.serve(learner, JSON)
    assert machine.resident == "plain"
    found = learner.idle_switch(machine.status(), at=1000.0)
    assert found is not None
    assert found.id == "mtp"
    machine.resident = "mtp"
    assert learner.idle_switch(machine.status(), at=1000.0) is None
    machine.resident = "plain"
    learner.loaded(machine.status()[0].lane, at=1000.0)
    assert learner.idle_switch(machine.status(), at=1059.0) is None, "a loaded lane stays for a while"
    assert learner.idle_switch(machine.status(), at=1061.0) is not None
    assert learner.idle_switch(machine.status(), at=999.0) is not None, "a clock that was set back is no dwell"
    assert Learner().idle_switch(machine.status(), at=0.0) is None
    assert learner.idle_switch((), at=0.0) is None


def test_with_nothing_in_memory_plain_is_loaded() -> None:
    """A load has to be made anyway, and all others are held against plain; as after a server was idle."""
    machine, learner = Machine(6.0, {JSON: 0.5}), Learner()
    for _ in range(2):
        machine.resident = ""
        assert machine.serve(learner, JSON) == "plain_first"
        assert machine.resident == "plain"


@pytest.mark.parametrize(("share", "back"), [(0.002, True), (0.0, False)])
def test_what_bad_first_tries_have_shut_is_loaded_again_to_find_out(share: float, back: bool) -> None:
    """A lane that lost on the first kind it met gets a trial on another, rarely; without, it would stay out."""
    prose = Workload("prose", TempBucket.WARM)
    machine = Machine(4.0, {POEM: 2.2, prose: 0.5})
    learner = Learner(LearnerSettings(retest_share=share))
    while "mtp" not in machine.used:
        machine.serve(learner, POEM)
    for _ in range(20):
        machine.serve(learner, POEM)
    assert machine.resident == "plain"
    rules = [machine.serve(learner, prose) for _ in range(1200)]
    assert (machine.resident == "mtp") == back
    assert rules.count("explore") <= 2


def test_a_loser_is_hardly_ever_loaded_to_find_out() -> None:
    """Where every kind loses, such trials cost less than a percent of plain's time."""
    prose = Workload("prose", TempBucket.WARM)
    machine, learner = Machine(4.0, {POEM: 1.8, prose: 1.5}), Learner()
    for _ in range(800):
        machine.serve(learner, POEM)
        machine.serve(learner, prose)
    assert machine.resident == "plain"
    assert machine.lost_s <= 0.01 * 1600 * 149 * 0.02
