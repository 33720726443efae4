"""Facts of model files that are not there."""

from __future__ import annotations

from pathlib import Path

from specproxy.adapters.gguf_facts import ModelFacts

__all__ = ["facts"]

GIB = 1 << 30


def facts(**given: object) -> ModelFacts:
    """A model of 4 GiB with 32 blocks, 1 GiB of which would be repacked."""
    base: dict[str, object] = {
        "path": Path("m.gguf"), "digest": "m", "architecture": "llama", "name": "m", "size_bytes": 4 * GIB,
        "weight_bytes": 4 * GIB, "parameters": 10**9, "quantisation": "Q8_0",
        "bytes_by_type": (("F16", 3 * GIB), ("Q4_K", GIB)), "context_length": 32768, "block_count": 32,
        "embd": 4096, "heads": 32, "kv_heads": (8,), "vocab_size": 128_000, "tokenizer": "gpt2",
        "tokenizer_pre": "", "bos": 1, "eos": 2, "add_bos": True, "add_eos": False, "expert_count": 0,
        "expert_used_count": 0, "mtp_layers": 0, "mtp_bytes": 0, "standalone": True, "recurrent": False,
        "kv_bytes_per_token": 131072, "state_bytes": 0, "chat_template": None,
    }  # fmt: skip
    return ModelFacts(**(base | given))  # type: ignore[arg-type]  # fields of ModelFacts
