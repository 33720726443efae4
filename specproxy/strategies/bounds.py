"""How far numbers of a stored state can have been learned: what is beyond is damage, and no belief.

JSON holds any number, and one that nothing can have led to would make estimates worthless, divide by zero, or
tell that a lane takes no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

__all__ = ["MOST", "ROUNDED", "amount", "between", "covariance", "logarithm", "running_mean", "whole"]

MOST = 1e18
"""Of seconds, tokens, requests and weights."""
_MOST_LOG = 50.0  # of the logarithm of a time or a ratio: 10^21 times as much
_MOST_VARIANCE = 1e6
_ROUNDING = 1e-6  # of a covariance, relative
ROUNDED = 1e-9
"""What rounding may have made of zero."""


def between(value: Any, low: float, high: float) -> float:
    """A number of a state.

    Raises:
        ValueError: it is no number from `low` to `high`.
    """
    if not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"damaged state: {str(value)[:40]} is not from {low:g} to {high:g}")
    return float(value)


def amount(value: Any) -> float:
    """A number that is not negative but by rounding: of seconds, tokens, requests, or a weight."""
    return between(value, -ROUNDED, MOST)


def whole(value: Any, least: int = 0) -> int:
    """A whole number of at least `least`."""
    return int(between(value, least, MOST))


def logarithm(value: Any) -> float:
    """The logarithm of a time or of a ratio of times."""
    return between(value, -_MOST_LOG, _MOST_LOG)


def running_mean(weight: Any, weighted: Any) -> tuple[float, float]:
    """A weight, and the sum of logarithms that have it."""
    weight = amount(weight)
    return weight, between(weighted, -_MOST_LOG * weight, _MOST_LOG * weight)


def covariance(rows: Sequence[Iterable[Any]]) -> list[list[float]]:
    """A covariance matrix, given by rows; rounding may have left it a little less than semi-definite.

    Raises:
        ValueError: it is none.
    """
    found = [[between(v, -_MOST_VARIANCE, _MOST_VARIANCE) for v in row] for row in rows]
    if any(len(row) != len(found) for row in found):
        raise ValueError("damaged state: a covariance matrix that is not square")
    matrix = np.array(found)
    slack = _ROUNDING * max(1.0, float(np.abs(matrix).max(initial=0.0)))
    if np.abs(matrix - matrix.T).max() > slack or np.linalg.eigvalsh(matrix)[0] < -slack:
        raise ValueError("damaged state: a covariance that there cannot be")
    return found
