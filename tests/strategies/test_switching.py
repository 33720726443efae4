"""Runs, the mix of traffic, and what it is worth to have a lane in memory."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from specproxy.strategies.switching import Traffic, future_costs


def traffic(*runs: tuple[str, int], times: int = 20) -> Traffic:
    """Traffic that went through these runs again and again."""
    found = Traffic()
    for _ in range(times):
        for workload, length in runs:
            for _ in range(length):
                found.note(workload)
    return found


def test_runs_and_shares_are_learned() -> None:
    """Lengths come close to the true ones; of runs, though not of requests, both workloads have half."""
    seen = traffic(("a", 8), ("b", 2))
    assert seen.expected_run("a") == pytest.approx(8.0, rel=0.1)
    assert seen.expected_run("b") == pytest.approx(2.0, rel=0.1)
    assert sum(seen.runs().values()) == pytest.approx(1.0)
    assert seen.runs()["a"] == pytest.approx(0.5, abs=0.1)


def test_a_run_longer_than_any_before_is_believed() -> None:
    """The present run counts once it is longer than the mean."""
    seen = traffic(("a", 2), ("b", 2))
    for _ in range(60):
        seen.note("a")
    assert seen.expected_run("a") > 6.0


def test_old_traffic_is_forgotten() -> None:
    """After many requests of another workload the first has hardly a share left, however long it went on."""
    seen = traffic(("a", 50), times=40)
    for _ in range(500):
        seen.note("b")
    assert seen.runs()["a"] < 0.01
    assert seen.n < 100.0


def test_state_survives() -> None:
    """What was loaded goes on as the original does."""
    seen = traffic(("a", 8), ("b", 2))
    again = Traffic()
    again.restore(json.loads(json.dumps(seen.dump())))
    assert again == seen


@pytest.mark.parametrize("load", [1.0, 6.0, 60.0])
def test_future_costs_solve_the_equation(load: float) -> None:
    """The fixed point agrees with long simulated traffic on each lane, decided by brute force."""
    seen = traffic(("a", 6), ("b", 6), times=30)
    costs = {"a": [3.0, 1.5], "b": [3.0, 4.0]}
    worth = [0.0, 0.0]
    for _ in range(300):
        worth = future_costs(seen, costs, [load, load], worth)
    trust, runs = seen.trust, seen.runs()

    def total(policy: dict[tuple[str, int], int], lane: int) -> float:
        """Discounted cost of a policy that says which lane each run is put on, from each lane."""
        values = np.zeros(2)
        for _ in range(400):
            following = np.zeros(2)
            for at in (0, 1):
                for workload, weight in runs.items():
                    to = policy[workload, at]
                    run = seen.expected_run(workload) * costs[workload][to]
                    following[at] += weight * (run + load * (to != at) + trust * values[to])
            values = following
        return float(values[lane])

    keys = [(workload, at) for workload in costs for at in (0, 1)]
    policies = [dict(zip(keys, choice, strict=True)) for choice in itertools.product((0, 1), repeat=4)]
    best = [min(total(policy, lane) for policy in policies) for lane in (0, 1)]
    assert worth[0] - worth[1] == pytest.approx(best[0] - best[1], abs=0.01)


def test_no_lane_is_worth_more_than_its_load() -> None:
    """Whoever has the wrong lane can always load the right one."""
    seen = traffic(("a", 4))
    worth = [0.0, 0.0]
    for _ in range(100):
        worth = future_costs(seen, {"a": [9.0, 1.0]}, [5.0, 6.0], worth)
    assert worth == [pytest.approx(6.0), 0.0]
