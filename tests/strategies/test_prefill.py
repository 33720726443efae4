"""What a prompt costs, and how far predicted cache hits are to be trusted."""

from __future__ import annotations

import json

import pytest

from specproxy.strategies.prefill import Prefill


def test_rates_are_learned_by_arm() -> None:
    """Lanes differ, and one that never ran takes after them; at first a prompt token is part of an answer's."""
    prefill = Prefill()
    assert prefill.seconds("a", 800, 0.02) == pytest.approx(800 * 0.02 / 8)
    for _ in range(30):
        prefill.learn("a", 1000, 1.0)
        prefill.learn("b", 1000, 4.0)
    assert prefill.seconds("a", 1000, 0.02) == pytest.approx(1.0, rel=0.1)
    assert prefill.seconds("b", 1000, 0.02) == pytest.approx(4.0, rel=0.1)
    assert 1.0 < prefill.seconds("c", 1000, 0.02) < 4.0
    assert prefill.seconds("a", 0, 0.02) == 0.0


def test_short_prompts_and_wild_times_teach_little() -> None:
    """Below a step's fixed costs nothing; a stall moves the mean by no more than a wild value may."""
    prefill = Prefill()
    prefill.learn("a", 15, 9.0)
    prefill.learn("a", 100, 0.0)
    assert prefill.dump()["rates"] == {}
    for _ in range(10):
        prefill.learn("a", 1000, 1.0)
    prefill.learn("a", 1000, 1e6)
    assert prefill.seconds("a", 1000, 0.02) < 1.2


def test_hits_are_trusted_as_far_as_they_came_true() -> None:
    """At first wholly; a cache that is never there is found out, and one that has more is not overrated."""
    prefill = Prefill()
    assert prefill.trusted("a", 512) == 512
    for _ in range(40):
        prefill.learn_hits("a", 512, 0)
        prefill.learn_hits("b", 512, 4096)
    assert prefill.trusted("a", 512) < 40
    assert prefill.trusted("b", 512) == pytest.approx(512)
    assert prefill.trusted("b", 0) == 0.0
    before = prefill.dump()["trust"]
    prefill.learn_hits("a", 0, 100)
    assert prefill.dump()["trust"] == before


def test_state_survives() -> None:
    prefill, again = Prefill(), Prefill()
    prefill.learn("a", 1000, 1.0)
    prefill.learn_hits("a", 512, 256)
    again.restore(json.loads(json.dumps(prefill.dump())))
    assert again.seconds("a", 700, 0.02) == prefill.seconds("a", 700, 0.02)
    assert again.trusted("a", 512) == prefill.trusted("a", 512)
