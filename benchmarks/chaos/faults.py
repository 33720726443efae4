"""What an upstream can do wrong: each fault is the bytes that it sends for a request, and how it ends.

A fault says what content it sends, so that a client's side can be held against it byte by byte: nothing may be
added, and nothing may be made to look complete that is not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = ["FAULTS", "SHAPES", "Answer", "Ending", "Shape", "Then"]


class Ending(StrEnum):
    """How a request ended for its client."""

    COMPLETE = "complete"  # framed to its end
    ERROR = "error"  # a whole error in the client's dialect, by the proxy
    CUT = "cut"  # broken off, and the client can tell


class Then(StrEnum):
    """What an upstream does after its bytes."""

    KEEP = "keep"
    CLOSE = "close"
    RESET = "reset"
    SILENT = "silent"  # until the other side has gone


@dataclass(frozen=True)
class Shape:
    """How requests and replies look in one dialect."""

    name: str
    path: str
    content_type: bytes
    events: tuple[bytes, ...]
    last: bytes  # what marks the end of the text
    error_event: bytes

    def body(self, tag: str, *, stream: bool = True) -> bytes:
        """A request that carries a tag in a field which no proxy looks at."""
        message = {"role": "user", "content": f"Say something about rivers, {tag}."}
        request: dict[str, Any] = {"model": "m", "stream": stream, "messages": [message], "user": tag}
        return json.dumps(request | ({"max_tokens": 64} if self.name == "anthropic" else {})).encode()

    def is_error(self, body: bytes) -> bool:
        """Whether a body is an error as a server of this dialect words it."""
        try:
            data = json.loads(body)
        except ValueError:
            return False
        if self.name == "ollama":
            return isinstance(data.get("error"), str)
        error = data.get("error")
        said = isinstance(error, dict) and isinstance(error.get("message"), str) and "type" in error
        return said and (self.name != "anthropic" or data.get("type") == "error")


def _sse(data: object, event: str = "") -> bytes:
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def _chat(text: str, finish: str | None = None) -> bytes:
    delta = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}
    return _sse({"object": "chat.completion.chunk", "model": "m", "choices": [delta]})


def _ollama(text: str, **more: object) -> bytes:
    line = {"model": "m", "message": {"role": "assistant", "content": text}, "done": False, **more}
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


def _delta(text: str) -> bytes:
    delta = {"type": "text_delta", "text": text}
    return _sse({"type": "content_block_delta", "index": 0, "delta": delta}, "content_block_delta")


_WORDS = ("The ", "river ", "flows ", "über ", "Stöcke ", "and ", "石 ", "to ", "the ", "sea.")

SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "openai",
            "/v1/chat/completions",
            b"text/event-stream",
            tuple(_chat(word) for word in _WORDS),
            _chat("", "stop") + b"data: [DONE]\n\n",
            _sse({"error": {"message": "decode failed", "type": "server_error"}}),
        ),
        Shape(
            "ollama",
            "/api/chat",
            b"application/x-ndjson",
            tuple(_ollama(word) for word in _WORDS),
            _ollama("", done=True, done_reason="stop", eval_count=10, eval_duration=10_000_000),
            b'{"error":"decode failed"}\n',
        ),
        Shape(
            "anthropic",
            "/v1/messages",
            b"text/event-stream",
            tuple(_delta(word) for word in _WORDS),
            _sse({"type": "message_stop"}, "message_stop"),
            _sse({"type": "error", "error": {"type": "api_error", "message": "decode failed"}}, "error"),
        ),
    )
}


@dataclass(frozen=True)
class Answer:
    """What an upstream sends for one request.

    Attributes:
        content: the body's pieces, as the client should see them at most.
        framing: how they are framed: ``chunked``, ``length`` (of all pieces), ``eof``, or ``raw``: `head` and
            `tail` are all there is.
        head: status line and headers without the empty line; framing headers are added.
        tail: bytes behind the content, in place of the end of its framing; None for the right end.
        pauses: seconds before pieces, by their number; -1 is before the head.
        by_byte: whether every byte is sent by itself.
        unread: whether the request's body is left unread.
        partial: content within `tail`, before that goes wrong.
        may: how a request may end for its client.
    """

    content: tuple[bytes, ...] = ()
    framing: str = "chunked"
    head: bytes = b"HTTP/1.1 200 OK\r\n"
    tail: bytes | None = None
    then: Then = Then.KEEP
    pauses: dict[int, float] = field(default_factory=dict)
    by_byte: bool = False
    unread: bool = False
    partial: bytes = b""  # content within the tail, before it goes wrong
    may: frozenset[Ending] = frozenset({Ending.COMPLETE})

    @property
    def begins(self) -> bytes:
        """Status line, headers and the empty line."""
        if self.framing == "raw":
            return self.head
        framing = {
            "chunked": b"Transfer-Encoding: chunked\r\n",
            "length": b"Content-Length: %d\r\n" % len(b"".join(self.content)),
            "eof": b"",
        }[self.framing]
        return self.head + framing + b"\r\n"

    @property
    def ends(self) -> bytes:
        """What follows the last piece."""
        if self.tail is not None:
            return self.tail
        return b"0\r\n\r\n" if self.framing == "chunked" else b""

    def piece(self, number: int) -> bytes:
        """A piece of content as it goes over the wire."""
        data = self.content[number]
        return b"%x\r\n%b\r\n" % (len(data), data) if self.framing == "chunked" else data


Fault = Callable[[Shape], Answer]
FAULTS: dict[str, Fault] = {}

_COMPLETE = frozenset({Ending.COMPLETE})
_ERROR = frozenset({Ending.ERROR})
_CUT = frozenset({Ending.CUT})


def _fault(function: Fault) -> Fault:
    FAULTS[function.__name__.strip("_")] = function
    return function


def _raw(name: str, head: bytes, **given: Any) -> None:
    """A fault that is no answer in any dialect: these bytes, and no more."""
    FAULTS[name] = lambda _: Answer(framing="raw", head=head, **given)


def _stream(shape: Shape, **given: Any) -> Answer:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: " + shape.content_type + b"\r\n"
    content = given.pop("content", (*shape.events, shape.last))
    return Answer(**{"head": head, "content": content} | given)


def _part(shape: Shape, n: int = 4) -> tuple[bytes, ...]:
    return shape.events[:n]


def _refusal(status: bytes, shape: Shape, **given: Any) -> Answer:
    body = shape.error_event.removeprefix(b"event: error\n").removeprefix(b"data: ").strip()
    head = b"HTTP/1.1 " + status + b"\r\nContent-Type: application/json\r\n"
    return Answer(**{"head": head, "content": (body,), "framing": "length"} | given)


# --- nothing wrong -------------------------------------------------------------------------------


@_fault
def _well(shape: Shape) -> Answer:
    return _stream(shape)


@_fault
def _well_in_one_piece(shape: Shape) -> Answer:
    return _stream(shape, content=(b"".join((*shape.events, shape.last)),), framing="length")


@_fault
def _trickles_byte_by_byte(shape: Shape) -> Answer:
    return _stream(shape, content=(*_part(shape, 2), shape.last), by_byte=True)


@_fault
def _is_silent_before_the_head(shape: Shape) -> Answer:
    return _stream(shape, pauses={-1: 0.3})


@_fault
def _stalls_in_mid_stream(shape: Shape) -> Answer:
    return _stream(shape, pauses={3: 0.3})


@_fault
def _sends_one_huge_event(shape: Shape) -> Answer:
    return _stream(shape, content=(shape.events[0], b"data: " + b"x" * 2_000_000 + b"\n\n", shape.last))


@_fault
def _ends_with_the_connection(shape: Shape) -> Answer:
    return _stream(shape, framing="eof", then=Then.CLOSE)


@_fault
def _closes_after_a_whole_reply(shape: Shape) -> Answer:
    return _stream(shape, then=Then.CLOSE)


@_fault
def _sends_interim_responses(shape: Shape) -> Answer:
    interim = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" * 20
    answer = _stream(shape)
    return _stream(shape, head=interim + answer.head)


# --- before the first byte -----------------------------------------------------------------------


@_fault
def _sends_a_header_without_end(shape: Shape) -> Answer:
    head = b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 600_000 + b"\r\n"
    return _stream(shape, head=head, may=_ERROR)


@_fault
def _sends_headers_without_end(shape: Shape) -> Answer:
    head = b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: %b\r\n" % (i, b"y" * 100) for i in range(6000))
    return _stream(shape, head=head, may=_ERROR)


@_fault
def _sends_a_zero_byte_in_a_header(shape: Shape) -> Answer:
    return _stream(shape, head=b"HTTP/1.1 200 OK\r\nX-Zero: a\0b\r\n", may=_ERROR)


@_fault
def _answers_before_the_request_is_read(shape: Shape) -> Answer:
    return _refusal(b"413 Too Large", shape, unread=True, then=Then.CLOSE, may=_COMPLETE | _ERROR)


# --- an answer that is an error ------------------------------------------------------------------


@_fault
def _answers_500(shape: Shape) -> Answer:
    return _refusal(b"500 Internal Server Error", shape)


@_fault
def _answers_503_while_it_loads(shape: Shape) -> Answer:
    return _refusal(b"503 Service Unavailable", shape)


@_fault
def _answers_429(shape: Shape) -> Answer:
    return _refusal(b"429 Too Many Requests", shape)


@_fault
def _answers_200_with_an_error_line(shape: Shape) -> Answer:
    return _stream(shape, content=(*_part(shape), shape.error_event))


@_fault
def _answers_200_with_an_error_alone(shape: Shape) -> Answer:
    return _stream(shape, content=(shape.error_event,))


# --- within the body -----------------------------------------------------------------------------


@_fault
def _closes_behind_the_head(shape: Shape) -> Answer:
    return _stream(shape, content=(), tail=b"", then=Then.CLOSE, may=_CUT)


@_fault
def _resets_behind_the_head(shape: Shape) -> Answer:
    return _stream(shape, content=(), tail=b"", then=Then.RESET, may=_CUT | _ERROR)


@_fault
def _closes_in_mid_stream(shape: Shape) -> Answer:
    return _stream(shape, content=_part(shape), tail=b"", then=Then.CLOSE, may=_CUT)


@_fault
def _resets_in_mid_stream(shape: Shape) -> Answer:
    return _stream(shape, content=_part(shape), tail=b"", then=Then.RESET, may=_CUT | _ERROR)


@_fault
def _closes_in_mid_character(shape: Shape) -> Answer:
    cut = shape.events[3].index("ü".encode()) + 1
    return _stream(
        shape, content=(*_part(shape, 3), shape.events[3][:cut]), tail=b"", then=Then.CLOSE, may=_CUT
    )


@_fault
def _closes_within_a_chunk(shape: Shape) -> Answer:
    return _stream(shape, content=_part(shape), tail=b"40\r\nhalf", partial=b"half", then=Then.CLOSE, may=_CUT)


@_fault
def _closes_before_the_last_chunk(shape: Shape) -> Answer:
    return _stream(shape, tail=b"", then=Then.CLOSE, may=_CUT)


@_fault
def _sends_a_malformed_chunk_size(shape: Shape) -> Answer:
    return _stream(shape, content=_part(shape), tail=b"zz\r\nhello\r\n", may=_CUT)


@_fault
def _sends_a_chunk_size_out_of_range(shape: Shape) -> Answer:
    return _stream(shape, content=_part(shape), tail=b"f" * 40 + b"\r\nhello\r\n", may=_CUT)


@_fault
def _sends_no_line_end_behind_a_chunk(shape: Shape) -> Answer:
    return _stream(shape, content=_part(shape), tail=b"3\r\nabcd\r\n", partial=b"abc", may=_CUT)


@_fault
def _promises_more_than_it_sends(shape: Shape) -> Answer:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: " + shape.content_type + b"\r\nContent-Length: 5000\r\n\r\n"
    return Answer(content=_part(shape), framing="raw", head=head, tail=b"", then=Then.CLOSE, may=_CUT)


@_fault
def _sends_more_than_it_promised(shape: Shape) -> Answer:
    extra = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nstolen"
    return _stream(shape, framing="length", tail=extra)


@_fault
def _resets_a_body_without_length(shape: Shape) -> Answer:
    return _stream(shape, content=_part(shape), framing="eof", then=Then.RESET, may=_CUT | _ERROR)


@_fault
def _sends_malformed_events(shape: Shape) -> Answer:
    junk = (b"data: {not json\n\n", b"\x00\xff\xfe\n", b":::\n\n", b'{"done": tr\n', b"data\n\n")
    return _stream(shape, content=(*_part(shape, 2), *junk, shape.last))


@_fault
def _ends_without_its_last_event(shape: Shape) -> Answer:
    return _stream(shape, content=shape.events)


@_fault
def _claims_a_coding_that_is_none(shape: Shape) -> Answer:
    answer = _stream(shape)
    return _stream(shape, head=answer.head + b"Content-Encoding: gzip\r\n")


@_fault
def _sends_odd_trailers(shape: Shape) -> Answer:
    return _stream(shape, tail=b"0\r\nX-Checksum: abc\r\nX-Note: end\r\n\r\n")


# --- for clients that do something wrong themselves ----------------------------------------------


@_fault
def _takes_its_time(shape: Shape) -> Answer:
    return _stream(shape, pauses=dict.fromkeys(range(11), 0.1))


@_fault
def _sends_a_flood(shape: Shape) -> Answer:
    return _stream(shape, content=(*shape.events[:1], *(b"data: " + b"x" * 65_000 + b"\n\n",) * 96, shape.last))


@_fault
def _never_goes_on(shape: Shape) -> Answer:
    return _stream(shape, content=_part(shape), tail=b"", then=Then.SILENT, may=frozenset())


# --- the same in every dialect ---------------------------------------------------------------------

_raw("closes_without_an_answer", b"", then=Then.CLOSE, may=_ERROR)
_raw("resets_without_an_answer", b"", then=Then.RESET, may=_ERROR)
_raw("closes_within_the_head", b"HTTP/1.1 200 OK\r\nContent-Ty", then=Then.CLOSE, may=_ERROR)
_raw("resets_within_the_head", b"HTTP/1.1 200 OK\r\nContent-Ty", then=Then.RESET, may=_ERROR)
_raw("speaks_another_protocol", b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n", may=_ERROR)
_raw(
    "sends_two_lengths",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 50\r\n\r\nhelloworld",
    may=_ERROR,
)
_raw(
    "sends_a_length_and_chunks",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + b"5\r\nhello\r\n0\r\n\r\n",
    may=_ERROR,
)
_raw(
    "switches_protocols_unasked",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\nwhatever",
    may=_ERROR,
)
_raw("never_answers", b"", then=Then.SILENT, may=frozenset())
