"""The learner end to end, in small simulated worlds and at its edges."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from specproxy.records import Observation, Outcome, Situation, TempBucket, Workload
from specproxy.strategies.base import Policy
from specproxy.strategies.classify import KINDS
from specproxy.strategies.cost import LaneFacts
from specproxy.strategies.learner import Learner
from specproxy.strategies.replay import ReplayResult
from specproxy.strategies.speed import arm_key
from tests.strategies.world import LOSING, MIXED, lane, observe, ready, simulate

CODE = Workload("code", TempBucket.COOL)


def test_it_is_a_policy() -> None:
    """The learner has the shape that the router expects."""
    assert isinstance(Learner(), Policy)


def test_plain_is_measured_first() -> None:
    """With nothing known the first requests go to plain, and the reason says so."""
    decision = Learner().choose(Situation(CODE, ready("plain", "mtp"), at=0.0), np.random.default_rng(0))
    assert (decision.lane.id, decision.rule, decision.propensity) == ("plain", "plain_first", 1.0)
    assert [c.lane for c in decision.candidates] == ["plain", "mtp"]


@pytest.mark.parametrize("seed", range(4))
def test_it_comes_close_to_the_oracle(seed: int) -> None:
    """In a world where each strategy wins some kind, learning costs little, and less later."""
    run = simulate(Learner(), lambda _: MIXED, 1000, seed)
    assert run.gap(0, 500) <= 0.06
    assert run.gap(500, 1000) <= 0.02


@pytest.mark.parametrize("seed", range(4))
def test_it_loses_little_where_everything_loses(seed: int) -> None:
    """Where plain is always best, 500 requests cost at most a few percent over plain."""
    assert simulate(Learner(), lambda _: LOSING, 500, seed).loss() <= 0.035


def test_the_same_seed_gives_the_same_decisions() -> None:
    """Nothing but the situation, the state and the generator counts."""
    first = simulate(Learner(), lambda _: MIXED, 120, 7)
    second = simulate(Learner(), lambda _: MIXED, 120, 7)
    assert first.decisions == second.decisions


@pytest.mark.parametrize(
    "change",
    [
        {"outcome": Outcome.TRUNCATED},
        {"outcome": Outcome.CLIENT_GONE},
        {"outcome": Outcome.ERROR},
        {"load_s": 2.0},
        {"strategy": "ngram", "repeat": True},
        {"decode_s": None},
        {"output_tokens": 1},
    ],
)
def test_samples_that_teach_nothing_about_speed_are_dropped(change: dict[str, object]) -> None:
    """Truncated, loaded, repeated or untimed requests leave every arm as it was."""
    learner = Learner()
    for _ in range(5):
        learner.learn_one(observe(lane("plain"), CODE))
        learner.learn_one(observe(lane("ngram"), CODE))
    before = {t: m["speed"] for t, m in learner.dump()["targets"].items()}
    learner.learn_one(replace(observe(lane("ngram"), CODE, tpt=0.5), **change))  # type: ignore[arg-type]  # of any field
    assert {t: m["speed"] for t, m in learner.dump()["targets"].items()} == before


def test_load_gives_the_same_decisions() -> None:
    """A dumped and loaded learner goes on exactly as the original does."""
    import json

    first = Learner()
    simulate(first, lambda _: MIXED, 200, 3)
    second = Learner()
    second.load(json.loads(json.dumps(first.dump())))
    assert (
        simulate(second, lambda _: MIXED, 100, 4).decisions
        == simulate(first, lambda _: MIXED, 100, 4).decisions
    )


def test_after_a_change_plain_is_measured_as_often_as_it_takes_and_no_more() -> None:
    """Of many requests at once two do, and one more where one of them failed; the rest go where they would."""
    learner, rng, lanes = Learner(), np.random.default_rng(1), ready("plain", "mtp:3")
    for i in range(60):
        which = lanes[i % 2].lane
        learner.learn_one(observe(which, CODE, tpt=0.02 if i % 2 == 0 else 0.01, at=5.0 * i))
    learner.model("t").speed.plain_checks = 2

    def crowd(name: str) -> list[str]:
        ids = [f"{name}{i}" for i in range(6)]
        asked = [Situation(CODE, lanes, at=400.0, in_flight=6, request_id=each) for each in ids]
        return [learner.choose(each, rng).rule for each in asked]

    assert crowd("a") == ["plain_first"] * 2 + ["exploit"] * 4
    learner.learn_one(replace(observe(lanes[0].lane, CODE, at=401.0, request_id="a0"), outcome=Outcome.ERROR))
    assert crowd("b") == ["plain_first"] + ["exploit"] * 5


@pytest.mark.parametrize("state", [{}, {"format": "x"}, {"format": "specproxy-learner", "version": 99}])
def test_foreign_or_newer_state_is_refused(state: dict[str, object]) -> None:
    """The caller gets a ValueError, and the learner stays usable."""
    learner = Learner()
    with pytest.raises(ValueError, match="state"):
        learner.load(state)
    assert learner.choose(Situation(CODE, ready("plain"), at=0.0), np.random.default_rng(0)).lane.id == "plain"


@pytest.mark.parametrize("stall", [20.0, 200.0])
@pytest.mark.parametrize("after", [20, 60, 150])
def test_a_stall_does_not_shut_the_gate(stall: float, after: int) -> None:
    """One request that takes 20 or 200 times as long, on a lane that wins, changes hardly a choice after it."""
    ready_lanes, rng = ready("plain", "mtp"), np.random.default_rng(5)
    learner, chosen = Learner(), []
    for t in range(after + 100):
        decision = learner.choose(Situation(CODE, ready_lanes, at=4.0 * t, request_id=str(t)), rng)
        ratio = 0.6 if decision.lane.id == "mtp" else 1.0
        tpt = 0.02 * ratio * float(np.exp(0.05 * rng.standard_normal()))
        learner.learn_one(
            observe(
                decision, CODE, tpt=tpt * (stall if t == after else 1.0), at=4.0 * t + 3.0, request_id=str(t)
            )
        )
        chosen.append(decision.lane.id)
    assert chosen[after + 1 :].count("mtp") >= 90


def test_a_lane_that_always_stalls_is_shut_out() -> None:
    """What repeats is the lane's fault: two such requests are booked in full, and the gate closes."""
    rng = np.random.default_rng(6)
    learner = Learner()
    lost = 0.0
    for t in range(300):
        situation = Situation(CODE, ready("plain", "mtp"), at=4.0 * t, request_id=str(t))
        decision = learner.choose(situation, rng)
        tpt = 0.2 if decision.lane.id == "mtp" else 0.02
        lost += (tpt - 0.02) * 149
        learner.learn_one(observe(decision, CODE, tpt=tpt, at=4.0 * t + 3.0, request_id=str(t)))
    assert lost <= 3 * (0.2 - 0.02) * 149


def test_a_deficit_may_be_worked_off() -> None:
    """Losses of one lane don't shut out another that gains for sure."""
    learner, rng = Learner(), np.random.default_rng(7)
    for t in range(12):
        for name, tpt in (("plain", 0.02), ("ngram", 0.008)):
            learner.learn_one(observe(lane(name), CODE, tpt=tpt, at=float(t)))
    learner.model("t").ledger(CODE.key).loss = 6.0 * 3.0
    situation = Situation(CODE, ready("plain", "ngram", "mtp"), at=99.0)
    decision = learner.choose(situation, rng)
    assert decision.lane.id == "ngram"
    assert next(c.note for c in decision.candidates if c.lane == "mtp") == "held back by the gate"
    learner.model("t").ledger(CODE.key).loss = 600.0
    assert learner.choose(situation, rng).lane.id == "plain"


def replayed(tokens: int, steps: int) -> ReplayResult:
    """A replay in which every step with a draft took in three of four guesses."""
    drafts = (tokens - steps) // 3
    return ReplayResult(tokens, steps, 4 * drafts, 3 * drafts, (steps - drafts, 0, 0, 0, drafts), (), (), 0)


@pytest.mark.parametrize("source", ["tokens", "pieces"])
def test_approximate_replays_are_held_against_what_was_counted(source: str) -> None:
    """Where the lane's own requests show that such replays promise too much, they are corrected; exact ones are
    taken at their word."""
    learner, told = Learner(), {}
    plain, ngram = lane("plain"), lane("ngram")
    base = Observation(
        "r", 1.0, CODE, plain.id, "plain", plain.fingerprint, plain.target, Outcome.COMPLETE,
        output_tokens=100, decode_s=2.0, prompt_tokens=50, prefill_s=0.1,
    )  # fmt: skip
    for _ in range(5):
        learner.learn_one(base)
    model = learner.model("t")
    key = arm_key(ngram.fingerprint, "ngram")
    own = replace(
        base,
        lane=ngram.id,
        strategy="ngram",
        fingerprint=ngram.fingerprint,
        draft_tokens=60,
        accepted_tokens=40,
    )
    for _ in range(40):
        learner.learn_replay(ngram, own, replayed(99, 39), source)  # 59 steps were counted
    fit = model.fit(key, source)
    assert fit is not None
    assert fit.correct(0.0) == pytest.approx(math.log(59 / 39), rel=0.25)
    for kind in ("ids", source):
        other = Learner()
        other.load(json.loads(json.dumps(learner.dump())))
        for _ in range(10):
            other.learn_replay(ngram, base, replayed(99, 39), kind)
        told[kind] = other.model("t").speed.belief(ngram, ("code", "cool")).mean
    assert told[source] > told["ids"] + 0.1


def test_damaged_fits_are_refused() -> None:
    """How far replays are to be believed is state like any other."""
    learner = Learner()
    learner.model("t").fit("arm", "tokens")
    state = json.loads(json.dumps(learner.dump()))
    Learner().load(state)
    state["targets"]["t"]["fits"][0][2] = {}
    with pytest.raises(ValueError, match="damaged"):
        Learner().load(state)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, 1e300, 10**400])
@pytest.mark.parametrize(
    "where", [("speed", "plain_checks"), ("speed", "level", "at"), ("speed", "level", "mean", 0)]
)
def test_numbers_without_bounds_are_refused(number: float, where: tuple[str | int, ...]) -> None:
    """JSON can hold them, and one would make every later estimate worthless; the learner stays as it was."""
    learner = Learner()
    learner.learn_one(observe(lane("plain"), CODE))
    before = learner.dump()
    state = json.loads(json.dumps(before))
    Learner().load(state)
    [place] = state["targets"].values()
    for step in where[:-1]:
        place = place[step]
    place[where[-1]] = number
    with pytest.raises(ValueError, match="damaged"):
        learner.load(state)
    assert learner.dump() == before


def test_the_first_request_of_a_workload_finds_its_priors_ready() -> None:
    """The cost model is asked between requests, for every workload there is; new facts are asked for anew."""
    learner = Learner()
    situation = Situation(CODE, ready("plain", "mtp"), at=0.0, request_id="1")
    decision = learner.choose(situation, np.random.default_rng(1))
    speed = learner.model("t").speed
    for i in range(200):
        learner.learn_one(observe(decision, CODE, at=float(i)))
    wanted = {(kind, str(t)) for kind in KINDS for t in TempBucket}
    assert {key[-1] for key in speed.priors._rules if key[1] == "mtp"} >= wanted
    learner.set_facts("mtp", LaneFacts(memory_pressure=True))
    assert not speed.priors._rules
    for i in range(200):
        learner.learn_one(observe(decision, CODE, at=float(i)))
    assert {key[-1] for key in speed.priors._rules if key[1] == "mtp"} >= wanted


@pytest.mark.parametrize("factor", [1.35, 1.8, 2.2])
@pytest.mark.parametrize("before", [0.6, 0.8])
def test_a_lane_that_has_become_worse_is_left(before: float, factor: float) -> None:
    """Also where nothing else has run for long, so that the machine could be to blame: plain is measured, and
    tells. Replies count no drafts."""
    used = _used_after(before, factor, 1.0)
    assert sum(used) <= 15 if before * factor > 1.0 else sum(used) >= 90


@pytest.mark.parametrize("machine", [0.6, 1.8])
def test_a_machine_that_has_become_slower_is_not_held_against_a_lane(machine: float) -> None:
    """By the same measurement of plain."""
    assert sum(_used_after(0.7, 1.0, machine)) >= 90


def _used_after(before: float, factor: float, machine: float) -> list[bool]:
    """Whether each of a hundred requests ran on a lane whose time is multiplied from there on."""
    learner, rng, used = Learner(), np.random.default_rng(5), []
    for t in range(300):
        decision = learner.choose(Situation(CODE, ready("plain", "mtp"), at=4.0 * t, request_id=str(t)), rng)
        used.append(decision.lane.id == "mtp")
        ratio = before * (factor if t >= 200 else 1.0) if used[-1] else 1.0
        tpt = 0.02 * ratio * (machine if t >= 200 else 1.0) * float(np.exp(0.05 * rng.standard_normal()))
        learner.learn_one(observe(decision, CODE, tpt=tpt, at=4.0 * t + 3.0, request_id=str(t)))
    assert sum(used[150:200]) >= 49
    return used[200:]
