"""The hierarchical belief about one arm: exact, robust, and the same after a dump."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from specproxy.strategies.posterior import Arm, Scales, student_weight

SCALES = Scales(arm=0.35, kind=0.2, cell=0.1)
CELLS = [("code", "cool"), ("code", "hot"), ("prose", "warm"), ("json", "greedy")]
UNSEEN = [("code", "greedy"), ("math", "cool")]


def learned(seed: int = 1, per_cell: int = 3) -> tuple[Arm, list[tuple[int, float, float]]]:
    """An arm that saw a few ratios near its cells' truths, and what was seen: cell, value, precision."""
    rng, arm = np.random.default_rng(seed), Arm(SCALES, half_life=1e12)
    seen = []
    for i, cell in enumerate(CELLS):
        for _ in range(per_cell):
            y = -0.2 * i + 0.02 * float(rng.standard_normal())
            before = arm._leaves.get(cell[0], {}).get(cell[1])
            had = before.precision if before else 0.0
            arm.learn(cell, 0.0, y, SCALES.variance(200), 200)
            seen.append((i, y, arm._leaves[cell[0]][cell[1]].precision - had))
    return arm, seen


def test_the_belief_is_the_exact_posterior() -> None:
    """Messages up and down the tree give what conditioning the whole Gaussian gives, seen cells and others."""
    arm, seen = learned()
    cells = CELLS + UNSEEN
    prior = np.full((len(cells), len(cells)), SCALES.arm**2)
    for i, one in enumerate(cells):
        for j, other in enumerate(cells):
            prior[i, j] += SCALES.kind**2 * (one[0] == other[0]) + SCALES.cell**2 * (i == j)
    precision, weighted = np.linalg.inv(prior), np.zeros(len(cells))
    for i, y, weight in seen:
        precision[i, i] += weight
        weighted[i] += weight * y
    covariance = np.linalg.inv(precision)
    mean = covariance @ weighted
    for i, cell in enumerate(cells):
        belief = arm.belief(cell, 0.0)
        assert belief.mean == pytest.approx(mean[i], abs=1e-9)
        assert belief.variance == pytest.approx(covariance[i, i], rel=1e-9)


def test_beliefs_are_kept_up_to_date() -> None:
    """What was asked for is there again after a change, and is what would have been worked out."""
    arm, _ = learned()
    for cell in CELLS + UNSEEN:
        arm.belief(cell, 0.0)
    arm.learn(CELLS[0], 0.0, -0.5, 0.02, 100)
    assert CELLS[2] not in arm.known
    arm.warm()
    again = Arm(SCALES, half_life=1e12)
    again.restore(json.loads(json.dumps(arm.dump())))
    for cell in CELLS + UNSEEN:
        assert arm.known[cell] == again.belief(cell, 0.0)
    assert arm.evidence == pytest.approx(13.0)


def test_a_stall_moves_neither_mean_nor_excess() -> None:
    """One request at fifty times the usual, among ten, changes the expected time by a few percent."""
    calm, stalled = Arm(SCALES), Arm(SCALES)
    for i in range(10):
        calm.learn(CELLS[0], 0.0, -0.3, 0.01, 150)
        stalled.learn(CELLS[0], 0.0, math.log(50.0) if i == 6 else -0.3, 0.01, 150)
    before, after = calm.belief(CELLS[0], 0.0), stalled.belief(CELLS[0], 0.0)
    assert after.mean + after.excess == pytest.approx(before.mean + before.excess, abs=0.12)


def test_what_repeats_is_believed() -> None:
    """Outliers weigh little one by one, but many of them are how the lane is: the expected time says so."""
    arm = Arm(SCALES)
    for _ in range(10):
        arm.learn(CELLS[0], 0.0, -0.3, 0.01, 150)
    for _ in range(60):
        arm.learn(CELLS[0], 0.0, 0.7, 0.01, 150)
    found = arm.belief(CELLS[0], 0.0)
    assert found.mean + found.excess > 0.3
    assert student_weight(0.5) == 1.0
    assert student_weight(10.0) < 0.06


def test_a_heavy_tail_costs() -> None:
    """A lane that is fast on most requests and slow on some takes more time than its median says."""
    rng, arm = np.random.default_rng(4), Arm(SCALES)
    for _ in range(200):
        arm.learn(CELLS[0], 0.0, -0.3 + 0.4 * float(rng.standard_normal()), 0.01, 150)
    assert arm.belief(CELLS[0], 0.0).excess == pytest.approx(0.08, abs=0.05)


def test_a_discount_keeps_the_mean_and_loses_the_certainty() -> None:
    """Of one kind or of all; the rest of the tree stays."""
    arm, _ = learned(per_cell=10)
    before = {cell: arm.belief(cell, 0.0) for cell in CELLS}
    arm.discount(0.05, "prose")
    assert arm.belief(CELLS[2], 0.0).variance > 3.0 * before[CELLS[2]].variance
    assert arm.belief(CELLS[3], 0.0).variance == pytest.approx(before[CELLS[3]].variance, rel=0.1)
    arm.discount(0.0)
    assert arm.belief(CELLS[0], 0.0).mean == pytest.approx(0.0)
    assert arm.evidence == 0.0


def test_age_forgets_live_evidence_only() -> None:
    """Half a half-life's requests elsewhere leave less of what ran here, and all of what was replayed."""
    arm = Arm(Scales(), half_life=100.0)
    cell = CELLS[0]
    for _ in range(4):
        arm.learn(cell, 0.0, 1.0, 0.01, 100.0)
        arm.learn_replay(cell, 0.0, 1.0, 0.3, 0.01, 100.0)
    before = arm.belief(cell, 0.0)
    arm.age(cell, 100.0)
    after = arm.belief(cell, 0.0)
    assert after.n == pytest.approx(before.n / 2)
    assert after.replayed == before.replayed
    assert after.variance > before.variance
    arm.age(("unseen", "cool"), 100.0)
    assert arm.belief(cell, 0.0) == after
