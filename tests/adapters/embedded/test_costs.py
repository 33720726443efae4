"""What is known of a machine's speed: measured, kept, and not upset by an interruption."""

from __future__ import annotations

import json
import random

import pytest

from specproxy.adapters.embedded.costs import StepCosts

PLAIN_S = 0.02


def known(slope: float = 0.0, **by_width: float) -> StepCosts:
    """Costs that were measured often enough to be believed, by ``w<width>`` in plain steps."""
    costs = StepCosts(slope)
    for name, ratio in {"w1": 1.0, **by_width}.items():
        for _ in range(20):
            costs.decoded(int(name[1:]), PLAIN_S * ratio)
    return costs


def test_an_interrupted_step_does_not_upset_the_costs() -> None:
    """A pause of the machine moves them little, even where nothing was measured for long: a width that looks
    dear is not used, so that nothing would set it right."""
    costs = known(w2=1.2)
    before = costs.verify(1)
    for _ in range(200):
        costs.decoded(2, 1.2 * PLAIN_S)
    costs.decoded(1, 100 * PLAIN_S)
    assert costs.verify(1) <= 1.16 * before


def test_catching_up_is_not_taken_for_the_cost_of_a_guess() -> None:
    """A drafter's first proposal goes through the whole prompt."""
    costs = known()
    before = costs.guess("draft")
    costs.guessed("draft", 2, 1.0, late=900)
    assert costs.guess("draft") == before
    costs.guessed("draft", 2, 0.02, late=3)
    assert costs.guess("draft") > before


def test_what_catching_up_costs_is_learnt_by_the_token() -> None:
    """And does not say that a guess is dear."""
    costs = known()
    for _ in range(20):
        costs.guessed("draft", 1, 0.002)
    costs.guessed("draft", 2, 2 * 0.002 + 99 * 0.0001, late=100)
    assert costs.catch_up("draft", 300) == pytest.approx(299 * 0.0001, rel=0.1)
    assert costs.guess("draft") == pytest.approx(0.002, rel=0.2)
    assert costs.catch_up("draft", 1) == 0


def test_a_width_that_was_found_dearer_takes_its_neighbours_along() -> None:
    """As where real text wakes more experts than the profile's: far ones less."""
    costs = known(w2=1.3, w3=1.6, w4=2.0, w17=6.0)
    for _ in range(100):
        costs.decoded(1, PLAIN_S)
    before = {width: costs.verify(width) for width in (1, 3, 4, 17)}
    for _ in range(12):
        costs.decoded(2, 1.75 * PLAIN_S)
    moved = {width: costs.verify(width) / seconds for width, seconds in before.items()}
    assert moved[1] == pytest.approx(1)
    assert moved[3] > 1.08
    assert 1.0 < moved[17] < moved[4] < moved[3]


def test_neighbours_that_are_measured_too_do_not_drift() -> None:
    """Each has noise of its own, and takes the other along; both stay where they are."""
    rng, costs = random.Random(2), known(w2=1.3, w3=1.6)
    for _ in range(20_000):
        for width, ratio in ((2, 1.3), (3, 1.6)):
            costs.decoded(width, PLAIN_S * ratio * rng.uniform(0.9, 1.1))
    assert costs.verify(2) == pytest.approx(1.3 * PLAIN_S, rel=0.06)
    assert costs.verify(3) == pytest.approx(1.6 * PLAIN_S, rel=0.06)


def test_widths_that_were_not_measured_lie_between_their_neighbours() -> None:
    """A steep machine is steep between its measurements too, and behind the last one."""
    costs = known(w4=4.0, w8=8.0)
    assert 4.0 < costs.verify(6) / PLAIN_S < 8.0
    assert 1.0 < costs.verify(2) / PLAIN_S < 4.0
    assert costs.verify(16) / PLAIN_S > 10.0


def test_each_token_brings_experts_of_its_own() -> None:
    """Two tokens of 32 experts, of which each uses four, read 7.5; a long draft reads nearly all."""
    experts = StepCosts(experts=(32, 4))
    assert experts.verify(2) == pytest.approx(0.1 + 0.9 * 7.5 / 4)
    assert experts.verify(17) == pytest.approx(0.1 + 0.9 * 8, rel=0.12)
    dense = StepCosts(experts=(32, 32))
    assert dense.verify(2) == StepCosts().verify(2) < 1.2
    for costs in (experts, dense):
        for width, ratio in ((1, 1.0), (2, 1.4), (8, 3.0)):
            for _ in range(20):
                costs.decoded(width, PLAIN_S * ratio)
        assert costs.verify(2) == pytest.approx(1.4 * PLAIN_S)  # what was measured is believed
        assert 1.4 < costs.verify(4) / PLAIN_S < 3.0


def test_one_measurement_counts_less_than_many() -> None:
    """Noise at one width does not decide at once."""
    costs = known()
    expected = costs.verify(5)
    costs.decoded(5, 10 * PLAIN_S)
    once = costs.verify(5)
    for _ in range(20):
        costs.decoded(5, 10 * PLAIN_S)
    assert expected < once < costs.verify(5)
    assert costs.verify(5) == pytest.approx(10 * PLAIN_S, rel=0.01)


def test_context_is_learnt_by_width() -> None:
    """Narrow steps read the cache once, wide ones compute with it as well."""
    costs = known(w8=2.0)
    for i in range(400):
        context = 1500 + i
        costs.decoded(1, PLAIN_S * (1 + 1e-3 * context), context)
        costs.decoded(8, PLAIN_S * (2 + 3e-3 * context), context)
    assert costs.verify(1, 2000) == pytest.approx(3 * PLAIN_S, rel=0.05)
    assert costs.verify(8, 2000) == pytest.approx(8 * PLAIN_S, rel=0.05)
    assert costs.verify(1) == pytest.approx(PLAIN_S, rel=0.05)


def test_what_a_model_is_known_to_read_is_expected_before_it_was_measured() -> None:
    """The caches' size says how steep it is at first."""
    assert known(5e-4).verify(1, 1000) == pytest.approx(1.5 * PLAIN_S)


def test_what_was_measured_long_ago_gives_way_faster() -> None:
    """The machine has become slower meanwhile, and one width was not used: two steps tell."""
    costs = known(w2=1.2)
    for _ in range(100):
        costs.decoded(2, 1.8 * PLAIN_S)
    for _ in range(2):
        costs.decoded(1, 1.5 * PLAIN_S)
    assert costs.verify(1) > 1.15 * PLAIN_S
    often = known()
    for _ in range(2):
        often.decoded(1, 1.5 * PLAIN_S)
    assert often.verify(1) < 1.12 * PLAIN_S


def test_work_beside_decoding_is_known_with_a_draft_and_without() -> None:
    costs = known()
    assert costs.beside(drafting=True) == 0
    for _ in range(20):
        costs.worked(0.001, drafting=True)
        costs.worked(0.0002, drafting=False)
    assert costs.beside(drafting=True) == pytest.approx(0.001)
    assert costs.beside(drafting=False) == pytest.approx(0.0002)


def test_costs_looked_up_by_the_row_are_those_of_every_width() -> None:
    """And follow what is measured within some steps."""
    costs = known(0.001, w4=1.6)
    assert costs.steps(300, 6)[1:7] == [costs.verify(width, 256) for width in range(1, 7)]
    for _ in range(200):
        costs.decoded(4, 3 * PLAIN_S)
    assert costs.steps(0, 4)[4] == pytest.approx(3 * PLAIN_S, rel=0.01)


def test_costs_outlive_a_restart() -> None:
    """Through JSON, and later measurements still count."""
    costs = known(w4=1.6)
    costs.guessed("mtp", 3, 0.006)
    for i in range(300):
        costs.decoded(1, PLAIN_S * 1.5, 1500 + i)
    again = StepCosts()
    again.restore(json.loads(json.dumps(costs.to_json())))
    for width in (1, 2, 4, 7, 12):
        assert again.verify(width, 700) == pytest.approx(costs.verify(width, 700))
    assert again.guess("mtp") == pytest.approx(costs.guess("mtp"))
    for _ in range(100):
        again.decoded(4, 3 * PLAIN_S)
    assert again.verify(4) == pytest.approx(3 * PLAIN_S, rel=0.02)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"widths": []},
        {"widths": {"1": [0.02, 1]}, "guesses": {}},
        {"widths": {"1": [-1, 3]}, "guesses": {}, "slopes": {}},
        {"widths": {"x": [1, 3]}, "guesses": {}, "slopes": {}},
        {"widths": {"1": []}, "guesses": {}, "slopes": {}},
    ],
)
def test_a_damaged_file_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        StepCosts().restore(data)


def test_many_steps_leave_the_costs_sound() -> None:
    """Running means neither drift nor lose their precision."""
    costs = StepCosts()
    for width, ratio in ((1, 1.0), (2, 1.3)):
        for _ in range(50_000):
            costs.decoded(width, PLAIN_S * ratio)
    assert costs.verify(1) == pytest.approx(PLAIN_S)
    assert costs.verify(2) == pytest.approx(1.3 * PLAIN_S)
