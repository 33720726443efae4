"""What a prompt token costs that isn't in the cache: seconds per token by lane, shrunk to its target's mean."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Prefill"]

_PSEUDO = 2.0
_LEAST_TOKENS = 16  # below this, fixed costs of a step hide the rate


@dataclass(slots=True)
class Prefill:
    """Running mean of ln(prefill seconds per uncached token), by arm and over all, with forgetting."""

    half_life: float = 100.0
    _arms: dict[str, list[float]] = field(default_factory=dict)  # n, mean

    def learn(self, arm: str, tokens: int, seconds: float) -> None:
        """Take in one prefill of `tokens` uncached tokens; short ones teach nothing."""
        if tokens < _LEAST_TOKENS or seconds <= 0.0:
            return
        value = math.log(seconds / tokens)
        keep = 0.5 ** (1.0 / self.half_life)
        for key in (arm, _ALL):
            n, mean = self._arms.get(key, [0.0, value])
            bounded = max(mean - 1.0, min(value, mean + 1.0)) if n >= _PSEUDO else value
            n = n * keep + 1.0
            self._arms[key] = [n, mean + (bounded - mean) / n]

    def seconds(self, arm: str, tokens: int, decode_s: float) -> float:
        """Expected prefill of that many uncached tokens on an arm.

        Before anything was measured a prompt token counts as an eighth of a decoded one (`decode_s`).
        """
        if tokens <= 0:
            return 0.0
        n_all, mean_all = self._arms.get(_ALL, [0.0, 0.0])
        if n_all <= 0.0:
            return tokens * decode_s / 8.0
        n, mean = self._arms.get(arm, [0.0, 0.0])
        return tokens * math.exp((n * mean + _PSEUDO * mean_all) / (n + _PSEUDO))

    def dump(self) -> list[list[Any]]:
        """State as JSON-serialisable data."""
        return [[arm, *numbers] for arm, numbers in self._arms.items()]

    def restore(self, state: list[list[Any]]) -> None:
        """Take over what `dump` gave."""
        self._arms = {str(arm): [float(v) for v in numbers] for arm, *numbers in state}


_ALL = ""
