"""`auto` on the benchmark's own texts, on machines whose costs were measured, without an engine."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.auto_sim import AUTO, DENSE, MOE, STAIRS, Machine, Texts, contest
from specproxy.adapters.embedded.auto import AutoController
from specproxy.adapters.embedded.controller import StepOutcome, StepView
from specproxy.records import EnginePriors


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts(1)


def ratios(texts: Texts, kind: str, machine: Machine, tokens: int, noise: float = 0.0) -> tuple[float, float]:
    """Time of the best fixed choice, and of plain, over auto's."""
    machine = replace(machine, noise=noise)
    seconds, _ = contest(texts, kind, machine, 8, tokens, taught=3, costs=machine.profiled())
    auto = seconds.pop(AUTO)
    return min(seconds.values()) / auto, seconds["plain"] / auto


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["prose", "creative"])
def test_hardly_slower_than_plain_on_many_experts(texts: Texts, kind: str, noise: float) -> None:
    """Two tokens take twice the time of one: nothing but long copies pays."""
    assert ratios(texts, kind, MOE, 256, noise)[1] >= 0.985


@pytest.mark.parametrize("machine", [DENSE, STAIRS])
@pytest.mark.parametrize("kind", ["json", "code", "edit", "prose", "creative"])
def test_near_the_best_in_hindsight(texts: Texts, kind: str, machine: Machine) -> None:
    """The best of plain and fifteen fixed choices, by the very requests that it is chosen for."""
    assert ratios(texts, kind, machine, 128)[0] >= 0.97


def test_an_unlucky_start_does_not_shut_a_drafter_out() -> None:
    """The head is by far the best, but began with wrong guesses, and no request is long: else it is 0.80."""
    assert ratios(Texts(2), "json", DENSE, 128)[0] >= 0.88


def test_better_than_any_fixed_choice_where_the_text_changes(texts: Texts) -> None:
    assert ratios(texts, "mixed", DENSE, 160)[0] >= 1.08


@pytest.mark.parametrize(("before", "after", "steps"), [(0.25, 0.97, 8), (0.97, 0.25, 6)])
def test_a_change_is_followed_within_some_steps(before: float, after: float, steps: int) -> None:
    """JSON in prose and prose behind it, where earlier requests had both; the median of twenty changes."""
    levels = (0.0, 10.0, 10.0, 0.0, 0.0, 0.0, 10.0, 10.0)
    took = []
    for seed in range(20):
        rng = random.Random(seed)
        controller = AutoController(DENSE.profiled(), 3, EnginePriors("r", "w", levels={"mtp": levels}))

        def step(chance: float, rng: random.Random = rng, controller: AutoController = controller) -> int:
            plan = controller.plan(StepView(("mtp",), 0, {"mtp": 6}, 50, 0))
            hits = 0
            while hits < plan.length and rng.random() < chance:
                hits += 1
            controller.learn(StepOutcome(plan, 0, plan.length, hits, proposed=plan.length))
            return plan.length

        for _ in range(60):
            step(before)
        followed = 0
        while followed < 60 and not (step(after) >= 3 if after > before else step(after) <= 1):
            followed += 1
        took.append(followed)
    assert sorted(took)[10] <= steps


def test_a_simulation_is_the_same_every_time() -> None:
    """So that two controllers can be compared by it."""
    runs = [contest(Texts(3), "mixed", DENSE, 3, 80, taught=1, costs=DENSE.profiled()) for _ in range(2)]
    assert runs[0] == runs[1]
