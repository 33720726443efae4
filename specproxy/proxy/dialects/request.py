"""From the body of a request to RequestFacts, whatever the dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import orjson

from specproxy.proxy.dialects import anthropic, llamacpp, ollama, openai
from specproxy.proxy.dialects.fields import Json
from specproxy.records import Dialect, RequestFacts

__all__ = ["read_facts"]

_READERS: Mapping[Dialect, Callable[[Json], RequestFacts]] = {
    Dialect.OPENAI_CHAT: openai.read_chat,
    Dialect.OPENAI_COMPLETIONS: openai.read_completions,
    Dialect.OPENAI_RESPONSES: openai.read_responses,
    Dialect.OLLAMA_CHAT: ollama.read_chat,
    Dialect.OLLAMA_GENERATE: ollama.read_generate,
    Dialect.ANTHROPIC: anthropic.read_messages,
    Dialect.LLAMACPP: llamacpp.read_completion,
    Dialect.LLAMACPP_INFILL: llamacpp.read_infill,
}


def read_facts(dialect: Dialect, body: bytes) -> RequestFacts | None:
    """Read what a request says about itself; None if the body is not a JSON object.

    Never raises: fields that are missing or of a wrong type count as absent.
    """
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return _READERS[dialect](data) if isinstance(data, dict) else None
