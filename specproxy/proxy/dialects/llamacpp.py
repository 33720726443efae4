"""llama.cpp's own routes: /completion and /infill."""

from __future__ import annotations

from specproxy.proxy.dialects.fields import (
    Json,
    flag,
    items,
    limit,
    mapping,
    number,
    objects,
    steering,
    text,
    whole,
)
from specproxy.proxy.dialects.openai import output_form
from specproxy.proxy.dialects.prompts import prompt_turns
from specproxy.records import Dialect, RequestFacts, Turn

__all__ = ["read_completion", "read_infill"]


def read_completion(data: Json) -> RequestFacts:
    """Facts of POST /completion and /completions: `prompt` is text, token ids, or a mixture of them."""
    turns, images = prompt_turns(data.get("prompt"))
    return _facts(Dialect.LLAMACPP, data, turns, images=images + len(items(data.get("image_data"))))


def read_infill(data: Json) -> RequestFacts:
    """Facts of POST /infill: turns are extra files, the text before and after the gap, and a prompt in it."""
    extra = [
        Turn("system", said) for chunk in objects(data.get("input_extra")) if (said := text(chunk.get("text")))
    ]
    around = [text(data.get(name)) for name in ("input_prefix", "input_suffix", "prompt")]
    turns = (*extra, *(Turn("user", said) for said in around if said))
    return _facts(Dialect.LLAMACPP_INFILL, data, turns, images=0)


def _facts(dialect: Dialect, data: Json, turns: tuple[Turn, ...], *, images: int) -> RequestFacts:
    return RequestFacts(
        dialect=dialect,
        model=text(data.get("model")),
        stream=flag(data.get("stream")),
        turns=turns,
        temperature=number(data.get("temperature")),
        max_tokens=limit(data.get("n_predict"), data.get("max_tokens")),
        seed=whole(data.get("seed")),
        n=max(1, whole(data.get("n_cmpl")) or 1, whole(data.get("n")) or 1),
        output=output_form(data),
        logprobs=(whole(data.get("n_probs")) or 0) > 0 or flag(mapping(data).get("logprobs")),
        images=images,
        infill=dialect is Dialect.LLAMACPP_INFILL,
        steering=steering(data),
    )
