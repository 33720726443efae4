"""Decisions in words and numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from specproxy.records import Decision, Situation, TempBucket, Workload
from specproxy.strategies.explain import Candidates, explained
from specproxy.strategies.learner import Learner
from specproxy.strategies.replay import ReplayResult
from tests.strategies.world import MIXED, lane, observe, ready, simulate

CODE = Workload("code", TempBucket.COOL)


def decided(learner: Learner, workload: Workload = CODE) -> Decision:
    lanes = ready("plain", *MIXED)
    return learner.choose(Situation(workload, lanes, at=1e4, prompt_tokens=300), np.random.default_rng(0))


@pytest.fixture(scope="module")
def learner() -> Learner:
    """One that has seen 300 requests."""
    found = Learner()
    simulate(found, lambda _: MIXED, 300, 1)
    return found


def test_every_candidate_is_explained(learner: Learner) -> None:
    """Times within intervals, prior beside evidence, propensities that sum to one; and all of it is JSON."""
    data = json.loads(json.dumps(explained(decided(learner))))
    assert [c["lane"] for c in data["candidates"]] == ["plain", "ngram", "draft", "mtp"]
    assert sum(c["propensity"] for c in data["candidates"]) == pytest.approx(1.0)
    for c in data["candidates"]:
        assert c["ratio_lo"] <= c["ratio"] <= c["ratio_hi"]
        assert 0.0 < c["fixed_s"] < c["expected_lo_s"] <= c["expected_s"] <= c["expected_hi_s"]
        assert c["prior"] > 0.0
    chosen = next(c for c in data["candidates"] if c["lane"] == data["lane"])
    assert chosen["n"] > 5.0
    assert chosen["ratio"] == pytest.approx(0.65, abs=0.07)
    assert next(c for c in data["candidates"] if c["lane"] == "ngram")["ratio_hi"] > 0.9
    assert data["reason"].count(". ") == 0


@pytest.mark.parametrize(("cached", "link"), [("", "and"), ("ngram", "but")])
def test_a_reason_does_not_contradict_itself(learner: Learner, cached: str, link: str) -> None:
    """A lane that takes longer for a token may win with less to read; the reason tells both apart."""
    workload = CODE if link == "and" else Workload("creative", TempBucket.HOT)
    lanes, hits = ready("plain", *MIXED), {cached: 50_000} if cached else {}
    situation = Situation(workload, lanes, at=1e4, prompt_tokens=50_000, prefix_hits=hits)
    decision = learner.choose(situation, np.random.default_rng(0))
    ratio = next(c.ratio for c in decision.candidates if c.lane == decision.lane.id)
    assert (decision.rule, ratio < 1) == ("exploit", link == "and")
    assert decision.reason.endswith(f"), {link} the whole request the least of all lanes")


def test_lanes_that_are_kept_out_say_why(learner: Learner) -> None:
    """On hot creative text everything loses, and the notes say so."""
    data = explained(decided(learner, Workload("creative", TempBucket.HOT)))
    assert data["lane"] == "plain"
    notes = {c["lane"]: c["note"] for c in data["candidates"] if not c["allowed"]}
    assert set(notes) == {"draft", "mtp"}
    assert all("loses to plain" in note or "gate" in note for note in notes.values())


def test_only_proven_losses_are_told_as_such() -> None:
    """Lanes that the gate keeps out, or that have yet to show, are not said to lose."""
    learner, lanes, poem = Learner(), ready("plain", "draft", "mtp"), Workload("creative", TempBucket.HOT)
    for i in range(4):
        learner.learn_one(observe(lanes[0].lane, poem, at=5.0 * i))
    unknown = learner.choose(Situation(poem, lanes, at=30.0), np.random.default_rng(0))
    assert not any(c.allowed for c in unknown.candidates[1:])
    assert (unknown.rule, unknown.reason) == ("exploit", "plain is expected to be fastest")
    for i in range(60):
        learner.learn_one(observe(lanes[i % 3].lane, poem, tpt=0.02 if i % 3 == 0 else 0.05, at=40.0 + 5.0 * i))
    known = learner.choose(Situation(poem, lanes, at=400.0, prompt_tokens=2000), np.random.default_rng(0))
    assert {c.note for c in known.candidates[1:]} == {"disabled: it loses to plain on this workload"}
    assert (known.rule, known.reason) == ("disabled", "every other lane loses to plain on this workload")


def test_one_is_no_plural() -> None:
    """Neither of requests nor of replays."""
    learner, ngram = Learner(), ready("ngram")[0].lane
    for name in ("plain", "plain", "ngram"):
        learner.learn_one(observe(lane(name), CODE, tpt=0.02 if name == "plain" else 0.012))
    elsewhere = observe(lane("plain"), CODE)
    learner.learn_replay(ngram, elsewhere, ReplayResult(150, 50, 100, 100, (0, 0, 50), (), (), 0))
    assert "1 request and 1 replay)" in decided(learner).reason


def test_candidates_are_a_sequence(learner: Learner) -> None:
    """Worked out when looked at, they compare, slice and print like the tuple that they stand for."""
    first, second = decided(learner).candidates, decided(learner).candidates
    assert isinstance(first, Candidates)
    assert len(first) == 4
    assert first == second
    assert first == tuple(first)
    assert hash(first) == hash(second)
    assert first[1:2] == (first[1],)
    assert repr(first) == repr(tuple(first))
    assert first != 3
