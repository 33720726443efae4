"""How many tokens a request will produce: learned by workload, bounded by its own limit.

Lengths of one kind of request are about log-normal. Mean and variance of their logarithm are kept per cell with
exponential forgetting, and shrunk to those of all requests, then to a prior.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from specproxy.strategies.bounds import ROUNDED, amount, between

__all__ = ["Lengths", "expected_min"]

Cell = tuple[str, str]
_Asked = tuple[Cell, int | None]  # a workload and a request's limit

_PRIOR_MEAN = math.log(150.0)
_PRIOR_VAR = 1.0
_PSEUDO = 2.0
_MOST_MEAN = 20.0  # of the logarithm: 500 million tokens
_MOST_ASKED = 16  # workloads and limits whose expectations are kept up to date


def expected_min(mean: float, variance: float, limit: int | None) -> float:
    """E[min(X, limit)] for ln X ~ N(mean, variance); at least one token."""
    whole = math.exp(mean + 0.5 * variance)
    if limit is None:
        return max(1.0, whole)
    sd = math.sqrt(max(variance, 1e-9))
    z = (math.log(max(limit, 1)) - mean) / sd
    below = whole * _normal_cdf(z - sd)
    return max(1.0, below + limit * (1.0 - _normal_cdf(z)))


@dataclass(slots=True)
class Lengths:
    """Running log-normal fit of output lengths by cell. `half_life` is in requests of the cell."""

    half_life: float = 100.0
    _cells: dict[Cell, list[float]] = field(default_factory=dict)  # n, mean, Σ squared deviation
    _known: dict[_Asked, float] = field(default_factory=dict, repr=False)  # since the last change
    _asked: deque[_Asked] = field(default_factory=lambda: deque(maxlen=_MOST_ASKED), repr=False)

    def learn(self, cell: Cell, tokens: int) -> None:
        """Take in the length of one complete output."""
        if tokens < 1:
            return
        value = min(math.log(tokens), _MOST_MEAN)
        for key in (cell, _ALL):
            n, mean, squares = self._cells.get(key, [0.0, 0.0, 0.0])
            keep = 0.5 ** (1.0 / self.half_life)
            n, squares = n * keep + 1.0, squares * keep
            step = value - mean
            mean += step / n
            self._cells[key] = [n, mean, squares + step * (value - mean)]
        self._known = {asked: self._expect(*asked) for asked in self._asked}

    def expect(self, cell: Cell, limit: int | None) -> float:
        """Expected number of output tokens of a request with this limit.

        What was asked for lately is worked out anew after each change, so that no decision has to wait for it.
        """
        found = self._known.get((cell, limit))
        if found is None:
            found = self._known[cell, limit] = self._expect(cell, limit)
            if (cell, limit) not in self._asked:
                self._asked.append((cell, limit))
        return found

    def _expect(self, cell: Cell, limit: int | None) -> float:
        mean, variance = _PRIOR_MEAN, _PRIOR_VAR
        for key in (_ALL, cell):
            n, seen, squares = self._cells.get(key, [0.0, 0.0, 0.0])
            if n > 0.0:
                spread = squares + n * _PSEUDO / (n + _PSEUDO) * (seen - mean) ** 2
                variance = (_PSEUDO * variance + spread) / (_PSEUDO + n)
                mean = (_PSEUDO * mean + n * seen) / (_PSEUDO + n)
        return expected_min(mean, variance, limit)

    def dump(self) -> list[list[Any]]:
        """State as JSON-serialisable data."""
        return [[kind, temperature, *numbers] for (kind, temperature), numbers in self._cells.items()]

    def restore(self, state: list[list[Any]]) -> None:
        """Take over what `dump` gave."""
        self._cells = {(str(k), str(t)): _sums(*numbers) for k, t, *numbers in state}
        self._known.clear()


_ALL: Cell = ("", "")


def _sums(n: Any, mean: Any, squares: Any) -> list[float]:
    """Sums of a cell, as far as lengths can have led to them."""
    n = amount(n)
    return [n, between(mean, 0.0, _MOST_MEAN), between(squares, -ROUNDED, n * _MOST_MEAN**2)]


def _normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2.0))
