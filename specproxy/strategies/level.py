"""What a token costs on plain now: the level that every lane of a target is compared with.

ln(time per token) = x·b + (effect of the lane) + noise, with x = (1, context, ln load, load). Plain decoding
reads all weights once a token, so its time hardly depends on the text, but on the context (the KV cache is read
too) and on what else the machine does. `b` follows a random walk in its first coordinate (other programs,
heat), and is estimated by a Kalman filter (a Bayesian linear regression that forgets), from requests on every
lane: how much one on another lane than plain tells about the level depends on how well that lane's effect is
known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from specproxy.strategies.bounds import MOST, between, covariance, logarithm
from specproxy.strategies.posterior import student_weight

__all__ = ["Features", "Level", "LoadEffect", "features"]

Features = tuple[float, float, float, float]
"""Regressors: constant, context, and load in two shapes."""

_CONTEXT_SCALE = 8192.0  # tokens of context at which reading the KV cache costs about as much as the weights
_SURPRISE_RATE = 0.5
_SURPRISE_CLIP = 3.0
_SURPRISE = 2.2  # two or three errors in a row of three standard deviations; by chance once in 7000 requests
_LOAD_SCALE = 8.0  # further requests in flight by which one unit of linear load stands
_PRIOR_MEAN = (math.log(0.03), 0.5, 0.3, 0.6)
_PRIOR_SD = (3.0, 0.5, 0.4, 0.8)
_SIZE = range(4)


def features(context_tokens: float, concurrency: float) -> Features:
    """Regressors of the level: constant, log context growth, and requests in flight (at least one).

    Load comes as its logarithm and as it is: time grows with the logarithm while requests share the reading of
    weights, and exponentially once they fight for compute.
    """
    others = max(concurrency, 1.0) - 1.0
    return (
        1.0,
        math.log1p(max(context_tokens, 0.0) / _CONTEXT_SCALE),
        math.log1p(others),
        others / _LOAD_SCALE,
    )


@dataclass(slots=True)
class Level:
    """Kalman filter over the coefficients. `drift` is the walk's variance a second."""

    drift: float = 1.5e-6
    mean: list[float] = field(default_factory=lambda: list(_PRIOR_MEAN))
    cov: list[list[float]] = field(
        default_factory=lambda: [[sd * sd if i == j else 0.0 for j in _SIZE] for i, sd in enumerate(_PRIOR_SD)]
    )
    at: float | None = None
    surprise: float = 0.0  # running mean of standardised errors

    def expect(self, x: Features) -> float:
        """Mean of ln(seconds per token) on plain at these features."""
        b = self.mean
        return b[0] + x[1] * b[1] + x[2] * b[2] + x[3] * b[3]

    def predict(self, x: Features) -> tuple[float, float]:
        """Mean and variance of ln(seconds per token) on plain at these features."""
        carried = self._carried(x)
        return self.expect(x), sum([x[i] * carried[i] for i in _SIZE])

    def step(self, start: Features, end: Features) -> tuple[float, float]:
        """Mean and variance of what ln(seconds per token) on plain changes by between these features."""
        x = [end[i] - start[i] for i in _SIZE]
        mean = sum([x[i] * self.mean[i] for i in _SIZE])
        return mean, sum([x[i] * x[j] * self.cov[i][j] for i in _SIZE for j in _SIZE])

    def learn(self, x: Features, value: float, variance: float, doubt: float = 0.0) -> bool:
        """Take in one ln(time per token), less the lane's effect, with its variance.

        A single outlier counts little. Errors that agree mean that the machine has become faster or slower all
        at once: then the level jumps. `doubt` is the variance of the lane's effect itself, which is part of no
        request but of all on that lane: as far as it may explain an error, agreement says nothing.

        Returns:
            Whether it jumped.
        """
        mean, own = self.predict(x)
        error = value - mean
        score = error / math.sqrt(own + variance + doubt)
        told = (own + variance) / (own + variance + doubt)
        variance += doubt
        clipped = max(-_SURPRISE_CLIP, min(score, _SURPRISE_CLIP))
        self.surprise += _SURPRISE_RATE * told * (clipped - self.surprise)
        jumped = abs(self.surprise) > _SURPRISE
        if jumped:
            self.surprise = 0.0
            self.widen(error * error)
        else:
            variance /= student_weight(score)
        self._update(x, error, variance)
        return jumped

    def advance(self, at: float) -> None:
        """Let the random walk run up to an instant; going back in time does nothing."""
        if self.at is not None and at > self.at:
            self.widen(self.drift * min(at - self.at, _LONGEST_GAP_S))
        self.at = at if self.at is None else max(at, self.at)

    def widen(self, variance: float) -> None:
        """Make the constant less certain, as after a restart on another build."""
        self.cov[0][0] += variance

    def _update(self, x: Features, error: float, variance: float) -> None:
        """The Kalman filter's measurement step."""
        carried = self._carried(x)
        total = sum([x[i] * carried[i] for i in _SIZE]) + variance
        for i in _SIZE:
            gain = carried[i] / total
            self.mean[i] += gain * error
            row = self.cov[i]
            for j in _SIZE:
                row[j] -= gain * carried[j]

    def _carried(self, x: Features) -> list[float]:
        return [row[0] + row[1] * x[1] + row[2] * x[2] + row[3] * x[3] for row in self.cov]

    def dump(self) -> dict[str, Any]:
        """State as JSON-serialisable data."""
        return {
            "mean": list(self.mean),
            "cov": [list(r) for r in self.cov],
            "at": self.at,
            "surprise": self.surprise,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `dump` gave."""
        first, second, third, fourth = map(logarithm, state["mean"])
        self.mean = [first, second, third, fourth]
        self.cov = covariance([list(row) for row in state["cov"]])
        if len(self.cov) != len(self.mean):
            raise ValueError("damaged state: a level of another size")
        self.at = None if state["at"] is None else between(state["at"], -MOST, MOST)
        self.surprise = between(state["surprise"], -_SURPRISE_CLIP, _SURPRISE_CLIP)


@dataclass(slots=True)
class LoadEffect:
    """How a lane's log ratio changes with the requests in flight; a Kalman filter over both shapes of load.

    Verifying drafts is compute, which neighbours take away, while plain decoding waits for memory: above some
    load drafting stops paying (Liu et al. 2024, arXiv 2406.14066). The prior is a weak version of that.
    """

    log: float = 0.05
    linear: float = 0.1
    log_var: float = 0.01
    linear_var: float = 0.25
    cross: float = 0.0

    @classmethod
    def none(cls) -> LoadEffect:
        """The effect on plain: none, since it is the reference."""
        return cls(0.0, 0.0, 0.0, 0.0)

    def expect(self, x: Features) -> float:
        """Mean effect at that load."""
        return self.log * x[2] + self.linear * x[3]

    def variance(self, x: Features) -> float:
        """Variance of the effect at that load."""
        _, _, u, v = x
        return self.log_var * u * u + 2.0 * self.cross * u * v + self.linear_var * v * v

    def learn(self, x: Features, residual: float, variance: float) -> None:
        """Take in a residual seen at that load, which is not yet corrected for the load's effect."""
        _, _, u, v = x
        log, linear = self.log_var * u + self.cross * v, self.cross * u + self.linear_var * v
        total = u * log + v * linear + variance
        error = residual - self.expect(x)
        self.log += log / total * error
        self.linear += linear / total * error
        self.log_var -= log * log / total
        self.linear_var -= linear * linear / total
        self.cross -= log * linear / total

    def numbers(self) -> list[float]:
        """All of it in the order of the constructor's arguments."""
        return [self.log, self.linear, self.log_var, self.linear_var, self.cross]

    @classmethod
    def restored(cls, state: list[Any]) -> LoadEffect:
        """What `numbers` gave."""
        log, linear, log_var, linear_var, cross = state
        (log_var, cross), (_, linear_var) = covariance([[log_var, cross], [cross, linear_var]])
        return cls(logarithm(log), logarithm(linear), log_var, linear_var, cross)


_LONGEST_GAP_S = 6 * 3600.0  # a night off is as uncertain as it gets
