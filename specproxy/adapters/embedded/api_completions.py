"""OpenAI's /v1/completions, /v1/embeddings and /v1/models, as llama-server speaks them."""

from __future__ import annotations

import base64
import math
import struct
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from specproxy.adapters.embedded.body import Fields, parse_body
from specproxy.adapters.embedded.counts import finish_reason, logprob_entries, timings, total, usage
from specproxy.adapters.embedded.forms import form_grammar
from specproxy.adapters.embedded.keys import SERVICE
from specproxy.adapters.embedded.output import Answer, Part, ShortCut, collect
from specproxy.adapters.embedded.params import MAX_LOGPROBS, MAX_REPLIES, limit, sampling
from specproxy.adapters.embedded.prompts import prompts
from specproxy.adapters.embedded.replies import Family, Frames, event, json_response
from specproxy.adapters.embedded.service import Call, Service, Work, threaded
from specproxy.adapters.embedded.streaming import EVENTS, stream_reply
from specproxy.adapters.embedded.types import Finished, Sampling, TokenLogprob

__all__ = ["completions", "embeddings", "models"]

NOT_HERE = {"suffix": ("",), "echo": (False,)}


async def completions(request: web.Request) -> web.StreamResponse:
    """Complete one prompt or several, streamed or whole."""
    service = request.app[SERVICE]
    call = service.call(request)
    data = await request.read()
    body, works = await threaded(data, lambda: _prepare(service, data))
    head = _Head(body.text("model") or service.names[0])
    count = sum(work.n for work in works)
    reply = _all(service, call, works) if len(works) > 1 else service.parts(call, works[0])
    if not body.flag("stream"):
        return json_response(_whole(head, await collect(reply, count), works[0].sampling.logprobs is not None))
    options = body.object("stream_options") or Fields({})
    return await stream_reply(request, reply, _Writer(head, options.flag("include_usage")), call.short_cut)


def _prepare(service: Service, data: bytes) -> tuple[Fields, list[Work]]:
    body = parse_body(data)
    body.refuse(NOT_HERE)
    vocab = service.card.vocab
    asked = service.with_defaults(body)
    work = Work(
        prompt=(),
        sampling=sampling(asked, vocab, logprobs=_logprobs(body), grammar=form_grammar(body)),
        max_tokens=limit(asked, "max_tokens", "n_predict"),
        n=body.integer("n", 1, MAX_REPLIES) or 1,
    )
    return body, [replace(work, prompt=prompt) for prompt in prompts(body, "prompt", service.engine, vocab)]


def _logprobs(body: Fields) -> int | None:
    if isinstance(body.get("logprobs"), bool):  # llama-server takes the chat API's flag here too
        return (body.integer("n_probs", 0, MAX_LOGPROBS) or 0) if body.flag("logprobs") else None
    count = body.integer("logprobs", 0, MAX_LOGPROBS)
    return count if count is not None else body.integer("n_probs", 1, MAX_LOGPROBS)


async def _all(service: Service, call: Call, works: Sequence[Work]) -> AsyncGenerator[Part, None]:
    """The replies to several prompts, one prompt after the other, with indices that run on."""
    base = 0
    for i, work in enumerate(works):
        # reports and reader events are kept by request id; indices that run on leave no short cut
        number = f"/{i}" if i else ""
        each = replace(call, request_id=f"{call.request_id}{number}", short_cut=ShortCut())
        async with aclosing(service.parts(each, work)) as stream:
            async for part in stream:
                yield replace(part, index=base + part.index) if base else part
        base += work.n


@dataclass(slots=True)
class _Head:
    model: str
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "choices": choices,
            "created": self.created,
            "id": self.id,
            "model": self.model,
            "system_fingerprint": "specproxy",
            "object": "text_completion",
        }


def _log(logprobs: Sequence[TokenLogprob], offset: int = 0) -> dict[str, Any]:
    """Log probabilities in the form of this API, and beside it in llama-server's (`content`)."""
    texts = [entry.text.decode("utf-8", "replace") for entry in logprobs]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [entry.logprob for entry in logprobs],
        "top_logprobs": [
            {text.decode("utf-8", "replace"): value for _, text, value in entry.top} for entry in logprobs
        ],
        "text_offset": offsets,
        "content": logprob_entries(logprobs),
    }


def _whole(head: _Head, answers: Sequence[Answer], logprobs: bool) -> dict[str, Any]:
    choices = [
        {
            "text": answer.content,
            "index": answer.index,
            "logprobs": _log(answer.logprobs) if logprobs else None,
            "finish_reason": finish_reason(0, answer.finished),
        }
        for answer in answers
    ]
    end = total([answer.finished for answer in answers])
    return head.wrap(choices) | {"usage": usage(end), "timings": timings(end)}


class _Writer:
    """Chunks of a streamed completion."""

    content_type = EVENTS
    family = Family.OPENAI

    def __init__(self, head: _Head, include_usage: bool) -> None:
        self._head = head
        self._include_usage = include_usage
        self._ends: list[Finished] = []
        self._offsets: dict[int, int] = {}
        self._frames = Frames(lambda index, text: event(head.wrap([self._choice(index, text)])))

    def begin(self) -> bytes:
        return b""

    def part(self, part: Part) -> bytes:
        text = "".join([delta.text for delta in part.deltas])
        offset = self._offsets.get(part.index, 0)
        self._offsets[part.index] = offset + len(text)
        if part.finished is None and not part.logprobs:
            return self._frames.chunk(part.index, text) if text else b""
        log = _log(part.logprobs, offset) if part.logprobs else None
        choice = self._choice(part.index, text, log)
        if part.finished is None:
            return event(self._head.wrap([choice]))
        self._ends.append(part.finished)
        choice["finish_reason"] = finish_reason(0, part.finished)
        chunk = self._head.wrap([choice])
        if not self._include_usage:
            chunk |= {"usage": usage(part.finished), "timings": timings(part.finished)}
        return event(chunk)

    @staticmethod
    def _choice(index: int, text: str, log: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"text": text, "index": index, "logprobs": log, "finish_reason": None}

    def end(self) -> bytes:
        out = b""
        if self._include_usage:
            end = total(self._ends)
            out = event(self._head.wrap([]) | {"usage": usage(end), "timings": timings(end)})
        return out + b"data: [DONE]\n\n"

    def fail(self, body: dict[str, object]) -> bytes:
        return event(body)


async def embeddings(request: web.Request) -> web.StreamResponse:
    """Embed one input or several; vectors have length 1."""
    service = request.app[SERVICE]
    call = service.call(request)
    data = await request.read()
    body = parse_body(data)
    body.refuse({"dimensions": (service.card.embedding,)})
    as_base64 = body.choice("encoding_format", ("float", "base64")) == "base64"
    name = "input" if body.has("input") else "content"
    inputs = await threaded(data, lambda: prompts(body, name, service.engine, service.card.vocab))
    ends = [await embed(service, call, prompt) for prompt in inputs]
    rows = [
        {"object": "embedding", "index": i, "embedding": _packed(v) if as_base64 else list(v)}
        for i, v in enumerate(unit(end.embedding) for end in ends)
    ]
    tokens = sum(len(prompt) for prompt in inputs)
    return json_response(
        {
            "object": "list",
            "model": body.text("model") or service.names[0],
            "data": rows,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


async def embed(service: Service, call: Call, prompt: tuple[int, ...]) -> Finished:
    """Embed one prompt; the vector is in `Finished.embedding`, not normalised."""
    work = Work(prompt=prompt, sampling=Sampling(), max_tokens=0, want_embedding=True)
    return (await collect(service.parts(call, work), 1))[0].finished


def unit(vector: Sequence[float]) -> tuple[float, ...]:
    """A vector scaled to length 1."""
    norm = math.sqrt(sum(x * x for x in vector)) or 1.0
    return tuple(x / norm for x in vector)


def _packed(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


async def models(request: web.Request) -> web.StreamResponse:
    """The model under all of its names."""
    service = request.app[SERVICE]
    card = service.card
    meta = {
        "n_vocab": card.vocab,
        "n_ctx": card.context,
        "n_ctx_train": card.train_context,
        "n_embd": card.embedding,
        "n_params": card.parameters,
        "size": card.size_bytes,
    }
    created = int(service.started_at)
    listed = [
        {"id": name, "object": "model", "created": created, "owned_by": "specproxy", "meta": meta}
        for name in service.names
    ]
    return json_response({"object": "list", "data": listed})
