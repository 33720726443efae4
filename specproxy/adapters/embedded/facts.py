"""What is known about a loaded model: its card, and the strategies that can run on it."""

from __future__ import annotations

from collections.abc import Mapping

from specproxy.adapters.embedded.options import EngineOptions
from specproxy.adapters.embedded.types import ModelCard
from specproxy.adapters.embedded.vocabulary import Vocabulary
from specproxy.adapters.gguf_facts import ModelFacts
from specproxy.records import Strategy

__all__ = ["model_card", "strategies"]


def strategies(limits: Mapping[str, int]) -> tuple[Strategy, ...]:
    """Plain, each drafter alone, the n-gram drafter before each other, and ``auto``.

    Args:
        limits: longest draft of each drafter that can run.
    """
    names = [(name,) for name in limits]
    pairs = [("ngram", name) for name in limits if "ngram" in limits and name != "ngram"]
    auto = [("auto",)] if limits else []
    return (Strategy(), *(Strategy(drafters) for drafters in [*names, *pairs, *auto]))


def model_card(
    options: EngineOptions,
    facts: ModelFacts,
    vocabulary: Vocabulary,
    *,
    context: int,
    limits: Mapping[str, int],
    refused: Mapping[str, str],
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
    )
