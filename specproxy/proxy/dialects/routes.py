"""Which dialect a request speaks, told from its method and path alone."""

from __future__ import annotations

import re

from specproxy.records import Dialect

__all__ = ["dialect_of"]

# The end of the path decides, so that a proxy prefix or a gateway's deployment path does not matter. Order
# matters where one tail ends with another. `/completions` is llama.cpp's own route unless a version segment
# stands before it: `/v1/completions` (OpenAI), `/api/v0/completions` (LM Studio).
_TAILS: tuple[tuple[str, Dialect], ...] = (
    ("/chat/completions", Dialect.OPENAI_CHAT),
    ("/responses", Dialect.OPENAI_RESPONSES),
    ("/api/chat", Dialect.OLLAMA_CHAT),
    ("/api/generate", Dialect.OLLAMA_GENERATE),
    ("/v1/messages", Dialect.ANTHROPIC),
    ("/completion", Dialect.LLAMACPP),
    ("/infill", Dialect.LLAMACPP_INFILL),
)
_VERSIONED_COMPLETIONS = re.compile(r"/v\d+(?:beta|alpha)?\d*/completions\Z")


def dialect_of(method: str, path: str) -> Dialect | None:
    """The dialect of a request that generates text, or None for everything else.

    `path` is the raw path without the query string. Only POST generates; a path is recognised by its end.
    """
    if method != "POST":
        return None
    for tail, dialect in _TAILS:
        if path.endswith(tail):
            return dialect
    if path.endswith("/completions"):
        return Dialect.OPENAI_COMPLETIONS if _VERSIONED_COMPLETIONS.search(path) else Dialect.LLAMACPP
    return None
