"""Policies to compare the learner with: simple, well known, and behind the same interface.

All obey the hard rules (hazards, pins); they differ in how they choose among the lanes that are left. Those
that learn keep, for every workload and lane, mean and variance of ln(time per token); none of them bounds its
loss, looks at replays, or knows of contexts, loads and queues. They start over when a lane's fingerprint
changes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specproxy.records import Decision, LaneStatus, Observation, Outcome, Situation, Workload
from specproxy.strategies.cost import LaneFacts, prior_ratio
from specproxy.strategies.rules import apply_rules

__all__ = [
    "AlwaysPlain",
    "EpsilonGreedy",
    "FixedLane",
    "Oracle",
    "RulesOnly",
    "ThompsonOnly",
    "Ucb1",
]

_VERSION = 1


@dataclass(frozen=True, slots=True)
class _Case:
    """What is left to decide once the rules have spoken."""

    workload: Workload
    lanes: Sequence[LaneStatus]
    rng: np.random.Generator

    @property
    def plain(self) -> LaneStatus:
        """The plain lane; the first one where there is none."""
        return next((s for s in self.lanes if s.lane.strategy.is_plain), self.lanes[0])


class _Baseline(ABC):
    """Hard rules first, then `_pick`. It learns nothing, and has no state, unless a subclass does."""

    name = "baseline"

    def choose(self, situation: Situation, rng: np.random.Generator) -> Decision:
        """Choose a lane by the rules, then by the policy.

        Raises:
            LaneUnavailable: no lane is ready, or none has the pinned strategy.
        """
        ruled = apply_rules(situation)
        if isinstance(ruled, Decision):
            return ruled
        chosen, reason = self._pick(_Case(situation.workload, ruled.lanes, rng))
        rule, reason = (ruled.rule, f"{ruled.reason}; {reason}") if ruled.rule else (self.name, reason)
        return Decision(chosen.lane, situation.workload, rule, reason)

    @abstractmethod
    def _pick(self, case: _Case) -> tuple[LaneStatus, str]:
        """One of the lanes, and why."""

    def learn_one(self, observation: Observation) -> None:
        """Take in one observation."""
        del observation

    def dump(self) -> dict[str, Any]:
        """State as JSON-serialisable data."""
        return {"format": self.name, "version": _VERSION}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `dump` gave.

        Raises:
            ValueError: the data is not of this policy or of a newer format.
        """
        if state.get("format") != self.name:
            raise ValueError(f"not the state of policy {self.name}")
        if int(state.get("version", 0)) > _VERSION:
            raise ValueError(f"state has version {state['version']}, newer than {_VERSION}")


class AlwaysPlain(_Baseline):
    """Plain decoding for everything; the first lane where there is no plain one."""

    name = "always-plain"

    def _pick(self, case: _Case) -> tuple[LaneStatus, str]:
        return case.plain, "always plain"


class FixedLane(_Baseline):
    """One lane for everything, plain where it is missing: what a server without a choice does."""

    def __init__(self, lane_id: str) -> None:
        self.lane_id = lane_id
        self.name = f"fixed:{lane_id}"

    def _pick(self, case: _Case) -> tuple[LaneStatus, str]:
        wanted = next((s for s in case.lanes if s.lane.id == self.lane_id), None)
        if wanted is not None:
            return wanted, f"always {self.lane_id}"
        return case.plain, f"{self.lane_id} is not there"


class Oracle(_Baseline):
    """The best lane of each workload, given the true means.

    Args:
        ratios: mean time per token relative to plain, by (workload key, lane id); lanes that are missing count
            as plain. May be changed between requests, where the truth changes.
    """

    name = "oracle"

    def __init__(self, ratios: Mapping[tuple[str, str], float]) -> None:
        self.ratios = ratios

    def _pick(self, case: _Case) -> tuple[LaneStatus, str]:
        best = min(case.lanes, key=lambda s: self.ratios.get((case.workload.key, s.lane.id), 1.0))
        return best, f"{best.lane.id} is truly the fastest here"


class RulesOnly(_Baseline):
    """The rules of thumb of the field, taken at their word: the cost model's best guess, never corrected."""

    name = "rules-only"

    def __init__(self, facts: Mapping[str, LaneFacts] | None = None) -> None:
        self._facts = dict(facts or {})

    def _pick(self, case: _Case) -> tuple[LaneStatus, str]:
        def guess(status: LaneStatus) -> float:
            facts = self._facts.get(status.lane.id)
            return prior_ratio(status.lane.strategy, facts, case.workload.kind, case.workload.temperature)

        best = min(case.lanes, key=guess)
        return best, f"{best.lane.id} should be the fastest by rule of thumb"


@dataclass(slots=True)
class _Cell:
    """Running mean and variance of ln(time per token) (Welford 1962)."""

    fingerprint: str
    n: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.n += 1.0
        step = value - self.mean
        self.mean += step / self.n
        self.squares += step * (value - self.mean)


@dataclass(slots=True)
class _Table:
    """Cells by workload and lane."""

    cells: dict[tuple[str, str], _Cell] = field(default_factory=dict)

    def seen(self, workload: str, lane: str) -> _Cell:
        return self.cells.get((workload, lane)) or _Cell("")

    def learn(self, observation: Observation) -> None:
        time = observation.time_per_token
        if observation.outcome is not Outcome.COMPLETE or time is None or observation.load_s > 0.0:
            return
        key = (observation.workload.key, observation.lane)
        cell = self.cells.get(key)
        if cell is None or cell.fingerprint != observation.fingerprint:
            cell = self.cells[key] = _Cell(observation.fingerprint)
        cell.add(math.log(time))


class _Learning(_Baseline):
    """A baseline that learns a table; lanes of a workload that were never tried come first, in order."""

    def __init__(self) -> None:
        self._table = _Table()

    def _pick(self, case: _Case) -> tuple[LaneStatus, str]:
        cells = [self._table.seen(case.workload.key, s.lane.id) for s in case.lanes]
        for status, cell in zip(case.lanes, cells, strict=True):
            if not cell.n:
                return status, f"{status.lane.id} was not tried here yet"
        index, why = self._best(cells, case.rng)
        return case.lanes[index], f"{case.lanes[index].lane.id} {why}"

    @abstractmethod
    def _best(self, cells: Sequence[_Cell], rng: np.random.Generator) -> tuple[int, str]:
        """Index of the cell to use, and why."""

    def learn_one(self, observation: Observation) -> None:
        """Take in one observation; incomplete ones and those with a load teach nothing."""
        self._table.learn(observation)

    def dump(self) -> dict[str, Any]:
        """State as JSON-serialisable data."""
        rows = [[*key, c.fingerprint, c.n, c.mean, c.squares] for key, c in self._table.cells.items()]
        return {**super().dump(), "cells": rows}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `dump` gave.

        Raises:
            ValueError: the data is not of this policy, is damaged, or is of a newer format.
        """
        super().load(state)
        try:
            cells = {
                (str(workload), str(lane)): _Cell(str(fingerprint), float(n), float(mean), float(squares))
                for workload, lane, fingerprint, n, mean, squares in state["cells"]
            }
        except (KeyError, TypeError) as error:
            raise ValueError(f"damaged state of policy {self.name}: {error!r}") from error
        self._table = _Table(cells)


class EpsilonGreedy(_Learning):
    """The best mean so far, and now and then any lane (Sutton and Barto, section 2.2)."""

    name = "epsilon-greedy"

    def __init__(self, epsilon: float = 0.1) -> None:
        super().__init__()
        self.epsilon = epsilon

    def _best(self, cells: Sequence[_Cell], rng: np.random.Generator) -> tuple[int, str]:
        if rng.random() < self.epsilon:
            return int(rng.integers(len(cells))), "was drawn at random"
        return min(range(len(cells)), key=lambda i: cells[i].mean), "has the best mean"


class Ucb1(_Learning):
    """The most optimistic estimate (Auer et al. 2002), in units of `scale`, about the range of ln(ratio)."""

    name = "ucb1"

    def __init__(self, scale: float = 0.5) -> None:
        super().__init__()
        self.scale = scale

    def _best(self, cells: Sequence[_Cell], rng: np.random.Generator) -> tuple[int, str]:
        del rng  # the bounds decide
        whole = math.log(sum(cell.n for cell in cells))

        def bound(i: int) -> float:
            return cells[i].mean - self.scale * math.sqrt(2.0 * whole / cells[i].n)

        return min(range(len(cells)), key=bound), "has the best lower bound"


class ThompsonOnly(_Learning):
    """Gaussian Thompson sampling with each workload on its own: no sharing, no replay, no gate.

    `prior_sd` is the assumed deviation of one observation, worth `prior_n` of them.
    """

    name = "thompson"

    def __init__(self, prior_sd: float = 0.25, prior_n: float = 2.0) -> None:
        super().__init__()
        self.prior_sd = prior_sd
        self.prior_n = prior_n

    def _best(self, cells: Sequence[_Cell], rng: np.random.Generator) -> tuple[int, str]:
        draws = []
        for cell in cells:
            variance = (cell.squares + self.prior_n * self.prior_sd**2) / (cell.n + self.prior_n)
            draws.append(cell.mean + math.sqrt(variance / cell.n) * float(rng.standard_normal()))
        return min(range(len(cells)), key=draws.__getitem__), "had the best draw"
