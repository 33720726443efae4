"""All that is known about one target: its level, its arms, lengths, prefill and ledgers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specproxy.records import Observation, Strategy, TempBucket, Workload
from specproxy.strategies.cost import LaneFacts, log_prior
from specproxy.strategies.gate import Ledger
from specproxy.strategies.lengths import Lengths
from specproxy.strategies.level import Level, features
from specproxy.strategies.posterior import Arm, Belief, Scales, student_weight
from specproxy.strategies.prefill import Prefill

__all__ = ["TargetModel", "arm_key"]

_MOST_ARMS = 64
PLAIN_SCALES = Scales(arm=1e-4, kind=0.05, cell=0.02, between=0.05, token=0.2)
_PLAIN_OTHER = Scales(arm=0.3, kind=0.05, cell=0.02, between=0.05, token=0.2)


def arm_key(fingerprint: str, strategy: str) -> str:
    """Statistics belong to a fingerprint and a strategy, since lanes of one engine may share the former."""
    return f"{fingerprint}/{strategy}"


@dataclass(slots=True)
class TargetModel:
    """Learned state of one target. `facts` maps lane ids to what is known about them beforehand."""

    scales: Scales
    half_life: float
    facts: Mapping[str, LaneFacts]
    level: Level = field(default_factory=Level)
    arms: dict[str, Arm] = field(default_factory=dict)
    lengths: Lengths = field(default_factory=Lengths)
    prefill: Prefill = field(default_factory=Prefill)
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    plain: str = ""  # key of the plain arm used last
    tested: dict[str, float] = field(default_factory=dict)  # workload|arm → plain seconds at the last test
    _priors: dict[tuple[str, str, str, str], float] = field(default_factory=dict)

    # --- reading ---------------------------------------------------------------------------------

    def prior(self, lane: str, strategy: str, workload: Workload) -> float:
        """Prior mean of the log ratio of a lane on a workload, from the cost model."""
        key = (lane, strategy, workload.kind, workload.temperature.value)
        found = self._priors.get(key)
        if found is None:
            facts = self.facts.get(lane)
            found = log_prior(Strategy.parse(strategy), facts, workload.kind, workload.temperature)
            self._priors[key] = found
        return found

    def belief(self, key: str, lane: str, strategy: str, workload: Workload) -> Belief:
        """What is believed about an arm on a workload."""
        prior = self.prior(lane, strategy, workload)
        return self.arm(key, strategy).belief((workload.kind, workload.temperature.value), prior)

    def plain_belief(self, workload: Workload) -> Belief:
        """What is believed about plain on a workload; the level itself, where plain was never seen."""
        if self.plain not in self.arms:
            return Belief(0.0, 0.0, 0.0)
        return self.arms[self.plain].belief((workload.kind, workload.temperature.value), 0.0)

    def ledger(self, workload: Workload) -> Ledger:
        """The loss account of a workload, opened on first use."""
        return self.ledgers.setdefault(workload.key, Ledger())

    def arm(self, key: str, strategy: str) -> Arm:
        """The arm of that key, created on first use.

        The first plain arm of a target is its reference: its effect is zero by definition. A further one (a new
        build, another device) is an arm like others, and makes the level less certain.
        """
        found = self.arms.get(key)
        if found is None:
            scales = self.scales
            if strategy == "plain":
                first = not any(k.endswith("/plain") for k in self.arms)
                scales = PLAIN_SCALES if first else _PLAIN_OTHER
            found = self.arms[key] = Arm(scales, self.half_life)
            self._prune(key)
        return found

    # --- learning --------------------------------------------------------------------------------

    def learn_speed(self, seen: Observation) -> None:
        """Split one request's log time per token into level, effect and noise, and learn each."""
        tpt = seen.time_per_token
        assert tpt is not None
        key = arm_key(seen.fingerprint, seen.strategy)
        if seen.strategy == "plain":
            self.note_plain(key)
        cell = (seen.workload.kind, seen.workload.temperature.value)
        arm = self.arm(key, seen.strategy)
        prior = self.prior(seen.lane, seen.strategy, seen.workload)
        belief = arm.belief(cell, prior)
        self.level.advance(seen.at)
        x = self.features(seen)
        level, level_var = self.level.predict(x)
        value = math.log(tpt)
        nominal = arm.scales.variance(seen.output_tokens, seen.weight)
        noise = nominal * arm.noise(cell[0])
        score = (value - level - belief.mean) / math.sqrt(noise + level_var + belief.variance)
        self.level.learn(x, value - belief.mean, (noise + belief.variance) / student_weight(score))
        arm.learn(cell, prior, value - level, nominal + level_var, seen.output_tokens)
        arm.last_at = max(arm.last_at, seen.at)

    def note_plain(self, key: str) -> None:
        """Remember the plain arm in use; a new one after an old one makes the level uncertain again."""
        if key != self.plain:
            if self.plain and key not in self.arms:
                self.level.widen(_NEW_PLAIN_VARIANCE)
            self.plain = key

    def learn_ledger(self, seen: Observation, credit: float) -> None:
        """Book what a request lost against plain; requests without times are not booked."""
        if seen.decode_s is None or seen.output_tokens < 2:
            return
        plain_s = self.plain_decode_s(seen)
        loss = 0.0 if seen.strategy == "plain" else seen.decode_s - plain_s
        ledger = self.ledger(seen.workload)
        ledger.finish(loss, plain_s if loss else seen.decode_s, credit)
        self.tested[f"{seen.workload.key}|{arm_key(seen.fingerprint, seen.strategy)}"] = ledger.plain_s

    def plain_decode_s(self, seen: Observation) -> float:
        """Seconds that plain would have taken for the tokens of a request."""
        level, _ = self.level.predict(self.features(seen))
        belief = self.plain_belief(seen.workload)
        return (seen.output_tokens - 1) * math.exp(level + belief.mean + belief.excess)

    @staticmethod
    def features(seen: Observation) -> tuple[float, float, float]:
        """Regressors of the level for a finished request."""
        return features(seen.prompt_tokens + 0.5 * seen.output_tokens, seen.concurrency)

    # --- state -----------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """State as JSON-serialisable data."""
        return {
            "level": self.level.dump(),
            "arms": {key: arm.dump() for key, arm in self.arms.items()},
            "lengths": self.lengths.dump(),
            "prefill": self.prefill.dump(),
            "ledgers": {key: ledger.dump() for key, ledger in self.ledgers.items()},
            "plain": self.plain,
            "tested": dict(self.tested),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `dump` gave."""
        self.level.restore(state["level"])
        self.arms = {}
        for key, arm in state["arms"].items():
            self.arm(key, key.rpartition("/")[2]).restore(arm)
        self.lengths.restore(state["lengths"])
        self.prefill.restore(state["prefill"])
        self.ledgers = {key: Ledger.restored(entry) for key, entry in state["ledgers"].items()}
        self.plain = str(state["plain"])
        self.tested = {str(k): float(v) for k, v in state["tested"].items()}

    def _prune(self, keep: str) -> None:
        """Forget the arms that were used least recently (old builds, old drafts)."""
        while len(self.arms) > _MOST_ARMS:
            oldest = min(
                (k for k in self.arms if k not in (keep, self.plain)), key=lambda k: self.arms[k].last_at
            )
            del self.arms[oldest]


_NEW_PLAIN_VARIANCE = 0.25


def cell_of(workload: Workload) -> tuple[str, str]:
    """Key of the statistics cell of a workload."""
    temperature: TempBucket = workload.temperature
    return workload.kind, temperature.value
