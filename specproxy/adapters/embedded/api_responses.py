"""OpenAI's /v1/responses, without state: text, reasoning and function calls."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from specproxy.adapters.embedded.body import Fields, parse_body
from specproxy.adapters.embedded.chat import Conversation, Prepared, normal_message
from specproxy.adapters.embedded.counts import timings
from specproxy.adapters.embedded.forms import FREE, Form
from specproxy.adapters.embedded.keys import SERVICE
from specproxy.adapters.embedded.output import Answer, Delta, Kind, Part, collect
from specproxy.adapters.embedded.params import limit, sampling
from specproxy.adapters.embedded.replies import Family, event, json_response
from specproxy.adapters.embedded.service import Service, Work, threaded
from specproxy.adapters.embedded.streaming import EVENTS, stream_reply
from specproxy.adapters.embedded.tools import openai_tools
from specproxy.adapters.embedded.types import Finished

__all__ = ["responses"]

REFUSED = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
}


async def responses(request: web.Request) -> web.StreamResponse:
    """Answer one request, streamed or whole."""
    service = request.app[SERVICE]
    call = service.call(request)
    data = await request.read()
    body, prepared, work = await threaded(data, lambda: _prepare(service, data))
    reply = service.parts(call, work, prepared.parser)
    head = _Head(body.text("model") or service.names[0], body)
    if body.flag("stream"):
        return await stream_reply(request, reply, _Writer(head), call.short_cut)
    answer = (await collect(reply, 1))[0]
    return json_response(head.response(_items(answer), answer.finished))


def _prepare(service: Service, data: bytes) -> tuple[Fields, Prepared, Work]:
    body = parse_body(data)
    body.refuse(REFUSED)
    prepared = service.chat.prepare(_conversation(body))
    # names that mean something else here than in llama-server's sampling
    own = Fields({key: value for key, value in body.data.items() if key not in ("stop", "prompt", "text")})
    work = Work(
        prompt=prepared.prompt,
        sampling=sampling(
            service.with_defaults(own), service.card.vocab, logprobs=None, grammar=prepared.grammar
        ),
        max_tokens=limit(body, "max_output_tokens"),
        render_tokens=prepared.render_tokens,
    )
    return body, prepared, work


def _conversation(body: Fields) -> Conversation:
    messages: list[dict[str, Any]] = []
    if instructions := body.text("instructions"):
        messages.append({"role": "system", "content": instructions})
    if isinstance(body.get("input"), str):
        messages.append({"role": "user", "content": body.get("input")})
    else:
        items = body.objects("input")
        if not items:
            raise body.wrong("input", "is required, and must not be empty")
        for item in items:
            _add(messages, item)
    effort = (body.object("reasoning") or Fields({})).text("effort")
    return Conversation(
        messages=messages,
        form=_form(body),
        tools=openai_tools(body),
        variables={"reasoning_effort": effort} if effort else {},
    )


def _add(messages: list[dict[str, Any]], item: Fields) -> None:
    """Add one input item to the conversation in OpenAI's chat form."""
    kind = item.text("type") or "message"
    if kind == "message":
        messages.append(normal_message(item.data, item.path("")[:-1]))
    elif kind == "function_call":
        call = {
            "id": item.text("call_id"),
            "function": {"name": item.get("name"), "arguments": item.get("arguments")},
        }
        message = normal_message(
            {"role": "assistant", "content": None, "tool_calls": [call]}, item.path("")[:-1]
        )
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
    elif kind == "function_call_output":
        output = {"role": "tool", "content": item.get("output"), "tool_call_id": item.text("call_id")}
        messages.append(normal_message(output, item.path("output")))
    elif kind != "reasoning":  # reasoning of earlier turns is not shown to the model again
        raise item.wrong("type", f"{kind!r} is not supported")


def _form(body: Fields) -> Form:
    given = (body.object("text") or Fields({})).object("format")
    kind = given.choice("type", ("text", "json_object", "json_schema")) if given else None
    if given is None or kind in (None, "text"):
        return FREE
    schema = {"type": "object"} if kind == "json_object" else given.get("schema")
    if schema is None:
        raise given.wrong("schema", "is required for type json_schema")
    return Form(schema=schema, field="text.format.schema")


@dataclass(slots=True)
class _Head:
    """What all objects of one response share."""

    model: str
    body: Fields
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def response(self, output: Sequence[dict[str, Any]], end: Finished | None) -> dict[str, Any]:
        """The response object; without `end` it is in progress."""
        body = self.body
        limited = end is not None and end.reason != "stop"
        status = "in_progress" if end is None else "incomplete" if limited else "completed"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None if end is None else int(time.time()),
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if limited else None,
            "error": None,
            "model": self.model,
            "output": output,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": body.flag("parallel_tool_calls", default=True),
            "previous_response_id": None,
            "reasoning": body.get("reasoning") or {},
            "store": False,
            "temperature": body.get("temperature"),
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": body.get("top_p"),
            "truncation": "disabled",
            "usage": None if end is None else _usage(end),
        }


def _usage(end: Finished) -> dict[str, Any]:
    prompt = end.prompt_n + end.cached_n
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": end.cached_n},
        "output_tokens": end.predicted_n,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + end.predicted_n,
    }


def _item(kind: str, text: str = "", *, name: str = "", call: str = "", done: bool = True) -> dict[str, Any]:
    """An output item: reasoning, message or function_call."""
    status = "completed" if done else "in_progress"
    if kind == "reasoning":
        content = [{"type": "reasoning_text", "text": text}] if done else []
        return {
            "id": f"rs_{uuid.uuid4().hex}",
            "type": kind,
            "summary": [],
            "content": content,
            "status": status,
        }
    if kind == "message":
        content = [_text_part(text)] if done else []
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": kind,
            "role": "assistant",
            "content": content,
            "status": status,
        }
    called = {"call_id": call, "name": name, "arguments": text}
    return {"id": f"fc_{uuid.uuid4().hex}", "type": kind, **called, "status": status}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _items(answer: Answer) -> list[dict[str, Any]]:
    items = [_item("reasoning", answer.reasoning)] if answer.reasoning else []
    if answer.content or not answer.calls:
        items.append(_item("message", answer.content))
    return items + [_item("function_call", c.arguments, name=c.name, call=c.id) for c in answer.calls]


class _Writer:
    """Events of a streamed response."""

    content_type = EVENTS
    family = Family.OPENAI

    def __init__(self, head: _Head) -> None:
        self._head = head
        self._sequence = 0
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text = ""

    def _event(self, kind: str, **members: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return event({"type": kind, "sequence_number": number, **members}, kind)

    def begin(self) -> bytes:
        response = self._head.response([], None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def part(self, part: Part) -> bytes:
        out = b"".join(self._delta(delta) for delta in part.deltas)
        if part.finished is None:
            return out
        if not self._items and self._open is None:
            out += self._start("message")
        out += self._finish()
        response = self._head.response(self._items, part.finished)
        return out + self._event(
            f"response.{response['status']}", response=response, timings=timings(part.finished)
        )

    def end(self) -> bytes:
        return b""

    def fail(self, body: dict[str, object]) -> bytes:
        error = body["error"]
        assert isinstance(error, dict)
        return self._event("error", code=error["type"], message=error["message"], param=None)

    def _where(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._items)}

    def _delta(self, delta: Delta) -> bytes:
        if delta.kind is Kind.CALL:
            return self._finish() + self._start("function_call", name=delta.name, call=delta.id)
        kind, name = {
            Kind.CONTENT: ("message", "response.output_text.delta"),
            Kind.REASONING: ("reasoning", "response.reasoning_text.delta"),
            Kind.ARGUMENTS: ("function_call", "response.function_call_arguments.delta"),
        }[delta.kind]
        out = b""
        if self._open is None or self._open["type"] != kind:
            out = self._finish() + self._start(kind)
        self._text += delta.text
        index = {} if kind == "function_call" else {"content_index": 0}
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return out + self._event(name, **self._where(), **index, delta=delta.text, **more)

    def _start(self, kind: str, *, name: str = "", call: str = "") -> bytes:
        self._open, self._text = _item(kind, name=name, call=call, done=False), ""
        out = self._event("response.output_item.added", output_index=len(self._items), item=self._open)
        if kind == "message":
            part = {"content_index": 0, "part": _text_part("")}
            out += self._event("response.content_part.added", **self._where(), **part)
        return out

    def _finish(self) -> bytes:
        item = self._open
        if item is None:
            return b""
        where = self._where()
        done = _item(item["type"], self._text, name=item.get("name", ""), call=item.get("call_id", ""))
        done["id"] = item["id"]
        out = b""
        if item["type"] == "message":
            at = {**where, "content_index": 0}
            out += self._event("response.output_text.done", **at, text=self._text, logprobs=[])
            out += self._event("response.content_part.done", **at, part=_text_part(self._text))
        elif item["type"] == "function_call":
            out += self._event(
                "response.function_call_arguments.done", **where, name=item["name"], arguments=self._text
            )
        else:
            out += self._event("response.reasoning_text.done", **where, content_index=0, text=self._text)
        out += self._event("response.output_item.done", output_index=len(self._items), item=done)
        self._items.append(done)
        self._open = None
        return out
