"""A small simulated machine for tests of policies: lanes with known mean ratios and log-normal noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from specproxy.records import (
    Control,
    Decision,
    Health,
    Lane,
    LaneStatus,
    Observation,
    Outcome,
    Situation,
    Strategy,
    TempBucket,
    TimingSource,
    Workload,
)
from specproxy.strategies.base import Policy

KINDS: tuple[tuple[str, TempBucket], ...] = (
    ("json_schema", TempBucket.GREEDY),
    ("code", TempBucket.COOL),
    ("code_edit", TempBucket.GREEDY),
    ("translation", TempBucket.COOL),
    ("prose", TempBucket.WARM),
    ("creative", TempBucket.HOT),
)

MIXED: Mapping[str, tuple[float, ...]] = {
    "ngram": (1.0, 1.0, 0.36, 0.85, 1.03, 1.0),
    "draft": (0.57, 0.66, 0.88, 1.0, 1.08, 1.5),
    "mtp": (0.53, 0.64, 0.85, 0.95, 1.15, 1.6),
}
LOSING: Mapping[str, tuple[float, ...]] = {
    "ngram": (1.10, 1.12, 1.05, 1.10, 1.10, 1.10),
    "draft": (1.30, 1.40, 1.50, 1.50, 1.70, 1.80),
    "mtp": (1.20, 1.30, 1.40, 1.30, 1.60, 1.90),
}
NOISE: Mapping[str, float] = {"plain": 0.04, "ngram": 0.2, "draft": 0.12, "mtp": 0.12}


def lane(strategy: str, fingerprint: str | None = None) -> Lane:
    """An instance lane named after its strategy."""
    return Lane(
        strategy,
        "b",
        "t",
        Strategy.parse(strategy),
        Control.INSTANCE,
        fingerprint or f"fp-{strategy}",
        load_s=3.0,
    )


def ready(*strategies: str) -> tuple[LaneStatus, ...]:
    """Ready lanes of those strategies."""
    return tuple(LaneStatus(lane(s), Health.READY) for s in strategies)


def observe(
    decision: Decision | Lane,
    workload: Workload,
    *,
    tpt: float = 0.02,
    tokens: int = 150,
    at: float = 0.0,
    request_id: str = "",
    **more: object,
) -> Observation:
    """A complete observation with that time per token."""
    chosen = decision.lane if isinstance(decision, Decision) else decision
    return Observation(
        request_id=request_id,
        at=at,
        workload=workload,
        lane=chosen.id,
        strategy=chosen.strategy.name,
        fingerprint=chosen.fingerprint,
        target=chosen.target,
        outcome=Outcome.COMPLETE,
        source=TimingSource.SERVER,
        output_tokens=tokens,
        decode_s=tpt * (tokens - 1),
        **more,  # type: ignore[arg-type]  # of any field
    )


@dataclass
class Run:
    """Expected seconds of every request: as chosen, on the best lane, and on plain."""

    chosen: list[float] = field(default_factory=list)
    oracle: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def gap(self, start: int = 0, end: int | None = None) -> float:
        """Time above the oracle's, relative."""
        return sum(self.chosen[start:end]) / sum(self.oracle[start:end]) - 1.0

    def loss(self, start: int = 0, end: int | None = None) -> float:
        """Time above plain's, relative."""
        return sum(self.chosen[start:end]) / sum(self.plain[start:end]) - 1.0


Ratios = Callable[[int], Mapping[str, tuple[float, ...]]]


def simulate(policy: Policy, ratios: Ratios, requests: int, seed: int, base: float = 0.02) -> Run:
    """Play a policy against the world, one request at a time; `ratios` gives the truth at request t."""
    rng, own = np.random.default_rng(seed), np.random.default_rng(seed + 1_000_003)
    run = Run()
    lanes = ready("plain", *ratios(0))
    for t in range(requests):
        k = int(rng.integers(len(KINDS)))
        workload = Workload(*KINDS[k])
        tokens = int(min(1000, max(8, rng.lognormal(4.8, 0.7))))
        prompt = int(rng.lognormal(5.5, 0.8))
        noise = {s.lane.id: float(rng.standard_normal()) for s in lanes}
        situation = Situation(workload, lanes, at=5.0 * t, prompt_tokens=prompt, request_id=str(t))
        decision = policy.choose(situation, own)
        means = {"plain": base, **{name: base * row[k] for name, row in ratios(t).items()}}
        name = decision.lane.id
        sd = NOISE[name]
        tpt = means[name] * math.exp(sd * noise[name] - 0.5 * sd * sd)
        seen = observe(decision, workload, tpt=tpt, tokens=tokens, at=5.0 * t + tpt * tokens, request_id=str(t))
        policy.learn_one(seen)
        run.chosen.append(tokens * means[name])
        run.oracle.append(tokens * min(means.values()))
        run.plain.append(tokens * means["plain"])
        run.decisions.append(decision)
    return run
