"""Clients that leave: in every phase the upstream is let go at once, and the request ends as CLIENT_GONE."""

from __future__ import annotations

import asyncio
import select

import pytest

from specproxy.adapters.base import Exchange, Headers, Sink, UpstreamRequest
from specproxy.adapters.endpoint import Endpoint
from specproxy.adapters.http import HttpBackend
from specproxy.proxy.relay import Attempt
from specproxy.proxy.server import ClientConnection
from specproxy.records import Lane, Outcome
from tests.support.client import RawClient, post
from tests.support.loops import both_loops
from tests.support.proxy import lane, running_proxy
from tests.support.relay import CHAT, EVENTS, GET, Recorder, settled
from tests.support.upstream import Conn, Upstream, chunk, chunked


class Leaving:
    """An upstream that reaches a phase, and notes when the proxy closes its connection."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.reached = asyncio.Event()
        self.closed = asyncio.Event()

    async def __call__(self, conn: Conn) -> None:
        await conn.head()
        if self.answer:
            await conn.send(self.answer)
        self.reached.set()
        await conn.gone()
        self.closed.set()


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/other"])
@pytest.mark.parametrize(
    "answer",
    [b"", EVENTS, EVENTS + chunk(b"data: 1\n\n"), b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"],
    ids=["before the head", "after the head", "in the stream", "in the body"],
)
@both_loops
async def test_the_client_leaves(answer: bytes, path: str, how: str) -> None:
    """In every phase of the answer, the upstream's connection is closed at once."""
    phase = Leaving(answer)
    async with Upstream(phase) as upstream, running_proxy(upstream.url) as proxy:
        client = await RawClient.connect(proxy.port)
        await client.send(post(path, CHAT))
        await phase.reached.wait()
        if answer:
            await client.head()
        getattr(client, how)()
        async with asyncio.timeout(5):  # 100 ms are promised; a busy machine may take longer to look
            await phase.closed.wait()
        if path != "/other":
            assert [seen.outcome for seen in proxy.seen] == [Outcome.CLIENT_GONE]
        assert proxy.handlers.active == 0


@pytest.mark.parametrize("how", ["close", "reset"])
@both_loops
async def test_the_client_leaves_while_it_sends(how: str) -> None:
    """Half a request is withdrawn."""
    phase = Leaving(b"")
    async with Upstream(phase) as upstream, running_proxy(upstream.url) as proxy:
        client = await RawClient.connect(proxy.port)
        await client.send(b"POST /other HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nhalf")
        await phase.reached.wait()
        getattr(client, how)()
        async with asyncio.timeout(5):
            await phase.closed.wait()


@both_loops
async def test_the_client_leaves_while_the_upstream_is_not_there_yet() -> None:
    """Nothing is sent once there is a connection."""
    recorder = Recorder()
    async with Upstream(recorder) as upstream, running_proxy(upstream.url) as proxy:
        client = await RawClient.connect(proxy.port)
        await client.send(post("/v1/chat/completions", CHAT))
        client.reset()
        async with await RawClient.connect(proxy.port) as other:
            await other.ask(GET)
        assert proxy.handlers.active == 0


@both_loops
async def test_others_are_not_disturbed_by_one_that_leaves() -> None:
    """Two streams on one upstream: one client leaves, the other's stream goes on."""
    go_on = asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.send(EVENTS + chunk(b"data: 1\n\n"))
        await go_on.wait()
        await conn.send(chunk(b"data: 2\n\n") + b"0\r\n\r\n")

    async with Upstream(script) as upstream, running_proxy(upstream.url) as proxy:
        clients = [await RawClient.connect(proxy.port) for _ in range(2)]
        for client in clients:
            await client.send(post("/v1/chat/completions", CHAT))
            await client.head()
            await client.exactly(len(chunk(b"data: 1\n\n")))
        clients[0].reset()
        go_on.set()
        assert await clients[1].until(b"0\r\n\r\n") == chunked(b"data: 2\n\n")
        clients[1].close()


@pytest.mark.skipif(
    not hasattr(select, "POLLRDHUP"), reason="only Linux tells about a client that is not read from"
)
@both_loops
async def test_the_client_leaves_while_the_upstream_does_not_read() -> None:
    """The upload is stopped, so nobody reads the client's socket: it is noticed all the same."""
    closed = asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.head()
        conn.stall()
        await stalled.wait()
        conn.read_on()
        await conn.gone()
        closed.set()

    stalled = asyncio.Event()
    async with Upstream(script) as upstream, running_proxy(upstream.url) as proxy:
        client = await RawClient.connect(proxy.port)
        await client.send(b"POST /other HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n")

        async def send() -> None:
            while True:
                await client.send(b"x" * 65536)

        sending = asyncio.create_task(send())
        await asyncio.wait((sending,), timeout=0.3)
        assert not sending.done()
        sending.cancel()
        client.reset()  # an orderly end would wait behind the bytes that nobody reads
        async with asyncio.timeout(5):
            await settled(lambda: proxy.server.connections == 0)
        stalled.set()
        async with asyncio.timeout(5):
            await closed.wait()


@both_loops
async def test_a_client_that_closes_its_sending_half_has_left() -> None:
    """It cannot be told from one that has gone."""
    phase = Leaving(b"")
    async with (
        Upstream(phase) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.send(post("/v1/chat/completions", CHAT))
        await phase.reached.wait()
        client.writer.write_eof()
        async with asyncio.timeout(5):
            await phase.closed.wait()
        assert [seen.outcome for seen in proxy.seen] == [Outcome.CLIENT_GONE]


@both_loops
async def test_waiting_requests_of_a_client_that_leaves_are_dropped() -> None:
    """Pipelined requests behind the current one never reach the upstream."""
    phase = Leaving(b"")
    async with Upstream(phase) as upstream, running_proxy(upstream.url) as proxy:
        client = await RawClient.connect(proxy.port)
        await client.send(post("/v1/chat/completions", CHAT) * 3)
        await phase.reached.wait()
        client.reset()
        async with asyncio.timeout(5):
            await phase.closed.wait()
        assert upstream.connections == 1
        assert len(proxy.seen) == 1


class Hasty(HttpBackend):
    """A backend whose clients are gone in the very moment in which they have the end of their answer."""

    def open(self, request: UpstreamRequest, lane: Lane, sink: Sink) -> Exchange:
        assert isinstance(sink, Attempt)
        return super().open(request, lane, Losing(sink))


class Losing:
    """A `Sink` that loses its client before the request's task can learn of the end."""

    def __init__(self, attempt: Attempt) -> None:
        self.head, self.data, self.fail = attempt.head, attempt.data, attempt.fail
        self._attempt = attempt

    def end(self, trailers: Headers) -> None:
        client = self._attempt.response.client
        assert isinstance(client, ClientConnection)
        asyncio.get_running_loop().call_soon(client.connection_lost, None)
        self._attempt.end(trailers)


async def test_who_leaves_with_the_whole_answer_has_not_gone() -> None:
    """Quick clients hang up before their request's task comes to its turn; what they got counts."""
    body = b'{"choices": [], "usage": {"completion_tokens": 1}}'
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    async with Upstream(Recorder(answer)) as upstream:
        backend = Hasty("hasty", Endpoint.parse(upstream.url), [lane("hasty")])
        async with running_proxy(backend) as proxy:
            client = await RawClient.connect(proxy.port)
            await client.send(post("/v1/chat/completions", CHAT))
            await settled(lambda: bool(proxy.seen))
            assert [seen.outcome for seen in proxy.seen] == [Outcome.COMPLETE]
            client.close()
