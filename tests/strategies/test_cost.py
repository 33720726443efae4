"""The cost model: its formulas, and each rule of thumb that it stands for; measurements overrule them."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.records import Situation, Strategy, TempBucket, Workload
from specproxy.strategies.classify import KINDS
from specproxy.strategies.cost import (
    ACCEPTANCE,
    DENSE_VERIFY,
    LAUNCH_S,
    LaneFacts,
    draft_cost,
    drafted_tokens,
    expert_spread,
    log_prior,
    prior_ratio,
    ratio_of,
    step_cost,
    tokens_per_step,
    verify_cost,
)
from specproxy.strategies.learner import Learner
from tests.strategies.world import observe, ready

MTP, DRAFT, NGRAM = Strategy(("mtp",), 3), Strategy(("draft",), 3), Strategy(("ngram",), 8)
FAST_MOE = LaneFacts(experts=32, experts_used=2)


@given(st.floats(0.05, 0.95), st.integers(1, 12), st.floats(0.0, 0.5))
def test_a_flat_machine_is_leviathans_formula(alpha: float, length: int, cost: float) -> None:
    """(1 − α^(γ+1)) / ((1 − α)(γc + 1)), where every guess is as good and verifying costs nothing."""
    tokens = (1.0 - alpha ** (length + 1)) / (1.0 - alpha)
    assert tokens_per_step([alpha] * length) == pytest.approx(tokens)
    assert 1.0 / ratio_of([alpha] * length, 1.0, cost) == pytest.approx(tokens / (length * cost + 1.0))


def test_acceptance_by_position_counts_in_order() -> None:
    """A published MTP head: .92, then .68 of those, then .38 of those."""
    assert tokens_per_step([0.92, 0.68, 0.38]) == pytest.approx(1.0 + 0.92 + 0.92 * 0.68 + 0.92 * 0.68 * 0.38)


def test_steps_without_a_draft_cost_a_plain_step() -> None:
    assert ratio_of([0.9] * 4, 2.0, 0.1, hits=0.0) == 1.0
    assert ratio_of([0.0], 1.5, 0.0, hits=0.5) == pytest.approx(1.25)


def test_the_verify_curve_is_a_staircase_that_goes_on() -> None:
    """Measured points as they are, lines between them, and the last slope beyond."""
    assert [verify_cost(DENSE_VERIFY, w) for w, _ in DENSE_VERIFY] == [cost for _, cost in DENSE_VERIFY]
    assert verify_cost(((1, 1.0), (3, 2.0)), 2) == 1.5
    assert verify_cost(((1, 1.0), (3, 2.0)), 7) == 4.0
    assert verify_cost(((2, 1.3),), 9) == 1.3
    costs = [verify_cost(DENSE_VERIFY, w) for w in range(1, 40)]
    assert all(a <= b for a, b in pairwise(costs))


@given(st.integers(2, 128), st.integers(1, 8), st.integers(1, 32))
def test_tokens_bring_experts_of_their_own(experts: int, used: int, width: int) -> None:
    """At most as many as there are, at least those of one token, and more with every token."""
    facts = LaneFacts(experts=experts, experts_used=min(used, experts))
    spread = expert_spread(facts, width)
    assert 1.0 - 1e-9 <= spread <= min(width, experts / facts.experts_used) + 1e-9
    assert expert_spread(facts, width + 1) >= spread - 1e-12
    assert expert_spread(LaneFacts(), width) == 1.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", list(TempBucket))
@pytest.mark.parametrize("strategy", [MTP, DRAFT], ids=str)
def test_a_fast_moe_loses(kind: str, temperature: TempBucket, strategy: Strategy) -> None:
    """Whatever the text, since guesses bring their own experts; and always more than a dense model does."""
    ratio = prior_ratio(strategy, FAST_MOE, kind, temperature)
    assert ratio > prior_ratio(strategy, LaneFacts(), kind, temperature)
    assert ratio > 0.95


def test_the_faster_plain_is_the_more_a_launch_weighs() -> None:
    """Three guesses cost half a millisecond each: 4.5% of a step at 30 tokens/s, and 30% at 200."""
    code = "code", TempBucket.COOL
    assert draft_cost(LaneFacts(), "mtp", 1 / 200) - draft_cost(LaneFacts(), "mtp") == pytest.approx(0.1)
    tokens = 1.0 + sum(math.prod(0.78 * 0.97 * 0.9**i for i in range(j)) for j in (1, 2, 3))
    for speed, share in ((30, 0.045), (200, 0.3)):
        for facts in (None, FAST_MOE):
            gap = prior_ratio(MTP, facts, *code, 1 / speed) - prior_ratio(MTP, facts, *code)
            assert gap == pytest.approx(3 * LAUNCH_S * speed / tokens)
            assert gap == pytest.approx(share / tokens)
    assert prior_ratio(NGRAM, None, *code, 1 / 200) == prior_ratio(NGRAM, None, *code), "it looks up a table"
    measured = LaneFacts(draft_cost=0.05)
    assert prior_ratio(MTP, measured, *code, 1 / 200) == prior_ratio(MTP, measured, *code)
    assert prior_ratio(Strategy(), None, *code, 1 / 200) == 1.0


@pytest.mark.parametrize("drafter", list(ACCEPTANCE))
@pytest.mark.parametrize("kind", KINDS)
def test_heat_takes_from_every_drafter(drafter: str, kind: str) -> None:
    """The hotter, the slower."""
    strategy = Strategy((drafter,), 3)
    ratios = [prior_ratio(strategy, None, kind, temperature) for temperature in TempBucket]
    assert ratios == sorted(ratios)
    assert ratios[0] < ratios[-1]


@pytest.mark.parametrize("kind", ["prose", "creative", "translation", "grounded"])
def test_from_temperature_one_up_a_draft_is_no_gain(kind: str) -> None:
    """At least not for texts that are hard to guess."""
    assert prior_ratio(DRAFT, None, kind, TempBucket.HOT) > 1.0


def test_few_right_guesses_lose_and_seventy_percent_win() -> None:
    """A draft of three by a model of a tenth, on the dense CPU curve; all guesses alike."""
    step = verify_cost(DENSE_VERIFY, 4)
    cost = draft_cost(LaneFacts(), "draft")

    def accepted(share: float) -> float:
        """The chance of a guess at which that share of drafted tokens is accepted."""
        chances = np.linspace(0.01, 0.99, 981)
        shares = [(tokens_per_step([a] * 3) - 1.0) / 3.0 for a in chances]
        return float(np.interp(share, shares, chances))

    assert ratio_of([accepted(0.25)] * 3, step, cost) > 1.0
    assert ratio_of([0.5] * 3, step, cost) > 0.98
    assert ratio_of([0.7] * 3, step, cost) < 0.8
    assert ratio_of([accepted(0.7)] * 3, step, cost) < 0.65


@pytest.mark.parametrize(("step", "chance"), [(verify_cost(DENSE_VERIFY, 4), 0.49), (2.4, 0.74)])
def test_the_rule_of_sixty_and_seventy_depends_on_what_checking_costs(step: float, chance: float) -> None:
    """A chance at which a draft of three breaks even: below the band on the usual curve, above it where kernels
    are made for any CPU."""
    cost = draft_cost(LaneFacts(), "draft")
    assert ratio_of([chance - 0.02] * 3, step, cost) > 1.0 > ratio_of([chance + 0.02] * 3, step, cost)


def test_a_draft_should_be_a_tenth() -> None:
    """A greater one costs more, and one of half the size takes as long as it saves."""
    ratios = [
        prior_ratio(DRAFT, LaneFacts(size_ratio=share), "code", TempBucket.COOL)
        for share in (0.05, 0.1, 0.25, 0.5)
    ]
    assert ratios == sorted(ratios)
    assert ratios[1] < 1.0 < ratios[3]
    assert draft_cost(LaneFacts(draft_cost=0.3, size_ratio=0.1), "draft") == 0.3


def test_a_draft_should_be_of_the_family() -> None:
    """Of another one it guesses less; of an unknown one nothing is held against it."""

    def ratio(same: bool | None) -> float:
        return prior_ratio(DRAFT, LaneFacts(same_family=same), "code", TempBucket.COOL)

    assert ratio(False) > ratio(True) == ratio(None)
    stranger, known = LaneFacts(same_family=False), LaneFacts()
    assert prior_ratio(MTP, stranger, "code", TempBucket.COOL) == prior_ratio(
        MTP, known, "code", TempBucket.COOL
    )


def test_memory_pressure_is_held_against_a_lane() -> None:
    facts = LaneFacts(memory_pressure=True)
    for strategy in (MTP, DRAFT, NGRAM):
        slower = prior_ratio(strategy, facts, "code", TempBucket.COOL)
        assert slower == pytest.approx(1.3 * prior_ratio(strategy, None, "code", TempBucket.COOL))
    assert prior_ratio(Strategy(), facts, "code", TempBucket.COOL) == 1.0


def test_ngrams_pay_where_text_is_copied() -> None:
    """Edits before all; and hardly anything is lost where nothing is found."""
    ratios = {kind: prior_ratio(NGRAM, None, kind, TempBucket.GREEDY) for kind in KINDS}
    assert min(ratios, key=lambda kind: ratios[kind]) == "code_edit"
    assert ratios["code_edit"] < 0.8
    assert max(ratios.values()) < 1.2


def test_mtp_costs_by_its_share_of_the_layers() -> None:
    assert draft_cost(LaneFacts(mtp_layers=1, layers=48), "mtp") < draft_cost(
        LaneFacts(mtp_layers=1, layers=12), "mtp"
    )
    assert draft_cost(LaneFacts(), "ngram") < draft_cost(LaneFacts(), "mtp") < draft_cost(LaneFacts(), "draft")


def test_a_measured_curve_replaces_the_usual_one() -> None:
    """On a GPU whose verifying is nearly flat the same draft pays."""
    flat = LaneFacts(verify=((1, 1.0), (8, 1.05)))
    assert step_cost(flat, 4) < 1.05
    assert prior_ratio(DRAFT, flat, "prose", TempBucket.WARM) < prior_ratio(
        DRAFT, None, "prose", TempBucket.WARM
    )


def test_a_combination_counts_as_its_best_part() -> None:
    both = Strategy(("ngram", "mtp"), 3)
    parts = [prior_ratio(Strategy((name,), 3), None, "code", TempBucket.COOL) for name in both.drafters]
    assert prior_ratio(both, None, "code", TempBucket.COOL) == min(parts)
    assert log_prior(both, None, "code", TempBucket.COOL) == pytest.approx(0.5 * math.log(min(parts)))


@pytest.mark.parametrize("temperature", TempBucket)
@pytest.mark.parametrize("kind", KINDS)
def test_an_engines_own_choice_counts_as_its_best_part_plain_included(
    kind: str, temperature: TempBucket
) -> None:
    """It does not draft at every step, so it is no draft lane of which some steps tell the rest."""
    auto = Strategy.parse("auto")
    fast = LaneFacts(experts=32, experts_used=4, size_ratio=0.3, mtp_layers=1, layers=16)
    small = LaneFacts(size_ratio=0.05, layers=16)
    for facts in (LaneFacts(), fast, small):
        assert prior_ratio(auto, facts, kind, temperature) <= 1.0
    parts = [
        prior_ratio(Strategy.parse(name), small, kind, temperature) for name in ("plain", "ngram", "draft")
    ]
    assert prior_ratio(auto, small, kind, temperature) == min(parts)
    assert drafted_tokens(auto, small, kind, temperature) is None


def test_measurements_overrule_the_rules() -> None:
    """Where drafting wins on a fast MoE all the same, that is soon believed, and where it loses it ends."""
    workload, lanes = Workload("code", TempBucket.COOL), ready("plain", "mtp")
    for ratio, share in ((0.6, (0.9, 1.0)), (1.4, (0.0, 0.1))):
        learner, rng, used = Learner(facts={"mtp": FAST_MOE}), np.random.default_rng(3), []
        for t in range(150):
            decision = learner.choose(Situation(workload, lanes, at=4.0 * t, request_id=str(t)), rng)
            used.append(decision.lane.id == "mtp")
            tpt = 0.02 * (ratio if used[-1] else 1.0) * float(np.exp(0.05 * rng.standard_normal()))
            learner.learn_one(observe(decision, workload, tpt=tpt, at=4.0 * t + 3.0, request_id=str(t)))
        assert share[0] <= float(np.mean(used[-50:])) <= share[1]
