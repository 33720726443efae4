"""Streamed replies of the real engine over a socket: text that the courier sends past the event loop."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from aiohttp import ClientSession, web

from tests.support.calibrated import CalibratedPair
from tests.support.embedded import request

# isort: split
from specproxy.adapters.embedded import api_completions
from specproxy.adapters.embedded.app import build_app, serve_site
from specproxy.adapters.embedded.courier import QUEUE, Courier, Stream
from specproxy.adapters.embedded.engine import LlamaEngine
from specproxy.adapters.embedded.keys import SERVICE
from specproxy.adapters.embedded.options import EngineOptions
from specproxy.adapters.embedded.output import Part, ShortCut
from specproxy.adapters.embedded.types import Finished, TokenEvent
from specproxy.errors import BackendError

pytestmark = pytest.mark.embedded

TOKENS = 400
MOST = 0.9 * TOKENS  # that wake the event loop: some do until the head is sent, all would without a courier


@pytest.fixture
async def app(pair: CalibratedPair) -> AsyncIterator[tuple[web.Application, str]]:
    """A served engine whose sockets take little at once, and its address."""
    app = build_app(LlamaEngine(EngineOptions(model=pair.target, draft=pair.draft, context=1024, threads=1)))
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    listener.bind(("127.0.0.1", 0))
    runner = await serve_site(app, lambda runner: web.SockSite(runner, listener))
    yield app, f"127.0.0.1:{listener.getsockname()[1]}"
    await runner.cleanup()


@pytest.fixture
def woken(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Events that went through the event loop."""
    events: list[object] = []
    put = Stream.put

    def spy(self: Stream, event: Any) -> None:
        events.append(event)
        put(self, event)

    monkeypatch.setattr(Stream, "put", spy)
    return events


def asked(pair: CalibratedPair, region: str = "json", **more: object) -> dict[str, object]:
    prompt = "please " + pair.marker(region)
    return {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True} | more


def said(raw: bytes) -> str:
    """The text of a stream's events, which has to be whole."""
    assert raw.endswith(b"data: [DONE]\n\n"), raw[-300:]
    events = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


@pytest.mark.parametrize("strategy", ["plain", "draft", "ngram+mtp"])
async def test_text_passes_the_event_loop_by(
    app: tuple[web.Application, str], pair: CalibratedPair, woken: list[object], strategy: str
) -> None:
    headers = {"X-Specproxy-Engine-Strategy": strategy}
    async with (
        ClientSession(f"http://{app[1]}") as session,
        session.post("/v1/completions", json=asked(pair), headers=headers) as reply,
    ):
        assert said(await reply.read()) == pair.text("json", TOKENS)
    tokens = sum(len(event.tokens) for event in woken if isinstance(event, TokenEvent))
    assert tokens < MOST, "the loop was woken for the first tokens only"
    assert isinstance(woken[-1], Finished)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/completion"]
)
async def test_every_dialect_says_the_same_whole_or_streamed(
    app: tuple[web.Application, str], pair: CalibratedPair, woken: list[object], path: str
) -> None:
    """Texts and order hold where the other thread sends, as they do with the fake engine, which does not."""
    content = "please " + pair.marker("code")
    limits = ("max_tokens", "max_output_tokens", "n_predict")
    body: dict[str, object] = dict.fromkeys(limits, TOKENS) | {"temperature": 0}
    body |= {"/completion": {"prompt": content}, "/v1/responses": {"input": content}}.get(
        path, {"messages": [{"role": "user", "content": content}]}
    )
    if path == "/api/chat":
        body = {"model": app[0][SERVICE].names[0], "messages": body["messages"]} | {
            "options": {"num_predict": TOKENS, "temperature": 0}
        }
    else:
        body = {name: value for name, value in body.items() if accepted(path, name)}
    async with ClientSession(f"http://{app[1]}") as session:
        async with session.post(path, json=body | {"stream": False}) as reply:
            whole = text_of(await reply.json())
        woken.clear()
        async with session.post(path, json=body | {"stream": True}) as reply:
            raw = (await reply.read()).decode()
    found = [
        json.loads(line.removeprefix("data: "))
        for line in raw.splitlines()
        if line.startswith(("data: {", "{"))
    ]
    assert whole
    assert "".join(map(delta_of, found)) == whole
    assert len(woken) < MOST


def accepted(path: str, name: str) -> bool:
    limits = {"/v1/responses": "max_output_tokens", "/completion": "n_predict"}
    return not name.startswith(("max_", "n_")) or name == limits.get(path, "max_tokens")


def text_of(body: dict[str, Any]) -> str:
    if "choices" in body:
        return str(body["choices"][0]["message"]["content"])
    if "output" in body:
        return str(body["output"][0]["content"][0]["text"])
    content = body.get("content", body.get("message"))
    return str(
        content
        if isinstance(content, str)
        else (content["content"] if isinstance(content, dict) else content[0]["text"])
    )


def delta_of(event: dict[str, Any]) -> str:
    if "choices" in event:
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    if "type" in event:
        delta = event.get("delta")
        if event["type"] == "response.output_text.delta":
            return str(delta)
        return (
            str(delta.get("text", ""))
            if event["type"] == "content_block_delta" and isinstance(delta, dict)
            else ""
        )
    if "message" in event:
        return str(event["message"]["content"])
    return "" if event.get("stop") else str(event["content"])


async def test_a_reader_that_is_slow_gets_all_in_order(
    app: tuple[web.Application, str], pair: CalibratedPair, woken: list[object]
) -> None:
    """What its socket does not take goes through the loop, and so does what follows until that is sent."""
    host, port = app[1].split(":")
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(raw, (host, int(port)))
        body = json.dumps(asked(pair, logprobs=10)).encode()
        head = f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
        await loop.sock_sendall(raw, head.encode() + body)
        # another stream beside it comes to its end while this one is not read
        async with ClientSession(f"http://{app[1]}") as session:
            for _ in range(3):
                async with session.post("/v1/completions", json=asked(pair, "code")) as reply:
                    assert said(await reply.read()) == pair.text("code", TOKENS)
        got = b""
        while block := await loop.sock_recv(raw, 2000):
            got += block
    head, _, stream = got.decode().partition("\r\n\r\n")
    assert "chunked" not in head.lower(), "HTTP/1.0 knows no chunks"
    assert said(stream.encode()) == pair.text("json", TOKENS)


async def test_clients_that_leave_free_their_sequences_and_sockets(
    app: tuple[web.Application, str], pair: CalibratedPair
) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    service = app[0][SERVICE]
    async with ClientSession(f"http://{app[1]}") as session:
        before = 0
        for round_ in range(9):
            async with session.post("/v1/completions", json=asked(pair, max_tokens=450)) as reply:
                await reply.content.readany()
                reply.close()
            async with asyncio.timeout(10):
                while service.active:  # noqa: ASYNC110  # nothing tells of it, since nobody waits for it
                    await asyncio.sleep(0.001)
            if round_ == 3:
                before = descriptors()
        assert descriptors() <= before
        async with session.post("/v1/completions", json=asked(pair)) as reply:
            assert said(await reply.read()) == pair.text("json", TOKENS)


async def test_what_cannot_be_rendered_ends_its_own_stream_only(
    app: tuple[web.Application, str], pair: CalibratedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, failed = api_completions._Writer.part, threading.Event()

    def faulty(self: api_completions._Writer, piece: Part) -> bytes:
        if threading.current_thread().name == "specproxy courier" and not failed.is_set():
            failed.set()
            raise ValueError("planted")
        return part(self, piece)

    monkeypatch.setattr(api_completions._Writer, "part", faulty)
    async with ClientSession(f"http://{app[1]}") as session:

        async def ask(region: str) -> bytes:
            async with session.post("/v1/completions", json=asked(pair, region)) as reply:
                return await reply.read()

        replies = dict(zip(("json", "code"), await asyncio.gather(ask("json"), ask("code")), strict=True))
        broken = [region for region, raw in replies.items() if b"planted" in raw]
        assert len(broken) == 1
        (whole,) = replies.keys() - set(broken)
        assert said(replies[whole]) == pair.text(whole, TOKENS)
        assert said(await ask(broken[0])) == pair.text(broken[0], TOKENS)


async def test_an_outlet_is_shut_before_an_event_counts_as_read() -> None:
    """Or the courier might send the next event before this one has been written."""
    outlet = ShortCut(send=lambda event: True)
    stream = Stream(asyncio.get_running_loop(), lambda: None, outlet)
    event = TokenEvent("a", (1,))
    assert stream.send(event)
    assert not stream.send(Finished("stop")), "the end is the loop's"
    stream.given += 1  # as the courier does for what goes through the loop
    assert not stream.send(event), "an event waits"
    stream.put(event)
    assert await stream.get() == event
    assert outlet.send is None
    assert not stream.send(event), "it has not been written yet"


async def test_a_stream_is_full_by_what_nobody_has_taken() -> None:
    outlet = ShortCut(send=lambda event: True)
    stream = Stream(asyncio.get_running_loop(), lambda: None, outlet)
    event = TokenEvent("a", (1,))
    for _ in range(QUEUE):
        assert not stream.full
        stream.made += 1
    assert stream.full
    assert stream.send(event)
    assert not stream.full


async def test_a_paused_sequence_goes_on_whoever_takes_its_events() -> None:
    """Where the courier was behind, it sends all that waits, and the loop has nothing to read."""
    resumed: list[int] = []
    stream = Stream(
        asyncio.get_running_loop(),
        lambda: resumed.append(stream.made - stream.short - stream.read),
        ShortCut(send=lambda event: True),
    )
    event = TokenEvent("a", (1,))
    stream.made = QUEUE
    for _ in range(QUEUE):
        assert stream.send(event)
    assert resumed == [QUEUE - 1], "once, and after the event counts as sent"


async def test_a_courier_gives_up_a_stream_once_and_carries_the_others() -> None:
    def broken(event: TokenEvent) -> bool:
        raise ValueError("planted")

    given_up: list[Stream] = []
    courier = Courier(given_up.append)
    loop, event = asyncio.get_running_loop(), TokenEvent("a", (1,))
    bad, good = Stream(loop, lambda: None, ShortCut(send=broken)), Stream(loop, lambda: None)
    courier.carry([(bad, event), (good, event), (bad, event)])
    courier.close()
    assert await good.get() == event
    failed = await bad.get()
    assert isinstance(failed, BackendError)
    assert "planted" in str(failed)
    assert given_up == [bad]
    assert bad.given == 1


async def test_an_engine_without_a_reader_on_a_socket_uses_the_loop(pair: CalibratedPair) -> None:
    engine = LlamaEngine(EngineOptions(model=pair.target, context=1024, threads=1))
    await engine.start()
    words = engine.tokenize("please " + pair.marker("json"))
    outlet = ShortCut()
    async with aclosing(engine.generate(request(words, tokens=20, outlet=outlet))) as stream:
        tokens = [t async for event in stream if isinstance(event, TokenEvent) for t in event.tokens]
    assert tokens == pair.text_ids("json", 20)
    await engine.aclose()
