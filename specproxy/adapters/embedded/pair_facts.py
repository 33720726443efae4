"""What the files say about a target and its drafters, in sentences for whoever starts the engine."""

from __future__ import annotations

from collections.abc import Iterator

from specproxy.adapters.gguf_facts import ASSISTANTS, ModelFacts, check_pair

__all__ = ["describe"]

MIB, GIB = 1 << 20, 1 << 30
FEW_EXPERTS = 0.25  # share of the experts below which each further token reads mostly new ones


def describe(target: ModelFacts, draft: ModelFacts | None) -> tuple[str, ...]:
    """One sentence for each fact that decides which strategies can pay; warnings come last.

    Raises:
        PairError: the draft cannot draft for the target.
    """
    warnings = check_pair(target, draft) if draft is not None else ()
    return (*_target(target), *(_draft(target, draft) if draft is not None else ()), *warnings)


def _target(facts: ModelFacts) -> Iterator[str]:
    kind = f"{facts.architecture}, {facts.quantisation}, {_size(facts.weight_bytes)}"
    experts = (
        f"{facts.expert_used_count} of {facts.expert_count} experts a token"
        if facts.is_moe
        else "dense (every weight is read for every token)"
    )
    yield f"Target {facts.path.name}: {kind}, {experts}."
    if facts.is_moe and facts.expert_used_count / facts.expert_count <= FEW_EXPERTS:
        yield "A draft touches more experts than one token does: checking it gains less than on a dense model."
    if facts.mtp_layers:
        heads = "one head" if facts.mtp_layers == 1 else f"{facts.mtp_layers} chained heads"
        yield f"Multi-token prediction: {heads}, {_size(facts.mtp_bytes)}."
    if facts.recurrent:
        yield (
            f"It keeps a recurrent state of {_size(facts.state_bytes)} a sequence; drafting needs one more for "
            "each token of the longest draft."
        )


def _draft(target: ModelFacts, draft: ModelFacts) -> Iterator[str]:
    if draft.sidecar_type == "draft-mtp":
        cache = (
            "reads the target's KV cache" if draft.architecture in ASSISTANTS else "keeps a cache of its own"
        )
        yield (
            f"Prediction head {draft.path.name}: {draft.architecture}, {_size(draft.weight_bytes)}, {cache}; "
            "strategy mtp runs it."
        )
        return
    if draft.sidecar_type is not None:
        yield f"Draft {draft.path.name}: {_size(draft.weight_bytes)}, no full model ({draft.sidecar_type})."
        return
    share = draft.weight_bytes / target.weight_bytes
    same = draft.architecture == target.architecture
    family = "the same family" if same else f"another family ({draft.architecture})"
    words = "the same tokenizer" if draft.tokenizer_pre == target.tokenizer_pre else "a fitting tokenizer"
    size = f"{_size(draft.weight_bytes)}, {share:.0%} of the target's"
    yield f"Draft {draft.path.name}: {size}, {family}, {words}."


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"
