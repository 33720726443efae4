"""The listening side: admission, our own routes, idle connections, shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

import pytest

from specproxy.errors import ConfigError, RequestError
from specproxy.proxy.app import ProxyServer
from specproxy.proxy.forward import Limits
from specproxy.proxy.guard import Guard
from specproxy.proxy.handlers import origin_form
from specproxy.proxy.inbound import HeaderView
from specproxy.proxy.server import SPARE_CONNECTIONS
from specproxy.proxy.server_limits import ServerLimits
from specproxy.records import Outcome
from tests.support.client import RawClient, post
from tests.support.loops import both_loops
from tests.support.proxy import running_proxy
from tests.support.relay import CHAT, EVENTS, GET, Recorder, settled
from tests.support.upstream import Conn, Upstream, chunk, chunked


@dataclass
class Reply:
    status: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()
    stream: None = None


class Admin:
    """Answers with what it was asked."""

    def refuse(self, method: str, target: str, headers: Mapping[str, str]) -> Reply | None:
        return Reply(403, b"no") if headers.get("x-refuse") else None

    def handle(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Reply:
        return Reply(
            201, f"{method} {target} {headers.get('x-a')} {body!r}".encode(), "text/plain", (("X-B", "2"),)
        )


# --- admission and our own routes ----------------------------------------------------------------


@both_loops
async def test_our_own_routes_do_not_go_upstream() -> None:
    """Everything under /specproxy/ is answered here, /specproxyish is not."""
    recorder = Recorder()
    async with (
        Upstream(recorder) as upstream,
        running_proxy(upstream.url, admin=Admin()) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        reply = await client.ask(post("/specproxy/api/x?y=1", b"body", b"X-A: 1"))
        body = b"POST /specproxy/api/x?y=1 1 b'body'"
        head = b"HTTP/1.1 201 Created\r\nContent-Type: text/plain\r\nX-B: 2\r\n"
        head += b"Content-Length: %d\r\n\r\n"
        assert (reply.head, reply.body) == (head % len(body), body)
        assert (await client.ask(b"GET /specproxy HTTP/1.1\r\nHost: x\r\n\r\n")).status == 201
        assert (await client.ask(b"HEAD /specproxy/ HTTP/1.1\r\nHost: x\r\n\r\n", head_only=True)).status == 201
        assert (await client.ask(b"GET /specproxyish HTTP/1.1\r\nHost: x\r\n\r\n")).status == 200
        assert [seen.request_line for seen in recorder.seen] == [b"GET /specproxyish HTTP/1.1"]


@both_loops
async def test_requests_that_wait_for_nothing_are_answered_in_turn() -> None:
    """However many of them come in one read."""
    async with (
        running_proxy("http://127.0.0.1:1", admin=Admin()) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        paths = [f"/specproxy/{i}" for i in range(1000)]
        await client.send(b"".join(post(path, b"") for path in paths))
        for path in paths:
            assert (await client.reply()).body == f"POST {path} None b''".encode()


@pytest.mark.parametrize(
    ("path", "shape"), [("/v1/chat/completions", b'"type":'), ("/api/chat", b'{"error":"')]
)
@both_loops
async def test_a_guard_keeps_requests_out(path: str, shape: bytes) -> None:
    """What it refuses gets its error in the client's dialect, and nothing goes upstream."""

    def guard(headers: Mapping[str, str]) -> bool:
        if headers.get("HOST") != "good":
            raise RequestError("not you", status=403)
        return False

    recorder = Recorder()
    async with (
        Upstream(recorder) as upstream,
        running_proxy(upstream.url, guard=guard) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        reply = await client.ask(post(path, CHAT))
        assert reply.status == 403
        assert shape in reply.body
        assert recorder.seen == []
        assert (await client.ask(b"GET / HTTP/1.1\r\nHost: good\r\n\r\n")).status == 200


@pytest.mark.parametrize(
    ("sent", "passed_on"),
    [
        ((b"Authorization: Bearer s3cret",), []),
        ((b"authorization: Basic dTpzM2NyZXQ=",), []),
        ((b"X-Specproxy-Token: s3cret", b"Authorization: Bearer theirs"), [b"Bearer theirs"]),
        ((b"X-Specproxy-Token: s3cret",), []),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/unknown"])
async def test_our_token_stays_here(sent: tuple[bytes, ...], passed_on: list[bytes], path: str) -> None:
    """An Authorization that is meant for us is no upstream's business; its own key goes on to it."""
    recorder = Recorder()
    async with (
        Upstream(recorder) as upstream,
        running_proxy(upstream.url, guard=Guard("s3cret").check) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        assert (await client.ask(post(path, CHAT, *sent))).status == 200
        assert recorder.seen[0].values(b"authorization") == passed_on
        assert b"s3cret" not in recorder.seen[0].head
        assert b"dTpzM2NyZXQ=" not in recorder.seen[0].head


@both_loops
async def test_connect_is_refused() -> None:
    """It is no forward proxy."""
    async with running_proxy("http://127.0.0.1:1") as proxy, await RawClient.connect(proxy.port) as client:
        reply = await client.ask(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n")
        assert reply.status == 405


@both_loops
async def test_a_bug_is_an_error_reply(caplog: pytest.LogCaptureFixture) -> None:
    """An unforeseen exception is logged and answered with 500; the connection lives on."""

    def guard(headers: Mapping[str, str]) -> bool:
        if "X-Bug" in headers:
            raise ZeroDivisionError("bug")
        return False

    async with (
        Upstream(Recorder()) as upstream,
        running_proxy(upstream.url, guard=guard) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        reply = await client.ask(b"GET / HTTP/1.1\r\nHost: x\r\nX-Bug: 1\r\n\r\n")
        assert reply.status == 500
        assert b"ZeroDivision" not in reply.body
        assert "could not be handled" in caplog.text
        assert (await client.ask(GET)).status == 200


@pytest.mark.parametrize(
    ("target", "origin"),
    [
        ("/a?b", "/a?b"),
        ("*", "*"),
        ("http://h/a//b?c", "/a//b?c"),
        ("http://h", "/"),
        ("https://h?x=http://i/", "/?x=http://i/"),
        ("/x?u=http://h/", "/x?u=http://h/"),
        ("h:80", "h:80"),
    ],
)
def test_origin_form(target: str, origin: str) -> None:
    """Absolute targets lose their authority."""
    assert origin_form(target) == origin


def test_headers_are_looked_up_without_case() -> None:
    """And of a repeated header the first counts, so that a second cannot replace what was checked."""
    view = HeaderView(((b"HOST", b"a"), (b"Host", b"b"), (b"X-\xff", b"\xfe")))
    assert view["host"] == view["Host"] == "a"
    assert view.get("nothing") is None
    assert len(view) == 2
    assert set(view) == {"host", "x-ÿ"}


# --- idle and lingering connections --------------------------------------------------------------


@both_loops
async def test_idle_connections_are_closed_in_time() -> None:
    """One that waits between requests, and one that does not finish its head; a busy one stays."""
    limits = ServerLimits(patience_s=10.0, idle_s=30.0)
    async with (
        Upstream(lambda conn: conn.gone()) as upstream,
        running_proxy(upstream.url, server_limits=limits) as proxy,
        await RawClient.connect(proxy.port) as idle,
        await RawClient.connect(proxy.port) as slow,
        await RawClient.connect(proxy.port) as busy,
    ):
        await slow.send(b"GET / HTTP/1.1\r\nHo")
        await busy.send(GET)
        await settled(lambda: proxy.handlers.active == 1 and proxy.server.connections == 3)
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(0.02)
        proxy.server.expire(now + 9.0)
        assert proxy.server.connections == 3
        proxy.server.expire(now + 20.0)
        assert (await slow.rest()).startswith(b"HTTP/1.1 408 ")
        slow.writer.close()
        await settled(lambda: proxy.server.connections == 2)
        proxy.server.expire(now + 40.0)
        assert await idle.rest() == b""
        assert proxy.server.connections == 1


@both_loops
async def test_an_unread_request_does_not_destroy_its_answer() -> None:
    """A client that is still sending gets the whole refusal, though nobody reads its body."""
    async with (
        Upstream(Recorder()) as upstream,
        running_proxy(upstream.url, limits=Limits(body=1000)) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.send(post("/x", b"y" * 10_000_000)[:100_000])
        reply = await client.reply()
        assert reply.status == 413
        for _ in range(20):
            await client.send(b"y" * 100_000)
        assert await client.rest() == b""


@both_loops
async def test_lingering_ends() -> None:
    """A client that goes on sending for ever is cut off."""
    async with (
        Upstream(Recorder()) as upstream,
        running_proxy(
            upstream.url, limits=Limits(body=1000), server_limits=ServerLimits(linger_s=0.05)
        ) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.send(post("/x", b"y" * 10_000_000)[:2000])
        assert (await client.reply()).status == 413
        await settled(lambda: proxy.server.connections == 0)


# --- listening and shutdown ----------------------------------------------------------------------


@both_loops
async def test_a_taken_port_is_a_config_error() -> None:
    """It says which address, and what to do."""
    async with running_proxy("http://127.0.0.1:1") as proxy:
        second = ProxyServer(proxy.handlers)
        with pytest.raises(ConfigError, match=f"127.0.0.1:{proxy.port}.*--port"):
            await second.start("127.0.0.1", proxy.port)
        await second.stop()


@both_loops
async def test_shutdown_lets_streams_end() -> None:
    """A stream in flight goes on to its end; new requests are told to come back; idle connections close."""
    go_on = asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.send(EVENTS + chunk(b"data: 1\n\n"))
        await go_on.wait()
        await conn.send(chunk(b"data: 2\n\n") + b"0\r\n\r\n")

    async with (
        Upstream(script) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as streaming,
        await RawClient.connect(proxy.port) as idle,
    ):
        await streaming.send(post("/v1/chat/completions", CHAT))
        await streaming.head()
        await settled(lambda: proxy.server.connections == 2)
        stopping = asyncio.create_task(proxy.server.stop(10.0))
        assert await idle.rest() == b""
        with pytest.raises(ConnectionError):
            await RawClient.connect(proxy.port)
        assert not stopping.done()
        go_on.set()
        assert await streaming.rest() == chunk(b"data: 1\n\n") + chunked(b"data: 2\n\n")
        await stopping


@both_loops
async def test_requests_during_shutdown_are_refused() -> None:
    """503 in the client's dialect, and the connection closes."""
    async with (
        Upstream(Recorder()) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        assert await proxy.handlers.drain(1.0)
        reply = await client.ask(post("/api/chat", CHAT))
        assert (reply.status, reply.values(b"connection")) == (503, [b"close"])
        assert b"shutting down" in reply.body


@both_loops
async def test_shutdown_does_not_wait_for_ever() -> None:
    """After the grace period streams are cut, upstreams are let go, and nothing is left."""
    closed = asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.send(EVENTS + chunk(b"data: 1\n\n"))
        await conn.gone()
        closed.set()

    async with (
        Upstream(script) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.send(post("/v1/chat/completions", CHAT))
        await client.head()
        await proxy.server.stop(0.05)
        assert await client.rest() == chunk(b"data: 1\n\n")
        await closed.wait()
        assert proxy.server.connections == 0
        assert [seen.outcome for seen in proxy.seen] == [Outcome.TRUNCATED]


@both_loops
async def test_many_clients_at_once() -> None:
    """Hundreds of requests at the same time all get their own answers, and leave nothing behind."""

    async def script(conn: Conn) -> None:
        while True:
            seen = await conn.request()
            await conn.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(seen.body), seen.body))

    async def one(port: int, i: int) -> None:
        async with await RawClient.connect(port) as client:
            for j in range(3):
                body = b'{"model":"m","messages":[],"user":"%d-%d"}' % (i, j)
                assert (await client.ask(post("/v1/chat/completions", body))).body == body

    async with Upstream(script) as upstream, running_proxy(upstream.url) as proxy:
        await asyncio.gather(*(one(proxy.port, i) for i in range(200)))
        await settled(lambda: len(proxy.seen) == 600)
        await settled(lambda: proxy.server.connections == 0)
        assert proxy.router.load.in_flight == 0
        assert {status.in_flight for status in proxy.router.lanes()} == {0}


# --- limits --------------------------------------------------------------------------------------


def held(go_on: asyncio.Event) -> Callable[[Conn], Awaitable[None]]:
    """A script that answers when it may."""

    async def script(conn: Conn) -> None:
        while True:
            await conn.request()
            await go_on.wait()
            await conn.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    return script


@pytest.mark.parametrize(
    ("path", "shape", "seen"),
    [("/v1/messages", b'"overloaded_error"', 1), ("/api/tags", b'{"error":"1 requests', 0)],
)
async def test_requests_above_the_limit_are_turned_away(
    path: str, shape: bytes, seen: int, caplog: pytest.LogCaptureFixture
) -> None:
    """With 503 and Retry-After in the client's dialect, naming the limit, and a line in the log."""
    go_on = asyncio.Event()
    async with (
        Upstream(held(go_on)) as upstream,
        running_proxy(upstream.url, limits=Limits(requests=1, queue=0)) as proxy,
        await RawClient.connect(proxy.port) as first,
        await RawClient.connect(proxy.port) as second,
    ):
        await first.send(GET)
        await settled(lambda: proxy.handlers.active == 1)
        for _ in range(3):
            reply = await second.ask(post(path, CHAT))
            assert (reply.status, reply.values(b"retry-after")) == (503, [b"1"])
            assert shape in reply.body
            assert b"limits.requests" in reply.body
        assert [s.outcome for s in proxy.seen] == [Outcome.UNREACHABLE] * seen * 3
        assert caplog.text.count("a limit was reached") == 1
        assert "limits.requests and limits.queue raise the limit" in caplog.text
        go_on.set()
        assert (await first.reply()).status == 200
        assert (await second.ask(GET)).status == 200


async def test_requests_wait_for_their_turn() -> None:
    """Above the limit they are answered later, not refused; one whose client leaves is observed too."""
    go_on = asyncio.Event()
    async with (
        Upstream(held(go_on)) as upstream,
        running_proxy(upstream.url, limits=Limits(requests=1, queue=5)) as proxy,
        await RawClient.connect(proxy.port) as first,
        await RawClient.connect(proxy.port) as second,
    ):
        await first.send(post("/api/chat", CHAT))
        await settled(lambda: proxy.handlers.active == 1)
        await second.send(post("/v1/chat/completions", CHAT))
        async with await RawClient.connect(proxy.port) as third:
            await third.send(post("/v1/chat/completions", CHAT))
            await settled(lambda: proxy.handlers.active == 3)
        await settled(lambda: [s.outcome for s in proxy.seen] == [Outcome.CLIENT_GONE])
        assert upstream.connections == 1
        go_on.set()
        assert (await first.reply()).status == 200
        assert (await second.reply()).status == 200
        await settled(lambda: len(proxy.seen) == 3)


@both_loops
async def test_connections_above_the_limit_are_told_so() -> None:
    """Those that are there stay, and a place that becomes free can be taken."""
    async with (
        Upstream(Recorder()) as upstream,
        running_proxy(upstream.url, server_limits=ServerLimits(connections=1)) as proxy,
    ):
        async with await RawClient.connect(proxy.port) as first:
            assert (await first.ask(GET)).status == 200
            async with await RawClient.connect(proxy.port) as second:
                reply = await second.ask(post("/v1/messages", CHAT))
                assert (reply.status, reply.values(b"retry-after")) == (503, [b"1"])
                assert b'"overloaded_error"' in reply.body
                assert b"limits.connections" in reply.body
                assert await second.rest() == b""
            assert (await first.ask(GET)).status == 200
        await settled(lambda: proxy.server.connections == 0)
        async with await RawClient.connect(proxy.port) as third:
            assert (await third.ask(GET)).status == 200


@both_loops
async def test_connections_far_above_the_limit_are_closed() -> None:
    """Answering costs as well, so there is an end to it."""
    async with running_proxy(server_limits=ServerLimits(connections=1)) as proxy, AsyncExitStack() as stack:
        for _ in range(1 + SPARE_CONNECTIONS):
            await stack.enter_async_context(await RawClient.connect(proxy.port))
        await settled(lambda: proxy.server.connections == 1 + SPARE_CONNECTIONS)
        async with await RawClient.connect(proxy.port) as last:
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await last.ask(GET)


@both_loops
@pytest.mark.parametrize(
    ("path", "error"), [(b"/api/chat", b'{"error":"the request has not'), (b"/v1/messages", b'{"type":"error"')]
)
async def test_slow_requests_are_refused(path: bytes, error: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """408 in the dialect of the path, for a head and for a body that do not go on; the log says which limit."""
    limits = ServerLimits(patience_s=10.0)
    async with (
        Upstream(lambda conn: conn.gone()) as upstream,
        running_proxy(upstream.url, server_limits=limits) as proxy,
        await RawClient.connect(proxy.port) as head,
        await RawClient.connect(proxy.port) as body,
        await RawClient.connect(proxy.port) as invited,
    ):
        await head.send(b"POST %b HTTP/1.1\r\nHo" % path)
        await body.send(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{" % path)
        await invited.send(
            b"POST %b HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n" % path
        )
        assert (await invited.head()).status == 100
        await settled(lambda: proxy.handlers.active == 2 and proxy.server.connections == 3)
        await asyncio.sleep(0.02)
        now = asyncio.get_running_loop().time()
        proxy.server.expire(now + 9.0)
        await asyncio.sleep(0.02)
        assert proxy.handlers.active == 2
        with caplog.at_level("WARNING"):
            proxy.server.expire(now + 11.0)
            for client in (head, body, invited):
                answer = await client.rest()
                assert answer.startswith(b"HTTP/1.1 408 ")
                assert error in answer
                assert b"limits.patience" in answer
        assert "limits.patience" in caplog.text
        assert proxy.handlers.active == 0


async def test_a_client_that_was_not_invited_yet_is_not_slow() -> None:
    """Who waits for 100 Continue in the queue waits for us; the time runs from the invitation."""
    go_on = asyncio.Event()
    limits = ServerLimits(patience_s=10.0)
    async with (
        Upstream(held(go_on)) as upstream,
        running_proxy(upstream.url, limits=Limits(requests=1, queue=5), server_limits=limits) as proxy,
        await RawClient.connect(proxy.port) as first,
        await RawClient.connect(proxy.port) as second,
    ):
        await first.send(post("/api/chat", CHAT))
        await settled(lambda: proxy.handlers.active == 1)
        await second.send(post("/api/chat", CHAT, b"Expect: 100-continue")[: -len(CHAT)])
        await settled(lambda: proxy.handlers.active == 2)
        proxy.server.expire(asyncio.get_running_loop().time() + 1000.0)
        go_on.set()
        assert (await first.reply()).status == 200
        assert (await second.head()).status == 100
        assert (await second.ask(CHAT)).status == 200


async def test_our_own_routes_invite_too() -> None:
    """A script that announces a body under /specproxy/ is told to send it."""
    async with (
        running_proxy("http://127.0.0.1:1", admin=Admin()) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.send(post("/specproxy/api/x", CHAT, b"Expect: 100-continue")[: -len(CHAT)])
        assert (await client.head()).status == 100
        assert (await client.ask(CHAT)).status == 201


@both_loops
@pytest.mark.parametrize("path", [b"/api/chat", b"/specproxy/api/lift", b"/other"])
@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [
        (b"1.1", b"Host: localhost\r\nhost: evil.example\r\n", 400),
        (b"1.1", b"Host: localhost\r\nHost: localhost\r\n", 400),
        (b"1.0", b"Host: localhost\r\nHost: localhost\r\n", 400),
        (b"1.1", b"", 400),
        (b"1.1", b"Host:\r\n", 200),
        (b"1.0", b"", 200),
    ],
)
async def test_a_request_has_one_host(path: bytes, version: bytes, hosts: bytes, status: int) -> None:
    """Two could be read in two ways by two servers; one that is missing is no HTTP/1.1 (RFC 9112, 3.2)."""
    recorder = Recorder()
    async with (
        Upstream(recorder) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.send(b"POST %b HTTP/%b\r\n%bContent-Length: 2\r\n\r\n{}" % (path, version, hosts))
        reply = await client.reply()
        assert (reply.status, len(recorder.seen)) == (status, status == 200)
        if status == 400:
            assert b"Host header" in reply.body
            assert await client.rest() == b""


@both_loops
@pytest.mark.parametrize("flood", ["trailers", "one trailer", "extension"])
async def test_what_is_no_body_behind_a_head_is_bounded_too(flood: str) -> None:
    """Trailers are kept until the end, so a client may not send them without end."""
    pieces = {
        "trailers": b"0\r\n" + b"".join(b"T%d: %b\r\n" % (i, b"v" * 1000) for i in range(800)),
        "one trailer": b"0\r\nT: " + b"v" * 800_000,
        "extension": b"1;" + b"x" * 800_000,
    }
    async with (
        Upstream(Recorder()) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        head = b"POST /api/chat HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"
        await client.send(head)
        await client.send(pieces[flood])
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"limits.head" in answer


async def test_a_transfer_coding_that_nobody_undoes_is_refused() -> None:
    """Else the upstream would take packed bytes for the body."""
    recorder = Recorder()
    async with (
        Upstream(recorder) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.send(
            b"POST /api/chat HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"
        )
        assert (await client.head()).status == 501
        assert recorder.seen == []


@pytest.mark.parametrize(
    "given", [{"head_bytes": 2000, "headers": 256}, {"head_bytes": 128 * 1024, "headers": 20}]
)
async def test_a_head_above_the_limits_names_them(given: dict[str, int]) -> None:
    """431 in the dialect of the path, whichever of the two it is."""
    lines = [b"X-%d: %b" % (i, b"y" * 50) for i in range(40)]
    async with (
        running_proxy(server_limits=ServerLimits(**given)) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        reply = await client.ask(post("/api/chat", CHAT, *lines))
        assert reply.status == 431
        assert reply.body.startswith(b'{"error":"the request head is longer than')
        assert b"limits.head and limits.headers" in reply.body


async def test_a_body_that_is_not_wanted_is_not_read() -> None:
    """What our own routes refuse by its head is answered before its body has come, which is not asked for."""
    async with (
        running_proxy("http://127.0.0.1:1", admin=Admin()) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        head = b"POST /specproxy/x HTTP/1.1\r\nHost: x\r\nX-Refuse: 1\r\nContent-Length: 99\r\n"
        await client.send(head + b"Expect: 100-continue\r\n\r\n")
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert b"Connection: close\r\n" in answer
        assert answer.endswith(b"no")


async def test_the_limit_of_our_own_routes_is_told_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """No setting raises it, so none is named."""
    async with (
        running_proxy("http://127.0.0.1:1", admin=Admin()) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.send(b"POST /specproxy/x HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (1 << 25))
        with suppress(ConnectionError):
            for _ in range(17):
                await client.send(bytes(1 << 20))
        reply = await client.reply()
    assert reply.status == 413
    assert b"fixed" in reply.body
    assert b"limits.body" not in reply.body
    assert "this limit of specproxy's own routes is fixed" in caplog.text
