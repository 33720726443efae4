"""What a prompt token costs that isn't in the cache, and how far a predicted cache hit is to be trusted."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from specproxy.strategies.bounds import amount, between, logarithm

__all__ = ["Prefill"]

_PSEUDO = 2.0
_LEAST_TOKENS = 16  # below this, fixed costs of a step hide the rate
_DECODE_SHARE = 1.0 / 8.0  # a prompt token in decoded ones, before anything was measured


@dataclass(slots=True)
class Prefill:
    """Running means by arm: ln(prefill seconds per uncached token), and cached tokens over predicted ones.

    Both are shrunk to the mean over all arms of the target; `half_life` is in requests.
    """

    half_life: float = 100.0
    _rates: dict[str, list[float]] = field(default_factory=dict)  # weight, mean
    _trust: dict[str, list[float]] = field(default_factory=dict)
    known: dict[str, float] = field(default_factory=dict, repr=False)  # seconds a token, since the last change

    def learn(self, arm: str, tokens: int, seconds: float) -> None:
        """Take in one prefill of `tokens` uncached tokens; short ones teach nothing."""
        if tokens >= _LEAST_TOKENS and seconds > 0.0:
            value = math.log(seconds / tokens)
            for key in (arm, _ALL):
                self._add(self._rates, key, value)
            self.known = {known: self._rate(known) for known in self.known}

    def learn_hits(self, arm: str, predicted: int, cached: int) -> None:
        """Take in how many of the tokens that were thought to be cached on an arm really were."""
        if predicted > 0:
            self._add(self._trust, arm, min(1.0, cached / predicted))

    def seconds(self, arm: str, tokens: float, decode_s: float) -> float:
        """Expected prefill of that many uncached tokens on an arm; a decoded token takes `decode_s`."""
        if tokens <= 0.0:
            return 0.0
        rate = self.known.get(arm)
        if rate is None:
            if _ALL not in self._rates:
                return tokens * decode_s * _DECODE_SHARE
            rate = self.known[arm] = self._rate(arm)
        return tokens * rate

    def trusted(self, arm: str, predicted: int) -> float:
        """Tokens that are probably cached, if that many are predicted: at first all of them."""
        if not predicted:
            return 0.0
        weight, mean = self._trust.get(arm, (0.0, 0.0))
        return predicted * (weight * mean + _PSEUDO) / (weight + _PSEUDO)

    def dump(self) -> dict[str, Any]:
        """State as JSON-serialisable data."""
        return {"rates": dict(self._rates), "trust": dict(self._trust)}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `dump` gave."""
        self._rates = {str(k): [amount(n), logarithm(mean)] for k, (n, mean) in state["rates"].items()}
        self._trust = {str(k): [amount(n), between(mean, 0.0, 1.0)] for k, (n, mean) in state["trust"].items()}
        self.known.clear()

    def _rate(self, arm: str) -> float:
        """Seconds a token on an arm."""
        weight, mean = self._rates.get(arm, (0.0, 0.0))
        return math.exp((weight * mean + _PSEUDO * self._rates[_ALL][1]) / (weight + _PSEUDO))

    def _add(self, means: dict[str, list[float]], key: str, value: float) -> None:
        """One value into a running mean; a wild one moves it by no more than one would expect of e^1."""
        weight, mean = means.get(key, (0.0, value))
        if weight >= _PSEUDO:
            value = max(mean - 1.0, min(value, mean + 1.0))
        weight = weight * 0.5 ** (1.0 / self.half_life) + 1.0
        means[key] = [weight, mean + (value - mean) / weight]


_ALL = ""
