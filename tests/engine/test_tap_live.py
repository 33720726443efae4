"""The tap reads what a real llama-server really sends, on every route that generates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from specproxy.adapters.base import Headers, ResponseHead, UpstreamRequest
from specproxy.adapters.http import Endpoint, HttpTransport
from specproxy.adapters.llama_server import ManagedLlamaServer
from specproxy.adapters.managed import ManagedOptions, plan_managed
from specproxy.errors import BackendError
from specproxy.proxy.dialects import dialect_of
from specproxy.proxy.tap import ReplyFacts, Tap
from specproxy.records import TimingSource
from tests.support.calibrated import CalibratedPair

pytestmark = [pytest.mark.engine, pytest.mark.timeout(60), pytest.mark.asyncio(loop_scope="module")]

TOKENS = 48
LANE = "mtp"


class TapSink:
    """Puts a response into a tap as it comes."""

    def __init__(self, tap: Tap) -> None:
        self.tap = tap
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[ReplyFacts] = self.loop.create_future()

    def head(self, head: ResponseHead) -> None:
        self.tap.head(head.status, head.headers, self.loop.time())

    def data(self, parts: Sequence[bytes]) -> None:
        self.tap.feed(parts, self.loop.time())

    def end(self, trailers: Headers) -> None:
        self.done.set_result(self.tap.finish(self.loop.time()))

    def fail(self, error: BackendError) -> None:
        self.done.set_exception(error)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(pair: CalibratedPair) -> AsyncIterator[ManagedLlamaServer]:
    """Lanes with and without drafting."""
    options = ManagedOptions(pair.target, None, threads=1, ctx=1024, strategies=(LANE,))
    backend = plan_managed(options).backend()
    await backend.start()
    await backend.settled()
    yield backend
    await backend.aclose()


async def ask(server: ManagedLlamaServer, lane: str, path: str, body: dict[str, Any]) -> ReplyFacts:
    transport = HttpTransport(Endpoint.parse(server.address(lane)))
    sink = TapSink(Tap(dialect_of("POST", path), started=asyncio.get_running_loop().time()))
    headers = ((b"Content-Type", b"application/json"),)
    try:
        transport.open(UpstreamRequest("POST", path, headers, json.dumps(body).encode()), sink)
        return await sink.done
    finally:
        await transport.aclose()


def bodies(prompt: str) -> dict[str, dict[str, Any]]:
    messages = [{"role": "user", "content": prompt}]
    return {
        "/v1/chat/completions": {"messages": messages, "max_tokens": TOKENS},
        "/v1/completions": {"prompt": prompt, "max_tokens": TOKENS},
        "/completion": {"prompt": prompt, "n_predict": TOKENS},
        "/v1/responses": {"input": prompt, "max_output_tokens": TOKENS},
        "/v1/messages": {"messages": messages, "max_tokens": TOKENS},
    }


WITH_TIMINGS = {
    ("/v1/chat/completions", False),
    ("/v1/chat/completions", True),
    ("/v1/completions", False),
    ("/v1/completions", True),
    ("/completion", False),
    ("/completion", True),
    ("/v1/responses", True),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/completion", "/v1/responses", "/v1/messages"]
)
async def test_figures_of_every_route(
    server: ManagedLlamaServer, pair: CalibratedPair, path: str, stream: bool
) -> None:
    """Token counts come from every route, times and draft counts wherever the server has them."""
    body = {**bodies("words " + pair.marker("json", 2))[path], "temperature": 0, "stream": stream}
    got = await ask(server, LANE, path, body)
    assert got.complete
    assert not got.error
    assert got.output_tokens == TOKENS
    assert got.prompt_tokens > 0
    assert (got.ttft_at is not None) is stream
    if (path, stream) in WITH_TIMINGS:
        expected = pair.expect("json", LANE, TOKENS, start=2)
        assert got.source is TimingSource.SERVER
        assert (got.draft_tokens, got.accepted_tokens) == (expected.drafted, expected.accepted)
        assert got.decode_s is not None
        assert got.decode_s > 0
        assert got.weight == 1.0
    else:
        assert got.source is TimingSource.USAGE
        assert got.draft_tokens == 0
        assert got.weight < 1.0


async def test_usage_chunk(server: ManagedLlamaServer, pair: CalibratedPair) -> None:
    """With include_usage the timings move to the chunk without choices."""
    body = bodies("words " + pair.marker("prose"))["/v1/chat/completions"]
    extra = {
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_progress": True,
    }
    got = await ask(server, LANE, "/v1/chat/completions", {**body, **extra})
    assert (got.source, got.output_tokens, got.complete) == (TimingSource.SERVER, TOKENS, True)


async def test_plain_lane_reports_no_drafts(server: ManagedLlamaServer, pair: CalibratedPair) -> None:
    """Nothing drafted is nothing counted."""
    body = {**bodies("words " + pair.marker("code"))["/completion"], "temperature": 0}
    got = await ask(server, "plain", "/completion", body)
    assert (got.draft_tokens, got.accepted_tokens, got.output_tokens) == (0, 0, TOKENS)


async def test_decode_time_lies_within_the_clock(server: ManagedLlamaServer, pair: CalibratedPair) -> None:
    """The server's decode time lies within the clock's: after the first content, and before the end."""
    body = bodies("words " + pair.marker("prose", 1))["/v1/chat/completions"]
    request = {**body, "max_tokens": 200, "temperature": 0, "stream": True}
    started = asyncio.get_running_loop().time()
    got = await ask(server, "plain", "/v1/chat/completions", request)
    ended = asyncio.get_running_loop().time()
    assert got.decode_s is not None
    assert got.ttft_at is not None
    assert started < got.ttft_at < ended
    assert got.decode_s < ended - started


async def test_errors(server: ManagedLlamaServer) -> None:
    """A prompt longer than the context is refused with a status, and read as an error."""
    got = await ask(server, "plain", "/completion", {"prompt": "word " * 4000, "stream": True})
    assert (got.error, got.complete) == (True, False)
