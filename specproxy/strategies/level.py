"""What a token costs on plain now: the level that every lane of a target is compared with.

ln(time per token) = x·b + (effect of the lane) + noise, with x = (1, context, load). Plain decoding reads all
weights once a token, so its time hardly depends on the text, but on the context (the KV cache is read too) and
on what else the machine does. `b` follows a random walk in its first coordinate (other programs, heat), and is
estimated by a Kalman filter (a Bayesian linear regression that forgets), from requests on every lane: how much
one on another lane than plain tells about the level depends on how well that lane's effect is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from specproxy.strategies.posterior import student_weight

__all__ = ["Level", "LoadEffect", "features"]

_CONTEXT_SCALE = 8192.0  # tokens of context at which reading the KV cache costs about as much as the weights
_SURPRISE_RATE = 0.5
_SURPRISE_CLIP = 3.0
_SURPRISE = 2.2  # two or three errors in a row of three standard deviations; by chance once in 7000 requests
_PRIOR_MEAN = (math.log(0.03), 0.5, 0.6)
_PRIOR_SD = (3.0, 0.5, 0.4)


def features(context_tokens: float, concurrency: float) -> tuple[float, float, float]:
    """Regressors of the level: constant, log context growth, log requests in flight (at least one)."""
    return 1.0, math.log1p(max(context_tokens, 0.0) / _CONTEXT_SCALE), math.log(max(concurrency, 1.0))


@dataclass(slots=True)
class Level:
    """Kalman filter over the three coefficients. `drift` is the walk's variance a second."""

    drift: float = 1.5e-6
    mean: list[float] = field(default_factory=lambda: list(_PRIOR_MEAN))
    cov: list[list[float]] = field(
        default_factory=lambda: [
            [sd * sd if i == j else 0.0 for j in range(3)] for i, sd in enumerate(_PRIOR_SD)
        ]
    )
    at: float | None = None
    surprise: float = 0.0  # running mean of standardised errors

    def predict(self, x: tuple[float, float, float]) -> tuple[float, float]:
        """Mean and variance of ln(seconds per token) on plain at these features."""
        mean = sum(xi * bi for xi, bi in zip(x, self.mean, strict=True))
        carried = [sum(row[j] * x[j] for j in range(3)) for row in self.cov]
        return mean, sum(x[i] * carried[i] for i in range(3))

    def learn(self, x: tuple[float, float, float], value: float, variance: float) -> bool:
        """Take in one ln(time per token), less the lane's effect, with its variance.

        A single outlier counts little. Errors that agree mean that the machine has become faster or slower
        all at once: then the level jumps.

        Returns:
            Whether it jumped.
        """
        mean, own = self.predict(x)
        error = value - mean
        score = error / math.sqrt(own + variance)
        self.surprise += _SURPRISE_RATE * (max(-_SURPRISE_CLIP, min(score, _SURPRISE_CLIP)) - self.surprise)
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

    def _update(self, x: tuple[float, float, float], error: float, variance: float) -> None:
        """The Kalman filter's measurement step."""
        carried = [sum(row[j] * x[j] for j in range(3)) for row in self.cov]
        total = sum(x[i] * carried[i] for i in range(3)) + variance
        for i in range(3):
            gain = carried[i] / total
            self.mean[i] += gain * error
            for j in range(3):
                self.cov[i][j] -= gain * carried[j]

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
        self.mean = [float(v) for v in state["mean"]]
        self.cov = [[float(v) for v in row] for row in state["cov"]]
        self.at = None if state["at"] is None else float(state["at"])
        self.surprise = float(state["surprise"])


@dataclass(slots=True)
class LoadEffect:
    """How a lane's log ratio changes with the logarithm of requests in flight; a scalar Kalman filter.

    Verifying drafts is compute, which neighbours take away, while plain decoding waits for memory: above some
    load drafting stops paying (Liu et al. 2024, arXiv 2406.14066). The prior is a weak version of that.
    """

    mean: float = 0.1
    variance: float = 0.04

    def learn(self, load: float, residual: float, variance: float) -> None:
        """Take in a residual seen at that log load, which is not yet corrected for the load's effect."""
        carried = self.variance * load
        total = load * carried + variance
        self.mean += carried / total * (residual - self.mean * load)
        self.variance -= carried * carried / total


_LONGEST_GAP_S = 6 * 3600.0  # a night off is as uncertain as it gets
