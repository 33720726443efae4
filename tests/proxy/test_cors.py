"""Pages that may call may read, too: what browsers ask beforehand, and what responses say."""

from __future__ import annotations

import pytest

from specproxy.proxy.guard import Guard
from tests.support.client import RawClient, post
from tests.support.proxy import running_proxy
from tests.support.relay import CHAT, Recorder
from tests.support.upstream import Upstream

PAGE = "http://localhost:3000"
ASKED = (
    b"OPTIONS /api/chat HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: %b\r\nAccess-Control-Request-Method: POST\r\n"
    b"Access-Control-Request-Headers: authorization,content-type\r\n\r\n"
)


def guarded(guard: Guard) -> dict[str, object]:
    return {"guard": guard.check, "reader": guard.reader}


@pytest.mark.parametrize("token", [None, "s3cret"])
@pytest.mark.parametrize("origin", [PAGE, "https://chat.example", "app://obsidian.md"])
async def test_what_a_browser_asks_beforehand_is_answered_here(origin: str, token: str | None) -> None:
    """Without a token, which browsers do not send with it, and without asking the upstream."""
    recorder = Recorder()
    async with (
        Upstream(recorder) as upstream,
        running_proxy(upstream.url, **guarded(Guard(token, origins=["https://chat.example"]))) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        reply = await client.ask(ASKED % origin.encode())
        assert reply.status == 204
        assert reply.values(b"access-control-allow-origin") == [origin.encode()]
        assert reply.values(b"access-control-allow-headers") == [b"authorization,content-type"]
        assert b"POST" in reply.values(b"access-control-allow-methods")[0]
        assert recorder.seen == []


async def test_a_foreign_page_is_told_nothing() -> None:
    """It gets the refusal that its call would get, and no leave to read it."""
    async with (
        Upstream(Recorder()) as upstream,
        running_proxy(upstream.url, **guarded(Guard())) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        reply = await client.ask(ASKED % b"https://evil.example")
        assert reply.status == 403
        assert reply.values(b"access-control-allow-origin") == []


@pytest.mark.parametrize("path", ["/api/chat", "/api/tags"])
async def test_a_response_may_be_read_by_the_page_that_asked(path: str) -> None:
    """Caches are told that it depends on the page; without Origin nothing is added."""
    async with (
        Upstream(Recorder()) as upstream,
        running_proxy(upstream.url, **guarded(Guard())) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        reply = await client.ask(_local(post(path, CHAT, f"Origin: {PAGE}".encode())))
        assert reply.values(b"access-control-allow-origin") == [PAGE.encode()]
        assert reply.values(b"vary") == [b"Origin"]
        assert (await client.ask(_local(post(path, CHAT)))).values(b"access-control-allow-origin") == []


async def test_an_upstream_that_says_who_may_read_is_left_to_it() -> None:
    """Two such headers would be none to a browser."""
    answer = b"HTTP/1.1 200 OK\r\nAccess-Control-Allow-Origin: *\r\nContent-Length: 2\r\n\r\nok"
    async with (
        Upstream(Recorder(answer)) as upstream,
        running_proxy(upstream.url, **guarded(Guard())) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        reply = await client.ask(_local(post("/x", CHAT, f"Origin: {PAGE}".encode())))
        assert reply.values(b"access-control-allow-origin") == [b"*"]


def _local(request: bytes) -> bytes:
    return request.replace(b"Host: proxy", b"Host: 127.0.0.1")
