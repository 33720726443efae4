"""When a reload pays: how long this kind of traffic goes on, and what comes after it.

A lane under `reload` control replaces another in memory, at the cost of a load. What it saves on this request
is seldom enough; it has to save over the run of like requests that this one starts or continues, and over what
comes then. Run lengths and the mix of workloads are learned, runs have no memory, and what it is worth to have
a lane in memory when a run begins follows from them (a Markov decision process whose states are the lanes;
Puterman 1994, ch. 8, relative values)::

    V(l) = Σ_w π_w · min_m ( load(m)·[m ≠ l] + run_w·cost(w, m) + γ·V(m) )

with π the mix of runs, and γ below one since a mix is only trusted for so long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specproxy.strategies.bounds import MOST, amount, between

__all__ = ["Dwell", "Traffic", "future_costs"]

_PRIOR_RUN = 2.0
_LONGEST_HORIZON = 50.0
_MOST_KEYS = 64
_RESCALE = 1e9


@dataclass(slots=True)
class Traffic:
    """Mix of workloads by share, and mean lengths of runs of one workload; `half_life` is in requests."""

    half_life: float = 50.0
    n: float = 0.0
    last: str = ""
    run: float = 0.0
    _unit: float = 1.0  # weight of the newest request; grows, so that older ones shrink beside it
    _shares: dict[str, float] = field(default_factory=dict)
    _runs: dict[str, list[float]] = field(default_factory=dict)  # weight, mean length

    def note(self, workload: str) -> None:
        """A request of that workload has arrived."""
        keep = 0.5 ** (1.0 / self.half_life)
        self.n = self.n * keep + 1.0
        self._unit /= keep
        self._shares[workload] = self._shares.get(workload, 0.0) + self._unit
        if self._unit > _RESCALE:
            self._shares = {key: value / self._unit for key, value in self._shares.items()}
            self._unit = 1.0
        if len(self._shares) > _MOST_KEYS:
            rarest = min(self._shares, key=lambda k: self._shares[k])
            self._shares.pop(rarest)
            self._runs.pop(rarest, None)
        if workload == self.last:
            self.run += 1.0
            return
        if self.last:
            weight, mean = self._runs.get(self.last, [0.0, 0.0])
            weight = min(weight + 1.0, 10.0)
            self._runs[self.last] = [weight, mean + (self.run - mean) / weight]
        self.last, self.run = workload, 1.0

    def expected_run(self, workload: str) -> float:
        """Requests of this workload still to come in a row, this one included (runs have no memory)."""
        weight, mean = self._runs.get(workload, [0.0, 0.0])
        if workload == self.last and self.run > mean:
            weight, mean = weight + 1.0, (weight * mean + self.run) / (weight + 1.0)
        return max(1.0, (_PRIOR_RUN + weight * mean) / (1.0 + weight))

    @property
    def horizon(self) -> float:
        """Requests over which the present mix may be trusted to last: half as long as it has been seen."""
        return min(0.5 * self.n, _LONGEST_HORIZON)

    @property
    def trust(self) -> float:
        """Share of what comes after the present run that may be counted on."""
        runs = self.runs()
        mean = sum([weight * self.expected_run(key) for key, weight in runs.items()])
        horizon = self.horizon
        return horizon / (horizon + mean) if runs else 0.0

    def runs(self) -> dict[str, float]:
        """Share of each workload in recent runs; sums to 1."""
        per_run = {key: share / self.expected_run(key) for key, share in self._shares.items()}
        whole = sum(per_run.values())
        return {key: value / whole for key, value in per_run.items()} if whole > 0.0 else {}

    def dump(self) -> dict[str, Any]:
        """State as JSON-serialisable data."""
        return {
            "n": self.n,
            "last": self.last,
            "run": self.run,
            "unit": self._unit,
            "shares": dict(self._shares),
            "runs": dict(self._runs),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `dump` gave."""
        self.n, self.last, self.run = amount(state["n"]), str(state["last"]), amount(state["run"])
        self._unit = between(state["unit"], 1.0, MOST)
        self._shares = {str(k): amount(v) for k, v in state["shares"].items()}
        self._runs = {str(k): [amount(n), amount(mean)] for k, (n, mean) in state["runs"].items()}


@dataclass(slots=True)
class Dwell:
    """When a backend last switched lanes, in time and in requests since."""

    at: float
    requests: float = 0.0


def future_costs(
    traffic: Traffic,
    costs: Mapping[str, Sequence[float]],
    loads: Sequence[float],
    before: Sequence[float],
) -> list[float]:
    """One sweep of the equation above over all lanes of a backend.

    Args:
        traffic: learned runs and mix.
        costs: seconds a request of each workload takes, by lane.
        loads: seconds that loading each lane takes.
        before: the values found so far.

    Returns:
        Seconds to come with each lane in memory when a run begins, the least of them being 0.
    """
    lanes = range(len(loads))
    trust = traffic.trust
    found = [0.0] * len(loads)
    for workload, weight in traffic.runs().items():
        row = costs.get(workload)
        if row is None:
            continue
        run = traffic.expected_run(workload)
        staying = [run * row[lane] + trust * before[lane] for lane in lanes]
        switching = min([staying[lane] + loads[lane] for lane in lanes])
        for lane in lanes:
            found[lane] += weight * min(staying[lane], switching)
    least = min(found)
    return [value - least for value in found]
