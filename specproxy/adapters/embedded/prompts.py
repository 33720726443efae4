"""Plain prompts: text, token ids, or both mixed, as llama-server takes them."""

from __future__ import annotations

from typing import Any

from specproxy.adapters.embedded.body import Fields
from specproxy.adapters.embedded.chat import Vocabulary

__all__ = ["prompts", "token_ids"]


def prompts(body: Fields, name: str, vocabulary: Vocabulary, vocab: int) -> list[tuple[int, ...]]:
    """The prompts of a member: a string, an array of ids and strings (one prompt), or an array of those.

    Raises:
        FieldError: it is missing, or something else.
    """
    value = body.get(name)
    if isinstance(value, str):
        return [tuple(vocabulary.tokenize(value))]
    if not isinstance(value, list) or not value:
        raise body.wrong(name, "must be a string, an array of token ids, or an array of prompts")
    # an array of numbers, with strings among them or not, is one prompt; otherwise each item is one
    if any(isinstance(item, int) for item in value):
        return [_mixed(body, name, value, vocabulary, vocab)]
    return [
        tuple(vocabulary.tokenize(item))
        if isinstance(item, str)
        else _mixed(body, name, item, vocabulary, vocab)
        for item in value
    ]


def _mixed(body: Fields, name: str, items: Any, vocabulary: Vocabulary, vocab: int) -> tuple[int, ...]:
    if not isinstance(items, list) or not items:
        raise body.wrong(name, "must hold strings or arrays of token ids")
    ids: list[int] = []
    for i, item in enumerate(items):
        if isinstance(item, str):
            ids += vocabulary.tokenize(item, add_special=i == 0)
        else:
            ids += token_ids(body, name, [item], vocab)
    return tuple(ids)


def token_ids(body: Fields, name: str, items: Any, vocab: int) -> tuple[int, ...]:
    """Checked token ids.

    Raises:
        FieldError: something is no token of the vocabulary.
    """
    if not isinstance(items, list):
        raise body.wrong(name, "must be an array of token ids")
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab:
            raise body.wrong(name, f"holds {item!r}, which is no token id (0 to {vocab - 1})")
    return tuple(items)
