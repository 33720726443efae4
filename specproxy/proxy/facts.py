"""What the learner may know about a lane before anything was measured, from the model files."""

from __future__ import annotations

from dataclasses import replace

from specproxy.adapters.gguf_facts import ModelFacts
from specproxy.adapters.server_program import uses_draft_file
from specproxy.records import Lane
from specproxy.strategies.cost import LaneFacts

__all__ = ["lane_facts", "pressed"]

STALLED = 0.1  # of the time: then what lanes take is read again and again


def pressed(facts: LaneFacts, lane: Lane, stalls: float) -> LaneFacts:
    """The same with whether the lane's memory is short, by the share of time that went into waiting for it."""
    return replace(facts, memory_pressure=stalls >= STALLED and lane.memory_bytes > 0)


def lane_facts(lane: Lane, target: ModelFacts, draft: ModelFacts | None, slots: int) -> LaneFacts:
    """Facts of the models that a lane decodes with; `draft` counts only where the lane's strategy uses it."""
    used = draft if draft is not None and uses_draft_file(lane.strategy, draft.sidecar_type) else None
    own = used is not None and used.sidecar_type is None  # a sidecar is made for its target
    return LaneFacts(
        experts=target.expert_count if target.is_moe else 0,
        experts_used=target.expert_used_count if target.is_moe else 0,
        expert_share=target.expert_share,
        size_ratio=used.weight_bytes / target.weight_bytes if used is not None else None,
        same_family=used.architecture == target.architecture if used is not None and own else None,
        mtp_layers=target.mtp_layers,
        layers=target.block_count,
        n_max=lane.strategy.n_max,
        slots=slots,
    )
