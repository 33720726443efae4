"""Noticing that a drafter no longer fits its target, or that a lane has become slower or faster.

Two signals are watched for every lane and kind of text: acceptance, and the logarithm of time per token
relative to plain. Each runs through a two-sided self-starting CUSUM (Page 1954; Hawkins 1987, "Self-starting
CUSUM charts for location and scale"): an observation is standardised by the mean and spread of those before
it, so nothing has to be known beforehand, and deviations beyond an allowance are summed until they pass a
threshold. The standardised values of all kinds of a lane also run through a CUSUM of the lane's own, since a
new draft or target shows in every kind at once.

Thresholds are set by simulation (tests/strategies/test_drift.py): with every request feeding both signals,
false alarms stay below 0.05 in 2000 requests, heavy tails and slow swings of the machine included, and a shift
of 35% is noticed within about six requests of the lane.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from specproxy.strategies.bounds import MOST, amount, between, logarithm, whole

__all__ = ["Cusum", "DriftEvent", "DriftMonitor", "Signal"]

Signal = Literal["acceptance", "time"]

_STATE = "specproxy-drift"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class DriftEvent:
    """A change that was noticed.

    Attributes:
        at: when it was noticed; `since` is when it seems to have begun.
        arm: the lane's statistics it concerns, as the caller names them.
        label: what to call the lane in a sentence.
        kind: kind of text at which it shows most.
        signal: what changed.
        before, after: means; acceptance from 0 to 1, time per token relative to plain.
        n: observations since it began, `steady` those before.
        whole_lane: whether it was noticed over all kinds together.
    """

    at: float
    since: float
    arm: str
    label: str
    kind: str
    signal: Signal
    before: float
    after: float
    n: int
    steady: int
    whole_lane: bool

    @property
    def worse(self) -> bool:
        """Whether the lane got worse: less accepted, or more time."""
        return (self.after < self.before) == (self.signal == "acceptance")

    @property
    def sentence(self) -> str:
        """What happened, in one sentence."""
        verb = "fell" if self.after < self.before else "rose"
        span = f"within {self.n} requests, after {self.steady} steady ones"
        if self.signal == "acceptance":
            change = f"{verb} from {self.before:.2f} to {self.after:.2f}"
            return f"acceptance of {self.label} on {self.kind} {change} {span}"
        change = f"{verb} from {self.before:.2f} to {self.after:.2f} of plain's"
        return f"time per token of {self.label} on {self.kind} {change} {span}"


@dataclass(frozen=True, slots=True)
class _Chart:
    """How one signal is standardised. An observation over n tokens has variance ``sd² · (1 + tokens/n)``."""

    prior_sd: float
    least_sd: float  # smaller spreads count as this: a tiny change is none, however sure
    tokens: float


_CHARTS: dict[Signal, _Chart] = {
    "acceptance": _Chart(prior_sd=0.12, least_sd=0.05, tokens=20.0),
    "time": _Chart(prior_sd=0.15, least_sd=0.06, tokens=40.0),
}
_PRIOR_N = 5.0  # observations' worth of belief in the prior spread
_BURN_IN = 10  # observations before deviations are summed
_MEMORY = 150.0  # observations that the running mean and spread reach back, so that slow change is followed
_LEAST_WEIGHT = 0.01  # of a value, see `DriftMonitor.learn_one`
_CLIP = 3.0  # one wild request counts as three standard deviations at most
_SLACK = 0.75
_THRESHOLD = 10.0


@dataclass(slots=True)
class Cusum:
    """Two-sided CUSUM over values that are standard normal while nothing changes.

    `up` and `down` are the two sums; `n_up` and `n_down` count values since the sum was last zero, which is
    the usual estimate of when a change began.
    """

    slack: float = _SLACK
    threshold: float = _THRESHOLD
    up: float = 0.0
    down: float = 0.0
    n_up: int = 0
    n_down: int = 0

    def update(self, z: float) -> int:
        """Take in one value; +1 or -1 where the upper or lower sum passes the threshold, else 0."""
        z = max(-_CLIP, min(z, _CLIP))
        self.up = max(0.0, self.up + z - self.slack)
        self.down = max(0.0, self.down - z - self.slack)
        self.n_up = self.n_up + 1 if self.up else 0
        self.n_down = self.n_down + 1 if self.down else 0
        if self.up > self.threshold:
            return 1
        return -1 if self.down > self.threshold else 0

    def reset(self) -> None:
        """Start summing anew."""
        self.up = self.down = 0.0
        self.n_up = self.n_down = 0


@dataclass(slots=True)
class _Run:
    """Weighted mean of a signal, and the moment it began."""

    since: float = 0.0
    n: int = 0
    weight: float = 0.0
    mean: float = 0.0

    def add(self, x: float, weight: float, at: float) -> None:
        if not self.n:
            self.since = at
        self.n += 1
        self.weight += weight
        self.mean += (x - self.mean) * weight / self.weight


@dataclass(slots=True)
class _Series:
    """One signal of one lane on one kind: running mean and spread, its CUSUM, and runs since the last zero."""

    n: int = 0
    weight: float = 0.0
    mean: float = 0.0
    spread: float = 0.0  # Σ w · residual²
    freedom: float = 0.0
    cusum: Cusum = field(default_factory=Cusum)
    before_up: float = 0.0  # the mean when the upper sum was last zero
    before_down: float = 0.0
    run_up: _Run = field(default_factory=_Run)
    run_down: _Run = field(default_factory=_Run)

    def standardise(self, x: float, weight: float, chart: _Chart) -> float | None:
        """How far `x` is from those before, in normal standard deviations; None during burn-in."""
        if self.n < _BURN_IN:
            return None
        freedom = self.freedom + _PRIOR_N
        variance = (self.spread + _PRIOR_N * chart.prior_sd**2) / freedom
        sd = math.sqrt(max(variance, chart.least_sd**2) * (1.0 / weight + 1.0 / self.weight))
        return normal_score((x - self.mean) / sd, freedom)

    def learn(self, x: float, weight: float) -> None:
        """Take the value into running mean and spread (West 1979, with weights and forgetting)."""
        keep = 1.0 - 1.0 / _MEMORY if self.n >= _MEMORY else 1.0
        self.n += 1
        self.weight = self.weight * keep + weight
        step = x - self.mean
        self.mean += step * weight / self.weight
        self.spread = self.spread * keep + weight * step * (x - self.mean)
        self.freedom = self.freedom * keep + (1.0 if self.n > 1 else 0.0)

    def watch(self, z: float, x: float, weight: float, at: float) -> int:
        """Sum a standardised value; +1 or -1 on an alarm."""
        found = self.cusum.update(z)
        if self.cusum.n_up <= 1:
            self.before_up, self.run_up = self.mean, _Run()
        if self.cusum.n_down <= 1:
            self.before_down, self.run_down = self.mean, _Run()
        if self.cusum.n_up:
            self.run_up.add(x, weight, at)
        if self.cusum.n_down:
            self.run_down.add(x, weight, at)
        return found

    def start_over(self, run: _Run) -> None:
        """Forget what was before a change; what came since is the new beginning."""
        self.n, self.weight, self.mean = run.n, run.weight, run.mean
        self.spread = self.freedom = 0.0
        self.cusum.reset()
        self.run_up, self.run_down = _Run(), _Run()


class DriftMonitor:
    """Watches acceptance and time of every lane, and tells when one of them changed for good.

    Pure: time comes in with the values. Callers pass only values that a lane's speed can be judged by: complete
    requests, no load within, no repeated prompt for n-gram drafters.
    """

    def __init__(self) -> None:
        self._series: dict[tuple[str, Signal, str], _Series] = {}
        self._whole: dict[tuple[str, Signal], Cusum] = {}

    def learn_one(
        self, arm: str, kind: str, signal: Signal, value: float, tokens: float, at: float, label: str = ""
    ) -> DriftEvent | None:
        """Take in one request's value; returns the change that it gives away, if any.

        After an event the lane's statistics start over, for all kinds if it was noticed over all of them.

        Args:
            arm: names the lane's statistics, its fingerprint included.
            kind: kind of text.
            signal: acceptance, or ``time`` for ln(time per token / plain's).
            value: the value.
            tokens: what it was measured over: drafted or output tokens, at least 1.
            at: when the request ended.
            label: what to call the lane in the event's sentence; the arm's name if empty.
        """
        chart = _CHARTS[signal]
        series = self._series.setdefault((arm, signal, kind), _Series())
        weight = 1.0 / (1.0 + chart.tokens / max(tokens, 1.0))
        z = series.standardise(value, weight, chart)
        if z is None:
            series.learn(value, weight)
            return None
        found = series.watch(z, value, weight, at)
        series.learn(value, weight)
        whole = self._whole.setdefault((arm, signal), Cusum())
        found_whole = whole.update(z)
        if not found and not found_whole:
            return None
        event = self._event(arm, signal, kind, found or found_whole, at, label or arm, bool(found_whole))
        self._start_over(event)
        return event

    def forget(self, arm: str) -> None:
        """Drop all that is known about an arm, after its lane was replaced."""
        self._series = {key: series for key, series in self._series.items() if key[0] != arm}
        self._whole = {key: cusum for key, cusum in self._whole.items() if key[0] != arm}

    def dump(self) -> dict[str, Any]:
        """All state as JSON-serialisable data."""
        return {
            "format": _STATE,
            "version": _VERSION,
            "series": [[*key, _series_state(series)] for key, series in self._series.items()],
            "whole": [[*key, _cusum_state(cusum)] for key, cusum in self._whole.items()],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `dump` gave.

        Raises:
            ValueError: the data is not a drift monitor's, is damaged, or is of a newer format.
        """
        if state.get("format") != _STATE:
            raise ValueError("not a drift monitor's state")
        if int(state.get("version", 0)) > _VERSION:
            raise ValueError(f"drift state has version {state['version']}, newer than {_VERSION}")
        try:
            series = {(str(a), _signal(s), str(k)): _series_from(v) for a, s, k, v in state["series"]}
            whole = {(str(a), _signal(s)): _cusum_from(v) for a, s, v in state["whole"]}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"damaged drift state: {error!r}") from error
        self._series, self._whole = series, whole

    def _event(
        self, arm: str, signal: Signal, kind: str, direction: int, at: float, label: str, whole: bool
    ) -> DriftEvent:
        """Describe an alarm by the kind on which the change is plainest."""
        if whole:
            kinds = [key[2] for key in self._series if key[:2] == (arm, signal)]
            kind = max(kinds, key=lambda k: _sum_of(self._series[arm, signal, k], direction))
        series = self._series[arm, signal, kind]
        run = series.run_up if direction > 0 else series.run_down
        before = series.before_up if direction > 0 else series.before_down
        after = run.mean if run.n else series.mean
        if signal == "time":
            before, after = math.exp(before), math.exp(after)
        return DriftEvent(
            at=at,
            since=run.since if run.n else at,
            arm=arm,
            label=label,
            kind=kind,
            signal=signal,
            before=before,
            after=after,
            n=run.n,
            steady=max(0, series.n - run.n),
            whole_lane=whole,
        )

    def _start_over(self, event: DriftEvent) -> None:
        """Both signals start over: a change shows in both, and one event a change is enough."""
        for (arm, _, kind), series in self._series.items():
            if arm == event.arm and (event.whole_lane or kind == event.kind):
                up = series.cusum.up > series.cusum.down
                series.start_over(series.run_up if up else series.run_down)
        for (arm, _), cusum in self._whole.items():
            if arm == event.arm:
                cusum.reset()


def normal_score(t: float, freedom: float) -> float:
    """A value of Student's t as the normal value of the same probability (Wallace 1959), error below 0.02."""
    score = math.sqrt(freedom * math.log1p(t * t / freedom)) * (8.0 * freedom + 1.0) / (8.0 * freedom + 3.0)
    return math.copysign(score, t)


def _sum_of(series: _Series, direction: int) -> float:
    return series.cusum.up if direction > 0 else series.cusum.down


def _signal(text: str) -> Signal:
    if text == "acceptance":
        return "acceptance"
    if text == "time":
        return "time"
    raise ValueError(f"no such signal: {text}")


def _cusum_state(cusum: Cusum) -> list[float]:
    return [cusum.up, cusum.down, cusum.n_up, cusum.n_down]


def _cusum_from(state: list[Any]) -> Cusum:
    up, down, n_up, n_down = state
    most = _THRESHOLD + _CLIP
    return Cusum(
        up=between(up, 0.0, most), down=between(down, 0.0, most), n_up=whole(n_up), n_down=whole(n_down)
    )


def _run_state(run: _Run) -> list[float]:
    return [run.since, run.n, run.weight, run.mean]


def _run_from(state: list[Any]) -> _Run:
    since, n, weight, mean = state
    n = whole(n)
    weight = between(weight, _LEAST_WEIGHT if n else 0.0, MOST)
    return _Run(between(since, -MOST, MOST), n, weight, logarithm(mean))


def _series_state(series: _Series) -> dict[str, Any]:
    return {
        "stats": [series.n, series.weight, series.mean, series.spread, series.freedom],
        "before": [series.before_up, series.before_down],
        "cusum": _cusum_state(series.cusum),
        "runs": [_run_state(series.run_up), _run_state(series.run_down)],
    }


def _series_from(state: dict[str, Any]) -> _Series:
    n, weight, mean, spread, freedom = state["stats"]
    up, down = state["before"]
    run_up, run_down = state["runs"]
    begun = _run_from([0.0, n, weight, mean])
    return _Series(
        n=begun.n,
        weight=begun.weight,
        mean=begun.mean,
        spread=amount(spread),
        freedom=amount(freedom),
        cusum=_cusum_from(state["cusum"]),
        before_up=logarithm(up),
        before_down=logarithm(down),
        run_up=_run_from(run_up),
        run_down=_run_from(run_down),
    )
