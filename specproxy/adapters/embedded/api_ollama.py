"""Ollama's /api/chat, /api/generate and /api/embed for the embedded engine's model."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from specproxy.adapters.embedded.api_completions import embed, unit
from specproxy.adapters.embedded.body import FieldError, Fields, parse_body
from specproxy.adapters.embedded.chat import Conversation, Prepared
from specproxy.adapters.embedded.counts import logprob_entries
from specproxy.adapters.embedded.forms import FREE, Form
from specproxy.adapters.embedded.keys import SERVICE
from specproxy.adapters.embedded.ollama_options import check_model, options, unload_wanted
from specproxy.adapters.embedded.output import Answer, Kind, OutputParser, Part, ToolCall, collect
from specproxy.adapters.embedded.params import MAX_LOGPROBS
from specproxy.adapters.embedded.prompts import token_ids
from specproxy.adapters.embedded.replies import Family, json_response, line
from specproxy.adapters.embedded.service import Service, Work, threaded
from specproxy.adapters.embedded.streaming import NDJSON, stream_reply
from specproxy.adapters.embedded.tools import NO_TOOLS, openai_tools
from specproxy.adapters.embedded.types import Finished, TokenLogprob

__all__ = ["chat", "embed_many", "embed_one", "generate"]

TEMPLATE_FIELDS = {"suffix": ("",), "template": ("",), "images": ([],)}


async def chat(request: web.Request) -> web.StreamResponse:
    """Answer a chat request; streamed unless `stream` is false."""
    service, began = request.app[SERVICE], time.perf_counter()
    data = await request.read()
    body = parse_body(data)
    check_model(service, body)
    if not body.items("messages"):
        return await _load_or_unload(service, body, {"message": {"role": "assistant", "content": ""}})
    prepared, work = await threaded(data, lambda: _prepare(service, body, _chat(service, body)))
    return await _reply(request, body, prepared, work, _Shape(body.text("model") or "", chat=True, began=began))


async def generate(request: web.Request) -> web.StreamResponse:
    """Answer a prompt; streamed unless `stream` is false."""
    service, began = request.app[SERVICE], time.perf_counter()
    data = await request.read()
    body = parse_body(data)
    check_model(service, body)
    body.refuse(TEMPLATE_FIELDS)
    if not body.text("prompt"):
        return await _load_or_unload(service, body, {"response": ""})
    prepared, work = await threaded(data, lambda: _prepare_generate(service, body))
    shape = _Shape(body.text("model") or "", False, began, () if body.flag("raw") else work.prompt)
    return await _reply(request, body, prepared, work, shape)


async def _reply(
    request: web.Request, body: Fields, prepared: Prepared, work: Work, shape: _Shape
) -> web.StreamResponse:
    service = request.app[SERVICE]
    call = service.call(request)
    reply = service.parts(call, work, prepared.parser)
    if body.flag("stream", default=True):
        response = await stream_reply(request, reply, _Writer(shape), call.short_cut)
    else:
        response = json_response(_whole(shape, (await collect(reply, 1))[0]))
    if unload_wanted(body):
        await service.engine.unload()
    return response


async def _load_or_unload(service: Service, body: Fields, empty: dict[str, Any]) -> web.Response:
    """A request without a prompt loads the model, or unloads it where `keep_alive` is 0."""
    reason = "load"
    if unload_wanted(body):
        await service.engine.unload()
        reason = "unload"
    else:
        await service.engine.start()
    head = {"model": body.text("model"), "created_at": now()}
    return json_response(head | empty | {"done": True, "done_reason": reason})


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


def _prepare(service: Service, body: Fields, conversation: Conversation) -> tuple[Prepared, Work]:
    prepared = service.chat.prepare(conversation)
    return prepared, _work(service, body, prepared)


def _work(service: Service, body: Fields, prepared: Prepared) -> Work:
    own = dict(service.setup.parameters) if service.setup is not None else None
    chosen, limit = options(body, service.card.vocab, own)
    top = body.integer("top_logprobs", 0, MAX_LOGPROBS)
    logprobs = (top or 0) if body.flag("logprobs") else None
    return Work(
        prompt=prepared.prompt,
        sampling=replace(chosen, grammar=prepared.grammar, logprobs=logprobs),
        max_tokens=limit,
        render_tokens=prepared.render_tokens,
    )


def _chat(service: Service, body: Fields) -> Conversation:
    messages = [_message(message) for message in body.objects("messages")]
    return Conversation(
        messages=messages,
        form=_form(body),
        tools=openai_tools(body) if body.has("tools") else NO_TOOLS,
        thinking=_thinking(service, body),
        variables=_effort(body),
    )


def _message(given: Fields) -> dict[str, Any]:
    if given.items("images"):
        raise given.wrong("images", "cannot be used: this model only reads text")
    message: dict[str, Any] = {"role": given.text("role") or "user", "content": given.text("content") or ""}
    calls = [call.object("function") or Fields({}) for call in given.objects("tool_calls")]
    if calls:
        message["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": call.text("name"), "arguments": call.get("arguments") or {}},
            }
            for call in calls
        ]
    if name := given.text("tool_name") or given.text("name"):
        message["name"] = name
    if thinking := given.text("thinking"):
        message["reasoning_content"] = thinking
    return message


def _form(body: Fields) -> Form:
    value = body.get("format")
    if value is None or value == "":
        return FREE
    if value == "json":
        return Form(schema={"type": "object"}, field="format")
    if not isinstance(value, dict):
        raise body.wrong("format", "must be 'json' or a JSON schema")
    return Form(schema=value, field="format")


def _thinking(service: Service, body: Fields) -> bool | None:
    """`think`, which may also be an effort; models that can reason do so unless told otherwise."""
    value = body.get("think")
    can = service.chat.tags is not None
    if isinstance(value, str) and value not in ("low", "medium", "high"):
        raise body.wrong("think", "must be a boolean, low, medium or high")
    if value and not can:
        raise FieldError("think", f"{body.text('model')!r} does not support thinking")
    if not can:
        return None
    return True if value is None else bool(value)


def _effort(body: Fields) -> Mapping[str, Any]:
    return {"reasoning_effort": body.get("think")} if isinstance(body.get("think"), str) else {}


def _prepare_generate(service: Service, body: Fields) -> tuple[Prepared, Work]:
    prompt = body.text("prompt") or ""
    form = _form(body)
    if body.flag("raw"):
        ids = service.engine.tokenize(prompt)
        prepared = replace(
            service.chat.prepare(Conversation([], form=form)), prompt=tuple(ids), parser=OutputParser
        )
        return prepared, _work(service, body, prepared)
    messages = [{"role": "user", "content": prompt}]
    if system := body.text("system"):
        messages.insert(0, {"role": "system", "content": system})
    prepared = service.chat.prepare(
        Conversation(messages, form=form, thinking=_thinking(service, body), variables=_effort(body))
    )
    before = token_ids(body, "context", body.get("context") or [], service.card.vocab)
    if before:  # an earlier reply's `context`: this turn goes on from there, without a BOS of its own
        own = prepared.prompt[1:] if prepared.prompt[:1] == (service.card.bos,) else prepared.prompt
        prepared = replace(prepared, prompt=before + own)
    return prepared, _work(service, body, prepared)


def durations(end: Finished, total_s: float) -> dict[str, int]:
    """Counts, and times in nanoseconds. The prompt's count includes cached tokens, as Ollama's does.

    `total_s` is all the time since the request came; waiting for others is in no other duration.
    """
    load, prompt, predicted = (round(ms * 1e6) for ms in (end.load_ms, end.prompt_ms, end.predicted_ms))
    return {
        "total_duration": max(round(total_s * 1e9), load + prompt + predicted),
        "load_duration": load,
        "prompt_eval_count": end.prompt_n + end.cached_n,
        "prompt_eval_duration": prompt,
        "eval_count": end.predicted_n,
        "eval_duration": predicted,
    }


@dataclass(frozen=True, slots=True)
class _Shape:
    """The objects of one reply. `prompt` is given where the last one tells the `context` to go on from."""

    model: str
    chat: bool
    began: float  # time.perf_counter() when the request came
    prompt: tuple[int, ...] = ()

    def head(self) -> dict[str, Any]:
        """Members that every object begins with."""
        return {"model": self.model, "created_at": now()}

    def text(self, content: str, thinking: str, calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """Members that carry text."""
        thought = {"thinking": thinking} if thinking else {}
        if not self.chat:
            return {"response": content, **thought}
        called = {"tool_calls": calls} if calls else {}
        return {"message": {"role": "assistant", "content": content, **thought, **called}}

    def last(self, end: Finished, tokens: Sequence[int]) -> dict[str, Any]:
        """Members that only the last object has."""
        reason = "stop" if end.reason == "stop" else "length"
        context = {"context": [*self.prompt, *tokens]} if self.prompt else {}
        taken = durations(end, time.perf_counter() - self.began)
        return {"done": True, "done_reason": reason, **context, **taken}


def _tool_call(index: int, call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        arguments = {}  # cut off by the length limit
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}


def _logged(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"logprobs": logprob_entries(logprobs)} if logprobs else {}


def _whole(shape: _Shape, answer: Answer) -> dict[str, Any]:
    calls = [_tool_call(i, call) for i, call in enumerate(answer.calls)]
    text = shape.text(answer.content, answer.reasoning, calls)
    return shape.head() | text | _logged(answer.logprobs) | shape.last(answer.finished, answer.tokens)


@dataclass(slots=True)
class _Open:
    """A tool call that is still being written: Ollama sends calls whole."""

    index: int
    call: ToolCall


class _Writer:
    """Lines of a streamed reply."""

    content_type = NDJSON
    family = Family.OLLAMA

    def __init__(self, shape: _Shape) -> None:
        self._shape = shape
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._open: _Open | None = None

    def begin(self) -> bytes:
        return b""

    def part(self, part: Part) -> bytes:
        self._tokens += part.tokens
        self._logprobs += part.logprobs
        out = b""
        for delta in part.deltas:
            if delta.kind is Kind.CONTENT:
                out += self._line(delta.text, "")
            elif delta.kind is Kind.REASONING:
                out += self._line("", delta.text)
            elif delta.kind is Kind.CALL:
                out += self._flush()
                self._open = _Open(delta.call, ToolCall(delta.id, delta.name))
            elif self._open is not None:
                self._open.call.arguments += delta.text
        if part.finished is None:
            return out
        last = self._shape.head() | self._shape.text("", "") | self._shape.last(part.finished, self._tokens)
        return out + self._flush() + line(last | _logged(self._logprobs))

    def _flush(self) -> bytes:
        if self._open is None:
            return b""
        call, self._open = _tool_call(self._open.index, self._open.call), None
        return line(self._shape.head() | self._shape.text("", "", (call,)) | {"done": False})

    def _line(self, content: str, thinking: str) -> bytes:
        logged, self._logprobs = _logged(self._logprobs), []
        return line(self._shape.head() | self._shape.text(content, thinking) | {"done": False} | logged)

    def end(self) -> bytes:
        return b""

    def fail(self, body: dict[str, object]) -> bytes:
        return line(body)


async def embed_many(request: web.Request) -> web.StreamResponse:
    """/api/embed: vectors of length 1 for one input or several."""
    service = request.app[SERVICE]
    data = await request.read()
    body = parse_body(data)
    check_model(service, body)
    call = service.call(request)
    texts = () if body.get("input") == "" else body.texts("input")
    inputs = await threaded(data, lambda: [tuple(service.engine.tokenize(text)) for text in texts])
    ends = [await embed(service, call, prompt) for prompt in inputs]
    milliseconds = sum(end.prompt_ms for end in ends)
    load = sum(end.load_ms for end in ends)
    return json_response(
        {
            "model": body.text("model"),
            "embeddings": [unit(end.embedding) for end in ends],
            "total_duration": round((milliseconds + load) * 1e6),
            "load_duration": round(load * 1e6),
            "prompt_eval_count": sum(map(len, inputs)),
        }
    )


async def embed_one(request: web.Request) -> web.StreamResponse:
    """/api/embeddings, the older form: one prompt, the vector as it is."""
    service = request.app[SERVICE]
    data = await request.read()
    body = parse_body(data)
    check_model(service, body)
    text = body.text("prompt")
    if not text:
        return json_response({"embedding": []})
    prompt = await threaded(data, lambda: tuple(service.engine.tokenize(text)))
    end = await embed(service, service.call(request), prompt)
    return json_response({"embedding": list(end.embedding)})
