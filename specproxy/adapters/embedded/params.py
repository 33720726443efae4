"""Sampling parameters of the OpenAI and llama.cpp routes, read as llama-server reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specproxy.adapters.embedded.body import Fields
from specproxy.adapters.embedded.types import Sampling

__all__ = ["MAX_LOGPROBS", "MAX_REPLIES", "REFUSED", "limit", "sampling", "stop_strings"]

MAX_LOGPROBS = 100  # alternatives a token; OpenAI allows 20, llama-server any number
MAX_REPLIES = 16  # sequences for one request
MAX_STOPS = 64  # stop strings, and sequence breakers of DRY, each of which walks through the vocabulary
MOST = 2**31 - 1  # of a whole number in llama.cpp
SMALLEST = 1e-9  # that logits are divided by: less leaves the highest alone, or makes it infinite
LARGEST = 1e30  # bias; beyond it 32 bits tell nothing apart, or hold infinity

SAMPLER_ORDER = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
RANDOM_SEED = 2**32 - 1  # llama.cpp's mark for "draw one"; -1 as an unsigned number

# Fields of llama-server, OpenAI and their relatives that change the text and that this engine does not have,
# with the values with which they change nothing. What is not known here is ignored, as the servers do.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    # llama-server
    "mirostat": (0,),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
    "top_n_sigma": (-1,),
    "adaptive_target": (-1,),
    "min_keep": (0,),
    "samplers": ("", [], SAMPLER_ORDER),
    "lora": ([],),
    "n_indent": (0,),
    "t_max_predict_ms": (0, -1),
    "post_sampling_probs": (False,),
    "n_discard": (0,),
    "multimodal_data": ([],),
    # OpenAI
    "audio": (),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none",),
    "web_search_options": (),
    "verbosity": ("medium",),
    "logits_processors": ([],),
    # names that other servers use
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
}


def limit(body: Fields, *names: str) -> int | None:
    """The longest reply in tokens, from the first of `names` that is given; None (or -1) is no limit."""
    for name in names:
        value = body.integer(name, low=-1)
        if value is not None:
            return None if value < 0 else value
    return None


def stop_strings(body: Fields, name: str = "stop") -> tuple[str, ...]:
    """Stop strings; empty ones are left out."""
    stops = tuple(text for text in body.texts(name) if text)
    if len(stops) > MAX_STOPS:
        raise body.wrong(name, f"may hold at most {MAX_STOPS} strings")
    return stops


def sampling(body: Fields, vocab: int, *, logprobs: int | None, grammar: str | None) -> Sampling:
    """All sampling fields of one request; what is not given is llama-server's default.

    Raises:
        FieldError: a field is of the wrong type or out of range, or not supported.
    """
    body.refuse(REFUSED)
    seed = body.integer("seed", -(2**63), 2**64 - 1)
    temperature = body.number("temperature", 0)
    given: dict[str, Any] = {
        "temperature": 0 if temperature is not None and temperature < SMALLEST else temperature,
        "top_k": body.integer("top_k", -1, MOST),
        "top_p": body.number("top_p", 0, 1),
        "min_p": body.number("min_p", 0, 1),
        "typical_p": body.number("typical_p", 0, 1),
        "repeat_penalty": body.number("repeat_penalty", SMALLEST),
        "repeat_last_n": body.integer("repeat_last_n", -1, MOST),
        "presence_penalty": body.number("presence_penalty"),
        "frequency_penalty": body.number("frequency_penalty"),
        "dry_multiplier": body.number("dry_multiplier", 0),
        "dry_base": body.number("dry_base", 0),
        "dry_allowed_length": body.integer("dry_allowed_length", 0, MOST),
        "dry_penalty_last_n": body.integer("dry_penalty_last_n", -1, MOST),
    }
    if body.has("dry_sequence_breakers"):
        given["dry_sequence_breakers"] = breakers = body.texts("dry_sequence_breakers")
        if len(breakers) > MAX_STOPS:
            raise body.wrong("dry_sequence_breakers", f"may hold at most {MAX_STOPS} strings")
    return Sampling(
        **{name: value for name, value in given.items() if value is not None},
        logit_bias=_logit_bias(body, vocab),
        seed=None if seed is None or seed % 2**32 == RANDOM_SEED else seed % 2**32,
        grammar=grammar,
        stop=stop_strings(body),
        ignore_eos=body.flag("ignore_eos"),
        logprobs=logprobs,
    )


def _logit_bias(body: Fields, vocab: int) -> dict[int, float]:
    """OpenAI's object {id: bias} or llama-server's array [[id, bias], …]; a bias of false forbids the token."""
    raw = body.get("logit_bias")
    if raw is None:
        return {}
    if isinstance(raw, dict):
        pairs = list(raw.items())
    elif isinstance(raw, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in raw):
        pairs = [(pair[0], pair[1]) for pair in raw]
    else:
        raise body.wrong("logit_bias", "must be an object from token ids to biases, or an array of [id, bias]")
    biases: dict[int, float] = {}
    for token, bias in pairs:
        try:
            number = int(token)
        except (TypeError, ValueError):
            raise body.wrong("logit_bias", f"must name tokens by id, not {token!r}") from None
        if not 0 <= number < vocab:
            raise body.wrong("logit_bias", f"names token {number}, but the vocabulary has {vocab}")
        if bias is False:
            bias = float("-inf")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise body.wrong("logit_bias", f"must give token {number} a number, or false")
        if bias > LARGEST:
            raise body.wrong("logit_bias", f"gives token {number} {bias:g}, and may give at most {LARGEST:g}")
        biases[number] = float(bias)
    return biases
