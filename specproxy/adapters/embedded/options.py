"""What the engine is started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from specproxy.adapters.embedded.llama import ModelParams

__all__ = ["EngineOptions"]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Files, sizes and limits of one engine.

    `context` is in tokens a sequence; 0 is the model's own, at most 8192. `threads` 0 is the number of physical
    cores. `batch` is the most tokens in one decode, and so the longest wait of a cancelled request; while other
    sequences stream, a prompt gets `prefill_share` tokens a step. `draft_max`, `mtp_max` and `ngram_max` are
    the longest drafts where a request's strategy does not say. `cached` is how many finished sequences are kept
    for their prefix, beside the running ones. `idle_unload_s` frees the model after so many seconds without a
    request. `state` is a directory for what was measured (None: it is not kept), `profile_s` is how long
    measuring may take when a model is loaded for the first time. `weights` applies to target and draft alike,
    `type_k` and `type_v` are ggml type names (``f16``, ``q8_0``).
    """

    model: Path
    draft: Path | None = None
    name: str = ""
    mtp: bool = True
    context: int = 0
    parallel: int = 4
    cached: int = 4
    batch: int = 512
    prefill_share: int = 64
    threads: int = 0
    threads_batch: int = 0
    draft_max: int = 3
    mtp_max: int = 3
    ngram_max: int = 8
    ngram_match: int = 3
    idle_unload_s: float | None = None
    state: Path | None = None
    profile_s: float = 0.0
    weights: ModelParams = field(default_factory=ModelParams)
    flash_attention: bool | None = None
    type_k: str | None = None
    type_v: str | None = None
    offload_kqv: bool = True
