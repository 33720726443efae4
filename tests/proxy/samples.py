"""Records for the tests of board, admin and metrics."""

from __future__ import annotations

from typing import Any

from specproxy.records import (
    Candidate,
    Control,
    Decision,
    Health,
    Lane,
    LaneStatus,
    Observation,
    Outcome,
    Strategy,
    TempBucket,
    Workload,
)

PLAIN = Lane("plain", "managed", "m.gguf", Strategy(), Control.INSTANCE, "fp-plain")
NGRAM = Lane(
    "ngram", "managed", "m.gguf", Strategy(("ngram",), 8), Control.INSTANCE, "fp-ngram", memory_bytes=2**30
)
CODE = Workload("code", TempBucket.GREEDY)


def lane_status(lane: Lane, **changes: Any) -> LaneStatus:
    return LaneStatus(**{"lane": lane, "health": Health.READY} | changes)


def observation(lane: Lane = PLAIN, per_token: float = 0.02, **changes: Any) -> Observation:
    """A complete request of 101 tokens at this many seconds a token."""
    values: dict[str, Any] = {
        "request_id": "r1",
        "at": 1000.0,
        "workload": CODE,
        "lane": lane.id,
        "strategy": lane.strategy.name,
        "fingerprint": lane.fingerprint,
        "target": lane.target,
        "outcome": Outcome.COMPLETE,
        "rule": "exploit",
        "status": 200,
        "ttft_s": 0.03,
        "total_s": 100 * per_token + 0.03,
        "prompt_tokens": 50,
        "output_tokens": 101,
        "prefill_s": 0.03,
        "decode_s": 100 * per_token,
    }
    return Observation(**values | changes)


def decision(lane: Lane = NGRAM) -> Decision:
    candidate = Candidate(lane.id, lane.strategy.name, 0.7, 0.6, 0.8, 5.0, 1.2)
    return Decision(lane, CODE, "exploit", "ngram is expected to be fastest", (candidate,), 0.9)
