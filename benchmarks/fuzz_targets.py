"""What is fuzzed: one function over bytes for each parser. Whatever comes, only errors of ours may be raised.

Each also has seeds: well-formed input, from which variants are made.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import orjson

from benchmarks.chaos.faults import SHAPES
from specproxy.adapters.reader import ResponseReader
from specproxy.proxy.dialects import dialect_of, read_facts, render_error
from specproxy.proxy.guard import Guard
from specproxy.proxy.handlers import origin_form
from specproxy.proxy.headers import read_inbound, response_headers
from specproxy.proxy.inbound import HeaderView
from specproxy.proxy.splice import splice
from specproxy.proxy.split import LineSplitter, SseSplitter
from specproxy.proxy.tap import Tap
from specproxy.records import Dialect
from specproxy.strategies.classify import classify

__all__ = ["FOLDER", "SEEDS", "TARGETS", "Target", "target"]

Target = Callable[[bytes], None]
TARGETS: dict[str, Target] = {}
SEEDS: dict[str, list[bytes]] = {}
FOLDER = Path(tempfile.mkdtemp(prefix="specproxy-fuzz-"))


def target(*seeds: bytes) -> Callable[[Target], Target]:
    """Have a function fuzzed under its name, with variants of these inputs."""

    def note(function: Target) -> Target:
        name = function.__name__.strip("_")
        TARGETS[name], SEEDS[name] = function, list(seeds)
        return function

    return note


_REQUESTS = [shape.body("x") for shape in SHAPES.values()]
_REQUESTS += [
    b'{"model":"m","prompt":["a",[1,2]],"n":2,"logprobs":5,"stop":"x","temperature":1e400}',
    b'{"model":"m","input":[{"role":"user","content":[{"type":"input_image"}]}],"tools":[{"type":"function"}]}',
    b'{"messages":[{"role":"user","content":[{"type":"image_url"}]}],"response_format":{"type":"json_schema"}}',
    b'{"model":"m","prompt":"x","format":{"type":"object"},"options":{"temperature":0,"num_predict":-1}}',
    b'{"input_prefix":"a","input_suffix":"b","grammar":"root ::= x","json_schema":{}}',
]


@target(*_REQUESTS)
def _request(data: bytes) -> None:
    """A request body, read as every dialect, judged, and spliced."""
    for dialect in Dialect:
        facts = read_facts(dialect, data)
        if facts is not None:
            classify(facts)
    try:
        whole = orjson.loads(data)
    except ValueError:
        return
    if isinstance(whole, dict):
        spliced = splice(data, model="other", fields=(("n_max", 3), ("/options/draft", 0)))
        assert isinstance(orjson.loads(spliced), dict), "a JSON object stays one"


_STREAMS = [b"".join((*shape.events, shape.last, shape.error_event)) for shape in SHAPES.values()]
_STREAMS += [
    b'data: {"choices":[],"usage":{"prompt_tokens":3},"timings":{"predicted_n":5,"predicted_ms":"x"}}\r\n\r\n',
    b'event: response.completed\rdata: {"response":{"usage":{"output_tokens":1e999}}}\r\r',
    b'{"done":true,"eval_count":-1,"eval_duration":null,"load_duration":1e300}\n',
]


@target(*_STREAMS)
def _reply(data: bytes) -> None:
    """A reply, read beside its stream as every dialect and kind, in two pieces."""
    middle = len(data) // 2
    for dialect in Dialect:
        for kind in (b"text/event-stream", b"application/x-ndjson", b"application/json"):
            tap = Tap(dialect, started=0.0)
            tap.head(200, ((b"Content-Type", kind),), 1.0)
            tap.feed((data[:middle], data[middle:]), 2.0)
            facts = tap.finish(3.0)
            assert facts.output_tokens >= 0
            assert 0.0 <= facts.weight <= 1.0


@target(*_STREAMS)
def _splitters(data: bytes) -> None:
    """Any chunking of a stream gives the same events."""
    for make in (LineSplitter, SseSplitter):
        whole, pieces = make(), make()
        expected = whole.feed(data) + whole.end()
        step = 1 + len(data) % 7
        found = [event for i in range(0, len(data), step) for event in pieces.feed(data[i : i + step])]
        assert found + pieces.end() == expected, "events depend on the chunking"


@target(
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX: y\r\n\r\n",
    b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.0 404 No\r\n\r\n",
)
def _response(data: bytes) -> None:
    """Bytes of an upstream, in pieces."""
    reader = ResponseReader()
    for i in range(0, len(data), 11):
        reader.feed(data[i : i + 11])
        reader.take_parts()
        if reader.error:
            break
    reader.eof()
    if reader.head is not None:
        response_headers(reader.head.headers)


@target(
    b"POST\n/v1/chat/completions?a=%2F\nHost: localhost:80\nOrigin: https://[::1]:1\nContent-Length: 5\n",
    b"GET\nhttp://x/api/tags\nAuthorization: Basic eDp5\nConnection: close, x-a\nX-Specproxy-Strategy: mtp\n",
)
def _head(data: bytes) -> None:
    """Method, target and headers of a request that the HTTP parser has let through."""
    method, _, rest = data.partition(b"\n")
    target, _, rest = rest.partition(b"\n")
    lines = [line.partition(b": ") for line in rest.split(b"\n") if line]
    headers = tuple((n, v) for n, _, v in lines if n.lower() != b"content-length" or v.isdigit())
    read_inbound(headers)
    view = HeaderView(headers)
    path = origin_form(target.decode("utf-8", "surrogateescape")).partition("?")[0]
    dialect = dialect_of(method.decode("latin-1"), path)
    for guard in (Guard(), Guard("secret")):
        guard.reader(view)
        try:
            guard.check(view)
        except Exception as error:
            render_error(dialect, path, error, 403)  # type: ignore[arg-type]  # any other than ours fails in there
