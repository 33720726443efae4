"""Large bodies and slow peers: everything arrives, memory stays flat, and nobody is slowed but by his own."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from specproxy.records import Outcome
from tests.support.client import RawClient, post
from tests.support.loops import both_loops
from tests.support.proxy import running_proxy
from tests.support.relay import CHAT, EVENTS, settled
from tests.support.upstream import Conn, Upstream, chunk

MIB = 1024 * 1024
BIG = 100 * MIB
FLAT = 30 * MIB  # far below BIG, and above what allocators keep


def memory() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.timeout(60)
@both_loops
async def test_a_large_response_flows() -> None:
    """100 MB down in chunks: every byte arrives, memory stays flat."""
    piece = bytes(range(256)) * 4096  # 1 MiB

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.send(EVENTS)
        for _ in range(BIG // MIB):
            await conn.send(chunk(piece))
        await conn.send(b"0\r\n\r\n")

    async with (
        Upstream(script) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.send(post("/v1/chat/completions", CHAT))
        await client.head()
        before = memory()
        received = peak = 0
        while size := int((await client.until(b"\r\n")).rstrip(), 16):
            data = await client.exactly(size + 2)
            start = received % 256
            assert data[:256] == piece[start : start + min(256, size)] + (b"\r\n" if size < 254 else b"")[:256]
            received += size
            peak = max(peak, memory() - before)
        assert received == BIG
        assert peak < FLAT


@pytest.mark.timeout(60)
@pytest.mark.parametrize("framed", ["length", "chunks"])
@both_loops
async def test_a_large_request_flows(framed: str) -> None:
    """100 MB up: every byte arrives, memory stays flat."""
    piece = bytes(range(256)) * 4096
    received = 0

    async def script(conn: Conn) -> None:
        nonlocal received
        await conn.head()
        if framed == "length":
            while received < BIG:
                received += len(await conn.reader.read(MIB))
        else:
            while size := int((await conn.reader.readuntil(b"\r\n")).rstrip(), 16):
                await conn.reader.readexactly(size + 2)
                received += size
            await conn.reader.readuntil(b"\r\n")
        await conn.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with (
        Upstream(script) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        before, peak = memory(), 0
        framing = b"Content-Length: %d" % BIG if framed == "length" else b"Transfer-Encoding: chunked"
        await client.send(b"POST /api/blobs/sha256:0 HTTP/1.1\r\nHost: x\r\n" + framing + b"\r\n\r\n")
        for _ in range(BIG // MIB):
            await client.send(piece if framed == "length" else chunk(piece))
            peak = max(peak, memory() - before)
        if framed == "chunks":
            await client.send(b"0\r\n\r\n")
        assert (await client.reply()).body == b"ok"
        assert received == BIG
        assert peak < FLAT


@both_loops
async def test_a_slow_reader_slows_the_upstream_down() -> None:
    """A client that does not read blocks the upstream's writes, and misses nothing once it does."""
    size = 64 * MIB
    sent = 0

    async def script(conn: Conn) -> None:
        nonlocal sent
        await conn.request()
        await conn.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        while sent < size:
            await conn.send(b"x" * 65536)
            sent += 65536

    async with (
        Upstream(script) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.send(post("/v1/chat/completions", CHAT))
        await client.head()
        before = -1
        while before != sent:  # until nothing moves any more
            before = sent
            await asyncio.sleep(0.1)
        assert sent < size / 2
        received = 0
        while received < size:
            received += len(await client.reader.read(MIB))
        assert received == size


@both_loops
async def test_a_slow_reader_that_leaves() -> None:
    """A blocked upstream is let go when the client that blocks it leaves."""
    closed = asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.send(EVENTS)
        try:
            while True:
                await conn.send(chunk(b"x" * 65536))
        finally:
            closed.set()

    async with Upstream(script) as upstream, running_proxy(upstream.url) as proxy:
        client = await RawClient.connect(proxy.port)
        await client.send(post("/v1/chat/completions", CHAT))
        await client.head()
        await asyncio.sleep(0.2)
        client.reset()
        async with asyncio.timeout(5):
            await closed.wait()
        assert [seen.outcome for seen in proxy.seen] == [Outcome.CLIENT_GONE]


@both_loops
async def test_a_slow_upstream_slows_the_client_down() -> None:
    """A request body waits in the client while the upstream does not read."""
    go_on = asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.head()
        conn.stall()
        await go_on.wait()
        conn.read_on()
        await conn.gone()

    async with (
        Upstream(script) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.send(b"POST /other HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (64 * MIB))
        sent = 0

        async def send() -> None:
            nonlocal sent
            while sent < 64 * MIB:
                await client.send(b"x" * 65536)
                sent += 65536

        sending = asyncio.create_task(send())
        done, _ = await asyncio.wait((sending,), timeout=0.3)
        assert not done
        assert sent < 32 * MIB
        go_on.set()
        await sending


@both_loops
async def test_an_upstream_that_answers_before_it_has_read_all() -> None:
    """An early refusal reaches the client, and ends the upload."""

    async def script(conn: Conn) -> None:
        await conn.head()
        await conn.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")

    async with (
        Upstream(script) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.send(b"POST /other HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nstart")
        reply = await client.reply()
        assert (reply.status, reply.body) == (413, b"big")
        await settled(lambda: proxy.handlers.active == 0)
