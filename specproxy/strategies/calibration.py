"""How replayed times relate to real ones: one lane's verify cost, learned from requests that have both.

A replay says how many tokens each step would have verified. Its time follows from the nominal cost curve t(w)
(`cost.step_cost`), stretched by an unknown factor and with an unknown offset in the logarithm::

    t'(w) = 1 + s·(t(w) − 1),     ln ratio' = ln ratio + ln(1 + (s − 1)·u) + b

where `u` is the share of the nominal time that goes into verifying drafts. The pair (s, b) is estimated by an
extended Kalman filter from requests that ran on the lane and were replayed as well, so that noise of the text
cancels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from specproxy.strategies.bounds import amount, between, covariance, logarithm

__all__ = ["VerifyScale"]

_LEAST_STRETCH = 0.05
_MOST_STRETCH = 1000.0
_WALK = 1e-5  # variance added to both by each comparison, so that old ones fade


@dataclass(slots=True)
class VerifyScale:
    """Stretch `s` and offset `b` with their covariance."""

    stretch: float = 1.0
    offset: float = 0.0
    var_stretch: float = 0.25
    var_offset: float = 0.01
    cov: float = 0.0
    n: float = 0.0

    def correction(self, share: float) -> tuple[float, float]:
        """What to add to a nominal log ratio whose verify share is `share`, and the variance of that."""
        factor = max(1.0 + (self.stretch - 1.0) * share, 0.1)
        slope = share / factor
        variance = slope * slope * self.var_stretch + 2.0 * slope * self.cov + self.var_offset
        return math.log(factor) + self.offset, max(variance, 0.0)

    def learn(self, excess: float, share: float, variance: float) -> None:
        """Take in one comparison: real minus nominal log ratio, with the variance of the real one."""
        expected, _ = self.correction(share)
        slope = share / max(1.0 + (self.stretch - 1.0) * share, 0.1)
        to_stretch = slope * self.var_stretch + self.cov
        to_offset = slope * self.cov + self.var_offset
        total = slope * to_stretch + to_offset + variance
        error = max(-1.0, min(excess - expected, 1.0))
        self.stretch = min(max(self.stretch + to_stretch / total * error, _LEAST_STRETCH), _MOST_STRETCH)
        self.offset += to_offset / total * error
        self.var_stretch += _WALK - to_stretch * to_stretch / total
        self.var_offset += _WALK - to_offset * to_offset / total
        self.cov -= to_stretch * to_offset / total
        self.n += 1.0

    def dump(self) -> list[float]:
        """State as JSON-serialisable data."""
        return [self.stretch, self.offset, self.var_stretch, self.var_offset, self.cov, self.n]

    @classmethod
    def restored(cls, state: list[Any]) -> VerifyScale:
        """What `dump` gave."""
        stretch, offset, var_stretch, var_offset, cov, n = state
        (var_stretch, cov), (_, var_offset) = covariance([[var_stretch, cov], [cov, var_offset]])
        stretch = between(stretch, _LEAST_STRETCH, _MOST_STRETCH)
        return cls(stretch, logarithm(offset), var_stretch, var_offset, cov, amount(n))
