"""Ollama's own API: chat and generate. A reply is streamed unless the request says otherwise."""

from __future__ import annotations

import orjson

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
from specproxy.proxy.dialects.prompts import template_turns
from specproxy.records import Dialect, OutputForm, RequestFacts, Turn

__all__ = ["read_chat", "read_generate"]

_ROLES = frozenset({"system", "assistant", "tool"})


def read_chat(data: Json) -> RequestFacts:
    """Facts of POST /api/chat."""
    turns: list[Turn] = []
    images = 0
    for message in objects(data.get("messages")):
        role = str(message.get("role"))
        images += len(items(message.get("images")))
        said = [text(message.get("content")) or "", *_call_texts(message)]
        turns.append(Turn(role if role in _ROLES else "user", "\n".join(filter(None, said))))
    tools = sum(1 for _ in objects(data.get("tools")))
    return _facts(
        Dialect.OLLAMA_CHAT,
        data,
        tuple(turns),
        images=images,
        tools=tools,
        tool_choice="auto" if tools else "none",
    )


def read_generate(data: Json) -> RequestFacts:
    """Facts of POST /api/generate; with `raw` the prompt is already templated."""
    system, prompt, suffix = (text(data.get(name)) or "" for name in ("system", "prompt", "suffix"))
    turns: list[Turn] = [Turn("system", system)] if system else []
    turns += template_turns(prompt) if flag(data.get("raw")) else [Turn("user", prompt)]
    if suffix:
        turns.append(Turn("user", suffix))
    return _facts(
        Dialect.OLLAMA_GENERATE, data, tuple(turns), images=len(items(data.get("images"))), infill=bool(suffix)
    )


def _facts(
    dialect: Dialect,
    data: Json,
    turns: tuple[Turn, ...],
    *,
    images: int,
    tools: int = 0,
    tool_choice: str = "none",
    infill: bool = False,
) -> RequestFacts:
    options = mapping(data.get("options"))
    think = data.get("think")
    return RequestFacts(
        dialect=dialect,
        model=text(data.get("model")),
        stream=data.get("stream") is not False,
        turns=turns,
        temperature=number(options.get("temperature")),
        max_tokens=limit(options.get("num_predict")),
        seed=whole(options.get("seed")),
        output=_form(data.get("format")),
        tools=tools,
        tool_choice=tool_choice,
        logprobs=flag(data.get("logprobs")) or (whole(data.get("top_logprobs")) or 0) > 0,
        images=images,
        thinking=think if isinstance(think, bool) else (True if isinstance(think, str) and think else None),
        infill=infill,
        steering=steering(data) + steering(options, "options."),
    )


def _form(value: object) -> OutputForm:
    """`format` is the word "json" or a schema; an empty one means nothing."""
    if isinstance(value, dict) and value:
        return OutputForm.JSON_SCHEMA
    return OutputForm.JSON_OBJECT if value == "json" else OutputForm.FREE


def _call_texts(message: Json) -> list[str]:
    found = []
    for call in objects(message.get("tool_calls")):
        function = mapping(call.get("function"))
        if name := text(function.get("name")):
            found.append(f"{name} {orjson.dumps(function.get('arguments')).decode()}")
    return found
