"""One test for each rule and each hazard."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specproxy.errors import LaneUnavailable
from specproxy.records import (
    Control,
    Decision,
    Health,
    Lane,
    LaneStatus,
    Situation,
    Strategy,
    TempBucket,
    Workload,
)
from specproxy.strategies.learner import Learner
from specproxy.strategies.rules import HAZARDS, Narrowed, alone, apply_rules


def status(strategy: str, health: Health = Health.READY, name: str | None = None) -> LaneStatus:
    """A lane named after its strategy."""
    lane = Lane(name or strategy, "b", "t", Strategy.parse(strategy), Control.INSTANCE, f"f-{strategy}")
    return LaneStatus(lane, health)


PLAIN, NGRAM, MTP = status("plain"), status("ngram"), status("mtp:4", name="mtp4")


def situation(*lanes: LaneStatus, flags: frozenset[str] = frozenset(), pin: str | None = None) -> Situation:
    return Situation(Workload("code", TempBucket.COOL, flags), lanes, at=0.0, pin=pin)


@pytest.mark.parametrize("flag", [flag for flag, _ in HAZARDS])
def test_hazards_go_to_plain_and_say_why(flag: str) -> None:
    """Each hazard ends on plain, whatever else is there, with its own reason."""
    decision = apply_rules(situation(NGRAM, PLAIN, MTP, flags=frozenset({flag})))
    assert isinstance(decision, Decision)
    assert (decision.lane, decision.rule) == (PLAIN.lane, "hazard")
    assert dict(HAZARDS)[flag] in decision.reason


def test_the_hazards_are_those_that_the_classifier_flags() -> None:
    """The flags that rules look at are spelled as records.Workload lists them."""
    assert {flag for flag, _ in HAZARDS} == {"logprobs", "images", "audio", "many", "steering"}


def test_thinking_is_no_hazard() -> None:
    """Other flags leave the choice open."""
    assert apply_rules(situation(PLAIN, NGRAM, flags=frozenset({"thinking"}))) == Narrowed((PLAIN, NGRAM))


def test_a_hazard_without_a_plain_lane_keeps_the_lanes_and_says_so() -> None:
    """The request is still served, and the reason names the missing lane."""
    narrowed = apply_rules(situation(NGRAM, MTP, flags=frozenset({"logprobs"})))
    assert isinstance(narrowed, Narrowed)
    assert narrowed.lanes == (NGRAM, MTP)
    assert "no plain lane" in narrowed.reason


def test_a_hazard_outranks_a_pin() -> None:
    """A wrong answer is worse than a slow one."""
    decision = apply_rules(situation(PLAIN, NGRAM, flags=frozenset({"logprobs"}), pin="ngram"))
    assert isinstance(decision, Decision)
    assert (decision.lane, decision.rule) == (PLAIN.lane, "hazard")


@pytest.mark.parametrize(
    ("pin", "lane"),
    [("ngram", NGRAM), (" NGRAM ", NGRAM), ("mtp", MTP), ("mtp:4", MTP), ("mtp4", MTP), ("plain", PLAIN)],
)
def test_a_pin_is_followed(pin: str, lane: LaneStatus) -> None:
    """By name, in any case, with or without the draft length, or by lane id."""
    decision = apply_rules(situation(PLAIN, NGRAM, MTP, pin=pin))
    assert isinstance(decision, Decision)
    assert (decision.lane, decision.rule) == (lane.lane, "pin")


@pytest.mark.parametrize("pin", ["draft", "mtp:9", "mtp:x", ":", ""])
def test_a_pin_without_a_lane_names_the_strategies_there_are(pin: str) -> None:
    """The error says what could have been asked for."""
    with pytest.raises(LaneUnavailable, match="available strategies: mtp, ngram, plain"):
        apply_rules(situation(PLAIN, NGRAM, MTP, pin=pin))


def test_a_pin_on_a_lane_that_is_not_ready_fails() -> None:
    """A starting lane can't take the request, so the pin can't be followed."""
    with pytest.raises(LaneUnavailable, match="available strategies: plain"):
        apply_rules(situation(PLAIN, status("ngram", Health.STARTING), pin="ngram"))


def test_pin_auto_leaves_the_choice_open_unless_such_a_lane_exists() -> None:
    """``auto`` is a strategy of the embedded engine; elsewhere it means the default."""
    assert apply_rules(situation(PLAIN, NGRAM, pin="auto")) == Narrowed((PLAIN, NGRAM))
    decision = apply_rules(situation(PLAIN, auto := status("auto"), pin="auto"))
    assert isinstance(decision, Decision)
    assert decision.lane is auto.lane


def test_several_lanes_with_the_pinned_strategy_stay_open() -> None:
    """The learner chooses among them, under the rule's name."""
    other = status("ngram", name="ngram-2")
    narrowed = apply_rules(situation(PLAIN, NGRAM, other, pin="ngram"))
    assert isinstance(narrowed, Narrowed)
    assert (narrowed.lanes, narrowed.rule) == ((NGRAM, other), "pin")


def test_one_ready_lane_is_the_only_choice() -> None:
    """Lanes that are not ready don't count."""
    decision = apply_rules(situation(status("plain", Health.UNHEALTHY), NGRAM))
    assert isinstance(decision, Decision)
    assert (decision.lane, decision.rule) == (NGRAM.lane, "only")


def test_no_ready_lane_says_what_state_they_are_in() -> None:
    """The error's hint lists every lane with its state."""
    with pytest.raises(LaneUnavailable, match="plain is starting, ngram is quarantined"):
        apply_rules(situation(status("plain", Health.STARTING), status("ngram", Health.QUARANTINED)))
    with pytest.raises(LaneUnavailable, match="no lane serves this model"):
        apply_rules(situation())


def test_without_a_rule_all_ready_lanes_are_left() -> None:
    """Nothing is decided, and no rule is named."""
    assert apply_rules(situation(PLAIN, NGRAM, status("draft", Health.STOPPED))) == Narrowed((PLAIN, NGRAM))


@pytest.mark.parametrize("flags", [(), ("thinking",), *((flag,) for flag, _ in HAZARDS)])
@pytest.mark.parametrize("lane", [PLAIN, MTP], ids=["plain", "mtp"])
def test_a_lane_alone_is_settled_as_the_learner_settles_it(lane: LaneStatus, flags: tuple[str, ...]) -> None:
    """Without asking it: the same lane, workload, rule, reason and propensity."""
    asked = Learner().choose(situation(lane, flags=frozenset(flags)), np.random.default_rng(1))
    told = alone(asked.workload, lane)
    assert replace(asked, candidates=()) == told
