"""llama.cpp's own routes: completion, tokens and templates, and what shows the server's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from aiohttp import web

from specproxy import __version__
from specproxy.adapters.embedded.api_chat import conversation
from specproxy.adapters.embedded.body import Fields, parse_body
from specproxy.adapters.embedded.counts import logprob_entries, timings
from specproxy.adapters.embedded.forms import form_grammar
from specproxy.adapters.embedded.keys import SERVICE
from specproxy.adapters.embedded.output import Part, collect
from specproxy.adapters.embedded.params import MAX_LOGPROBS, MAX_REPLIES, limit, sampling
from specproxy.adapters.embedded.prompts import prompts, token_ids
from specproxy.adapters.embedded.replies import Family, event, json_response
from specproxy.adapters.embedded.service import Call, Service, Work, threaded
from specproxy.adapters.embedded.streaming import EVENTS, stream_reply
from specproxy.adapters.embedded.types import Finished, Sampling

__all__ = ["apply_template", "completion", "detokenize", "health", "metrics", "props", "slots", "tokenize"]


async def completion(request: web.Request) -> web.StreamResponse:
    """llama-server's native completion: one object for one reply, an array for several."""
    service = request.app[SERVICE]
    call = service.call(request)
    data = await request.read()
    body, works = await threaded(data, lambda: _prepare(service, data))
    if body.flag("stream"):
        if len(works) > 1 or works[0].n > 1:
            raise body.wrong("stream", "is only supported for one reply to one prompt")
        texts = _Results(service, call, works[0], with_tokens=True)
        return await stream_reply(request, service.parts(call, works[0]), _Writer(texts), call.short_cut)
    results: list[dict[str, Any]] = []
    for work in works:
        made = _Results(service, call, work, with_tokens=body.flag("return_tokens"))
        answers = await collect(service.parts(call, work), work.n)
        for answer in answers:
            made.logprobs = logprob_entries(answer.logprobs)
            made.tokens = answer.tokens
            results.append(made.final(len(results), answer.content, answer.finished))
    return json_response(results[0] if len(results) == 1 else results)


def _prepare(service: Service, data: bytes) -> tuple[Fields, list[Work]]:
    body = parse_body(data)
    vocab = service.card.vocab
    probs = body.integer("n_probs", 0, MAX_LOGPROBS)
    shared = sampling(body, vocab, logprobs=probs or None, grammar=form_grammar(body))
    tokens = limit(body, "n_predict", "max_tokens")
    n = body.integer("n_cmpl", 1, MAX_REPLIES) or body.integer("n", 1, MAX_REPLIES) or 1
    found = prompts(body, "prompt", service.engine, vocab)
    return body, [Work(prompt=prompt, sampling=shared, max_tokens=tokens, n=n) for prompt in found]


@dataclass(slots=True)
class _Results:
    """Result objects for the replies to one prompt."""

    service: Service
    call: Call
    work: Work
    with_tokens: bool
    tokens: Sequence[int] = ()
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    has_new_line: bool = False

    def partial(
        self, text: str, tokens: Sequence[int], predicted: int, logprobs: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """One piece of a stream."""
        result: dict[str, Any] = {
            "index": 0,
            "content": text,
            "tokens": tokens,
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": predicted,
            "tokens_evaluated": len(self.work.prompt),
        }
        if logprobs:
            result["completion_probabilities"] = logprobs
        return result

    def final(self, index: int, text: str, end: Finished) -> dict[str, Any]:
        """The last (or only) object of a reply."""
        limited = end.reason != "stop"
        result: dict[str, Any] = {
            "index": index,
            "content": text,
            "tokens": list(self.tokens) if self.with_tokens else [],
            "id_slot": 0,
            "stop": True,
            "model": self.service.names[0],
            "tokens_predicted": end.predicted_n,
            "tokens_evaluated": end.prompt_n + end.cached_n,
            "generation_settings": settings(self.work.sampling, self.work.max_tokens, self.call),
            "prompt": self.service.engine.detokenize(list(self.work.prompt)).decode("utf-8", "replace"),
            "has_new_line": self.has_new_line or "\n" in text,
            "truncated": False,
            "stop_type": "limit" if limited else "word" if end.stop_text else "eos",
            "stopping_word": end.stop_text,
            "tokens_cached": end.prompt_n + end.cached_n + max(0, end.predicted_n - 1),
            "timings": timings(end),
        }
        if self.logprobs:
            result["completion_probabilities"] = self.logprobs
        return result


def settings(sampling: Sampling, max_tokens: int | None, call: Call | None = None) -> dict[str, Any]:
    """Sampling as llama-server shows it."""
    shown = asdict(sampling)
    shown["logit_bias"] = [{"token": token, "bias": bias} for token, bias in sampling.logit_bias.items()]
    shown |= {
        "seed": 2**32 - 1 if sampling.seed is None else sampling.seed,
        "grammar": sampling.grammar or "",
        "n_predict": -1 if max_tokens is None else max_tokens,
        "n_probs": sampling.logprobs or 0,
        "speculative.types": call.strategy.name if call else "none",
    }
    for ours in ("logprobs", "stop_tokens"):
        del shown[ours]
    return shown


class _Writer:
    """Events of a streamed native completion; there is no [DONE]."""

    content_type = EVENTS
    family = Family.OPENAI

    def __init__(self, results: _Results) -> None:
        self._results = results
        self._predicted = 0

    def begin(self) -> bytes:
        return b""

    def part(self, part: Part) -> bytes:
        text = "".join(delta.text for delta in part.deltas)
        if part.finished is not None:
            return event(self._results.final(0, text, part.finished))
        self._predicted += len(part.tokens)
        self._results.has_new_line |= "\n" in text
        if not text and not part.tokens:
            return b""
        return event(self._results.partial(text, part.tokens, self._predicted, logprob_entries(part.logprobs)))

    def end(self) -> bytes:
        return b""

    def fail(self, body: dict[str, object]) -> bytes:
        return event(body)


async def tokenize(request: web.Request) -> web.StreamResponse:
    """Token ids of a text, with their pieces if asked."""
    engine = _engine(request)
    data = await request.read()
    body = parse_body(data)
    text = body.text("content") or ""
    special, parse = body.flag("add_special"), body.flag("parse_special", default=True)
    ids = await threaded(data, lambda: engine.tokenize(text, add_special=special, parse_special=parse))
    if not body.flag("with_pieces"):
        return json_response({"tokens": ids})

    def pieces() -> list[dict[str, Any]]:
        return [{"id": token, "piece": _piece(engine.detokenize([token]))} for token in ids]

    return json_response({"tokens": await threaded(data, pieces)})


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)  # part of a character


async def detokenize(request: web.Request) -> web.StreamResponse:
    """The text of token ids."""
    service = request.app[SERVICE]
    data = await request.read()

    def text() -> str:
        body = parse_body(data)
        ids = token_ids(body, "tokens", body.items("tokens") or [], service.card.vocab)
        return service.engine.detokenize(list(ids)).decode("utf-8", "replace")

    return json_response({"content": await threaded(data, text)})


async def apply_template(request: web.Request) -> web.StreamResponse:
    """The prompt that a chat request would be given."""
    service = request.app[SERVICE]
    data = await request.read()
    text = await threaded(data, lambda: service.chat.render(conversation(parse_body(data))))
    return json_response({"prompt": text})


async def props(request: web.Request) -> web.StreamResponse:
    """What is served, and with which defaults."""
    service = request.app[SERVICE]
    card, chat = service.card, service.chat
    return json_response(
        {
            "default_generation_settings": {"n_ctx": card.context, "params": settings(Sampling(), None)},
            "total_slots": service.slots,
            "model_alias": service.names[0],
            "model_path": card.path,
            "modalities": {"vision": False, "audio": False},
            "chat_template": chat.template.source,
            "bos_token": chat.bos_text,
            "eos_token": chat.eos_text,
            "build_info": f"specproxy {__version__} (embedded)",
            "is_sleeping": False,
            "strategies": [strategy.name for strategy in card.strategies],
            "strategies_refused": dict(card.refused),
            "memory": dict(card.memory),
        }
    )


async def slots(request: web.Request) -> web.StreamResponse:
    """Busy and free slots; `speculative` says whether a request there drafts."""
    service = request.app[SERVICE]
    calls = list(service.active.values())[: service.slots]  # those behind them wait
    busy = [
        {
            "id": i,
            "n_ctx": service.card.context,
            "is_processing": True,
            "speculative": not call.strategy.is_plain,
        }
        for i, call in enumerate(calls)
    ]
    free = [
        {"id": i, "n_ctx": service.card.context, "is_processing": False, "speculative": False}
        for i in range(len(busy), service.slots)
    ]
    return json_response(busy + free)


async def health(request: web.Request) -> web.StreamResponse:
    """Whether the model has been loaded."""
    _ = request.app[SERVICE].card
    return json_response({"status": "ok"})


METRICS = (
    ("prompt_tokens_total", "Prompt tokens processed.", "prompt_tokens", 1),
    ("prompt_seconds_total", "Time spent on prompts.", "prompt_ms", 1000),
    ("tokens_predicted_total", "Tokens generated.", "predicted_tokens", 1),
    ("tokens_predicted_seconds_total", "Time spent on generating.", "predicted_ms", 1000),
    ("spec_decode_num_draft_tokens_total", "Tokens drafted.", "drafted", 1),
    ("spec_decode_num_accepted_tokens_total", "Drafted tokens that were accepted.", "accepted", 1),
)


async def metrics(request: web.Request) -> web.StreamResponse:
    """Counters in Prometheus' text format, named as llama-server names them."""
    service = request.app[SERVICE]
    _ = service.card
    lines = []
    for name, description, attribute, scale in METRICS:
        value = getattr(service.counters, attribute) / scale
        lines += [
            f"# HELP llamacpp:{name} {description}",
            f"# TYPE llamacpp:{name} counter",
            f"llamacpp:{name} {value:g}",
        ]
    lines += [
        "# HELP llamacpp:requests_processing Requests being served.",
        "# TYPE llamacpp:requests_processing gauge",
        f"llamacpp:requests_processing {len(service.active)}",
    ]
    return web.Response(text="\n".join(lines) + "\n", headers={"Content-Type": "text/plain; version=0.0.4"})


def _engine(request: web.Request) -> Any:
    service = request.app[SERVICE]
    _ = service.card  # refuses while loading
    return service.engine
