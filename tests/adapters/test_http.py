"""The HTTP transport: connections and their reuse, failures, and the iterator's view."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from specproxy.adapters.base import UpstreamRequest
from specproxy.adapters.http import Endpoint, HttpBackend, HttpTransport, ResponseStream, fetch
from specproxy.errors import ConfigError, UpstreamClosed, UpstreamConnectError, UpstreamProtocolError
from specproxy.records import Health
from tests.support.loops import both_loops
from tests.support.proxy import lane
from tests.support.sink import RecordingSink
from tests.support.upstream import CERTIFICATE, Conn, Upstream, chunk, chunked, tls_context

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
GET = UpstreamRequest("GET", "/", (), replayable=True)


def always(response: bytes, *, close: bool = False) -> Callable[[Conn], Awaitable[None]]:
    """A script that answers every request alike."""

    async def script(conn: Conn) -> None:
        while True:
            await conn.request()
            await conn.send(response)
            if close:
                conn.close()
                return

    return script


def transport_to(upstream: Upstream, **options: float) -> HttpTransport:
    return HttpTransport(Endpoint.parse(upstream.url), **options)  # type: ignore[arg-type]  # max_idle is an int


async def settled(condition: Callable[[], bool]) -> None:
    """Let the loop turn until a condition holds; the test's time-out is the limit."""
    while not condition():  # noqa: ASYNC110 - the condition is about sockets, which set no event
        await asyncio.sleep(0.001)


# --- requests on the wire ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "head"),
    [
        (
            UpstreamRequest("GET", "/a%2Fb?x=%20&y", ((b"X-One", b"1"), (b"x-one", b"2")), b""),
            b"GET /a%2Fb?x=%20&y HTTP/1.1\r\nHost: HOST\r\nX-One: 1\r\nx-one: 2\r\n\r\n",
        ),
        (UpstreamRequest("POST", "/", (), b""), b"POST / HTTP/1.1\r\nHost: HOST\r\nContent-Length: 0\r\n\r\n"),
        (UpstreamRequest("GET", "/", (), b"", 0), b"GET / HTTP/1.1\r\nHost: HOST\r\nContent-Length: 0\r\n\r\n"),
        (UpstreamRequest("GET", "/", (), b"x"), b"GET / HTTP/1.1\r\nHost: HOST\r\nContent-Length: 1\r\n\r\n"),
        (UpstreamRequest("GET", "/\udce9", (), b""), b"GET /\xe9 HTTP/1.1\r\nHost: HOST\r\n\r\n"),
    ],
    ids=["headers", "empty post", "explicit zero", "get with body", "raw bytes"],
)
@both_loops
async def test_request_heads(request_: UpstreamRequest, head: bytes) -> None:
    """Target and headers go out as given, Host and Content-Length are ours."""
    seen: list[bytes] = []

    async def script(conn: Conn) -> None:
        seen.append((await conn.request()).head)
        await conn.send(OK)

    async with Upstream(script) as upstream:
        transport = transport_to(upstream)
        await fetch(transport.open, request_)
        assert seen == [head.replace(b"HOST", b"127.0.0.1:%d" % upstream.port)]
        await transport.aclose()


@pytest.mark.parametrize(
    ("url", "authority", "target"),
    [
        ("http://localhost:11434", "localhost:11434", "/v1"),
        ("http://localhost:80/api/", "localhost", "/api/v1"),
        ("https://[::1]/x", "[::1]", "/x/v1"),
        ("https://example.org:8443", "example.org:8443", "/v1"),
        ("unix:///run/engine.sock", "localhost", "/v1"),
    ],
)
def test_endpoints(url: str, authority: str, target: str) -> None:
    """A URL gives address, Host header and path prefix."""
    head = Endpoint.parse(url).head_of(UpstreamRequest("GET", "/v1", ()))
    assert head == f"GET {target} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode()


@pytest.mark.parametrize(
    "url", ["", "localhost:80", "ftp://x", "http://", "http://x:99999", "http://[::1", "unix:"]
)
def test_unusable_endpoints(url: str) -> None:
    """What is not an upstream URL is refused by name."""
    with pytest.raises(ConfigError, match="URL"):
        Endpoint.parse(url)


@pytest.mark.parametrize("strip", [True, False])
def test_origins_can_be_stripped(strip: bool) -> None:
    """Origin and Referer go, whatever their spelling, if the endpoint says so; all else stays."""
    endpoint = Endpoint.parse("http://127.0.0.1:11434", strip_origin=strip)
    head = endpoint.head_of(
        UpstreamRequest("GET", "/", ((b"oRIGIN", b"x"), (b"Referer", b"y"), (b"X-A", b"1")))
    )
    assert (b"oRIGIN: x\r\n" in head) is not strip
    assert (b"Referer: y\r\n" in head) is not strip
    assert b"X-A: 1\r\n" in head


# --- reuse ---------------------------------------------------------------------------------------


@both_loops
async def test_a_kept_connection_is_reused() -> None:
    """Replayable requests share a connection one after the other."""
    async with Upstream(always(OK)) as upstream:
        transport = transport_to(upstream)
        for _ in range(3):
            assert (await fetch(transport.open, GET)).body == b"hi"
        assert upstream.connections == 1
        assert transport.idle == 1
        await transport.aclose()
        assert transport.connections == 0


@both_loops
async def test_what_may_not_be_sent_twice_gets_a_fresh_connection() -> None:
    """A request that is not replayable never runs into a dead kept-alive connection."""
    async with Upstream(always(OK)) as upstream:
        transport = transport_to(upstream)
        await fetch(transport.open, GET)
        await fetch(transport.open, UpstreamRequest("POST", "/", (), b"x"))
        assert upstream.connections == 2
        await transport.aclose()


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi",
        OK + b"junk",
    ],
    ids=["close", "1.0", "junk"],
)
@both_loops
async def test_a_connection_that_cannot_be_kept_is_closed(response: bytes) -> None:
    """Close, HTTP/1.0 and bytes that nobody asked for: good response, new connection."""
    async with Upstream(always(response)) as upstream:
        transport = transport_to(upstream)
        for _ in range(2):
            assert (await fetch(transport.open, GET)).body == b"hi"
        assert upstream.connections == 2
        await settled(lambda: transport.connections == 0)
        await transport.aclose()


@both_loops
async def test_junk_on_an_idle_connection_closes_it() -> None:
    """Bytes between two responses cannot be taken for the next response."""
    poke = asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.send(OK)
        await poke.wait()
        await conn.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")

    async with Upstream(script) as upstream:
        transport = transport_to(upstream)
        await fetch(transport.open, GET)
        assert transport.idle == 1
        poke.set()
        await settled(lambda: transport.connections == 0)
        assert (await fetch(transport.open, GET)).body == b"hi"
        await transport.aclose()


@both_loops
async def test_idle_connections_are_few_and_short_lived() -> None:
    """At most `max_idle` are kept, for at most `idle_s`."""
    async with Upstream(always(OK)) as upstream:
        transport = transport_to(upstream, max_idle=2, idle_s=0.05)
        await asyncio.gather(*(fetch(transport.open, GET) for _ in range(5)))
        assert transport.idle == 2
        await settled(lambda: transport.connections == 0)
        assert transport.idle == 0
        await transport.aclose()


@both_loops
async def test_a_dead_kept_connection_costs_one_resend() -> None:
    """The upstream closes just as the next request comes: it is sent again, once, unseen."""
    served: list[bytes] = []

    async def script(conn: Conn) -> None:
        for serves in (True, upstream.connections > 1):
            seen = await conn.request()
            if not serves:
                conn.reset()
                return
            served.append(seen.request_line)
            await conn.send(OK)

    async with Upstream(script) as upstream:
        transport = transport_to(upstream)
        for _ in range(2):
            assert (await fetch(transport.open, GET)).body == b"hi"
        assert upstream.connections == 2
        assert len(served) == 2
        await transport.aclose()


@both_loops
async def test_a_fresh_connection_is_not_tried_twice() -> None:
    """A server that closes without answering gets a request once."""

    async def script(conn: Conn) -> None:
        await conn.request()
        conn.close()

    async with Upstream(script) as upstream:
        transport = transport_to(upstream)
        with pytest.raises(UpstreamClosed, match="without answering"):
            await fetch(transport.open, GET)
        assert upstream.connections == 1
        await transport.aclose()


@both_loops
async def test_an_answer_that_began_is_not_asked_for_again() -> None:
    """After the first byte of a response, even an interim one, nothing is sent again."""

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.send(OK)
        await conn.request()
        await conn.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        conn.close()

    async with Upstream(script) as upstream:
        transport = transport_to(upstream)
        await fetch(transport.open, GET)
        with pytest.raises(UpstreamClosed, match="before the response was complete"):
            await fetch(transport.open, GET)
        assert upstream.connections == 1
        await transport.aclose()


@both_loops
async def test_an_early_answer_spoils_the_connection() -> None:
    """A response to a request that was not sent whole leaves the connection in the middle of a body."""

    async def script(conn: Conn) -> None:
        await conn.head()
        await conn.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")

    async with Upstream(script) as upstream:
        transport = transport_to(upstream)
        sink = RecordingSink()
        exchange = transport.open(UpstreamRequest("POST", "/", (), None, 1000), sink)
        await exchange.write(b"x")
        assert await sink.over() == "end"
        with pytest.raises(UpstreamClosed):
            await exchange.write(b"y")
        await settled(lambda: transport.connections == 0)
        await transport.aclose()


@both_loops
async def test_an_answer_before_write_end_keeps_the_connection() -> None:
    """A body of known length is complete with its last byte, not with the call that says so."""
    async with Upstream(always(OK)) as upstream:
        transport = transport_to(upstream)
        sink = RecordingSink()
        exchange = transport.open(UpstreamRequest("POST", "/", (), None, 3), sink)
        await exchange.write(b"abc")
        assert await sink.over() == "end"
        await exchange.write_end()
        assert transport.idle == 1
        await transport.aclose()


# --- failures ------------------------------------------------------------------------------------


@both_loops
async def test_nobody_listens() -> None:
    """A refused connection is told by address and reason, and nothing was sent."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        transport = HttpTransport(Endpoint.parse(f"http://127.0.0.1:{free.getsockname()[1]}"))
        with pytest.raises(UpstreamConnectError, match="refused"):
            await fetch(transport.open, GET)
        await transport.aclose()


@both_loops
async def test_localhost_means_both_families() -> None:
    """An upstream that listens on 127.0.0.1 only is found by the name localhost."""
    async with Upstream(always(OK)) as upstream:
        transport = HttpTransport(Endpoint.parse(f"http://localhost:{upstream.port}"))
        assert (await fetch(transport.open, GET)).body == b"hi"
        await transport.aclose()


@both_loops
async def test_a_missing_socket_file() -> None:
    """A Unix socket that is not there is a connection error too."""
    transport = HttpTransport(Endpoint.parse("unix:///nonexistent/socket"))
    with pytest.raises(UpstreamConnectError, match="No such file"):
        await fetch(transport.open, GET)
    await transport.aclose()


@both_loops
async def test_connecting_has_a_time_limit() -> None:
    """A server that accepts but never completes TLS is given up on."""
    async with Upstream(lambda conn: conn.gone()) as upstream:
        endpoint = Endpoint.parse(upstream.url.replace("http:", "https:"), connect_timeout_s=0.05)
        transport = HttpTransport(endpoint)
        with pytest.raises(UpstreamConnectError, match=r"within 0\.05 s"):
            await fetch(transport.open, GET)
        await transport.aclose()


@both_loops
async def test_a_certificate_that_nobody_trusts() -> None:
    """TLS is verified unless told otherwise."""
    async with Upstream(always(OK), tls=tls_context()) as upstream:
        transport = transport_to(upstream)
        with pytest.raises(UpstreamConnectError, match="certificate"):
            await fetch(transport.open, GET)
        await transport.aclose()


@both_loops
async def test_a_certificate_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A private authority is trusted through SSL_CERT_FILE, as everywhere."""
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    async with Upstream(always(OK), tls=tls_context()) as upstream:
        transport = HttpTransport(Endpoint.parse(upstream.url))
        assert (await fetch(transport.open, GET)).body == b"hi"
        await transport.aclose()


@both_loops
async def test_what_is_not_http_fails() -> None:
    """A server of another protocol is named as such."""
    async with Upstream(always(b"-ERR unknown command\r\n")) as upstream:
        transport = transport_to(upstream)
        with pytest.raises(UpstreamProtocolError):
            await fetch(transport.open, GET)
        await settled(lambda: transport.connections == 0)
        await transport.aclose()


@pytest.mark.parametrize("end", ["close", "reset"])
@both_loops
async def test_a_body_without_length_ends_with_close_but_not_with_reset(end: str) -> None:
    """An orderly close completes it, a reset breaks it off."""

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.send(b"HTTP/1.1 200 OK\r\n\r\nsome")
        await read.wait()
        getattr(conn, end)()

    read = asyncio.Event()
    async with Upstream(script) as upstream:
        transport = transport_to(upstream)
        sink = RecordingSink()
        transport.open(GET, sink)
        await sink.heard("data")
        read.set()
        assert await sink.over() == ("end" if end == "close" else "fail")
        assert sink.body == b"some"
        await transport.aclose()


@both_loops
async def test_giving_up_while_connecting() -> None:
    """An exchange aborted before there is a connection leaves none behind."""
    async with Upstream(always(OK)) as upstream:
        transport = transport_to(upstream)
        sink = RecordingSink()
        transport.open(GET, sink).abort()
        await fetch(transport.open, GET)
        await settled(lambda: transport.connections == transport.idle)
        assert sink.calls == []
        await transport.aclose()


@both_loops
async def test_giving_up_closes_the_connection() -> None:
    """The upstream sees the end at once, before it has answered."""
    seen = asyncio.Event()
    gone = asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.request()
        seen.set()
        await conn.gone()
        gone.set()

    async with Upstream(script) as upstream:
        transport = transport_to(upstream)
        exchange = transport.open(GET, RecordingSink())
        await seen.wait()
        exchange.abort()
        async with asyncio.timeout(5):
            await gone.wait()
        await transport.aclose()


@both_loops
async def test_closing_while_connecting_fails_the_exchange() -> None:
    """Nobody waits for ever for a connection that is not made any more."""
    async with Upstream(lambda conn: conn.gone()) as upstream:
        transport = HttpTransport(Endpoint.parse(upstream.url.replace("http:", "https:")))
        sink = RecordingSink()
        transport.open(GET, sink)
        await asyncio.sleep(0)
        await transport.aclose()
        assert await sink.over() == "fail"


# --- back-pressure -------------------------------------------------------------------------------


@both_loops
async def test_a_slow_upstream_holds_the_writer_back() -> None:
    """Pieces of a body wait while the upstream does not read."""
    read = asyncio.Event()

    async def script(conn: Conn) -> None:
        conn.stall()
        await read.wait()
        conn.read_on()
        await conn.request()
        await conn.send(OK)

    async with Upstream(script) as upstream:
        transport = transport_to(upstream)
        sink = RecordingSink()
        size, piece = 64 * 1024 * 1024, b"x" * 65536
        exchange = transport.open(UpstreamRequest("POST", "/", (), None, size), sink)
        written = 0

        async def write() -> None:
            nonlocal written
            while written < size:
                await exchange.write(piece)
                written += len(piece)
            await exchange.write_end()

        writing = asyncio.create_task(write())
        done, _ = await asyncio.wait((writing,), timeout=0.3)
        assert not done
        assert written < size / 2
        read.set()
        await writing
        assert await sink.over() == "end"
        await transport.aclose()


@both_loops
async def test_a_writer_is_freed_when_the_upstream_goes() -> None:
    """A body that waits for a slow upstream raises when that upstream has gone."""
    full = asyncio.Event()

    async def script(conn: Conn) -> None:
        conn.stall()
        await full.wait()
        conn.reset()

    async with Upstream(script) as upstream:
        transport = transport_to(upstream)
        exchange = transport.open(UpstreamRequest("POST", "/", (), None, None), RecordingSink())

        async def write() -> None:
            while True:
                await exchange.write(b"x" * 65536)

        writing = asyncio.create_task(write())
        await asyncio.wait((writing,), timeout=0.2)
        full.set()
        with pytest.raises(UpstreamClosed):
            await writing
        await transport.aclose()


@both_loops
async def test_an_iterator_that_is_slow_pauses_the_upstream() -> None:
    """A reader that does not read holds little, and misses nothing."""
    size = 32 * 1024 * 1024
    sent = 0

    async def script(conn: Conn) -> None:
        nonlocal sent
        await conn.request()
        await conn.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        while sent < size:
            await conn.send(b"x" * 65536)
            sent += 65536

    async with Upstream(script) as upstream:
        transport = transport_to(upstream)
        async with ResponseStream(transport.open, GET) as response:
            await response.wait_head()
            before = -1
            while before != sent:  # until nothing moves any more
                before = sent
                await asyncio.sleep(0.05)
            assert sent < size / 2
            received = 0
            async for piece in response:
                received += len(piece)
        assert received == size
        await transport.aclose()


# --- the iterator's view -------------------------------------------------------------------------


@both_loops
async def test_fetch_gives_everything() -> None:
    """Status, headers, body and trailers of a chunked reply."""
    wire = b"HTTP/1.1 201 Made\r\nX-A: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with Upstream(always(wire + chunked(b"a", b"b", trailers=b"X-T: 1\r\n"))) as upstream:
        transport = transport_to(upstream)
        reply = await fetch(transport.open, GET)
        assert (reply.head.status, reply.head.reason) == (201, b"Made")
        assert reply.head.headers == ((b"X-A", b"1"), (b"Transfer-Encoding", b"chunked"))
        assert (reply.body, reply.trailers) == (b"ab", ((b"X-T", b"1"),))
        await transport.aclose()


@both_loops
async def test_fetch_has_limits() -> None:
    """Too slow and too long are errors, and leave no connection open."""

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"12345"))

    async with Upstream(script) as upstream:
        transport = transport_to(upstream)
        with pytest.raises(UpstreamClosed, match="within"):
            await fetch(transport.open, GET, timeout_s=0.05)
        with pytest.raises(UpstreamProtocolError, match="longer than 4 bytes"):
            await fetch(transport.open, GET, limit=4)
        await settled(lambda: transport.connections == 0)
        await transport.aclose()


@both_loops
async def test_a_stream_breaks_after_its_data() -> None:
    """What came before the break is read first."""

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nsome")
        conn.close()

    async with Upstream(script) as upstream:
        transport = transport_to(upstream)
        async with ResponseStream(transport.open, GET) as response:
            assert await anext(response) == b"some"
            with pytest.raises(UpstreamClosed):
                await anext(response)
        await transport.aclose()


# --- the backend's lanes -------------------------------------------------------------------------


@both_loops
async def test_health_is_marked_and_kept() -> None:
    """A lane that stays keeps its health when lanes are replaced; `since` moves only with the health."""
    backend = HttpBackend("b", Endpoint.parse("http://127.0.0.1:1"), [lane("b"), lane("b", "ngram")])
    backend.mark("b/ngram", Health.UNHEALTHY, "503")
    since = backend.lanes()[1].since
    backend.mark("b/ngram", Health.UNHEALTHY, "502")
    assert (backend.lanes()[1].note, backend.lanes()[1].since) == ("502", since)
    backend.set_lanes([lane("b", "ngram"), lane("b", "mtp")])
    assert [(s.lane.id, s.health) for s in backend.lanes()] == [
        ("b/ngram", Health.UNHEALTHY),
        ("b/mtp", Health.READY),
    ]


@both_loops
async def test_an_absent_server_is_a_probe_result() -> None:
    """Probing what is not there is no error."""
    backend = HttpBackend("b", Endpoint.parse("unix:///nonexistent/socket"), [lane("b")])
    assert not (await backend.probe()).reachable
    await backend.aclose()
