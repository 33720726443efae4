"""What adds up over days: memory and descriptors, over many requests and loads; and who holds up the loop."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psutil
import pytest
from aiohttp import web

from tests.support.calibrated import CalibratedPair
from tests.support.embedded import GREEDY, request
from tests.support.loop_watch import watched_loop

# isort: split
from specproxy.adapters.embedded.app import build_app, serve_site
from specproxy.adapters.embedded.engine import LlamaEngine
from specproxy.adapters.embedded.options import EngineOptions
from specproxy.adapters.embedded.types import GenerateRequest

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(60)]

GROWTH = 4_000_000  # bytes; what is lost with every request or load is several times that


def options(pair: CalibratedPair) -> EngineOptions:
    return EngineOptions(model=pair.target, draft=pair.draft, context=512, threads=1)


async def drain(engine: LlamaEngine, work: GenerateRequest) -> None:
    async for _ in engine.generate(work):
        pass


async def growth(rounds: Callable[[int], Awaitable[None]], count: int) -> tuple[int, int]:
    """Bytes and descriptors that `count` rounds add, behind a few that fill what is kept on purpose."""
    process = psutil.Process()

    async def measured(rounds_: int) -> tuple[int, int]:
        await rounds(rounds_)
        gc.collect()
        return int(process.memory_info().rss), len(os.listdir("/proc/self/fd"))

    before, after = await measured(max(10, count // 4)), await measured(count)
    return after[0] - before[0], after[1] - before[1]


async def test_a_thousand_short_requests_leave_nothing_behind(pair: CalibratedPair) -> None:
    engine = LlamaEngine(options(pair))
    await engine.start()
    grammar = replace(GREEDY, grammar='root ::= (" edit" [0-9]+)+')
    warm = replace(GREEDY, temperature=1.0, seed=3, repeat_penalty=1.1, dry_multiplier=0.5)
    strategies = [("mtp", GREEDY), ("draft", warm), ("ngram", grammar), ("auto", GREEDY), ("plain", warm)]
    made = 0

    async def rounds(count: int) -> None:
        nonlocal made
        for _ in range(count):
            work = []
            for strategy, sampling in strategies:
                made += 1
                words = engine.tokenize(f"number {made} " + pair.marker("edit", made % 32))
                work.append(request(words, strategy, tokens=3, sampling=sampling))
            await asyncio.gather(*(drain(engine, each) for each in work))

    memory, descriptors = await growth(rounds, 160)
    assert made == 1000
    assert memory < GROWTH
    assert descriptors == 0
    await engine.aclose()


async def test_loading_again_and_again_leaves_nothing_behind(pair: CalibratedPair) -> None:
    """Unloading frees weights, caches and contexts of target, draft and head."""
    engine = LlamaEngine(options(pair))
    await engine.start()
    words = engine.tokenize("please " + pair.marker("json"))

    async def rounds(count: int) -> None:
        for number in range(count):
            await engine.unload()
            await drain(engine, request(words, ("mtp", "draft")[number % 2], tokens=4))

    memory, descriptors = await growth(rounds, 40)
    assert memory < GROWTH
    assert descriptors == 0
    await engine.aclose()


def post(port: int, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """One request from another thread, so that reading its reply is not the loop's work."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=50)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    raw = reply.read()
    connection.close()
    return reply.status, raw


async def test_no_request_holds_up_the_event_loop_for_20_ms(pair: CalibratedPair) -> None:
    """Neither long prompts, nor a schema, nor loading, nor streams side by side."""
    engine = LlamaEngine(replace(options(pair), context=4096))
    runner = await serve_site(build_app(engine), lambda runner: web.TCPSite(runner, "127.0.0.1", 0))
    port = runner.addresses[0][1]
    members = {f"member_{i}": {"enum": ["a", "b", i]} for i in range(40)}
    schema = {"type": "object", "properties": members, "required": list(members)}
    hard = {"type": "string", "pattern": "^(a|b|cd){3,40}x{0,200}(y{1,50}){1,4}$"}
    chat = {"messages": [{"role": "user", "content": "please " + pair.marker("json")}], "max_tokens": 20}
    work: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "the " * 3000 + pair.marker("code"), "max_tokens": 20, "stream": True}),
        ("/v1/completions", {"prompt": "the " * 6000, "max_tokens": 2}),  # refused: it does not fit
        (
            "/v1/chat/completions",
            chat | {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        ),
        ("/v1/chat/completions", chat | {"stream": True, "logprobs": True, "top_logprobs": 20}),
        ("/v1/chat/completions", chat | {"response_format": {"type": "json_object", "schema": hard}}),
        ("/tokenize", {"content": "word " * 4000}),
        ("/tokenize", {"content": "word " * 4000, "with_pieces": True}),
        ("/detokenize", {"tokens": [5] * 50_000}),
        ("/api/embed", {"model": pair.target.stem, "input": "word " * 2000}),  # too long
        ("/api/embeddings", {"model": pair.target.stem, "prompt": "word " * 2000}),  # too long
    ]
    await engine.unload()  # the first of them loads it again
    ask = asyncio.get_running_loop().run_in_executor
    with ThreadPoolExecutor(len(work)) as clients:  # the loop's own threads are the server's
        async with watched_loop() as longest:
            replies = await asyncio.gather(*(ask(clients, post, port, path, body) for path, body in work))
    assert [status for status, _ in replies] == [200, 400, *[200] * 6, 400, 400], replies
    assert longest.seconds < 0.02
    await runner.cleanup()
