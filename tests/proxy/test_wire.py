"""Bytes through the proxy, compared on real sockets: what one side sends is what the other side gets."""

from __future__ import annotations

import asyncio
import gzip

import pytest

from specproxy.proxy.forward import Limits
from specproxy.records import Outcome
from tests.support.client import RawClient, post
from tests.support.loops import both_loops
from tests.support.proxy import running_proxy
from tests.support.relay import CHAT, EVENTS, GET, Recorder, settled
from tests.support.upstream import Conn, Received, Upstream, chunk, chunked

OWN_HEADERS = (b"x-specproxy-", b"server-timing: specproxy")


def without_own(head: bytes) -> bytes:
    """A response head without the lines that the proxy adds to explain itself."""
    lines = head.split(b"\r\n")
    return b"\r\n".join(line for line in lines if not line.lower().startswith(OWN_HEADERS))


async def relayed(request: bytes, answer: bytes, *, head_only: bool = False) -> bytes:
    """What a client gets for a request that the upstream answers so."""
    async with (
        Upstream(Recorder(answer)) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        reply = await client.ask(request, head_only=head_only)
        # the connection is still good, and nothing more came
        assert (await client.ask(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n", head_only=True)).status
        return reply.head + reply.body


# --- responses -----------------------------------------------------------------------------------

OK_BODY = b"Content-Length: 2\r\n\r\nok"
UNCHANGED = {
    "plain": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    "own reason": b"HTTP/1.1 200 Fine By Me\r\nContent-Length: 2\r\n\r\nok",
    "no reason": b"HTTP/1.1 418 \r\nContent-Length: 2\r\n\r\nok",
    "odd status": b"HTTP/1.1 299 Odd\r\nContent-Length: 2\r\n\r\nok",
    "duplicates": b"HTTP/1.1 200 OK\r\nSet-Cookie: a\r\nVary: x\r\nset-cookie: b\r\n" + OK_BODY,
    "case and order": b"HTTP/1.1 200 OK\r\nzEBRA: 1\r\nContent-length: 2\r\nApple: 2\r\n\r\nok",
    "raw bytes": b"HTTP/1.1 200 OK\r\nX-Raw: \xff\xe9\r\nContent-Length: 2\r\n\r\nok",
    "empty value": b"HTTP/1.1 200 OK\r\nX-Empty: \r\nContent-Length: 2\r\n\r\nok",
    "no content type": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    "its own date and server": b"HTTP/1.1 200 OK\r\nDate: never\r\nServer: x\r\nContent-Length: 2\r\n\r\nok",
    "accel": b"HTTP/1.1 200 OK\r\nX-Accel-Buffering: no\r\nCache-Control: no-cache\r\n" + OK_BODY,
    "server timing": b"HTTP/1.1 200 OK\r\nServer-Timing: db;dur=5\r\nContent-Length: 2\r\n\r\nok",
    "cors": b"HTTP/1.1 200 OK\r\nAccess-Control-Allow-Origin: *\r\nContent-Length: 2\r\n\r\nok",
    "error": b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\nwell",
    "no content": b"HTTP/1.1 204 No Content\r\nX-A: 1\r\n\r\n",
    "not modified": b'HTTP/1.1 304 Not Modified\r\nETag: "x"\r\nContent-Length: 99\r\n\r\n',
    "empty body": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "chunks": b"HTTP/1.1 200 OK\r\nX-A: 1\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(b"one", b"two"),
    "empty chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(),
    "trailers": b"HTTP/1.1 200 OK\r\nTrailer: X-T\r\nTransfer-Encoding: chunked\r\n\r\n"
    + chunked(b"x", trailers=b"X-T: 1\r\nx-t: 2\r\n"),
    "sse comments": EVENTS
    + chunked(b": ping\n\n", b"event: x\nid: 7\nretry: 5\ndata: a\ndata: b\n\n", b":\n\n"),
    "crlf events": EVENTS + chunked(b"data: a\r\n\r\n", b"data: b\r\r"),
    "gzip": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%b"
    % (len(gzip.compress(b"x" * 99, mtime=0)), gzip.compress(b"x" * 99, mtime=0)),
    "all bytes": b"HTTP/1.1 200 OK\r\nContent-Length: 256\r\n\r\n" + bytes(range(256)),
}


@pytest.mark.parametrize("answer", UNCHANGED.values(), ids=UNCHANGED.keys())
@both_loops
async def test_responses_are_unchanged(answer: bytes) -> None:
    """Head and body arrive byte for byte, chunk boundaries included, with nothing added."""
    assert await relayed(GET, answer) == answer


@pytest.mark.parametrize("answer", UNCHANGED.values(), ids=UNCHANGED.keys())
@both_loops
async def test_routed_responses_are_unchanged_apart_from_our_headers(answer: bytes) -> None:
    """A routed request gets the same bytes, with the lines that explain the choice."""
    got = await relayed(post("/v1/chat/completions", CHAT), answer)
    head, _, body = got.partition(b"\r\n\r\n")
    assert b"X-Specproxy-Lane: b0/plain" in head
    assert without_own(head) + b"\r\n\r\n" + body == answer


@both_loops
async def test_routed_responses_say_what_was_decided() -> None:
    """Lane, strategy, workload, reason and timing; an upstream's own Server-Timing stays."""
    answer = b"HTTP/1.1 200 OK\r\nServer-Timing: db;dur=5\r\nContent-Length: 2\r\n\r\nok"
    async with (
        Upstream(Recorder(answer)) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        reply = await client.ask(post("/v1/chat/completions", CHAT))
        assert reply.values(b"X-Specproxy-Lane") == [b"b0/plain"]
        assert reply.values(b"X-Specproxy-Strategy") == [b"plain"]
        assert reply.values(b"X-Specproxy-Reason") == [b"scripted: plain is wanted"]
        assert proxy.seen[0].workload.key.encode() in reply.values(b"X-Specproxy-Workload")
        first, ours = reply.values(b"Server-Timing")
        assert first == b"db;dur=5"
        assert ours.startswith(b"specproxy;dur=")
        assert ours.endswith(b';desc="b0/plain"')


@pytest.mark.parametrize("headers", [b"Content-Length: 5\r\n", b"X-A: 1\r\n"])
@both_loops
async def test_head_requests(headers: bytes) -> None:
    """The answer to HEAD keeps its headers and has no body."""
    answer = b"HTTP/1.1 200 OK\r\n" + headers + b"\r\n"
    request = b"HEAD /x HTTP/1.1\r\nHost: x\r\n\r\n"
    assert await relayed(request, answer, head_only=True) == answer


@both_loops
async def test_connection_headers_stay_on_their_connection() -> None:
    """Hop-by-hop headers of a response end here, those that Connection names too."""
    answer = (
        b"HTTP/1.1 200 OK\r\nConnection: keep-alive, X-Hop\r\nKeep-Alive: timeout=5, max=9\r\nX-Hop: 1\r\n"
        b"X-End: 1\r\nProxy-Connection: x\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nok"
    )
    assert await relayed(GET, answer) == b"HTTP/1.1 200 OK\r\nX-End: 1\r\nContent-Length: 2\r\n\r\nok"


@both_loops
async def test_a_body_that_ends_with_the_connection_becomes_chunked() -> None:
    """Without a length we tell the end by chunks, and the client's connection stays."""

    async def script(conn: Conn) -> None:
        seen = await conn.request()
        if seen.request_line.startswith(b"HEAD"):
            await conn.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            return
        await conn.send(b"HTTP/1.0 200 OK\r\nX-A: 1\r\n\r\nsome")
        conn.close()

    async with (
        Upstream(script) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        reply = await client.ask(GET)
        assert reply.head == b"HTTP/1.1 200 OK\r\nX-A: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert reply.body == chunked(b"some")
        assert (await client.ask(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n", head_only=True)).status == 200


@both_loops
async def test_interim_responses_are_not_passed_on() -> None:
    """103 Early Hints of an upstream are skipped."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    assert await relayed(GET, hints + answer) == answer


# --- requests ------------------------------------------------------------------------------------


async def sent_upstream(request: bytes) -> Received:
    """What the upstream gets for a client's bytes."""
    recorder = Recorder()
    async with (
        Upstream(recorder) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.ask(request, head_only=request.startswith(b"HEAD"))
        (seen,) = recorder.seen
        seen.head = seen.head.replace(b"Host: 127.0.0.1:%d\r\n" % upstream.port, b"Host: HOST\r\n")
        return seen


@pytest.mark.parametrize(
    "target",
    [
        b"/",
        b"/v1/models/a%2Fb%20c",
        b"/x?q=%2F&q=a+b&&=&%zz",
        b"/x?",
        b"//double//slash/../up",
        b"/x;a=1/@:!$&'()*,",
        b"/sp%0Aecial%00",
        b"/v1/models/org/name:tag",
        b"/" + b"long" * 5000,
        "/ü?ß=é".encode(),
        b"/\xff\xfe",
    ],
    ids=lambda t: t[:20].decode("latin-1"),
)
@both_loops
async def test_request_targets_are_raw(target: bytes) -> None:
    """Path and query go on as they came, encoded or not."""
    seen = await sent_upstream(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert seen.head == b"GET " + target + b" HTTP/1.1\r\nHost: HOST\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "got"),
    [
        (b"OPTIONS * HTTP/1.1", b"OPTIONS * HTTP/1.1"),
        (b"GET http://elsewhere.example/a%2F?b HTTP/1.1", b"GET /a%2F?b HTTP/1.1"),
        (b"GET http://elsewhere.example HTTP/1.1", b"GET / HTTP/1.1"),
        (b"GET http://elsewhere.example?b HTTP/1.1", b"GET /?b HTTP/1.1"),
    ],
)
@both_loops
async def test_other_forms_of_targets(sent: bytes, got: bytes) -> None:
    """The asterisk form stays; the absolute form becomes a path, and never another upstream."""
    seen = await sent_upstream(sent + b"\r\nHost: x\r\n\r\n")
    assert seen.request_line == got


@pytest.mark.parametrize(
    "method",
    ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "PROPFIND", "REPORT", "FETCH", "get", "X!~1"],
)
@both_loops
async def test_methods(method: str) -> None:
    """Methods go on, known or not."""
    seen = await sent_upstream(f"{method} /x HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert seen.request_line == f"{method} /x HTTP/1.1".encode()


@pytest.mark.parametrize(
    "line", [b"FETCH /x HTTP/1.1\r\n", "GET /ü HTTP/1.1\r\n".encode(), b"GET /x HTTP/1.1\r\n"]
)
@both_loops
async def test_requests_that_come_a_byte_at_a_time(line: bytes) -> None:
    """Two on one connection, with empty lines before them: what is read at once makes no difference."""
    recorder = Recorder()
    async with (
        Upstream(recorder) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        for _ in range(2):
            for byte in b"\r\n" + line + b"Host: x\r\nContent-Length: 2\r\n\r\nhi":
                await client.send(bytes((byte,)))
                await asyncio.sleep(0)
            assert (await client.reply()).status == 200
    assert [(seen.request_line + b"\r\n", seen.body) for seen in recorder.seen] == [(line, b"hi")] * 2


@both_loops
async def test_trailers_of_a_request_go_on() -> None:
    """Behind a body in chunks, in order and spelling; those that are not end to end stay here."""
    sent = asyncio.get_running_loop().create_future()

    async def script(conn: Conn) -> None:
        await conn.head()
        sent.set_result(await conn.reader.readuntil(b"\r\n\r\n"))
        await conn.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with (
        Upstream(script) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.send(b"POST /other HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        trailers = b"X-Sum: 1\r\nKeep-Alive: 1\r\nX-Specproxy-Token: t\r\nHost: y\r\nx-sum: 2\r\n"
        await client.send(chunked(b"hi", trailers=trailers))
        assert (await client.reply()).status == 200
    assert await sent == chunked(b"hi", trailers=b"X-Sum: 1\r\nx-sum: 2\r\n")


@both_loops
async def test_request_headers_are_raw() -> None:
    """Order, spelling, duplicates and odd bytes stay; Host is the upstream's."""
    headers = (
        b"zEBRA: 1\r\nAccept-Encoding: gzip, br\r\nX-Dup: a\r\nAuthorization: Bearer k\r\nx-dup: b\r\n"
        b"X-Raw: \xff\r\n"
    )
    seen = await sent_upstream(b"GET /x HTTP/1.1\r\nHost: proxy.example\r\n" + headers + b"\r\n")
    assert seen.head == b"GET /x HTTP/1.1\r\nHost: HOST\r\n" + headers + b"\r\n"


@both_loops
async def test_what_does_not_go_upstream() -> None:
    """Hop-by-hop headers, those that Connection names, and ours stay here."""
    seen = await sent_upstream(
        b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, X-Hop\r\nKeep-Alive: 1\r\nX-Hop: 1\r\n"
        b"TE: trailers\r\nProxy-Connection: x\r\nProxy-Authorization: x\r\nX-Specproxy-Token: secret\r\n"
        b"X-Specproxy-Strategy: plain\r\nX-End: 1\r\n\r\n"
    )
    assert seen.head == b"GET /x HTTP/1.1\r\nHost: HOST\r\nX-End: 1\r\n\r\n"


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
@both_loops
async def test_an_upgrade_is_declined(upgrade: bytes) -> None:
    """Clients that offer HTTP/2 over cleartext get HTTP/1.1, body and all; the connection stays usable."""
    recorder = Recorder()
    async with (
        Upstream(recorder) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        offer = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: " + upgrade, b"HTTP2-Settings: AAMAAABk")
        for _ in range(2):
            reply = await client.ask(post("/v1/chat/completions", CHAT, *offer))
            assert reply.status == 200
        for seen in recorder.seen:
            assert seen.body == CHAT
            assert not seen.values(b"upgrade")


@both_loops
async def test_a_websocket_is_refused_clearly() -> None:
    """Its client can go on with nothing but a 101, so it is told here; the connection stays usable."""
    recorder = Recorder()
    async with (
        Upstream(recorder) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        offer = b"Connection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\nSec-WebSocket-Version: 13\r\n"
        reply = await client.ask(b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\n%b\r\n" % offer)
        assert reply.status == 501
        assert b"WebSocket connections are not relayed" in reply.body
        assert recorder.seen == []
        assert (await client.ask(GET)).body == b"ok"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/other"])
@pytest.mark.parametrize("body", [CHAT, b"{", b"", b"[1]", bytes(range(256)) * 40, b"\xff\xfe"])
@both_loops
async def test_bodies_with_a_length(path: str, body: bytes) -> None:
    """A body goes on unchanged, JSON or not, with its length."""
    seen = await sent_upstream(post(path, body))
    assert seen.body == body
    assert seen.values(b"content-length") == [b"%d" % len(body)]


@pytest.mark.parametrize(("path", "has_length"), [("/v1/chat/completions", True), ("/other", False)])
@both_loops
async def test_chunked_bodies(path: str, has_length: bool) -> None:
    """What we read to classify gets a Content-Length, which some servers need; all else stays chunked."""
    pieces = [CHAT[i : i + 7] for i in range(0, len(CHAT), 7)]
    recorder = Recorder()
    async with (
        Upstream(recorder) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.send(f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for piece in pieces:
            await client.send(chunk(piece))
            await asyncio.sleep(0)
        await client.send(b"0\r\n\r\n")
        assert (await client.reply()).status == 200
    (seen,) = recorder.seen
    assert seen.body == CHAT
    assert bool(seen.values(b"content-length")) is has_length
    assert bool(seen.values(b"transfer-encoding")) is not has_length


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/other"])
@both_loops
async def test_encoded_bodies_are_left_alone(path: str) -> None:
    """A compressed request is neither decoded nor judged."""
    body = gzip.compress(CHAT)
    seen = await sent_upstream(post(path, body, b"Content-Encoding: gzip", b"Content-Type: application/json"))
    assert seen.body == body
    assert seen.values(b"content-encoding") == [b"gzip"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/other"])
@both_loops
async def test_expect_100_continue(path: str) -> None:
    """The client is told to go on before it sends its body; the upstream is not asked."""
    recorder = Recorder()
    async with (
        Upstream(recorder) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.send(post(path, CHAT, b"Expect: 100-continue")[: -len(CHAT)])
        assert (await client.head()).head == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert (await client.ask(CHAT)).body == b"ok"
        assert recorder.seen[0].body == CHAT
        assert not recorder.seen[0].values(b"expect")


@both_loops
async def test_a_body_above_the_inspection_limit_passes_unread() -> None:
    """It is streamed to the default lane, whole, and counted as unread."""
    body = b'{"model":"m","messages":[{"role":"user","content":"' + b"x" * 300_000 + b'"}]}'
    recorder = Recorder()
    async with (
        Upstream(recorder) as upstream,
        running_proxy(upstream.url, limits=Limits(inspect=100_000)) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        chunks = b"".join(chunk(body[i : i + 9999]) for i in range(0, len(body), 9999)) + b"0\r\n\r\n"
        for request in (
            post("/v1/chat/completions", body),
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks,
        ):
            reply = await client.ask(request)
            assert without_own(reply.head) == b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"
            assert reply.values(b"X-Specproxy-Workload") == [b"unread/warm"]
        assert [seen.body for seen in recorder.seen] == [body, body]
        await settled(lambda: [seen.rule for seen in proxy.seen] == ["unread", "unread"])


@pytest.mark.parametrize("framed", ["length", "chunks"])
@both_loops
async def test_a_body_above_the_limit_is_refused(framed: str) -> None:
    """413 in the client's dialect; the connection closes, since the rest of the body is unread."""
    async with (
        Upstream(Recorder()) as upstream,
        running_proxy(upstream.url, limits=Limits(inspect=10, body=1000)) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        if framed == "length":
            await client.send(post("/api/chat", b"x" * 1001)[:-1])
        else:
            await client.send(b"POST /api/chat HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            await client.send(chunk(b"x" * 600) + chunk(b"x" * 600))
        reply = await client.reply()
        assert reply.status == 413
        assert reply.body.startswith(b'{"error":"the request body is longer than 1000 bytes')
        assert reply.values(b"connection") == [b"close"]


@both_loops
async def test_a_malformed_chunk_is_the_clients_fault() -> None:
    """400 in the client's dialect, and the half request is withdrawn from the upstream."""
    withdrawn = asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.head()
        await conn.gone()
        withdrawn.set()

    async with (
        Upstream(script) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.send(b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"good"))
        await client.send(b"zz\r\nbad\r\n")
        reply = await client.reply()
        assert reply.status == 400
        await withdrawn.wait()


# --- HTTP/1.0 and connections --------------------------------------------------------------------


@both_loops
async def test_http_1_0_clients_get_no_chunks() -> None:
    """They read to the end of the connection."""
    async with (
        Upstream(Recorder(EVENTS + chunked(b"one", b"two", trailers=b"X-T: 1\r\n"))) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.send(b"GET /x HTTP/1.0\r\n\r\n")
        assert await client.rest() == b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\nonetwo"


@both_loops
async def test_http_1_0_clients_may_keep_their_connection() -> None:
    """With a length and on request it stays, and is told so."""
    async with (
        Upstream(Recorder()) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        for _ in range(2):
            reply = await client.ask(b"GET /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            assert reply.values(b"connection") == [b"keep-alive"]
            assert reply.body == b"ok"


@both_loops
async def test_connection_close_is_honoured() -> None:
    """The client that asks for it is told, and gets it; the upstream's connection stays."""
    async with Upstream(Recorder()) as upstream, running_proxy(upstream.url) as proxy:
        for _ in range(2):
            async with await RawClient.connect(proxy.port) as client:
                await client.send(b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                got = await client.rest()
                assert got == b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
        assert upstream.connections == 1


@both_loops
async def test_an_upstream_that_closes_does_not_close_the_client() -> None:
    """`Connection: close` of the upstream is about its connection."""
    answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.send(answer)
        conn.close()

    async with (
        Upstream(script) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        for _ in range(3):
            assert (await client.ask(GET)).head == b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"
        assert upstream.connections == 3


@both_loops
async def test_pipelined_requests_are_answered_in_order() -> None:
    """Requests sent at once get their answers one after the other."""

    async def script(conn: Conn) -> None:
        while True:
            seen = await conn.request()
            path = seen.request_line.split(b" ")[1]
            await conn.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(path), path))

    async with (
        Upstream(script) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        paths = [b"/%d" % i for i in range(100)]
        await client.send(b"".join(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n" for path in paths))
        assert [(await client.reply()).body for _ in paths] == paths


JUNK = {
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "space in name": (b"GET / HTTP/1.1\r\nBad Header: x", 400),
    "control in value": (b"GET / HTTP/1.1\r\nX: a\x01b", 400),
    "bare newlines": (b"GET / HTTP/1.1\nHost: x\n\n", 400),
    "folded": (b"GET / HTTP/1.1\r\nX: a\r\n b", 400),
    "bad method": (b"FE(TCH / HTTP/1.1", 400),
    "half a line": (b"FETCH /", 400),
    "HTTP/0.9": (b"GET /", 505),
    "HTTP/2": (b"GET / HTTP/2.0", 505),
    "two lengths": (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2", 400),
    "negative length": (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1", 400),
    "odd coding": (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip", 501),
    "long head": (b"GET / HTTP/1.1\r\nX: " + b"x" * 300_000, 431),
    "many headers": (b"GET / HTTP/1.1\r\n" + b"\r\n".join(b"X-%d: x" % i for i in range(300)), 431),
}


@pytest.mark.parametrize(("junk", "status"), JUNK.values(), ids=JUNK.keys())
@both_loops
async def test_what_is_not_http_is_refused(junk: bytes, status: int) -> None:
    """It gets an error as JSON and a closed connection, and never reaches the upstream."""
    recorder = Recorder()
    async with (
        Upstream(recorder) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.send(b"GET /good HTTP/1.1\r\nHost: x\r\n\r\n" + junk + b"\r\n\r\n")
        assert (await client.reply()).status == 200
        reply = await client.reply()
        assert reply.status == status
        assert b'"error"' in reply.body
        assert await client.rest() == b""
        assert [seen.request_line for seen in recorder.seen] == [b"GET /good HTTP/1.1"]


@both_loops
async def test_smuggled_requests_are_refused() -> None:
    """Two framings of one body are an attack, not a request."""
    recorder = Recorder()
    async with (
        Upstream(recorder) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.send(
            b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
            b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
        )
        assert b" 400 " in await client.rest()
        assert recorder.seen == []


# --- streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/other"])
@both_loops
async def test_chunks_are_never_delayed(path: str) -> None:
    """The upstream sends a chunk only after the client has the one before; so with the head."""
    turn = asyncio.Semaphore(0)

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.send(EVENTS)
        for i in range(20):
            await turn.acquire()
            await conn.send(chunk(b"data: %d\n\n" % i))
        await turn.acquire()
        await conn.send(b"0\r\n\r\n")

    async with (
        Upstream(script) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.send(post(path, CHAT))
        await client.head()
        for i in range(20):
            turn.release()
            expected = chunk(b"data: %d\n\n" % i)
            assert await client.exactly(len(expected)) == expected
        turn.release()
        assert await client.exactly(5) == b"0\r\n\r\n"


@both_loops
async def test_a_chunk_is_passed_on_before_it_is_whole() -> None:
    """A large chunk arrives in pieces; each goes on when it comes."""
    turn = asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.send(EVENTS + b"a\r\nhello")
        await turn.wait()
        await conn.send(b"world\r\n0\r\n\r\n")

    async with (
        Upstream(script) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.send(GET)
        await client.head()
        assert await client.exactly(len(chunk(b"hello"))) == chunk(b"hello")
        turn.set()
        assert await client.until(b"0\r\n\r\n") == chunked(b"world")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/other"])
@pytest.mark.parametrize("how", ["close", "reset", "junk"])
@both_loops
async def test_a_broken_stream_is_broken_for_the_client(path: str, how: str) -> None:
    """All that came is passed on, then the connection closes without the final chunk."""
    read = asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.send(EVENTS + chunk(b"data: 1\n\n"))
        await read.wait()
        if how == "junk":
            await conn.send(b"zz\r\n")
        else:
            getattr(conn, how)()

    async with (
        Upstream(script) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.send(post(path, CHAT))
        await client.head()
        assert await client.exactly(len(chunk(b"data: 1\n\n"))) == chunk(b"data: 1\n\n")
        read.set()
        assert await client.rest() == b""
        if path != "/other":
            assert [seen.outcome for seen in proxy.seen] == [Outcome.TRUNCATED]


@both_loops
async def test_a_short_body_is_short_for_the_client() -> None:
    """An upstream that promises more than it sends: the same bytes, then the connection closes."""

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nsome")
        conn.close()

    async with (
        Upstream(script) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.send(GET)
        assert await client.rest() == b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nsome"


@both_loops
async def test_an_error_in_mid_stream_passes() -> None:
    """An error event and the proper end behind it arrive as they are, and the observation says error."""
    error = b'data: {"error":{"message":"slot gone","code":500}}\n\n'
    answer = EVENTS + chunked(b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n', error)
    async with (
        Upstream(Recorder(answer)) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        reply = await client.ask(post("/v1/chat/completions", CHAT))
        assert reply.body == answer[len(EVENTS) :]
        assert (await client.ask(GET)).status == 200
        assert [seen.outcome for seen in proxy.seen] == [Outcome.ERROR]
