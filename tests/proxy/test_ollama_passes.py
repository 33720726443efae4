"""What is Ollama's own just works: progress of pulls, blobs, and models that are not ours to route."""

from __future__ import annotations

import asyncio
import json

import pytest

from specproxy.adapters.base import ProbeResult, ServedModel
from specproxy.adapters.weights import Weights
from specproxy.proxy.sidecar import Sidecar
from specproxy.records import Outcome
from tests.support.client import RawClient, post
from tests.support.proxy import ScriptedPolicy, running_proxy
from tests.support.upstream import Conn, Received, Upstream, chunk

LINES = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = {"model": "m", "done": True, "eval_count": 9, "eval_duration": 10**9, "message": {"content": "ab"}}


async def test_progress_of_a_pull_comes_as_it_is_made() -> None:
    """A line is with the client before the next one is written; nobody counts it as a request to a model."""
    lines = [{"status": f"pulling {i}", "total": 9, "completed": i} for i in range(3)]

    async def script(conn: Conn) -> None:
        seen = await conn.request()
        assert seen.body == b'{"model":"m"}'
        await conn.send(LINES)
        for line in lines:
            await conn.send(chunk(json.dumps(line).encode() + b"\n"))
            await got.get()
        await conn.send(b"0\r\n\r\n")

    got: asyncio.Queue[None] = asyncio.Queue()
    async with (
        Upstream(script) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.send(post("/api/pull", b'{"model":"m"}'))
        await client.head()
        for line in lines:
            assert json.dumps(line).encode() in await client.until(b"}\n")
            got.put_nowait(None)
        await client.until(b"0\r\n\r\n")
        assert proxy.seen == []


async def test_blobs_are_looked_for_and_sent_up() -> None:
    """HEAD and POST, the body in chunks and binary; the digest stays as it was written."""
    seen: list[Received] = []

    async def script(conn: Conn) -> None:
        while True:
            seen.append(request := await conn.request())
            if request.request_line.startswith(b"HEAD"):
                await conn.send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 18\r\n\r\n")
            else:
                await conn.send(b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n")

    path, blob = b"/api/blobs/sha256:" + b"0" * 64, bytes(range(256)) * 100
    async with (
        Upstream(script) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        reply = await client.ask(b"HEAD " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n", head_only=True)
        assert (reply.status, reply.values(b"content-length")) == (404, [b"18"])
        head = b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert (await client.ask(head + chunk(blob) + b"0\r\n\r\n")).status == 201
    assert [r.request_line.split(b" ")[:2] for r in seen] == [[b"HEAD", path], [b"POST", path]]
    assert seen[1].body == blob


@pytest.mark.parametrize(
    ("name", "why"),
    [("big:cloud", "it runs in the cloud"), ("mlx", "it runs on MLX, which chooses its draft length itself")],
)
async def test_models_that_are_not_ours_to_route_pass_untouched(name: str, why: str) -> None:
    """`keep_alive` and all; one Observation each, from which nothing is learned."""
    body = json.dumps({"model": name, "keep_alive": 0, "stream": False, "messages": []}).encode()
    bodies: list[bytes] = []

    async def script(conn: Conn) -> None:
        bodies.append((await conn.request()).body)
        text = json.dumps(DONE).encode()
        await conn.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
        await conn.send(b"Content-Length: %d\r\n\r\n%b" % (len(text), text))

    async with Upstream(script) as upstream:
        served = (ServedModel("m:latest"), ServedModel(name, unrouted=why))
        found = ProbeResult(True, "ollama", "0.33.0", ("m:latest", name), served=served)

        async def probe(url: str) -> ProbeResult:
            return found

        fleet = Sidecar([upstream.url], probe, weights=lambda *_: Weights())
        await fleet.start()
        policy = ScriptedPolicy()
        async with running_proxy(*fleet.backends, policy=policy) as proxy:
            async with await RawClient.connect(proxy.port) as client:
                assert (await client.ask(post("/api/chat", body))).status == 200
            assert bodies == [body]
            assert [(s.outcome, s.rule) for s in proxy.seen] == [(Outcome.COMPLETE, "unknown_model")]
            assert policy.learned == []
        await fleet.aclose()
