"""Hierarchical Gaussian belief about one arm's log time per token: cell → kind → arm → prior.

An arm is a strategy with one fingerprint. What is believed about it is a tree::

    arm effect   a      ~ N(0, scale_arm²)
    kind effect  b_k    ~ N(0, scale_kind²)     kind of workload
    cell effect  c_kt   ~ N(0, scale_cell²)     kind × temperature bucket
    observation  y      ~ N(prior_kt + a + b_k + c_kt, v)

With known scales the posterior of every cell is exact and closed-form: precision-weighted messages go up the
tree, and down again without what the cell itself sent (Gelman et al., Bayesian Data Analysis, ch. 5.4 and
15.1). Means of cells that were never seen thus come from their kind, then from the arm, then from the prior.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Arm", "Belief", "Scales"]

Cell = tuple[str, str]  # kind, temperature bucket


@dataclass(frozen=True, slots=True)
class Scales:
    """Standard deviations of the effects, and of one observation (between requests; per token).

    An observation over `n` tokens has variance ``between² + token²/n``.
    """

    arm: float = 0.35
    kind: float = 0.25
    cell: float = 0.12
    between: float = 0.10
    token: float = 0.7

    def variance(self, tokens: int, weight: float = 1.0) -> float:
        """Variance of an observation over that many tokens; `weight` (0 to 1] says how far it is trusted."""
        return (self.between**2 + self.token**2 / max(tokens, 1)) / max(weight, 1e-3)


@dataclass(slots=True)
class Belief:
    """Mean and variance of a cell's log ratio; `n` requests of evidence; `excess` is ln E[e^noise]."""

    mean: float
    variance: float
    n: float
    excess: float = 0.0

    @property
    def sd(self) -> float:
        return math.sqrt(self.variance)

    @property
    def ratio(self) -> float:
        """Expected time per token relative to the level, noise between requests included."""
        return math.exp(self.mean + self.excess)


@dataclass(slots=True)
class _Leaf:
    """Sufficient statistics of one cell, relative to its prior mean."""

    prior: float
    precision: float = 0.0
    weighted: float = 0.0  # Σ precision · (y − prior)
    n: float = 0.0


@dataclass(slots=True)
class _Spread:
    """Running scale of standardised residuals, and the mean of e^residual, of one kind.

    The variance of requests around their cell is learned as a multiple of the nominal one. The time that a
    lane takes is the arithmetic mean of e^y, not e^mean(y): a lane that is fast on most requests and slow on
    some has the same log mean as a steady one, but costs more.
    """

    n: float = 0.0
    squares: float = 0.0
    tokens: float = 0.0
    raised: float = 0.0  # Σ tokens · e^residual


@dataclass(slots=True)
class Arm:
    """Belief about one arm over all cells. All methods are O(kinds + temperature buckets)."""

    scales: Scales
    half_life: float = 300.0
    last_at: float = 0.0
    _leaves: dict[str, dict[str, _Leaf]] = field(default_factory=dict)
    _spreads: dict[str, _Spread] = field(default_factory=dict)

    # --- reading ---------------------------------------------------------------------------------

    def belief(self, cell: Cell, prior: float) -> Belief:
        """Posterior of a cell. `prior` is its prior mean, used where the cell has not been seen."""
        kind, temperature = cell
        leaves = self._leaves.get(kind, {})
        leaf = leaves.get(temperature)
        sibling_p, sibling_w = self._kind_sums(leaves, without=temperature)
        arm_p, arm_w = self._arm_sums(without=kind)
        mean, variance = arm_w / arm_p, 1.0 / arm_p + self.scales.kind**2
        mean, variance = _combine(mean, variance, sibling_p, sibling_w)
        variance += self.scales.cell**2
        if leaf is not None:
            mean, variance = _combine(mean, variance, leaf.precision, leaf.weighted)
            prior = leaf.prior
        return Belief(prior + mean, variance, leaf.n if leaf else 0.0, self._excess(kind))

    def noise(self, kind: str) -> float:
        """Learned multiple of the nominal variance of requests of this kind."""
        whole_n = sum(s.n for s in self._spreads.values())
        whole = (_PSEUDO + sum(s.squares for s in self._spreads.values())) / (_PSEUDO + whole_n)
        spread = self._spreads.get(kind)
        if spread is None:
            return whole
        return (_PSEUDO * whole + spread.squares) / (_PSEUDO + spread.n)

    @property
    def evidence(self) -> float:
        """Requests of evidence over all cells, after forgetting."""
        return sum(leaf.n for leaves in self._leaves.values() for leaf in leaves.values())

    # --- learning --------------------------------------------------------------------------------

    def learn(self, cell: Cell, prior: float, y: float, variance: float, tokens: float) -> float:
        """Take in one log ratio with its variance; returns the standardised residual.

        The weight of an outlier shrinks as under Student's t with four degrees of freedom, so that one stalled
        request says little, while many of them are believed.
        """
        kind, temperature = cell
        belief = self.belief(cell, prior)
        noise = self.noise(kind)
        residual = y - belief.mean
        square = residual**2 / (variance + belief.variance)
        self._learn_spread(kind, residual, min(square, _SQUARE_CAP * noise), tokens)
        variance *= noise
        score = residual / math.sqrt(variance + belief.variance)
        precision = student_weight(score) / variance
        leaf = self._leaves.setdefault(kind, {}).setdefault(temperature, _Leaf(prior))
        keep = 0.5 ** (1.0 / self.half_life)
        leaf.precision = leaf.precision * keep + precision
        leaf.weighted = leaf.weighted * keep + precision * (y - leaf.prior)
        leaf.n = leaf.n * keep + 1.0
        return score

    def discount(self, factor: float) -> None:
        """Keep only this share (0 to 1) of all evidence, after a change that made it doubtful."""
        for leaves in self._leaves.values():
            for leaf in leaves.values():
                leaf.precision *= factor
                leaf.weighted *= factor
                leaf.n *= factor
        for spread in self._spreads.values():
            spread.n *= factor
            spread.squares *= factor
            spread.tokens *= factor
            spread.raised *= factor

    # --- state -----------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """State as JSON-serialisable data."""
        return {
            "last_at": self.last_at,
            "cells": [
                [kind, temperature, leaf.prior, leaf.precision, leaf.weighted, leaf.n]
                for kind, leaves in self._leaves.items()
                for temperature, leaf in leaves.items()
            ],
            "spreads": [[k, s.n, s.squares, s.tokens, s.raised] for k, s in self._spreads.items()],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `dump` gave."""
        self.last_at = float(state["last_at"])
        self._leaves = {}
        for kind, temperature, *numbers in state["cells"]:
            self._leaves.setdefault(kind, {})[temperature] = _Leaf(*map(float, numbers))
        self._spreads = {kind: _Spread(*map(float, numbers)) for kind, *numbers in state["spreads"]}

    # --- inside ----------------------------------------------------------------------------------

    def _kind_sums(self, leaves: dict[str, _Leaf], without: str | None = None) -> tuple[float, float]:
        """Precision and weighted mean that a kind's cells send up, each blurred by the cell effect."""
        precision = weighted = 0.0
        blur = self.scales.cell**2
        for temperature, leaf in leaves.items():
            if temperature != without and leaf.precision > 0.0:
                share = 1.0 / (1.0 + leaf.precision * blur)
                precision += leaf.precision * share
                weighted += leaf.weighted * share
        return precision, weighted

    def _arm_sums(self, without: str) -> tuple[float, float]:
        """Precision and weighted mean of the arm effect, prior included, without one kind's evidence."""
        precision, weighted = 1.0 / self.scales.arm**2, 0.0
        blur = self.scales.kind**2
        for kind, leaves in self._leaves.items():
            if kind != without:
                kind_p, kind_w = self._kind_sums(leaves)
                share = 1.0 / (1.0 + kind_p * blur)
                precision += kind_p * share
                weighted += kind_w * share
        return precision, weighted

    def _learn_spread(self, kind: str, residual: float, square: float, tokens: float) -> None:
        spread = self._spreads.setdefault(kind, _Spread())
        keep = 0.5 ** (1.0 / self.half_life)
        spread.n = spread.n * keep + 1.0
        spread.squares = spread.squares * keep + square
        clipped = max(-_RESIDUAL_CAP, min(residual, _RESIDUAL_CAP))
        spread.tokens = spread.tokens * keep + tokens
        spread.raised = spread.raised * keep + tokens * math.exp(clipped)

    def _excess(self, kind: str) -> float:
        """ln of the mean of e^residual, shrunk towards none by `_PSEUDO` requests of average length."""
        spread = self._spreads.get(kind)
        if spread is None or spread.n <= 0.0:
            return 0.0
        pseudo = _PSEUDO * spread.tokens / spread.n
        return math.log((spread.raised + pseudo) / (spread.tokens + pseudo))


_PSEUDO = 8.0  # requests' worth of belief in the nominal spread
_SQUARE_CAP = 9.0  # a residual beyond three standard deviations counts as three
_RESIDUAL_CAP = 1.0  # e^1: a single request counts as at most 2.7 times its lane's usual time
_DEGREES = 4.0


def student_weight(score: float) -> float:
    """Weight of a residual under Student's t (four degrees of freedom), 1 up to one standard deviation."""
    return min(1.0, (_DEGREES + 1.0) / (_DEGREES + score * score))


def _combine(mean: float, variance: float, precision: float, weighted: float) -> tuple[float, float]:
    total = 1.0 / variance + precision
    return (mean / variance + weighted) / total, 1.0 / total
