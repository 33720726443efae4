"""Reads a reply beside its stream: tokens, timings, usage, and whether it came to its end.

The tap sees the very bytes that go to the client and changes nothing. It runs for every event of every stream,
so an event is parsed only if it holds a key that promises figures or an end; all others cost a few searches.
Memory is constant: events longer than `split.EVENT_LIMIT` and documents are kept by their end only. A reply
that is to be replayed is held as it came, up to a limit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from specproxy.adapters.base import Headers
from specproxy.proxy.dialects.fields import Json, mapping, objects
from specproxy.proxy.dialects.replies import Figures, parse_object, salvage
from specproxy.proxy.split import EVENT_LIMIT, LineSplitter, SseSplitter, Tail, event_data
from specproxy.records import Dialect, TimingSource

__all__ = ["ReplyFacts", "Tap"]

# How far figures are to be trusted. Wall clock includes scheduling and the network; events are not tokens.
WEIGHT_SERVER = 1.0
WEIGHT_USAGE = 0.5
WEIGHT_WHOLE = 0.2
WEIGHT_ESTIMATE = 0.25

# With wall clock, decode time is honest only if tokens really came one after the other: a server that
# collects a tool call or hidden thoughts and sends them at once shows far fewer events than tokens. A
# speculating server may put a whole accepted draft into one event, hence not one for one.
MAX_TOKENS_PER_EVENT = 8

# Without a stream only the whole duration is known. It stands for the decode time if the prompt is short
# beside the output: prefill is at least four times as fast a token, so that a quarter as many tokens add 6%
# at most.
MAX_PROMPT_SHARE = 0.25

_OLLAMA = frozenset({Dialect.OLLAMA_CHAT, Dialect.OLLAMA_GENERATE})
_OPENAI = frozenset({Dialect.OPENAI_CHAT, Dialect.OPENAI_COMPLETIONS})
_LLAMACPP = frozenset({Dialect.LLAMACPP, Dialect.LLAMACPP_INFILL})

# A key with a string that is not empty: text, thoughts, or a piece of a tool call.
_CONTENT = re.compile(
    rb'"(?:content|reasoning_content|reasoning|thinking|text|response|delta|arguments|partial_json|name)"\s?:\s?"[^"]'
)
# Thoughts, and how Ollama's OpenAI routes are known.
_THOUGHTS, _BY_OLLAMA = re.compile(rb'"(?:thinking|reasoning)"\s?:\s?"[^"]'), b'"fp_ollama"'
# The same of its Responses route, where nothing else bears its name: others number thoughts in hex digits.
_OLLAMA_THOUGHTS = re.compile(rb'"(?:item_)?id"\s?:\s?"rs_(?:resp_)?\d{1,6}"')
# Events that may carry content, where other events hold text too.
_CONTENT_ONLY_IN = {Dialect.OPENAI_RESPONSES: b'.delta"', Dialect.ANTHROPIC: b"content_block_delta"}

_FIGURE_MARKS = (b'"timings"', b'"usage"', b'"error"', b"error:", b'"stats"', b'"metrics"', b'"sglext"')
_END_MARKS: dict[Dialect, tuple[bytes, ...]] = {
    Dialect.OPENAI_CHAT: (b"[DONE]", b'"finish_reason":"', b'"finish_reason": "'),
    Dialect.OPENAI_COMPLETIONS: (b"[DONE]", b'"finish_reason":"', b'"finish_reason": "'),
    Dialect.OPENAI_RESPONSES: (b"response.completed", b"response.incomplete", b"response.failed"),
    Dialect.OLLAMA_CHAT: (b'"done":true', b'"done": true'),
    Dialect.OLLAMA_GENERATE: (b'"done":true', b'"done": true'),
    Dialect.ANTHROPIC: (b"message_stop", b"server_tool_use"),
    Dialect.LLAMACPP: (b'"stop":true', b'"stop": true'),
    Dialect.LLAMACPP_INFILL: (b'"stop":true', b'"stop": true'),
}


@dataclass(frozen=True, slots=True)
class ReplyFacts:
    """What a reply said about itself. Times are in seconds, `ttft_at` is an instant of the caller's clock.

    `decode_s` covers `output_tokens - 1` tokens. `ttft_at` is the first content of a stream, thoughts and
    tool calls included; None for a reply in one piece. `complete` says that the reply reached the end that
    its dialect marks; where that cannot be read (an unknown dialect, a compressed reply) it is true and the
    transport decides. `error` is an error status, or an error in mid-stream. `weight` (0 to 1) is how far the
    figures are to be trusted. `thought` says that an Ollama showed thoughts: with a form for the answer it then
    decodes twice, and its figures are of the second time alone.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prefill_s: float | None = None
    decode_s: float | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0
    load_s: float = 0.0
    ttft_at: float | None = None
    source: TimingSource = TimingSource.NONE
    complete: bool = False
    error: bool = False
    weight: float = 0.0
    thought: bool = False


class Tap:
    """Reads one reply: `head`, then `feed` for every read, then `finish` once. Never raises.

    `tokens_per_event` is what a content event counts where the stream tells no usage; the caller learns it.
    `now` is any monotonic clock, in seconds; `started` is when the request was sent, None if that is not known.
    `hold` is how many bytes of a body may be held for `held`; a longer one is let go.
    """

    def __init__(
        self,
        dialect: Dialect | None,
        *,
        tokens_per_event: float = 1.0,
        started: float | None = None,
        hold: int = 0,
    ) -> None:
        self._dialect = dialect
        self._tokens_per_event = tokens_per_event
        self._started = started
        self._figures = Figures()
        self._splitter: SseSplitter | LineSplitter | None = None
        self._sse = False
        self._document = Tail()
        self._readable = False
        self._marks = _END_MARKS[dialect] + _FIGURE_MARKS if dialect else ()
        self._gate = _CONTENT_ONLY_IN.get(dialect, b"") if dialect else b""
        self._events = 0
        self._first_at: float | None = None
        self._done_at: float | None = None
        self._error = False
        self._several = False
        self._thought = False
        self._hold = hold
        self._held: list[bytes] = []

    @property
    def held(self) -> tuple[bytes, ...]:
        """The body as it came; empty if it was not to be held, is too long, or cannot be read."""
        return tuple(self._held)

    @property
    def content_events(self) -> int:
        """Events with content so far: beside `output_tokens`, what `tokens_per_event` is learned from."""
        return self._events

    def head(
        self,
        status: int,
        headers: Headers,
        now: float,  # noqa: ARG002  # every call carries the time; here it is not needed yet
    ) -> None:
        """Take in the status and headers, which say how the body is to be read."""
        values = {name.lower(): value.strip().lower() for name, value in headers}
        self._error = status >= 400
        self._readable = self._dialect is not None and values.get(b"content-encoding", b"") in (
            b"",
            b"identity",
        )
        if not self._readable:
            return
        kind = values.get(b"content-type", b"").partition(b";")[0].rstrip()
        if kind == b"text/event-stream":
            self._splitter, self._sse = SseSplitter(), True
        elif kind in (b"application/x-ndjson", b"application/jsonl"):
            self._splitter = LineSplitter()

    def feed(self, parts: Sequence[bytes], now: float) -> None:
        """Take in what arrived in one read."""
        if not self._readable:
            if self._first_at is None and any(parts):
                self._first_at = now
            return
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        if self._hold:
            self._keep(data)
        if self._splitter is None:
            self._document.feed(data)
        else:
            self._events_of(self._splitter.feed(data), now)

    def finish(self, now: float) -> ReplyFacts:
        """Conclude, whether the reply came to its end or not. `now` is when the transport was done."""
        if self._splitter is not None:
            self._events_of(self._splitter.end(), now)
        elif self._readable:
            self._read_document(now)
        if not self._readable:
            return ReplyFacts(ttft_at=self._first_at, complete=not self._error, error=self._error)
        return self._conclude()

    # --- reading ---------------------------------------------------------------------------------

    def _keep(self, data: bytes) -> None:
        self._hold = max(0, self._hold - len(data))
        self._held.append(data)
        if not self._hold:
            self._held.clear()

    def _events_of(self, events: list[bytes], now: float) -> None:
        """Look at events that were completed by one read; most reads hold no figures and no end."""
        gate, search = self._gate, _CONTENT.search
        counted = sum(1 for event in events if gate in event and search(event))
        if counted:
            self._events += counted
            if self._first_at is None:
                self._first_at = now
                self._look_for_thoughts(b"\n".join(events))
        together = events[0] if len(events) == 1 else b"\n".join(events)
        if len(together) < EVENT_LIMIT and not self._is_marked(together):
            return
        for event in events:
            if len(event) >= EVENT_LIMIT:
                self._take(salvage(event), now)
            elif self._is_marked(event):
                self._inspect(event, now)

    def _look_for_thoughts(self, data: bytes) -> None:
        """Whether an Ollama begins with thoughts."""
        if self._dialect is Dialect.OPENAI_RESPONSES:
            self._thought = bool(_OLLAMA_THOUGHTS.search(data))
        else:
            self._thought = bool(_THOUGHTS.search(data)) and (self._dialect in _OLLAMA or _BY_OLLAMA in data)

    def _is_marked(self, data: bytes) -> bool:
        """Whether anything in it promises figures, an end or an error."""
        return any(mark in data for mark in self._marks)

    def _inspect(self, event: bytes, now: float) -> None:
        """Look into an event that may hold figures, an end or an error."""
        data = event_data(event) if self._sse else event
        if data == b"[DONE]":
            self._mark_done(now)
        elif event.startswith(b"error:"):
            self._error = True
        else:
            self._take(parse_object(data) or {}, now)

    def _take(self, payload: Json, now: float) -> None:
        self._read(payload)
        if _is_error(payload):
            self._error = True
        elif self._dialect is not None and _is_end(self._dialect, payload):
            self._mark_done(now)

    def _read(self, payload: Json) -> None:
        self._figures.read(payload)
        choices = list(objects(payload.get("choices")))
        several = len(choices) > 1 or any(choice.get("index") for choice in choices)
        self._several = self._several or several or _searched(payload)

    def _mark_done(self, now: float) -> None:
        if self._done_at is None:
            self._done_at = now

    def _read_document(self, now: float) -> None:
        """A reply in one piece: parsed whole if it was kept whole, else by what its end holds."""
        text = self._document.end()
        self._look_for_thoughts(text)
        payload = parse_object(text) if self._document.whole else salvage(text)
        if payload is not None:
            self._read(payload)
            self._error = self._error or _is_error(payload)
        if payload is not None and text.rstrip().endswith(b"}"):
            self._mark_done(now)

    # --- concluding ------------------------------------------------------------------------------

    def _conclude(self) -> ReplyFacts:
        figures = self._figures
        source = self._source()
        tokens = figures.output_tokens
        decode_s, weight = figures.decode_s, WEIGHT_SERVER
        if source is TimingSource.ESTIMATE:
            tokens = round(self._events * self._tokens_per_event)
        if source is not TimingSource.SERVER:
            decode_s, weight = self._wall_clock(tokens, source)
        complete = self._done_at is not None and not self._error
        return ReplyFacts(
            prompt_tokens=figures.prompt_tokens,
            cached_tokens=figures.cached_tokens,
            output_tokens=tokens,
            prefill_s=figures.prefill_s,
            decode_s=decode_s,
            draft_tokens=figures.draft_tokens,
            accepted_tokens=figures.accepted_tokens,
            load_s=figures.load_s,
            ttft_at=self._first_at,
            source=source,
            complete=complete,
            error=self._error,
            weight=weight if complete and not self._several else 0.0,
            thought=self._thought,
        )

    def _source(self) -> TimingSource:
        if self._figures.timed:
            return TimingSource.SERVER
        if self._figures.counted:
            return TimingSource.USAGE
        return TimingSource.ESTIMATE if self._events else TimingSource.NONE

    def _wall_clock(self, tokens: int, source: TimingSource) -> tuple[float | None, float]:
        """Decode time by the clock and its weight: from the first content to the end, or nothing honest."""
        if self._done_at is None:
            return None, 0.0
        if self._first_at is not None:
            if self._events < 2 or tokens > self._events * MAX_TOKENS_PER_EVENT:
                return None, 0.0
            weight = WEIGHT_USAGE if source is TimingSource.USAGE else WEIGHT_ESTIMATE
            return self._done_at - self._first_at, weight
        fresh = self._figures.prompt_tokens - self._figures.cached_tokens
        if self._started is None or source is not TimingSource.USAGE or fresh > tokens * MAX_PROMPT_SHARE:
            return None, 0.0
        return self._done_at - self._started, WEIGHT_WHOLE


def _searched(payload: Json) -> bool:
    """Whether the server called a tool of its own and went on: then it has decoded more than once."""
    blocks = (mapping(payload.get("content_block")), *objects(payload.get("content")))
    return any(block.get("type") == "server_tool_use" for block in blocks)


def _is_error(payload: Json) -> bool:
    """Whether an object reports an error in the middle of a stream (every dialect has its place for it)."""
    if payload.get("error") or payload.get("type") in ("error", "response.failed"):
        return True
    return bool(mapping(payload.get("response")).get("error"))


def _is_end(dialect: Dialect, payload: Json) -> bool:
    """Whether an object of a stream says that the text is complete.

    Of an object too long to keep, `done` or `stop` may be cut off; what stands only in last objects tells then.
    """
    if dialect in _OPENAI:
        return any(isinstance(choice.get("finish_reason"), str) for choice in objects(payload.get("choices")))
    if dialect in _OLLAMA:
        return payload.get("done") is True or "eval_count" in payload
    if dialect in _LLAMACPP:
        return payload.get("stop") is True or "stop_type" in payload
    if dialect is Dialect.ANTHROPIC:
        return payload.get("type") == "message_stop"
    return payload.get("type") in ("response.completed", "response.incomplete")
