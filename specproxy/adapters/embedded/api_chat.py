"""OpenAI's /v1/chat/completions, as llama-server speaks it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from specproxy.adapters.embedded.body import Fields, parse_body
from specproxy.adapters.embedded.chat import Conversation, Prepared, normal_message
from specproxy.adapters.embedded.counts import (
    answers_total,
    finish_reason,
    logprob_entries,
    timings,
    total,
    usage,
)
from specproxy.adapters.embedded.forms import answer_form
from specproxy.adapters.embedded.keys import SERVICE
from specproxy.adapters.embedded.output import Answer, Delta, Kind, Part, collect
from specproxy.adapters.embedded.params import MAX_LOGPROBS, MAX_REPLIES, limit, sampling
from specproxy.adapters.embedded.replies import Family, Frames, event, json_response
from specproxy.adapters.embedded.service import Service, Work, threaded
from specproxy.adapters.embedded.streaming import EVENTS, stream_reply
from specproxy.adapters.embedded.tools import openai_tools
from specproxy.adapters.embedded.types import Finished, TokenLogprob

__all__ = ["chat_completions", "conversation", "message_of"]


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer one chat request, streamed or whole."""
    service = request.app[SERVICE]
    call = service.call(request)
    data = await request.read()
    body, prepared, work = await threaded(data, lambda: _prepare(service, data))
    reply = service.parts(call, work, prepared.parser)
    head = _Head(body.text("model") or service.names[0])
    if not body.flag("stream"):
        answers = await collect(reply, work.n)
        return json_response(_whole(head, answers, work.sampling.logprobs is not None))
    options = body.object("stream_options") or Fields({})
    return await stream_reply(request, reply, _Writer(head, options.flag("include_usage")), call.short_cut)


def _prepare(service: Service, data: bytes) -> tuple[Fields, Prepared, Work]:
    body = parse_body(data)
    prepared = service.chat.prepare(conversation(body))
    asked = service.with_defaults(body)
    work = Work(
        prompt=prepared.prompt,
        sampling=sampling(asked, service.card.vocab, logprobs=_logprobs(body), grammar=prepared.grammar),
        max_tokens=limit(asked, "max_completion_tokens", "max_tokens", "n_predict"),
        n=body.integer("n", 1, MAX_REPLIES) or 1,
        render_tokens=prepared.render_tokens,
    )
    return body, prepared, work


def conversation(body: Fields) -> Conversation:
    """The conversation that a chat request asks to continue.

    Raises:
        FieldError: it has no messages, or a field cannot be served.
    """
    messages = body.items("messages")
    if not messages:
        raise body.wrong("messages", "is required, and must not be empty")
    variables = body.object("chat_template_kwargs") or Fields({})
    extra = dict(variables.data)
    if effort := body.text("reasoning_effort"):
        extra.setdefault("reasoning_effort", effort)
    return Conversation(
        messages=[normal_message(message, f"messages[{i}]") for i, message in enumerate(messages)],
        form=answer_form(body),
        tools=openai_tools(body),
        split=body.choice("reasoning_format", ("auto", "none", "deepseek")) != "none",
        prefill=body.flag("prefill_assistant", default=True),
        generation_prompt=body.flag("add_generation_prompt", default=True),
        variables=extra,
    )


def _logprobs(body: Fields) -> int | None:
    top = body.integer("top_logprobs", 0, MAX_LOGPROBS)
    # llama.cpp's own name for it, which its clients also send here
    n_probs = body.integer("n_probs", 0, MAX_LOGPROBS)
    if body.flag("logprobs"):
        return top or n_probs or 0
    if top is not None:
        raise body.wrong("top_logprobs", "needs 'logprobs' to be true")
    return n_probs or None


@dataclass(slots=True)
class _Head:
    """What all objects of one reply share."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "choices": choices,
            "created": self.created,
            "id": self.id,
            "model": self.model,
            "system_fingerprint": "specproxy",
            "object": kind,
        }


def message_of(answer: Answer) -> dict[str, Any]:
    """A whole reply as a message."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}, "id": call.id}
            for call in answer.calls
        ]
    return message


def _whole(head: _Head, answers: Sequence[Answer], logprobs: bool) -> dict[str, Any]:
    choices = []
    for answer in answers:
        choice: dict[str, Any] = {
            "finish_reason": finish_reason(len(answer.calls), answer.finished),
            "index": answer.index,
            "message": message_of(answer),
        }
        if logprobs:
            choice["logprobs"] = {"content": logprob_entries(answer.logprobs)}
        choices.append(choice)
    end = answers_total(answers)
    return head.wrap("chat.completion", choices) | {"usage": usage(end), "timings": timings(end)}


class _Writer:
    """Chunks of a streamed chat reply."""

    content_type = EVENTS
    family = Family.OPENAI

    def __init__(self, head: _Head, include_usage: bool) -> None:
        self._head = head
        self._include_usage = include_usage
        self._begun: set[int] = set()
        self._calls: dict[int, int] = {}
        self._logprobs: dict[int, list[TokenLogprob]] = {}
        self._ends: list[Finished] = []
        self._frames = Frames(lambda index, text: self._chunk(index, {"content": text}))

    def begin(self) -> bytes:
        return b""

    def part(self, part: Part) -> bytes:
        out = b""
        if part.index not in self._begun:
            self._begun.add(part.index)
            out += self._chunk(part.index, {"role": "assistant", "content": None})
        waiting = self._logprobs.setdefault(part.index, [])
        waiting += part.logprobs
        for delta in part.deltas:
            if delta.kind is Kind.CALL:
                self._calls[part.index] = delta.call + 1
            if delta.kind is Kind.CONTENT and not waiting:
                out += self._frames.chunk(part.index, delta.text)
                continue
            out += self._chunk(part.index, _delta(delta), waiting)
            waiting.clear()
        return out + self._finish(part.index, part.finished) if part.finished else out

    def _finish(self, index: int, end: Finished) -> bytes:
        self._ends.append(end)
        reason = finish_reason(self._calls.get(index, 0), end)
        chunk = self._head.wrap(
            "chat.completion.chunk", [{"finish_reason": reason, "index": index, "delta": {}}]
        )
        if waiting := self._logprobs.get(index):
            chunk["choices"][0]["logprobs"] = {"content": logprob_entries(waiting)}
        if not self._include_usage:
            chunk["timings"] = timings(end)
        return event(chunk)

    def end(self) -> bytes:
        out = b""
        if self._include_usage:
            end = total(self._ends)
            last = self._head.wrap("chat.completion.chunk", [])
            out = event(last | {"usage": usage(end), "timings": timings(end)})
        return out + b"data: [DONE]\n\n"

    def fail(self, body: dict[str, object]) -> bytes:
        return event(body)

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        choice: dict[str, Any] = {"finish_reason": None, "index": index, "delta": delta}
        if logprobs:
            choice["logprobs"] = {"content": logprob_entries(logprobs)}
        return event(self._head.wrap("chat.completion.chunk", [choice]))


def _delta(delta: Delta) -> dict[str, Any]:
    if delta.kind is Kind.CONTENT:
        return {"content": delta.text}
    if delta.kind is Kind.REASONING:
        return {"reasoning_content": delta.text}
    call: dict[str, Any] = {"index": delta.call, "function": {"arguments": delta.text}}
    if delta.kind is Kind.CALL:
        call |= {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
    return {"tool_calls": [call]}
