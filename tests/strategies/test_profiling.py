"""What is measured of lanes in idle time: in which order, for how long, and what it teaches."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.profile_sim import WORLDS, measure, profiled
from benchmarks.sim import TARGET
from benchmarks.world import load_worlds
from specproxy.config_values import PROFILE_S
from specproxy.records import (
    PROFILE,
    Control,
    Lane,
    LaneStatus,
    Observation,
    Situation,
    Strategy,
    TempBucket,
    Workload,
)
from specproxy.strategies.learner import Learner
from specproxy.strategies.profiling import ORDER, RUNS, Profile, learn, next_round, subjects, summary
from specproxy.strategies.replay import ReplayResult
from specproxy.strategies.speed import arm_key, cell_of
from specproxy.strategies.target import TargetModel
from tests.strategies.world import KINDS, LOSING, MIXED, lane, observe, ready, simulate

PLAIN, NGRAM, DRAFT = lane("plain"), lane("ngram"), lane("draft")
BASE = 0.02


def run(one: Lane, kind: str, ratio: float, tokens: int = 64, at: float = 0.0) -> Observation:
    """A run of our own that took so much of plain's time."""
    workload = Workload(kind, TempBucket.WARM, frozenset({PROFILE}))
    return observe(one, workload, tpt=BASE * ratio, tokens=tokens, at=at, prompt_tokens=100, prefill_s=0.5)


def plan_run(
    model: TargetModel, lanes: tuple[Lane, ...], ratio: float, rounds: int = 1000
) -> list[tuple[str, tuple[str, ...]]]:
    """Run the plan, lanes other than plain at this ratio; returns kinds and lanes of each round."""
    done = []
    for _ in range(rounds):
        planned = next_round(model, lanes)
        if planned is None:
            break
        done.append((planned.kind, tuple(one.id for one in planned.lanes)))
        for one in planned.lanes:
            learn(model, run(one, planned.kind, 1.0 if one.strategy.is_plain else ratio, at=float(len(done))))
    return done


@pytest.fixture
def model() -> TargetModel:
    return Learner().model("t")


def test_plain_is_run_with_the_others_and_kinds_take_turns(model: TargetModel) -> None:
    """Every ratio has a plain beside it, first and last in turn; a second round begins when all had one."""
    rounds = plan_run(model, (PLAIN, NGRAM), 1.0)
    assert [kind for kind, _ in rounds] == [*ORDER, *ORDER]
    assert {lanes for _, lanes in rounds[: len(ORDER)]} == {("plain", "ngram")}
    assert {lanes for _, lanes in rounds[len(ORDER) :]} == {("ngram", "plain")}


def test_what_is_settled_is_not_measured_again(model: TargetModel) -> None:
    """A lane that takes three times plain's time is done with after a few runs; one like plain is not."""
    assert len(plan_run(model, (PLAIN, NGRAM), 3.0)) <= 3
    cells = [("chat", "warm"), ("json", "greedy")]
    assert all(model.speed.belief(NGRAM, cell).mean > 0.7 for cell in cells)


def test_lanes_compete_with_the_fastest(model: TargetModel) -> None:
    """Once a lane is far ahead, one that may beat plain need not be measured any more, nor the first itself."""
    for kind in ("code", "prose"):
        for one, ratio in ((PLAIN, 1.0), (NGRAM, 0.2), (DRAFT, 0.95)):
            learn(model, run(one, kind, ratio, tokens=400))
    assert next_round(model, (PLAIN, NGRAM, DRAFT), ["code"]) is None
    planned = next_round(model, (PLAIN, DRAFT), ["code"])
    assert planned is not None
    assert planned.lanes == (DRAFT, PLAIN)


def test_only_wanted_kinds(model: TargetModel) -> None:
    """Kinds for which nobody has a prompt are left out."""
    planned = next_round(model, (PLAIN, NGRAM), ["math"])
    assert planned is not None
    assert planned.kind == "math"
    assert next_round(model, (PLAIN, NGRAM), []) is None


def test_a_changed_lane_begins_afresh(model: TargetModel) -> None:
    """Its fingerprint is another one, so that it is measured, beside plain; and its own seconds are new."""
    plan_run(model, (PLAIN, NGRAM), 1.0)
    for one in (PLAIN, NGRAM):
        model.profile.spend(arm_key(one.fingerprint, one.strategy.name), 50.0)
    assert next_round(model, (PLAIN, NGRAM)) is None
    changed = lane("ngram", "fp-new")
    planned = next_round(model, (PLAIN, changed))
    assert planned is not None
    assert planned.lanes == (PLAIN, changed)
    arms = [arm_key(one.fingerprint, one.strategy.name) for one in (PLAIN, changed)]
    assert model.profile.spent(arms) == 50.0


def test_runs_last_some_seconds(model: TargetModel) -> None:
    """Few tokens at first and on slow machines, more where decoding is fast, and never very many."""

    def tokens(tpt: float) -> int:
        fresh = Learner().model("t")
        fresh.speed.plain = arm_key("fp-plain", "plain")
        for i in range(3):
            learn(fresh, replace(run(PLAIN, "math", 1.0, at=float(i)), decode_s=63 * tpt))
        planned = next_round(fresh, (PLAIN, NGRAM))
        assert planned is not None
        return planned.tokens

    first = next_round(model, (PLAIN, NGRAM))
    assert first is not None
    assert first.tokens == tokens(0.5) == 32
    assert 55 <= tokens(0.05) <= 65
    assert tokens(0.001) == 96


def test_who_is_measured() -> None:
    """One lane of each arm, plain first, where there is plain and another; of an engine only its own choice."""
    twin = replace(NGRAM, id="ngram2")
    assert subjects([NGRAM, twin, PLAIN]) == (PLAIN, NGRAM)
    assert subjects([PLAIN]) == subjects([NGRAM, DRAFT]) == subjects([PLAIN, replace(PLAIN, id="p2")]) == ()
    engine = [
        Lane(name, "e", "t", Strategy.parse(name), Control.REQUEST, "fp")
        for name in ("auto", "plain", "ngram", "mtp")
    ]
    assert [one.id for one in subjects(engine)] == ["plain", "auto"]
    assert [one.id for one in subjects(engine[1:])] == ["plain", "ngram", "mtp"]


def test_a_profile_is_the_users_business_only_as_evidence_on_speed(model: TargetModel) -> None:
    """Lengths, traffic, ledgers and the curve know of no run; speeds of prompts and of tokens do."""
    before = model.dump()
    learn(model, run(PLAIN, "code", 1.0))
    learn(model, run(NGRAM, "code", 0.5))
    after = model.dump()
    assert {key for key in after if after[key] != before[key]} == {"speed", "prefill", "profile"}
    assert model.speed.belief(NGRAM, ("code", "cool")).mean < -0.2


def test_own_runs_are_told_apart(model: TargetModel) -> None:
    """They have a cell of their own, and a belief says how many stand behind it, and how many requests."""
    seen = run(NGRAM, "code", 0.5)
    assert cell_of(seen.workload) == ("code", PROFILE)
    learn(model, run(PLAIN, "code", 1.0))
    learn(model, seen)
    belief = model.speed.belief(NGRAM, ("code", "cool"))
    assert belief.n == 0.0
    assert belief.profiled == pytest.approx(1.0)
    assert model.speed.belief(NGRAM, ("prose", "cool")).profiled == 0.0


def test_a_few_requests_outweigh_a_profile() -> None:
    """However much our prompts of a kind gained: if the user's lose, that is believed after a handful."""
    learner = Learner()
    model = learner.model("t")
    for i in range(RUNS):
        learn(model, run(PLAIN, "grounded", 1.0, at=float(i)))
        learn(model, run(NGRAM, "grounded", 0.5, at=float(i)))
    cell = ("grounded", "greedy")
    assert model.speed.belief(NGRAM, cell).mean < -0.3
    workload = Workload("grounded", TempBucket.GREEDY)
    for i in range(4):
        learner.learn_one(observe(PLAIN, workload, tpt=BASE, at=10.0 + i))
        learner.learn_one(observe(NGRAM, workload, tpt=BASE * 1.2, at=10.0 + i))
    assert model.speed.belief(NGRAM, cell).mean == pytest.approx(math.log(1.2), abs=0.1)


@pytest.mark.parametrize(("ratios", "most"), [(MIXED, 0.5), (LOSING, 0.9)], ids=["mixed", "losing"])
def test_a_profile_spares_first_tries(ratios: Mapping[str, tuple[float, ...]], most: float) -> None:
    """The first sixty requests are farther from the best that there is without one, though its prompts are not
    the user's: each kind is off by a fifth on each lane."""

    def gap(seed: int, *, own_runs: bool) -> float:
        learner, rng, kinds = Learner(), np.random.default_rng(seed), [kind for kind, _ in KINDS]
        lanes = [status.lane for status in ready("plain", *ratios)]
        off = {(kind, one.id): 0.2 * rng.standard_normal() for kind in ORDER for one in lanes}
        model = learner.model("t")
        while own_runs and (planned := next_round(model, lanes)) is not None:
            for one in planned.lanes:
                noise = 0.12 * rng.standard_normal()
                if one is not lanes[0]:
                    like = kinds.index(planned.kind if planned.kind in kinds else "prose")
                    noise += math.log(ratios[one.id][like]) + off[planned.kind, one.id]
                learn(model, run(one, planned.kind, math.exp(noise)))
        return simulate(learner, lambda _: ratios, 60, seed).gap()

    without, with_profile = (np.mean([gap(seed, own_runs=own) for seed in range(12)]) for own in (False, True))
    assert with_profile < most * without


def test_a_lane_that_loses_in_a_profile_is_out_of_use() -> None:
    """No request of that kind has to find it out, and the decision says on what it stands."""
    learner = Learner()
    model = learner.model("t")
    for i in range(RUNS):
        learn(model, run(PLAIN, "chat", 1.0, at=float(i)))
        learn(model, run(DRAFT, "chat", 2.5, at=float(i)))
    statuses: tuple[LaneStatus, ...] = ready("plain", "draft")
    situation = Situation(Workload("chat", TempBucket.WARM), statuses, at=5.0, prompt_tokens=100)
    decision = learner.choose(situation, np.random.default_rng(0))
    draft = next(c for c in decision.candidates if c.lane == "draft")
    assert decision.lane.id == "plain"
    assert not draft.allowed
    assert draft.n == 0.0
    assert draft.profiled == pytest.approx(2.0, abs=0.1)
    assert "loses to plain" in draft.note


def test_a_reason_names_runs_of_our_own() -> None:
    """Evidence from a profile is not called a request."""
    learner = Learner()
    model = learner.model("t")
    for i in range(RUNS):
        learn(model, run(PLAIN, "code", 1.0, at=float(i)))
        learn(model, run(DRAFT, "code", 0.5, at=float(i)))
    situation = Situation(Workload("code", TempBucket.WARM), ready("plain", "draft"), at=5.0, prompt_tokens=100)
    decision = learner.choose(situation, np.random.default_rng(0))
    assert decision.lane.id == "draft"
    assert "0 requests, 2 runs of our own)" in decision.reason


def test_replays_of_runs_stay_with_them(model: TargetModel) -> None:
    """What a run would have taken on an n-gram lane belongs to the cell of our own prompts too."""
    learner = Learner()
    learner.learn_replay(NGRAM, run(PLAIN, "code", 1.0), ReplayResult(150, 50, 100, 100, (0, 0, 50), (), (), 0))
    belief = learner.model("t").speed.belief(NGRAM, ("code", "cool"))
    assert belief.replayed == 0.0
    assert belief.mean < 0.0


def test_what_was_done_survives_a_restart() -> None:
    """Nothing is measured twice; a state of before there were profiles loads."""
    learner, again = Learner(), Learner()
    lanes = (PLAIN, NGRAM)
    plan_run(learner.model("t"), lanes, 1.0, rounds=5)
    learner.model("t").profile.spend(arm_key("fp-ngram", "ngram"), 7.0)
    learner.model("t").profile.refuse(arm_key("fp-ngram", "ngram"), "json")
    again.load(json.loads(json.dumps(learner.dump())))
    assert again.model("t").profile == learner.model("t").profile
    assert next_round(again.model("t"), lanes) == next_round(learner.model("t"), lanes)
    old = learner.dump()
    del old["targets"]["t"]["profile"]
    again.load(old)
    assert again.model("t").profile == Profile()


@pytest.mark.parametrize(
    "profile",
    [
        {"runs": {"a": {"code": -1}}, "seconds": {}, "refused": []},
        {"runs": {}, "seconds": {"a": -5.0}, "refused": []},
        {"runs": {}, "seconds": {}},
        {"runs": {}, "seconds": {}, "refused": ["a"]},
        {"runs": [], "seconds": {}, "refused": []},
    ],
)
def test_damage_is_noticed(profile: object) -> None:
    """A state that nothing can have led to is refused as a whole."""
    learner = Learner()
    learner.model("t")
    state = learner.dump()
    state["targets"]["t"]["profile"] = profile
    with pytest.raises(ValueError, match=r"damaged|unpack"):
        Learner().load(state)


def test_a_finding_is_a_sentence(model: TargetModel) -> None:
    """How much was measured, how long it took, and what is expected to be fastest where."""
    assert summary(model, (PLAIN, NGRAM)) == ""
    for kind, ratio in (("code_edit", 0.4), ("prose", 1.6), ("chat", 1.6)):
        for i in range(RUNS):
            learn(model, run(PLAIN, kind, 1.0, at=float(i)))
            learn(model, run(NGRAM, kind, ratio, at=float(i)))
    model.profile.spend(arm_key("fp-ngram", "ngram"), 12.3)
    told = (
        "profiled 2 lanes on 3 kinds in 12 s; expected to be fastest: ngram on code_edit; plain on the other 2"
    )
    assert summary(model, (PLAIN, NGRAM)) == told
    only = Learner().model("t")
    learn(only, run(PLAIN, "math", 1.0))
    learn(only, run(NGRAM, "math", 0.5))
    assert summary(only, (PLAIN, NGRAM)).endswith("expected to be fastest: ngram on all")


def test_arms_of_old_set_ups_are_forgotten() -> None:
    """Those that were used longest ago go first, with their runs."""
    profile = Profile()
    for i in range(300):
        profile.count(f"arm{i}", "code")
        profile.refuse(f"arm{i}", "math")
        profile.spend(f"arm{i}", 1.0)
        profile.spend("kept", 1.0)
    assert "kept" in profile.seconds
    assert "arm299" in profile.seconds
    assert len(profile.seconds) == 256
    assert "arm0" not in profile.runs
    assert ("arm0", "math") not in profile.refused
    assert ("arm299", "math") in profile.refused


Outcomes = st.lists(st.tuples(st.sampled_from(["done", "failed", "broken"]), st.floats(0.2, 4.0)), max_size=400)


@settings(max_examples=25)
@given(outcomes=Outcomes, names=st.sets(st.sampled_from(sorted(MIXED)), min_size=1))
def test_a_plan_comes_to_an_end(outcomes: list[tuple[str, float]], names: set[str]) -> None:
    """Whatever runs say or however they fail, no lane has more than its share of runs, each beside plain.

    Only runs that were broken off are made again.
    """
    model, lanes = Learner().model("t"), tuple(lane(name) for name in ("plain", *sorted(names)))
    script, counted = iter(outcomes), 0
    while (planned := next_round(model, lanes)) is not None:
        assert PLAIN in planned.lanes
        assert len(planned.lanes) == len(set(planned.lanes)) >= 2
        assert planned.kind in ORDER
        assert 32 <= planned.tokens <= 96
        for one in planned.lanes:
            result, ratio = next(script, ("done", 1.0))
            if result == "broken":
                break
            counted += 1
            if result == "failed":
                model.profile.refuse(arm_key(one.fingerprint, one.strategy.name), planned.kind)
            else:
                learn(model, run(one, planned.kind, ratio, at=float(counted)))
    assert all(n <= RUNS for kinds in model.profile.runs.values() for n in kinds.values())


def test_a_recorded_world_can_be_profiled_first() -> None:
    """Within the bound, and then no lane begins without evidence."""
    [world] = [world for world in load_worlds(WORLDS) if world.name == "smollm2-wheel"]
    learner = Learner()
    assert 0.0 < profiled(learner, world, 1, 0.2) < PROFILE_S + 10.0
    arms = learner.model(TARGET).speed.arms
    assert min(arm.evidence for arm in arms.values()) >= 5.0
    assert learner.model(TARGET).ledgers == {}
    *_, worst, gap, spent = measure(world, 30, 1, None)
    assert spent == 0.0
    assert worst > 0.0
    assert gap >= 0.0
