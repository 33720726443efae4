"""What the engine's benchmark has measured so far, as lines for people and as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.engine_client import Reply

__all__ = ["Figures", "Ratio"]

# names of comparisons → keys of their median in the last line; the lower bound has `_lo` behind it
KEYS = {
    "null": "null",
    "plain": "plain_vs_llama_server",
    "shipped": "plain_vs_llama_server_as_shipped",
    "ngram": "ngram_vs_llama_server",
    "draft": "draft_vs_llama_server",
    "mtp": "mtp_vs_llama_server",
    "batch4_plain": "batch4_plain_vs_llama_server",
    "batch4_mixed": "batch4_mixed_vs_plain",
    "smollm2_plain": "smollm2_plain_vs_llama_server",
    "smollm2_ngram": "smollm2_ngram_vs_llama_server",
}
OTHERS = ("bandwidth_share", "python_ms_per_step")


@dataclass(frozen=True, slots=True)
class Ratio:
    """A median with its interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Ratio:
        """Bootstrap over pairs, 90%."""
        values = np.asarray(ratios)
        draws = np.random.default_rng(0).choice(values, (2000, len(values)))
        low, high = np.quantile(np.median(draws, axis=1), [0.05, 0.95])
        return cls(float(np.median(values)), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


class Figures:
    """Collects ratios and single values. `source` says which llama-server it was."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._ratios: dict[str, list[float]] = {}
        self._speeds: dict[str, list[tuple[float, float]]] = {}
        self._drafts: dict[str, list[int]] = {}  # ours drafted, accepted, theirs drafted, accepted
        self._values: dict[str, float] = {}
        self._texts = self._forks = 0

    def add_pair(self, name: str, ours: Reply, theirs: Reply) -> None:
        """One text, said by both."""
        self.add_ratio(name, theirs.seconds / ours.seconds)
        self._speeds.setdefault(name, []).append((ours.tokens / ours.seconds, theirs.tokens / theirs.seconds))
        counts = self._drafts.setdefault(name, [0, 0, 0, 0])
        for at, reply in ((0, ours), (2, theirs)):
            counts[at] += reply.timings.get("draft_n", 0)
            counts[at + 1] += reply.timings.get("draft_n_accepted", 0)
        self._texts += 1
        self._forks += ours.text != theirs.text

    def add_ratio(self, name: str, ratio: float) -> None:
        """Their time over ours."""
        self._ratios.setdefault(name, []).append(ratio)

    def set(self, key: str, value: float) -> None:
        """A value of its own."""
        self._values[key] = round(value, 4)

    def show(self, name: str) -> None:
        """Print one comparison."""
        line = f"{name:14} {Ratio.of(self._ratios[name])} of {len(self._ratios[name]):3}"
        if name in self._speeds:
            ours, theirs = np.median(np.array(self._speeds[name]), axis=0)
            line += f"   {ours:6.1f} against {theirs:6.1f} tok/s"
        if any(self._drafts.get(name, ())):
            a, b, c, d = self._drafts[name]
            line += f"   accepted {b}/{a} against {d}/{c}"
        print(line, flush=True)

    def finish(self) -> None:
        """Print the last lines, with what there is."""
        figures: dict[str, float | None] = {}
        for name, key in KEYS.items():
            ratio = Ratio.of(self._ratios[name]) if name in self._ratios else None
            figures[key] = ratio and round(ratio.median, 4)
            figures[f"{key}_lo"] = ratio and round(ratio.low, 4)
        figures |= {key: self._values.get(key) for key in OTHERS}
        print(f"texts that differed between the two: {self._forks} of {self._texts}")
        print(json.dumps(figures | {"llama_server": self._source}), flush=True)
