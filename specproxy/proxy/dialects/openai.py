"""OpenAI's three text APIs as the local servers speak them, with the fields that those servers add."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from specproxy.proxy.dialects.fields import (
    Json,
    chosen_tool,
    copies,
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
from specproxy.proxy.dialects.prompts import prompt_turns
from specproxy.records import Dialect, OutputForm, RequestFacts, Turn

__all__ = ["output_form", "read_chat", "read_completions", "read_responses"]

# What a chat request may have without asking for anything but text.
_PLAIN_FIELDS = frozenset(
    {
        "model",
        "messages",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "max_tokens",
        "max_completion_tokens",
        "n_predict",
        "seed",
        "stop",
        "user",
        "presence_penalty",
        "frequency_penalty",
    }
)
_ROLES = {
    "system": "system",
    "developer": "system",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_IMAGE_PARTS = frozenset({"image_url", "input_image", "image"})
_AUDIO_PARTS = frozenset({"input_audio", "audio_url", "audio"})
_SCHEMA_FIELDS = ("json_schema", "guided_json")
_GRAMMAR_FIELDS = ("grammar", "guided_grammar", "guided_regex", "guided_choice", "regex", "ebnf")


def read_chat(data: Json) -> RequestFacts:
    """Facts of POST /v1/chat/completions."""
    turns: list[Turn] = []
    images = audio = 0
    for message in objects(data.get("messages")):
        words, seen, heard = read_parts(message.get("content"))
        images += seen
        audio += heard
        role = _ROLES.get(str(message.get("role")), "user")
        called = _call_texts(message) if "tool_calls" in message or "function_call" in message else ()
        turns.append(Turn(role, "\n".join([words, *called]).strip("\n")))
    facts = RequestFacts(
        dialect=Dialect.OPENAI_CHAT,
        model=text(data.get("model")),
        stream=flag(data.get("stream")),
        turns=tuple(turns),
        temperature=number(data.get("temperature")),
        max_tokens=limit(data.get("max_completion_tokens"), data.get("max_tokens"), data.get("n_predict")),
        seed=whole(data.get("seed")),
        images=images,
        audio=audio,
    )
    return facts if data.keys() <= _PLAIN_FIELDS else _with_wishes(facts, data)


def _with_wishes(facts: RequestFacts, data: Json) -> RequestFacts:
    """With what else a chat request may ask for, by fields that most do not have."""
    tools = sum(1 for _ in objects(data.get("tools"))) or sum(1 for _ in objects(data.get("functions")))
    return replace(
        facts,
        n=copies(data),
        output=output_form(data),
        tools=tools,
        tool_choice=chosen_tool(tools, data.get("tool_choice", data.get("function_call"))),
        logprobs=flag(data.get("logprobs")) or _positive(data.get("top_logprobs"), data.get("n_probs")),
        thinking=_thinking(data),
        thought_limit=_limits_thought(data),
        steering=steering(data),
    )


def read_completions(data: Json) -> RequestFacts:
    """Facts of POST /v1/completions; `logprobs` is a number there, and 0 still asks for the token's own."""
    suffix = text(data.get("suffix")) or ""
    logprobs = data.get("logprobs")
    turns, images = prompt_turns(data.get("prompt"))
    return RequestFacts(
        dialect=Dialect.OPENAI_COMPLETIONS,
        model=text(data.get("model")),
        stream=flag(data.get("stream")),
        turns=(*turns, Turn("user", suffix)) if suffix else turns,
        temperature=number(data.get("temperature")),
        max_tokens=limit(data.get("max_tokens"), data.get("n_predict")),
        seed=whole(data.get("seed")),
        n=max(copies(data), whole(data.get("best_of")) or 1),
        output=output_form(data),
        logprobs=flag(logprobs) or whole(logprobs) is not None or _positive(data.get("n_probs")),
        images=images,
        infill=bool(suffix),
        steering=steering(data),
    )


def read_responses(data: Json) -> RequestFacts:
    """Facts of POST /v1/responses; `input` is a string or a list of items."""
    instructions = text(data.get("instructions"))
    turns = [Turn("system", instructions)] if instructions else []
    images = audio = 0
    given = data.get("input")
    if isinstance(given, str):
        turns.append(Turn("user", given))
    for item in objects(given):
        turn, seen, heard = _response_item(item)
        images += seen
        audio += heard
        if turn:
            turns.append(turn)
    form = mapping(mapping(data.get("text")).get("format"))
    tools = sum(1 for _ in objects(data.get("tools")))
    return RequestFacts(
        dialect=Dialect.OPENAI_RESPONSES,
        model=text(data.get("model")),
        stream=flag(data.get("stream")),
        turns=tuple(turns),
        temperature=number(data.get("temperature")),
        max_tokens=limit(data.get("max_output_tokens"), data.get("max_tokens")),
        seed=whole(data.get("seed")),
        output=output_form({**data, "response_format": form} if form else data),
        tools=tools,
        tool_choice=chosen_tool(tools, data.get("tool_choice")),
        logprobs="message.output_text.logprobs" in items(data.get("include"))
        or _positive(data.get("top_logprobs")),
        images=images,
        audio=audio,
        thinking=_thinking(data),
        thought_limit=_limits_thought(data),
        steering=steering(data),
    )


def output_form(data: Json) -> OutputForm:
    """The form that is demanded of the text, also by the fields of llama-server, vLLM and SGLang."""
    form = mapping(data.get("response_format"))
    kind = form.get("type")
    structured = mapping(data.get("structured_outputs"))
    if kind == "json_schema" or form.get("schema") or any(data.get(f) for f in _SCHEMA_FIELDS):
        return OutputForm.JSON_SCHEMA
    if structured.get("json") or kind == "structural_tag":
        return OutputForm.JSON_SCHEMA
    if structured or any(data.get(f) for f in _GRAMMAR_FIELDS):
        return OutputForm.GRAMMAR
    return OutputForm.JSON_OBJECT if kind == "json_object" or structured.get("json_object") else OutputForm.FREE


def read_parts(content: object) -> tuple[str, int, int]:
    """Text, number of images and number of audio clips in a message's content (a string or parts)."""
    if isinstance(content, str):
        return content, 0, 0
    words: list[str] = []
    images = audio = 0
    for part in items(content):
        if isinstance(part, str):
            words.append(part)
            continue
        fields = mapping(part)
        kind = text(fields.get("type"))
        images += kind in _IMAGE_PARTS
        audio += kind in _AUDIO_PARTS
        if said := text(fields.get("text")) or text(fields.get("refusal")):
            words.append(said)
    return "\n".join(words), images, audio


def _call_texts(message: Json) -> Iterator[str]:
    """What an assistant's message says outside of its content: tool calls."""
    calls = [mapping(call.get("function")) for call in objects(message.get("tool_calls"))]
    for call in [*calls, mapping(message.get("function_call"))]:
        if name := text(call.get("name")):
            yield f"{name} {text(call.get('arguments')) or ''}"


def _response_item(item: Json) -> tuple[Turn | None, int, int]:
    """One item of a Responses input as a turn, with its images and audio clips."""
    kind = item.get("type")
    if kind in ("function_call", "custom_tool_call"):
        return Turn("assistant", f"{item.get('name')} {text(item.get('arguments')) or ''}"), 0, 0
    if kind in ("function_call_output", "custom_tool_call_output"):
        words, images, audio = read_parts(item.get("output"))
        return Turn("tool", words), images, audio
    if "content" in item or "role" in item:
        words, images, audio = read_parts(item.get("content"))
        return Turn(_ROLES.get(str(item.get("role")), "user"), words), images, audio
    return None, 0, 0


def _positive(*values: object) -> bool:
    return any((whole(value) or 0) > 0 for value in values)


def _limits_thought(data: Json) -> bool:
    """Whether thoughts are to end after a number of tokens: llama-server's field, and mlx_vlm.server's."""
    return any(whole(data.get(name)) is not None for name in ("thinking_budget_tokens", "thinking_budget"))


def _thinking(data: Json) -> bool | None:
    """Whether the client switched thinking on or off; None where it says nothing."""
    switch = mapping(data.get("chat_template_kwargs")).get("enable_thinking", data.get("enable_thinking"))
    if isinstance(switch, bool):
        return switch
    budget = whole(data.get("thinking_budget_tokens"))
    if budget is not None:
        return budget != 0
    effort = text(data.get("reasoning_effort")) or text(mapping(data.get("reasoning")).get("effort"))
    return None if effort is None else effort != "none"
