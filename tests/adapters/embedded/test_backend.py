"""The engine in its child process: lanes, reports, crashes, refusals."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from specproxy.adapters.base import UpstreamRequest
from specproxy.adapters.embedded.backend import EmbeddedBackend, EmbeddedOptions
from specproxy.adapters.embedded.watchdog import Patience
from specproxy.adapters.http import ResponseStream, fetch
from specproxy.adapters.supervise import Backoff
from specproxy.errors import BackendError, ConfigError, ModelFileError, PairError
from specproxy.records import Control, Health, Lane
from tests.support.calibrated import CalibratedPair

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(120)]
TOKENS = 40


def options(pair: CalibratedPair) -> EmbeddedOptions:
    return EmbeddedOptions(pair.target, pair.draft, threads=1, ctx=1024, parallel=2)


@pytest.fixture
async def backend(pair: CalibratedPair) -> AsyncIterator[EmbeddedBackend]:
    """A running backend on a calibrated pair."""
    running = EmbeddedBackend(options(pair), backoff=Backoff(first_s=0.05))
    await running.start()
    yield running
    await running.aclose()


def request(lane: Lane, body: dict[str, Any], request_id: str = "") -> UpstreamRequest:
    headers = [(name.encode(), value.encode()) for name, value in lane.headers]
    if request_id:
        headers.append((b"X-Specproxy-Request-Id", request_id.encode()))
    return UpstreamRequest("POST", "/v1/completions", tuple(headers), orjson.dumps(body))


async def ask(backend: EmbeddedBackend, lane: Lane, body: dict[str, Any], request_id: str = "") -> Any:
    reply = await fetch(
        lambda r, sink: backend.open(r, lane, sink), request(lane, body, request_id), timeout_s=60
    )
    assert reply.head.status == 200, reply.body
    return orjson.loads(reply.body)


async def test_every_lane_says_the_same_and_drafts_as_expected(
    backend: EmbeddedBackend, pair: CalibratedPair
) -> None:
    lanes = {status.lane.id: status.lane for status in backend.lanes()}
    assert {"plain", "ngram", "draft", "mtp", "auto"} <= lanes.keys()
    assert {status.health for status in backend.lanes()} == {Health.READY}
    assert {lane.control for lane in lanes.values()} == {Control.REQUEST}
    assert len({lane.fingerprint for lane in lanes.values()}) == len(lanes)
    assert len({lane.target for lane in lanes.values()}) == 1
    body = {"prompt": pair.marker("json"), "max_tokens": TOKENS, "temperature": 0}
    for name, lane in lanes.items():
        made = await ask(backend, lane, body, f"r-{name}")
        assert made["choices"][0]["text"] == pair.text("json", TOKENS), name
        if name in ("draft", "mtp"):
            expected = pair.expect("json", name, TOKENS)
            assert made["timings"]["draft_n"] == expected.drafted
            assert made["timings"]["draft_n_accepted"] == expected.accepted
        report = await backend.report(f"r-{name}")
        assert report is not None
        assert list(report.output_ids) == pair.text_ids("json", TOKENS)
        assert await backend.report(f"r-{name}") is None


async def test_a_crash_in_native_code_is_survived(backend: EmbeddedBackend, pair: CalibratedPair) -> None:
    lane = backend.lanes()[0].lane
    seen: list[Health] = []
    changed = asyncio.Event()

    def note() -> None:
        seen.append(backend.lanes()[0].health)
        if seen[-2:] == [Health.UNHEALTHY, Health.READY]:
            changed.set()

    backend._changed = note
    assert backend.pid is not None
    stream = ResponseStream(
        lambda r, sink: backend.open(r, lane, sink),
        request(lane, {"prompt": pair.marker("json"), "max_tokens": 900, "stream": True}),
    )
    async with stream:
        await stream.wait_head()
        os.kill(backend.pid, signal.SIGSEGV)
        with pytest.raises(BackendError):
            async for _ in stream:
                pass
    async with asyncio.timeout(60):
        await changed.wait()
    made = await ask(backend, lane, {"prompt": pair.marker("json"), "max_tokens": 5, "temperature": 0})
    assert made["choices"][0]["text"] == pair.text("json", 5)


async def test_leaving_frees_the_slot(backend: EmbeddedBackend, pair: CalibratedPair) -> None:
    lane = backend.lanes()[0].lane
    body = {"prompt": pair.marker("json"), "max_tokens": 900, "stream": True, "ignore_eos": True}
    async with ResponseStream(lambda r, sink: backend.open(r, lane, sink), request(lane, body)) as stream:
        await stream.wait_head()

    async def busy() -> int:
        slots = await fetch(
            lambda r, sink: backend.open(r, lane, sink), UpstreamRequest("GET", "/slots", ()), timeout_s=10
        )
        return sum(slot["is_processing"] for slot in orjson.loads(slots.body))

    async with asyncio.timeout(10):
        while await busy():
            pass


async def test_closing_leaves_nothing_behind(pair: CalibratedPair) -> None:
    running = EmbeddedBackend(options(pair))
    await running.start()
    pid, directory = running.pid, running._directory
    assert pid is not None
    assert directory is not None
    await running.aclose()
    await running.aclose()
    assert not directory.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert {status.health for status in running.lanes()} == {Health.STOPPED}


async def test_a_lane_of_a_closed_backend_fails_at_once(pair: CalibratedPair) -> None:
    running = EmbeddedBackend(options(pair))
    await running.start()
    lane = running.lanes()[0].lane
    await running.aclose()
    with pytest.raises(BackendError):
        await ask(running, lane, {"prompt": "x"})


async def test_what_cannot_be_loaded_is_said_in_one_message(pair: CalibratedPair, tmp_path: Path) -> None:
    truncated = tmp_path / "truncated.gguf"
    truncated.write_bytes(pair.target.read_bytes()[:-100_000])
    other = tmp_path / "text.gguf"
    other.write_text("no model")
    for wrong in (truncated, other, tmp_path / "missing.gguf"):
        with pytest.raises(ModelFileError):
            await EmbeddedBackend(replace(options(pair), model=wrong)).start()
    with pytest.raises(PairError):
        await EmbeddedBackend(replace(options(pair), draft=pair.target)).start()
    bad = replace(options(pair), extra_args=("--cache-type-k", "nonsense"))
    with pytest.raises(ConfigError, match="nonsense"):
        await EmbeddedBackend(bad, backoff=Backoff(first_s=0.01)).start()


async def test_memory_is_told_by_what_each_lane_adds(backend: EmbeddedBackend) -> None:
    """Plain carries what all share; drafters what they bring; n-grams nothing."""
    memory = {status.lane.id: status.lane.memory_bytes for status in backend.lanes()}
    assert memory["plain"] == sum(backend.memory[part] for part in ("weights", "kv", "states"))
    assert (memory["ngram"], memory["auto"]) == (0, 0)
    assert memory["draft"] == memory["ngram+draft"] == backend.memory["draft"] > 0
    assert memory["mtp"] == backend.memory["mtp"] > 0
    assert (backend.context, backend.slots) == (1024, 2)


async def test_a_child_that_does_not_answer_is_killed_and_started_again(pair: CalibratedPair) -> None:
    """As a stopped process stands for one that hangs."""
    back = asyncio.Event()
    seen: list[Health] = []

    def note() -> None:
        seen.append(running._health)
        if seen[-2:] == [Health.UNHEALTHY, Health.READY]:
            back.set()

    patience = Patience(every_s=0.05, answer_s=0.5)
    running = EmbeddedBackend(options(pair), backoff=Backoff(first_s=0.05), patience=patience, on_change=note)
    await running.start()
    first = running.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    async with asyncio.timeout(60):
        await back.wait()
    assert running.pid not in (None, first)
    made = await ask(running, running.lanes()[0].lane, {"prompt": pair.marker("json"), "max_tokens": 3})
    assert made["usage"]["completion_tokens"] == 3
    await running.aclose()
