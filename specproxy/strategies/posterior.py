"""Hierarchical Gaussian belief about one arm's log time per token: cell → kind → arm → prior.

An arm is a strategy with one fingerprint. What is believed about it is a tree::

    arm effect   a      ~ N(0, scale_arm²)
    kind effect  b_k    ~ N(0, scale_kind²)     kind of workload
    cell effect  c_kt   ~ N(0, scale_cell²)     kind × temperature bucket
    observation  y      ~ N(prior_kt + a + b_k + c_kt, v)

With known scales the posterior of every cell is exact and closed-form: precision-weighted messages go up the
tree, and down again without what the cell itself sent (Gelman et al., Bayesian Data Analysis, ch. 5.4 and
15.1). Means of cells that were never seen thus come from their kind, then from the arm, then from the prior.

Evidence is of two sorts: requests that ran on the arm, and replays of requests that ran elsewhere. Replays
are exact about tokens a step, but their times pass through a cost curve with its own error (`calibration`),
which is common to all of them and doesn't average out.

Runs of our own (`profiling`) have a cell beside those of the temperature buckets. Its effect is wider, since
our prompts are not the user's: a kind hears of it only so far, and a few requests of the user's outweigh it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specproxy.records import PROFILE
from specproxy.strategies.bounds import MOST, amount, between, logarithm, running_mean
from specproxy.strategies.calibration import VerifyScale

__all__ = ["Arm", "Belief", "Cell", "Scales", "student_weight"]

Cell = tuple[str, str]
"""Kind of workload, temperature bucket (or `PROFILE`)."""

_PSEUDO = 8.0  # requests' worth of belief in the nominal spread
_SQUARE_CAP = 9.0  # a residual beyond three standard deviations counts as three
_RESIDUAL_CAP = 1.0  # e^1: a single request counts as at most 2.7 times its lane's usual time
_DEGREES = 4.0
_ROUNDING = 1e-6
_MOST_TOKENS = 1e12  # of one request
_MOST_ASKED = 32  # cells whose beliefs are kept up to date


@dataclass(frozen=True, slots=True)
class Scales:
    """Standard deviations of the effects, and of one observation (between requests; per token).

    `profile` is the cell effect of our own prompts. An observation over `n` tokens has variance
    ``between² + token²/n``.
    """

    arm: float = 0.35
    kind: float = 0.20
    cell: float = 0.10
    profile: float = 0.20
    between: float = 0.10
    token: float = 0.7

    def blur(self, temperature: str) -> float:
        """Variance of a cell's effect."""
        return self.profile**2 if temperature == PROFILE else self.cell**2

    def variance(self, tokens: int, weight: float = 1.0) -> float:
        """Variance of an observation over that many tokens; `weight` (0 to 1] says how far it is trusted."""
        return (self.between**2 + self.token**2 / max(tokens, 1)) / max(weight, 1e-3)


@dataclass(slots=True)
class Belief:
    """Mean and variance of a cell's log ratio.

    `prior` is the mean that the cost model gave; `n` and `replayed` count the cell's requests of evidence,
    after forgetting, `profiled` runs of our own on its kind; `excess` is ln E[e^noise].
    """

    mean: float
    variance: float
    prior: float = 0.0
    n: float = 0.0
    replayed: float = 0.0
    excess: float = 0.0
    profiled: float = 0.0

    @property
    def sd(self) -> float:
        """Standard deviation of the log ratio."""
        return math.sqrt(self.variance)


@dataclass(slots=True)
class _Leaf:
    """Sufficient statistics of one cell, relative to its prior mean; replays apart."""

    prior: float
    precision: float = 0.0
    weighted: float = 0.0  # Σ precision · (y − prior)
    n: float = 0.0
    replay_precision: float = 0.0
    replay_weighted: float = 0.0
    replay_share: float = 0.0  # Σ precision · share of the time that verifying drafts took
    replayed: float = 0.0
    own: tuple[float, float] = field(
        default=(0.0, 0.0), init=False
    )  # precision and weighted mean of all its evidence
    up: tuple[float, float] = field(
        default=(0.0, 0.0), init=False
    )  # the same as its kind hears it, blurred by the cell effect

    def evidence(self, scale: VerifyScale) -> tuple[float, float]:
        """Precision and precision-weighted mean of both sorts of evidence together."""
        if self.replay_precision <= 0.0:
            return self.precision, self.weighted
        shift, shift_var = scale.correction(self.replay_share / self.replay_precision)
        precision = 1.0 / (1.0 / self.replay_precision + shift_var)
        mean = self.replay_weighted / self.replay_precision + shift
        return self.precision + precision, self.weighted + precision * mean

    def numbers(self) -> list[float]:
        """All of it in the order of the constructor's arguments."""
        live = [self.prior, self.precision, self.weighted, self.n]
        return [*live, self.replay_precision, self.replay_weighted, self.replay_share, self.replayed]

    @classmethod
    def restored(cls, state: list[Any]) -> _Leaf:
        """What `numbers` gave."""
        prior, precision, weighted, n, replay_precision, replay_weighted, share, replayed = state
        return cls(
            logarithm(prior),
            *running_mean(precision, weighted),
            amount(n),
            *running_mean(replay_precision, replay_weighted),
            between(share, 0.0, amount(replay_precision)),
            amount(replayed),
        )

    def decay(self, keep: float) -> None:
        """Forget all but a share of it."""
        self.precision *= keep
        self.weighted *= keep
        self.n *= keep
        self.replay_precision *= keep
        self.replay_weighted *= keep
        self.replay_share *= keep
        self.replayed *= keep


class _Message(NamedTuple):
    """What a kind says about its arm: precision and weighted mean, and the sums over its cells behind them.

    `excess` is ln of the mean of e^residual on that kind.
    """

    precision: float
    weighted: float
    cells: float
    cells_weighted: float
    excess: float


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

    def learn(self, residual: float, square: float, tokens: float, keep: float) -> None:
        """Take in one residual, without a stall, and its square in nominal variances."""
        self.n = self.n * keep + 1.0
        self.squares = self.squares * keep + square
        self.tokens = self.tokens * keep + tokens
        self.raised = self.raised * keep + tokens * math.exp(residual)

    @classmethod
    def restored(cls, state: list[Any]) -> _Spread:
        """What `Arm.dump` gave: every request had a token at least, and its residual was bounded."""
        n, squares, tokens, raised = map(amount, state)
        between(tokens, n * (1.0 - _ROUNDING), n * _MOST_TOKENS)
        reach = math.exp(_RESIDUAL_CAP) * (1.0 + _ROUNDING)
        return cls(n, squares, tokens, between(raised, tokens / reach, tokens * reach))

    def excess(self) -> float:
        """ln of the mean of e^residual, shrunk towards none by `_PSEUDO` requests of average length."""
        if self.n <= 0.0:
            return 0.0
        pseudo = _PSEUDO * self.tokens / self.n
        return math.log((self.raised + pseudo) / (self.tokens + pseudo))


@dataclass(slots=True)
class Arm:
    """Belief about one arm over all cells. `half_life` is in requests of a cell."""

    scales: Scales
    half_life: float = 200.0
    last_at: float = 0.0
    evidence: float = 0.0  # requests that ran on this arm, over all cells, after forgetting
    calibration: VerifyScale = field(default_factory=VerifyScale)
    _leaves: dict[str, dict[str, _Leaf]] = field(default_factory=dict)
    _spreads: dict[str, _Spread] = field(default_factory=dict)
    known: dict[Cell, Belief] = field(default_factory=dict, repr=False)  # asked for since the last change
    _asked: dict[Cell, float] = field(default_factory=dict, repr=False)  # with the prior means of these cells
    _up: dict[str, _Message] = field(default_factory=dict, repr=False)  # by kind
    _total: tuple[float, float] = field(init=False, repr=False)  # of all messages and the arm's prior

    def __post_init__(self) -> None:
        self._total = 1.0 / self.scales.arm**2, 0.0

    # --- reading ---------------------------------------------------------------------------------

    def belief(self, cell: Cell, prior: float) -> Belief:
        """Posterior of a cell. `prior` is its prior mean, used where the cell has not been seen."""
        found = self.known.get(cell)
        if found is None:
            found = self.known[cell] = self._posterior(cell, prior)
            self._asked[cell] = prior
            if len(self._asked) > _MOST_ASKED:
                self._asked.pop(next(iter(self._asked)))
        return found

    def warm(self) -> None:
        """Work out anew, after a change, what was asked for before, so that no decision has to wait for it."""
        if not self.known:
            self.known = {cell: self._posterior(cell, prior) for cell, prior in self._asked.items()}

    def noise(self, kind: str) -> float:
        """Learned multiple of the nominal variance of requests of this kind."""
        n = squares = 0.0
        for spread in self._spreads.values():
            n += spread.n
            squares += spread.squares
        whole = (_PSEUDO + squares) / (_PSEUDO + n)
        own = self._spreads.get(kind)
        return whole if own is None else (_PSEUDO * whole + own.squares) / (_PSEUDO + own.n)

    # --- learning --------------------------------------------------------------------------------

    def learn(self, cell: Cell, prior: float, y: float, variance: float, tokens: float) -> None:
        """Take in one log ratio with its nominal variance.

        The weight of an outlier shrinks as under Student's t, so that one stalled request says little, while
        many of them are believed.
        """
        leaf, keep, square = self._residual(cell, prior, y, variance, tokens)
        noise = self.noise(cell[0])
        precision = student_weight(math.sqrt(square / noise)) / (variance * noise)
        leaf.precision = leaf.precision * keep + precision
        leaf.weighted = leaf.weighted * keep + precision * (y - leaf.prior)
        leaf.n = leaf.n * keep + 1.0
        self._send_up(cell[0])

    def learn_replay(
        self, cell: Cell, prior: float, y: float, share: float, variance: float, tokens: float
    ) -> None:
        """Take in a replay: its log ratio on the nominal cost curve, and the share of verifying in its time.

        Replays are not outliers, however odd: no stall and no neighbour can spoil them.
        """
        shift, _ = self.calibration.correction(share)
        leaf, keep, _ = self._residual(cell, prior, y + shift, variance, tokens)
        precision = 1.0 / (variance * self.noise(cell[0]))
        leaf.replay_precision = leaf.replay_precision * keep + precision
        leaf.replay_weighted = leaf.replay_weighted * keep + precision * (y - leaf.prior)
        leaf.replay_share = leaf.replay_share * keep + precision * share
        leaf.replayed = leaf.replayed * keep + 1.0
        self._send_up(cell[0])

    def recalibrate(self, y: float, nominal: float, share: float, variance: float) -> None:
        """Compare a request that ran on this arm with its own replay (`nominal` and `share`)."""
        self.calibration.learn(y - nominal, share, variance)
        self._send_all()

    def rebase(self, prior_of: Callable[[Cell], float]) -> None:
        """Take other prior means than before, also for cells that have evidence."""
        for kind, leaves in self._leaves.items():
            for temperature, leaf in leaves.items():
                prior = prior_of((kind, temperature))
                leaf.weighted += leaf.precision * (leaf.prior - prior)
                leaf.replay_weighted += leaf.replay_precision * (leaf.prior - prior)
                leaf.prior = prior
        self._asked = {cell: prior_of(cell) for cell in self._asked}
        self._send_all()

    def refresh(self) -> None:
        """Forget what was computed from priors that may have changed."""
        self.known.clear()
        self._asked.clear()

    def age(self, cell: Cell, requests: float) -> None:
        """Forget of a cell what so many requests make old that ran elsewhere; replays, which went on, stay."""
        leaf = self._leaves.get(cell[0], {}).get(cell[1])
        if leaf is not None and leaf.n:
            keep = 0.5 ** (requests / self.half_life)
            leaf.precision *= keep
            leaf.weighted *= keep
            leaf.n *= keep
            self._send_up(cell[0])

    def discount(self, factor: float, kind: str | None = None) -> None:
        """Keep only this share (0 to 1) of the evidence, of one kind or of all, after a change."""
        for name, leaves in self._leaves.items():
            if kind is None or name == kind:
                for leaf in leaves.values():
                    leaf.decay(factor)
        for name, spread in self._spreads.items():
            if kind is None or name == kind:
                spread.n *= factor
                spread.squares *= factor
                spread.tokens *= factor
                spread.raised *= factor
        self._send_all()

    # --- state -----------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """State as JSON-serialisable data."""
        return {
            "last_at": self.last_at,
            "calibration": self.calibration.dump(),
            "cells": [
                [kind, temperature, *leaf.numbers()]
                for kind, leaves in self._leaves.items()
                for temperature, leaf in leaves.items()
            ],
            "spreads": [[k, s.n, s.squares, s.tokens, s.raised] for k, s in self._spreads.items()],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `dump` gave."""
        self.last_at = between(state["last_at"], -MOST, MOST)
        self.calibration = VerifyScale.restored(state["calibration"])
        self._leaves = {}
        for kind, temperature, *numbers in state["cells"]:
            self._leaves.setdefault(str(kind), {})[str(temperature)] = _Leaf.restored(numbers)
        self._spreads = {str(kind): _Spread.restored(numbers) for kind, *numbers in state["spreads"]}
        self._send_all()

    # --- inside ----------------------------------------------------------------------------------

    def _posterior(self, cell: Cell, prior: float) -> Belief:
        """Messages from above, without what the cell itself sent up, and the cell's own evidence."""
        kind, temperature = cell
        scales, blur = self.scales, self.scales.blur(temperature)
        precision, weighted = self._total
        up = self._up.get(kind)
        if up is None:
            variance = 1.0 / precision + scales.kind**2
            return Belief(prior + weighted / precision, variance + blur, prior)
        precision, weighted = precision - up.precision, weighted - up.weighted
        variance = 1.0 / precision + scales.kind**2
        mean = weighted / precision
        leaves = self._leaves[kind]
        leaf = leaves.get(temperature)
        profiled = leaves[PROFILE].n if PROFILE in leaves else 0.0
        others, others_weighted = up.cells, up.cells_weighted
        if leaf is not None:
            others, others_weighted = max(others - leaf.up[0], 0.0), others_weighted - leaf.up[1]
        total = 1.0 / variance + others
        mean, variance = (mean / variance + others_weighted) / total, 1.0 / total + blur
        if leaf is None:
            return Belief(prior + mean, variance, prior, 0.0, 0.0, up.excess, profiled)
        own, own_weighted = leaf.own
        total = 1.0 / variance + own
        mean = (mean / variance + own_weighted) / total
        return Belief(leaf.prior + mean, 1.0 / total, leaf.prior, leaf.n, leaf.replayed, up.excess, profiled)

    def _send_up(self, kind: str) -> None:
        """Work out anew what a kind says about the arm, after its evidence has changed."""
        self._hear(kind)
        self._sum_up()

    def _send_all(self) -> None:
        self._up.clear()
        for kind in self._leaves:
            self._hear(kind)
        self._sum_up()

    def _hear(self, kind: str) -> None:
        """A kind's message, from those of its cells."""
        cells = cells_weighted = 0.0
        for temperature, leaf in self._leaves.get(kind, {}).items():
            own, weighted = leaf.own = leaf.evidence(self.calibration)
            share = 1.0 / (1.0 + own * self.scales.blur(temperature))
            leaf.up = own * share, weighted * share
            cells += leaf.up[0]
            cells_weighted += leaf.up[1]
        share = 1.0 / (1.0 + cells * self.scales.kind**2)
        spread = self._spreads.get(kind)
        excess = spread.excess() if spread else 0.0
        self._up[kind] = _Message(cells * share, cells_weighted * share, cells, cells_weighted, excess)

    def _sum_up(self) -> None:
        precision, weighted = 1.0 / self.scales.arm**2, 0.0
        for message in self._up.values():
            precision += message.precision
            weighted += message.weighted
        self._total = precision, weighted
        self.evidence = sum([leaf.n for leaves in self._leaves.values() for leaf in leaves.values()])
        self.known.clear()

    def _residual(
        self, cell: Cell, prior: float, y: float, variance: float, tokens: float
    ) -> tuple[_Leaf, float, float]:
        """Leaf, decay factor, and squared residual in nominal variances; the kind's spread learns it."""
        kind, temperature = cell
        belief = self.belief(cell, prior)
        keep = 0.5 ** (1.0 / self.half_life)
        residual = y - belief.mean
        square = residual**2 / (variance + belief.variance)
        noise = self.noise(kind)
        capped = min(square, _SQUARE_CAP * noise)
        reach = min(_RESIDUAL_CAP, math.sqrt(_SQUARE_CAP * noise * (variance + belief.variance)))
        clipped = max(-reach, min(residual, reach))
        self._spreads.setdefault(kind, _Spread()).learn(clipped, capped, tokens, keep)
        leaf = self._leaves.setdefault(kind, {}).setdefault(temperature, _Leaf(prior))
        return leaf, keep, square


def student_weight(score: float) -> float:
    """Weight of a residual under Student's t (four degrees of freedom), 1 up to one standard deviation."""
    return min(1.0, (_DEGREES + 1.0) / (_DEGREES + score * score))
