"""When a reload pays: how long this kind of traffic goes on, and what the traffic as a whole would gain.

A lane under `reload` control replaces another in memory, at the cost of a load. What it saves on this request
is seldom enough; it has to save over the run of like requests that this one starts or continues, and must not
lose more on what comes after. Run lengths and the mix of workloads are learned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Dwell", "Traffic", "switch_gain"]

_PRIOR_RUN = 2.0
_LONGEST_HORIZON = 50.0
_MOST_KEYS = 64


@dataclass(slots=True)
class Traffic:
    """Mix of workloads by share, and mean lengths of runs of one workload; `half_life` is in requests."""

    half_life: float = 50.0
    n: float = 0.0
    last: str = ""
    run: float = 0.0
    _shares: dict[str, float] = field(default_factory=dict)
    _runs: dict[str, list[float]] = field(default_factory=dict)  # weight, mean length

    def note(self, workload: str) -> None:
        """A request of that workload has arrived."""
        keep = 0.5 ** (1.0 / self.half_life)
        self.n = self.n * keep + 1.0
        for key in self._shares:
            self._shares[key] *= keep
        self._shares[workload] = self._shares.get(workload, 0.0) + 1.0
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

    def shares(self) -> dict[str, float]:
        """Share of each workload in recent traffic; sums to 1."""
        whole = sum(self._shares.values())
        return {key: value / whole for key, value in self._shares.items()} if whole > 0.0 else {}

    def dump(self) -> dict[str, Any]:
        """State as JSON-serialisable data."""
        return {
            "n": self.n,
            "last": self.last,
            "run": self.run,
            "shares": dict(self._shares),
            "runs": dict(self._runs),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `dump` gave."""
        self.n, self.last, self.run = float(state["n"]), str(state["last"]), float(state["run"])
        self._shares = {str(k): float(v) for k, v in state["shares"].items()}
        self._runs = {str(k): [float(v) for v in entry] for k, entry in state["runs"].items()}


@dataclass(slots=True)
class Dwell:
    """When a backend last switched lanes, in time and in requests since."""

    at: float
    requests: float = 0.0


def switch_gain(
    traffic: Traffic, workload: str, saving: Callable[[str], float], *, load_back_s: float, dwell: float
) -> float:
    """Seconds saved by another lane being resident, the load itself not counted.

    Args:
        traffic: learned runs and mix.
        workload: key of the request at hand.
        saving: seconds saved per request of a workload; negative if it loses.
        load_back_s: what returning would cost; a loss on later traffic is no greater than that.
        dwell: requests for which the new lane has to stay.
    """
    run = traffic.expected_run(workload)
    later = max(traffic.horizon, dwell) - run
    gain = run * saving(workload)
    if later > 0.0:
        mixed = sum(share * saving(key) for key, share in traffic.shares().items())
        gain += max(later * mixed, -load_back_s)
    return gain
