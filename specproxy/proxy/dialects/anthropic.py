"""Anthropic's Messages API. Tool results come inside user messages; they become turns of their own."""

from __future__ import annotations

from dataclasses import dataclass, field

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
from specproxy.records import Dialect, OutputForm, RequestFacts, Turn

__all__ = ["read_messages"]


@dataclass(slots=True)
class _Transcript:
    """Turns and attachments gathered from messages."""

    turns: list[Turn] = field(default_factory=list)
    images: int = 0

    def add(self, role: str, content: object) -> None:
        """Take in one message's content: a string or blocks, in order."""
        if isinstance(content, str):
            self.turns.append(Turn(role, content))
            return
        words: list[str] = []
        for block in items(content):
            self._block(mapping(block), words)
        if words:
            self.turns.append(Turn(role, "\n".join(words)))

    def _block(self, block: Json, words: list[str]) -> None:
        kind = block.get("type")
        if kind == "tool_result":
            self.add("tool", block.get("content"))
        elif kind == "image":
            self.images += 1
        elif kind == "tool_use":
            words.append(f"{block.get('name')} {_compact(block.get('input'))}")
        elif said := text(block.get("text")):
            words.append(said)


def read_messages(data: Json) -> RequestFacts:
    """Facts of POST /v1/messages."""
    transcript = _Transcript()
    if system := data.get("system"):
        transcript.add("system", system)
    for message in objects(data.get("messages")):
        role = message.get("role")
        transcript.add(role if role in ("assistant", "system") else "user", message.get("content"))
    tools = sum(1 for _ in objects(data.get("tools")))
    return RequestFacts(
        dialect=Dialect.ANTHROPIC,
        model=text(data.get("model")),
        stream=flag(data.get("stream")),
        turns=tuple(transcript.turns),
        temperature=number(data.get("temperature")),
        max_tokens=limit(data.get("max_tokens")),
        seed=whole(data.get("seed")),
        output=_form(data),
        tools=tools,
        tool_choice=_choice(tools, data.get("tool_choice")),
        images=transcript.images,
        thinking=_thinking(data.get("thinking")),
        thought_limit=whole(mapping(data.get("thinking")).get("budget_tokens")) is not None,
        steering=steering(data),
    )


def _choice(tools: int, choice: object) -> str:
    if not tools:
        return "none"
    return {"any": "required", "tool": "named", "none": "none"}.get(str(mapping(choice).get("type")), "auto")


def _thinking(value: object) -> bool | None:
    kind = mapping(value).get("type")
    return None if kind is None else kind != "disabled"


def _form(data: Json) -> OutputForm:
    form = mapping(mapping(data.get("output_config")).get("format")) or mapping(data.get("output_format"))
    return OutputForm.JSON_SCHEMA if form.get("type") == "json_schema" else OutputForm.FREE


def _compact(value: object) -> str:
    return orjson.dumps(value).decode() if value else ""
