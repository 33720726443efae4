"""What model files tell the learner about a lane beforehand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specproxy.proxy.facts import lane_facts, pressed
from specproxy.records import Strategy, TempBucket
from specproxy.strategies.cost import prior_ratio
from tests.proxy.samples import PLAIN
from tests.support.model_facts import GIB, facts

DENSE = facts()
MOE = facts(expert_count=64, expert_used_count=4, expert_bytes=3 * GIB)
MTP = replace(PLAIN, strategy=Strategy(("mtp",), 3))
DRAFT = replace(PLAIN, strategy=Strategy(("draft",), 4))


def test_a_draft_is_known_by_its_size_and_family() -> None:
    """Only to the lane that uses it."""
    small = facts(weight_bytes=GIB // 2, digest="d")
    told = lane_facts(DRAFT, DENSE, small, 2)
    assert (told.size_ratio, told.same_family, told.n_max, told.slots) == (0.125, True, 4, 2)
    assert lane_facts(DRAFT, DENSE, facts(architecture="qwen3"), 1).same_family is False
    assert lane_facts(MTP, facts(mtp_layers=1), small, 1).size_ratio is None


def test_short_memory_is_held_against_lanes_that_take_some() -> None:
    """By what the system says of the last minute; lanes without memory of their own are not concerned."""
    told = lane_facts(MTP, DENSE, None, 1)
    big = replace(MTP, memory_bytes=GIB)
    assert pressed(told, big, 0.3).memory_pressure
    assert not pressed(told, big, 0.01).memory_pressure
    assert not pressed(told, MTP, 0.3).memory_pressure
    assert pressed(pressed(told, big, 0.3), big, 0.0) == told


def test_experts_are_known_by_the_bytes_that_a_token_reads() -> None:
    """A mixture whose experts are most of what is read loses more by drafting than one whose are not."""
    told = lane_facts(MTP, MOE, None, 1)
    assert (told.experts, told.experts_used) == (64, 4)
    assert told.expert_share == pytest.approx(3 / 16 / (1 + 3 / 16))
    whole = lane_facts(MTP, facts(expert_count=64, expert_used_count=4, expert_bytes=4 * GIB), None, 1)
    assert whole.expert_share == 1.0
    ratios = [
        prior_ratio(MTP.strategy, known, "code", TempBucket.COOL)
        for known in (lane_facts(MTP, DENSE, None, 1), told, whole)
    ]
    assert ratios == sorted(ratios)
    assert ratios[0] < ratios[2]
