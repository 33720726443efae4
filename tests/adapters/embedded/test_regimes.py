"""Levels of a chance that hold for a while: bad luck is told from another text."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from specproxy.adapters.embedded.regimes import LEVELS, Regimes


def feed(
    regimes: Regimes, chance: float, drafts: int, *, length: int = 2, seed: int = 0, fall: float = 1.0
) -> None:
    """Drafts whose guesses are right with this chance, falling from position to position."""
    rng = random.Random(f"{seed} {chance}")
    for _ in range(drafts):
        regimes.step()
        hits = 0
        while hits < length and rng.random() < chance * fall**hits:
            hits += 1
        regimes.add(hits, min(length, hits + 1))


def chances(regimes: Regimes, level: int | None = None) -> list[float]:
    """Of three positions, each if those before it are right."""
    return [after / before for before, after in pairwise([1.0, *regimes.rights(3, level)])]


def test_the_learner_says_where_to_start() -> None:
    assert Regimes(0.65).chance() == pytest.approx(0.65, abs=0.06)
    assert Regimes(0.65, [(20.0, 100.0)]).chance() < 0.35
    assert Regimes(0.65, [(95.0, 100.0)]).chance() > 0.75


@pytest.mark.parametrize("truth", [0.1, 0.4, 0.7, 0.95])
def test_text_of_one_nature_finds_its_level_and_keeps_it(truth: float) -> None:
    """And is not upset by three wrong guesses in a row."""
    regimes = Regimes(0.65)
    feed(regimes, truth, 150)
    before = regimes.chance()
    assert before == pytest.approx(truth, abs=0.15)
    for _ in range(2):
        regimes.step()
        regimes.add(0, 1)
    assert regimes.chance() > before - 0.3


def test_mixed_text_is_followed_within_three_guesses() -> None:
    """Once both levels are known, from this request or from earlier ones."""
    regimes = Regimes(0.65)
    for turn in range(4):
        feed(regimes, 0.95 if turn % 2 else 0.15, 20, seed=turn)
    again = Regimes(0.65, [(55.0, 100.0)], tuple(regimes.counts))
    for each in (regimes, again):
        feed(each, 0.15, 12, seed=9)
        low = each.chance()
        for _ in range(2):
            each.step()
            each.add(2, 2)
        assert low < 0.35
        assert each.chance() > 0.7


def test_a_level_that_was_not_seen_for_long_is_expected_again() -> None:
    """While a drafter idles, its chance drifts back to what the text has shown as a whole."""
    regimes = Regimes(0.65)
    feed(regimes, 0.95, 40)
    feed(regimes, 0.05, 8)
    low = regimes.chance()
    regimes.step(100)
    assert regimes.chance() > low + 0.3


@pytest.mark.parametrize(("belief", "truth"), [(0.95, 0.1), (0.1, 0.95), (0.5, 0.25), (0.4, 0.8)])
def test_a_wrong_prior_is_outvoted_and_does_not_come_back(belief: float, truth: float) -> None:
    """However sure the learner was; not after an idle while either."""
    regimes = Regimes(0.65, [(1000 * belief, 1000.0)])
    feed(regimes, truth, 80)
    assert regimes.chance() == pytest.approx(truth, abs=0.15)
    regimes.step(1000)
    assert regimes.chance() == pytest.approx(truth, abs=0.2)


def test_right_guesses_make_the_next_one_likelier() -> None:
    """Where the level is uncertain; where it is known, no guess changes it."""
    first, second, third = chances(Regimes(0.5))
    assert first < second < third
    known = chances(Regimes(0.5), 4)
    assert known[0] == pytest.approx(LEVELS[4])
    assert known[0] > known[1] > known[2]


def test_positions_that_fall_are_learnt() -> None:
    """As heads that guess several tokens do: 0.9, 0.63, 0.44."""
    regimes = Regimes(0.65)
    feed(regimes, 0.9, 400, length=3, fall=0.7)
    first, second, third = chances(regimes)
    assert first == pytest.approx(0.9, abs=0.1)
    assert second == pytest.approx(0.63, abs=0.15)
    assert third == pytest.approx(0.44, abs=0.15)


def test_the_learners_positions_fall_too() -> None:
    first, second, third = chances(Regimes(0.65, [(900, 1000), (600, 1000), (300, 1000)]))
    assert first > 0.7
    assert second < 0.85 * first
    assert third < 0.7 * second


def test_a_million_steps_leave_the_weights_sound() -> None:
    """They stay a distribution, and none is lost for good."""
    regimes = Regimes(0.5)
    for i in range(20_000):  # a guess in every fiftieth step, as where drafting does not pay
        regimes.step(50)
        regimes.add(int(i % 4 > 0), 1)
    assert sum(regimes.weights()) == pytest.approx(1)
    assert min(regimes.weights()) > 0
    assert 0.6 < regimes.chance() < 0.85
    feed(regimes, 0.05, 60)
    assert regimes.chance() < 0.3


def test_one_guess_is_not_all_that_a_workload_is_judged_by() -> None:
    """Where a single one was seen to be wrong, or right, what is usual counts more; many outweigh it."""
    assert 0.4 < Regimes(0.65, [(0.0, 1.0)]).chance() < 0.65
    assert 0.65 < Regimes(0.65, [(1.0, 1.0)]).chance() < 0.85
    assert Regimes(0.65, [(0.0, 40.0)]).chance() < 0.2
