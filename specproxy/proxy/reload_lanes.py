"""Lanes of one Ollama that displace each other: with drafts and without, at the cost of a load."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from specproxy.adapters.base import ServedModel
from specproxy.adapters.gguf_facts import ModelFacts
from specproxy.adapters.ollama_serve import NUM_PREDICT
from specproxy.records import Control, Dialect, Lane, Strategy

__all__ = ["other_way", "reload_lanes"]

NATIVE = frozenset({Dialect.OLLAMA_CHAT, Dialect.OLLAMA_GENERATE})
MTP = Strategy(("mtp",), 3)


def other_way(model: ServedModel, facts: ModelFacts | None) -> Strategy | None:
    """How Ollama could decode a model besides its own way; None where its option makes no difference."""
    if model.drafting:
        return Strategy()
    has_mtp = facts.has_mtp if facts is not None else model.mtp_layers > 0
    return MTP if has_mtp and not model.draft else None


def reload_lanes(lane: Lane, model: ServedModel, facts: ModelFacts | None, load_s: float) -> list[Lane]:
    """A model's own lane, and one by Ollama's option ``draft_num_predict``, which loads the model anew.

    The second one is for Ollama's own routes: no other has options.
    """
    strategy = other_way(model, facts)
    if strategy is None:
        return [lane]
    fingerprint = hashlib.sha256(f"{lane.fingerprint}\0{strategy}".encode()).hexdigest()[:16]
    own = replace(lane, control=Control.RELOAD, load_s=load_s)
    other = replace(
        own,
        id=f"{lane.id}-{strategy.name}",
        strategy=strategy,
        fingerprint=fingerprint,
        overrides=((NUM_PREDICT, strategy.n_max or 0),),
        dialects=NATIVE,
    )
    return [own, other]
