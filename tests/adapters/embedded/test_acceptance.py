"""Posteriors of acceptance: priors that give way, and counts that stay sound."""

from __future__ import annotations

import pytest

from specproxy.adapters.embedded.acceptance import Acceptance


def feed(acceptance: Acceptance, chance: float, count: int, *, fade: float = 0.96) -> None:
    """Count guesses of which an even share is right."""
    due = 0.0
    for _ in range(count):
        due += chance
        hit = due >= 1
        due -= hit
        acceptance.fade(fade)
        acceptance.add(0, hit, 1)


@pytest.mark.parametrize(("belief", "truth"), [(0.95, 0.1), (0.1, 0.95), (0.5, 0.25), (0.4, 0.8)])
def test_a_wrong_prior_is_outvoted_and_does_not_come_back(belief: float, truth: float) -> None:
    """However sure the learner was; not after an idle while either."""
    acceptance = Acceptance([0.65], [(1000 * belief, 1000.0)])
    feed(acceptance, truth, 100)
    assert acceptance.chance(0) == pytest.approx(truth, abs=0.1)
    for _ in range(2000):
        acceptance.fade(0.995)
    assert acceptance.chance(0) == pytest.approx(truth, abs=0.17)


def test_what_the_learner_has_seen_outweighs_what_is_true_of_most_texts() -> None:
    """A workload that copies does so nearly always: ten of ten are more than one half and ten of ten."""
    assert Acceptance([0.45], [(10.0, 10.0)]).chance(0) > 0.9
    assert Acceptance([0.45], [(0.0, 10.0)]).chance(0) < 0.1
    assert Acceptance([0.45], [(0.0, 0.0)]).chance(0) == pytest.approx(0.45)


def test_a_right_prior_is_what_idleness_leads_back_to() -> None:
    """A bad stretch is forgotten."""
    acceptance = Acceptance([0.65], [(90, 100)])
    feed(acceptance, 0.0, 8)
    assert (bad := acceptance.chance(0)) < 0.5
    for _ in range(1000):
        acceptance.fade(0.995)
    assert acceptance.chance(0) > max(0.5, bad + 0.1)


def test_a_change_is_followed_within_some_tens_of_guesses() -> None:
    acceptance = Acceptance([0.65])
    feed(acceptance, 0.9, 200)
    feed(acceptance, 0.1, 40)
    assert acceptance.chance(0) < 0.35


def test_a_million_steps_leave_the_counts_sound() -> None:
    """Forgetting keeps them small, and chances between 0 and 1."""
    acceptance = Acceptance([0.5])
    for i in range(100_000):  # something to be seen in every tenth step
        acceptance.fade(0.96**10)
        acceptance.add(0, i % 4 > 0, 1)
    cell = acceptance._cells[0]
    assert cell.recent == pytest.approx(1 / (1 - 0.96**10), rel=0.01)
    assert cell.tried == pytest.approx(100, rel=0.01)
    assert 0.55 < acceptance.chance(0) < 0.9
