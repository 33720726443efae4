"""What the engine's benchmark has measured so far, as lines for people and as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.engine_client import Reply

__all__ = ["Figures", "Ratio"]

Floats = npt.NDArray[np.float64]

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
    def of(cls, groups: Sequence[Sequence[float] | Floats]) -> Ratio:
        """Median of all ratios, and a bootstrap interval of 90%.

        Args:
            groups: ratios by the servers that they were measured on, at least one. Two processes of the same
                program differ in speed for as long as they live, so what is drawn are servers first, and then
                pairs of requests on them.
        """
        rng = np.random.default_rng(0)
        values = [np.asarray(group) for group in groups if len(group)]
        medians = []
        for _ in range(2000):
            drawn = [values[at] for at in rng.integers(len(values), size=len(values))]
            medians.append(np.median(np.concatenate([rng.choice(group, len(group)) for group in drawn])))
        low, high = np.quantile(medians, [0.05, 0.95])
        return cls(float(np.median(np.concatenate(values))), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


class Figures:
    """Collects ratios and single values. `source` says which llama-server it was."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._ratios: dict[str, list[list[float]]] = {}  # by servers
        self._servers = 0
        self._speeds: dict[str, list[tuple[float, float]]] = {}
        self._drafts: dict[str, list[int]] = {}  # ours drafted, accepted, theirs drafted, accepted
        self._values: dict[str, float] = {}
        self._texts = self._forks = 0

    def new_servers(self) -> None:
        """What is added from here on was measured on other processes."""
        self._servers += 1

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
        groups = self._ratios.setdefault(name, [])
        while len(groups) <= self._servers:
            groups.append([])
        groups[self._servers].append(ratio)

    def set(self, key: str, value: float) -> None:
        """A value of its own."""
        self._values[key] = round(value, 4)

    def show(self, name: str) -> None:
        """Print one comparison."""
        groups = self._ratios[name]
        line = f"{name:14} {Ratio.of(groups)} of {sum(map(len, groups)):3}"
        if name in self._speeds:
            ours, theirs = np.median(np.array(self._speeds[name]), axis=0)
            line += f"   {ours:6.1f} against {theirs:6.1f} tok/s"
        each = [f"{np.median(group):.3f}" for group in groups if group]
        if len(each) > 1:
            line += f"   by servers {' '.join(each)}"
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
