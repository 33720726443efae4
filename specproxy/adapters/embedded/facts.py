"""What is known about a loaded model: its card, and the strategies that can run on it."""

from __future__ import annotations

from collections.abc import Mapping

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from specproxy.adapters.embedded.options import EngineOptions
from specproxy.adapters.embedded.types import ModelCard
from specproxy.adapters.embedded.vocabulary import Vocabulary
from specproxy.adapters.gguf_facts import MTP_ARCHITECTURES, ModelFacts
from specproxy.errors import ConfigError, ModelFileError
from specproxy.records import Strategy

__all__ = ["MTP_CHAINS", "MTP_GRAPHS", "check_memory", "memory_needs", "model_card", "strategies"]

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
MTP_CHAINS = frozenset({"hy_v3", "mimo2", "step35"})
"""Architectures whose MTP graph runs the head that a context chooses (llama-cpp-python 0.3.36).

The others' graphs assert that there is one head only, which ends the process.
"""

MTP_GRAPHS = MTP_ARCHITECTURES - {"glm5-next", "qwen4exp"}
"""Architectures that this binding's llama.cpp has a graph for (llama-cpp-python 0.3.36).

For others it would run the whole model's graph on a cache that lacks the model's layers.
"""

MIB = 1 << 20
F16 = 2  # bytes of an element, which is what `ModelFacts` counts caches in


def strategies(limits: Mapping[str, int]) -> tuple[Strategy, ...]:
    """Plain, each drafter alone, the n-gram drafter before each other, and ``auto``.

    Args:
        limits: longest draft of each drafter that can run.
    """
    names = [(name,) for name in limits]
    pairs = [("ngram", name) for name in limits if "ngram" in limits and name != "ngram"]
    auto = [("auto",)] if limits else []
    return (Strategy(), *(Strategy(drafters) for drafters in [*names, *pairs, *auto]))


def memory_needs(
    target: ModelFacts,
    draft: ModelFacts | None,
    head: ModelFacts | None,
    options: EngineOptions,
    *,
    context: int,
    states: int,
) -> dict[str, int]:
    """Bytes that weights, caches and recurrent states take, draft and MTP head by themselves.

    Args:
        target: facts about the target.
        draft: facts about the draft model, if there is one.
        head: facts about the file whose prediction head runs, if one does: the target's own, or another one.
        options: sizes and cache types.
        context: tokens for each sequence.
        states: recurrent states kept for rollback, beside the current one.
    """
    cells = context * options.parallel
    wide = (_element_bytes(options.type_k) + _element_bytes(options.type_v)) / (2 * F16)

    def cache(facts: ModelFacts) -> int:
        return int(facts.kv_bytes_per_token * cells * wide)

    own = head is not None and head.path == target.path
    needs = {
        "weights": target.weight_bytes - (0 if own else target.mtp_bytes),
        "kv": cache(target),
        "states": target.state_bytes * options.parallel * (1 + states),
    }
    if head is not None:
        # every head of a chain has a context, whose cache has the layers of all heads
        rows = head.mtp_layers**2 * cache(head) // max(1, head.block_count)
        needs["mtp"] = rows + (0 if own else head.weight_bytes)
    if draft is not None:
        needs["draft"] = draft.weight_bytes + cache(draft)
    return needs


def check_memory(needs: Mapping[str, int], available: int, context: int, parallel: int) -> None:
    """Refuse a load that would only end with the process being killed.

    Mapped weights may be dropped and read again, so they are left out.

    Raises:
        ModelFileError: the caches need more than is available.
    """
    caches = sum(size for name, size in needs.items() if name != "weights")
    if caches > available:
        raise ModelFileError(
            f"a context of {context} tokens for {parallel} sequences needs {caches // MIB} MiB, "
            f"and {available // MIB} MiB are free",
            hint="a smaller context or fewer parallel sequences need less memory",
        )


def _element_bytes(cache_type: str | None) -> float:
    """Bytes of one element of a KV cache.

    Raises:
        ConfigError: a cache cannot be of this type.
    """
    if cache_type is None:
        return F16
    if cache_type.lower() not in CACHE_TYPES:
        raise ConfigError(f"a KV cache can be {', '.join(CACHE_TYPES)}, not {cache_type}")
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[cache_type.upper()]]
    return float(size / block)


def model_card(
    options: EngineOptions,
    facts: ModelFacts,
    vocabulary: Vocabulary,
    *,
    context: int,
    limits: Mapping[str, int],
    refused: Mapping[str, str],
    memory: Mapping[str, int],
) -> ModelCard:
    """The card of a model with `context` tokens for each sequence."""
    return ModelCard(
        name=options.name or options.model.stem,
        path=str(options.model),
        context=context,
        train_context=facts.context_length or 0,
        vocab=vocabulary.size,
        embedding=facts.embd,
        parameters=facts.parameters,
        size_bytes=facts.weight_bytes,
        architecture=facts.architecture,
        quantisation=facts.quantisation,
        chat_template=facts.chat_template,
        bos=vocabulary.bos,
        eos=vocabulary.eos,
        strategies=strategies(limits),
        refused=dict(refused),
        memory=dict(memory),
    )
