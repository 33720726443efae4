"""Anthropic's /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from specproxy.adapters.embedded.body import Fields, parse_body
from specproxy.adapters.embedded.chat import Conversation, Prepared
from specproxy.adapters.embedded.forms import FREE, Form
from specproxy.adapters.embedded.keys import SERVICE
from specproxy.adapters.embedded.output import Answer, Delta, Kind, Part, collect
from specproxy.adapters.embedded.params import sampling, stop_strings
from specproxy.adapters.embedded.replies import Family, event, json_response
from specproxy.adapters.embedded.service import Service, Work, threaded
from specproxy.adapters.embedded.streaming import EVENTS, stream_reply
from specproxy.adapters.embedded.tools import NO_TOOLS, Tool, Toolbox
from specproxy.adapters.embedded.types import Finished

__all__ = ["count_tokens", "messages"]

REFUSED: Mapping[str, Sequence[Any]] = {"mcp_servers": ([],), "container": (), "context_management": ()}
CHOICES = ("auto", "any", "tool", "none")


async def messages(request: web.Request) -> web.StreamResponse:
    """Answer one request, streamed or whole."""
    service = request.app[SERVICE]
    call = service.call(request)
    data = await request.read()
    body, prepared, work = await threaded(data, lambda: _prepare(service, data))
    reply = service.parts(call, work, prepared.parser)
    model = body.text("model") or service.names[0]
    if body.flag("stream"):
        return await stream_reply(request, reply, _Writer(model, len(work.prompt)), call.short_cut)
    return json_response(_whole(model, (await collect(reply, 1))[0]))


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """The number of prompt tokens of a request."""
    service = request.app[SERVICE]
    data = await request.read()
    prepared = await threaded(data, lambda: service.chat.prepare(_conversation(service, parse_body(data))))
    return json_response({"input_tokens": len(prepared.prompt)})


def _prepare(service: Service, data: bytes) -> tuple[Fields, Prepared, Work]:
    body = parse_body(data)
    body.refuse(REFUSED)
    prepared = service.chat.prepare(_conversation(service, body))
    shared = {key: value for key, value in body.data.items() if key not in ("stop", "logit_bias")}
    stops = {"stop": list(found)} if (found := stop_strings(body, "stop_sequences")) else {}
    chosen = sampling(
        service.with_defaults(Fields(shared | stops)),
        service.card.vocab,
        logprobs=None,
        grammar=prepared.grammar,
    )
    work = Work(
        prompt=prepared.prompt,
        sampling=chosen,
        max_tokens=body.integer("max_tokens", 1),
        render_tokens=prepared.render_tokens,
    )
    return body, prepared, work


def _conversation(service: Service, body: Fields) -> Conversation:
    given = body.objects("messages")
    if not given:
        raise body.wrong("messages", "is required, and must not be empty")
    system = _text(body, "system")
    turns = [{"role": "system", "content": system}] if system else []
    return Conversation(
        messages=[*turns, *(message for turn in given for message in _messages(turn))],
        form=_form(body),
        tools=_tools(body),
        thinking=_thinking(service, body),
    )


def _text(fields: Fields, name: str) -> str:
    """A string, or text blocks joined by line breaks."""
    if not isinstance(fields.get(name), list):
        return fields.text(name) or ""
    return "\n".join(_block_text(block) for block in fields.objects(name))


def _block_text(block: Fields) -> str:
    kind = block.text("type")
    if kind != "text":
        raise block.wrong("type", f"{kind!r} cannot be used here: this model only reads text")
    return block.text("text") or ""


def _messages(turn: Fields) -> list[dict[str, Any]]:
    """One turn as messages in OpenAI's form: tool results become messages of their own, before the text."""
    role = turn.choice("role", ("user", "assistant", "system"))
    if role is None:
        raise turn.wrong("role", "is required")
    if not isinstance(turn.get("content"), list):
        return [{"role": role, "content": turn.text("content") or ""}]
    results, texts, calls, thoughts = [], [], [], []
    for block in turn.objects("content"):
        kind = block.text("type")
        if kind == "tool_result":
            results.append(
                {"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": _text(block, "content")}
            )
        elif kind == "tool_use":
            function = {"name": block.text("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.text("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(block.text("thinking") or "")
        elif kind != "redacted_thinking":
            texts.append(_block_text(block))
    if not texts and not calls:
        return results
    message: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return [*results, message]


def _form(body: Fields) -> Form:
    config = body.object("output_config")
    wanted = (config.object("format") if config else None) or body.object("output_format")
    if wanted is None:
        return FREE
    if wanted.text("type") != "json_schema" or not wanted.has("schema"):
        raise wanted.wrong("type", "must be json_schema, with a 'schema'")
    return Form(schema=wanted.get("schema"), field=wanted.path("schema"))


def _thinking(service: Service, body: Fields) -> bool | None:
    given = body.object("thinking")
    kind = given.choice("type", ("enabled", "disabled", "adaptive")) if given else "disabled"
    return None if service.chat.tags is None else kind != "disabled"


def _tools(body: Fields) -> Toolbox:
    tools = []
    for given in body.objects("tools"):
        if given.text("type") not in (None, "custom"):
            raise given.wrong("type", f"{given.text('type')!r} is not supported: only tools of your own are")
        name = given.text("name")
        if not name:
            raise given.wrong("name", "is required")
        tools.append(
            Tool(name, given.get("input_schema") or {"type": "object"}, given.text("description") or "")
        )
    choice = body.object("tool_choice") or Fields({"type": "auto"}, "tool_choice")
    mode = choice.choice("type", CHOICES)
    if mode == "none" or not tools:
        return NO_TOOLS
    only = choice.text("name") if mode == "tool" else None
    if mode == "tool" and all(tool.name != only for tool in tools):
        raise choice.wrong("name", f"names {only!r}, which is not among the 'tools'")
    return Toolbox(
        tuple(tools),
        "auto" if mode == "auto" else "required",
        only,
        not choice.flag("disable_parallel_tool_use") and only is None,
    )


def _stop(end: Finished, calls: int) -> dict[str, Any]:
    if end.reason != "stop":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if end.stop_text:
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_text}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(end: Finished) -> dict[str, int]:
    return {
        "input_tokens": end.prompt_n,
        "cache_read_input_tokens": end.cached_n,
        "output_tokens": end.predicted_n,
    }


def _whole(model: str, answer: Answer) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    if answer.reasoning:
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content or not answer.calls:
        content.append({"type": "text", "text": answer.content})
    for call in answer.calls:
        try:
            arguments = json.loads(call.arguments or "{}")
        except ValueError:
            arguments = {}  # cut off by the length limit
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return {
        **_message(model, content),
        **_stop(answer.finished, len(answer.calls)),
        "usage": _usage(answer.finished),
    }


def _message(model: str, content: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"msg_{uuid.uuid4().hex[:24]}",
        "type": "message",
        "role": "assistant",
        "content": content,
        "model": model,
        "stop_reason": None,
        "stop_sequence": None,
    }


def _named(body: dict[str, Any]) -> bytes:
    return event(body, body["type"])


class _Writer:
    """Events of a streamed reply: blocks that are opened, added to, and closed."""

    content_type = EVENTS
    family = Family.ANTHROPIC

    def __init__(self, model: str, prompt_tokens: int) -> None:
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._index = -1
        self._kind = ""
        self._calls = 0

    def begin(self) -> bytes:
        usage = {"input_tokens": self._prompt_tokens, "cache_read_input_tokens": 0, "output_tokens": 0}
        return _named({"type": "message_start", "message": {**_message(self._model, []), "usage": usage}})

    def part(self, part: Part) -> bytes:
        out = b"".join(self._delta(delta) for delta in part.deltas)
        if part.finished is None:
            return out
        if self._index < 0:
            out += self._open("text", {"type": "text", "text": ""})
        out += self._close()
        end = {
            "type": "message_delta",
            "delta": _stop(part.finished, self._calls),
            "usage": _usage(part.finished),
        }
        return out + _named(end)

    def end(self) -> bytes:
        return _named({"type": "message_stop"})

    def fail(self, body: dict[str, object]) -> bytes:
        return event(body, "error")

    def _delta(self, delta: Delta) -> bytes:
        if delta.kind is Kind.CALL:
            self._calls += 1
            block = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
            return self._open("tool_use", block)
        if delta.kind is Kind.ARGUMENTS:
            return self._add({"type": "input_json_delta", "partial_json": delta.text})
        if delta.kind is Kind.REASONING:
            opened = self._need("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return opened + self._add({"type": "thinking_delta", "thinking": delta.text})
        opened = self._need("text", {"type": "text", "text": ""})
        return opened + self._add({"type": "text_delta", "text": delta.text})

    def _need(self, kind: str, block: dict[str, Any]) -> bytes:
        return b"" if self._kind == kind else self._open(kind, block)

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        closed = self._close()
        self._index += 1
        self._kind = kind
        return closed + _named({"type": "content_block_start", "index": self._index, "content_block": block})

    def _add(self, delta: dict[str, Any]) -> bytes:
        return _named({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        kind, self._kind = self._kind, ""
        if not kind:
            return b""
        # clients expect a signature at the end of reasoning
        signed = self._add({"type": "signature_delta", "signature": ""}) if kind == "thinking" else b""
        return signed + _named({"type": "content_block_stop", "index": self._index})
