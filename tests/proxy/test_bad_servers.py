"""Each kind of server, going wrong in each way: clients are told in their dialect, and nothing is learned."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from specproxy.adapters.llama_server import LanePlan, ManagedLlamaServer
from specproxy.adapters.openai_compat import Deployed
from specproxy.adapters.probe import Prober
from specproxy.adapters.supervise import ChildSpec
from specproxy.adapters.weights import Weights
from specproxy.proxy.deployments import ADAPTERS
from specproxy.proxy.sidecar import Sidecar
from specproxy.records import Control, Health, Lane, Outcome, Strategy
from specproxy.strategies.learner import Learner
from tests.support.client import RawClient, RawReply, post
from tests.support.ports import free_port
from tests.support.proxy import Proxy, running_proxy
from tests.support.rude import MOODS, RudeServer
from tests.support.upstream import Conn, Upstream

SIDECAR_KINDS = ("in front of llama-server", "llama-router", "llama-swap", "ollama")
KINDS = (*ADAPTERS, *SIDECAR_KINDS)
ROUTES = {
    "/v1/chat/completions": b'{"error":{"message":',
    "/v1/messages": b'{"type":"error","error":{',
    "/api/chat": b'{"error":"',
}
"""A route of each dialect, and how an error begins there."""

CHAT = {"model": "m", "stream": False, "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}


@asynccontextmanager
async def before(server: RudeServer) -> AsyncIterator[Proxy]:
    """A proxy in front of a server that is well, with the learner that is used in earnest."""
    if server.kind in SIDECAR_KINDS:
        fleet = Sidecar([server.url], Prober(), weights=lambda *_: Weights())
        await fleet.start()
        backends, closing = fleet.backends, fleet.aclose
    else:
        backend = ADAPTERS[server.kind](Deployed("d", server.url, "m"))
        await backend.check()
        backends, closing = (backend,), backend.aclose
    assert {s.health for b in backends for s in b.lanes()} == {Health.READY}
    try:
        async with running_proxy(*backends, policy=Learner()) as proxy:  # type: ignore[arg-type]  # any Policy will do
            yield proxy
    finally:
        await closing()


async def ask(proxy: Proxy, path: str) -> RawReply:
    client = await RawClient.connect(proxy.port)
    reply = await client.ask(post(path, json.dumps(CHAT).encode()))
    client.close()
    return reply


def learned(proxy: Proxy) -> float:
    """Evidence that the learner has about any lane, in requests."""
    policy: Learner = proxy.policy  # type: ignore[assignment]  # it was put there by `before`
    candidates = proxy.decisions[-1].candidates if proxy.decisions[-1] is not None else ()
    assert policy is not None
    return sum(candidate.n for candidate in candidates)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("mood", ["down", "half up"])
async def test_a_server_that_does_not_answer(kind: str, path: str, mood: str) -> None:
    """The error is ours: 503 or 502 in the client's dialect, one Observation, nothing learned."""
    async with RudeServer(kind) as server, before(server) as proxy:
        if mood == "down":
            await server.__aexit__()
        server.mood = mood
        for _ in range(2):
            reply = await ask(proxy, path)
            assert reply.status == (503 if mood == "down" else 502)
            assert reply.content.startswith(ROUTES[path])
        assert {seen.outcome for seen in proxy.seen} == {Outcome.UNREACHABLE}
        assert learned(proxy) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mood", MOODS)
async def test_a_server_that_answers_wrongly(kind: str, mood: str) -> None:
    """Its answer is the truth and is passed on as it is; nothing is learned from it."""
    path = "/api/chat" if kind == "ollama" else "/v1/chat/completions"
    async with RudeServer(kind) as server, before(server) as proxy:
        server.mood = mood
        for _ in range(2):
            reply = await ask(proxy, path)
            assert (reply.status, reply.content) == (MOODS[mood][0], MOODS[mood][2])
        assert all(seen.outcome in (Outcome.ERROR, Outcome.TRUNCATED) for seen in proxy.seen)
        assert len(proxy.seen) == 2
        assert learned(proxy) == 0


@asynccontextmanager
async def lane_of_ours(mood: str) -> AsyncIterator[Proxy]:
    """A proxy with one lane that it started itself; its server is well when asked how it is, and only then."""
    lane = Lane("plain", "managed", "m", Strategy(), Control.INSTANCE, "print")
    command = (sys.executable, "-m", "tests.support.stub_server", *(("--mood", mood) if mood else ()))
    backend = ManagedLlamaServer("managed", [LanePlan(lane, ChildSpec("lane plain", command))])
    await backend.start()
    async with running_proxy(backend, policy=Learner()) as proxy:  # type: ignore[arg-type]  # any Policy will do
        yield proxy


async def nobody_answers(proxy: Proxy, path: str, pid: int | None) -> None:
    """The one lane's process dies (`pid`), or ends connections: 503 or 502 in the client's dialect."""
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        while proxy.router.lanes()[0].health is Health.READY:  # noqa: ASYNC110 - told by no event
            await asyncio.sleep(0.01)
    reply = await ask(proxy, path)
    assert reply.status == (502 if pid is None else 503)
    assert reply.content.startswith(ROUTES[path])
    assert {seen.outcome for seen in proxy.seen} == {Outcome.UNREACHABLE}
    assert learned(proxy) == 0


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("mood", ["down", "half up"])
async def test_a_lane_of_ours_that_does_not_answer(path: str, mood: str) -> None:
    """As with servers of others."""
    async with lane_of_ours(mood.replace("down", "")) as proxy:
        [backend] = proxy.router.backends
        assert isinstance(backend, ManagedLlamaServer)
        await nobody_answers(proxy, path, backend.pid("plain") if mood == "down" else None)


@pytest.mark.parametrize("mood", MOODS)
async def test_a_lane_of_ours_that_answers_wrongly(mood: str) -> None:
    """As with servers of others."""
    async with lane_of_ours(mood) as proxy:
        for _ in range(2):
            reply = await ask(proxy, "/api/chat" if mood.startswith("ollama") else "/v1/chat/completions")
            assert (reply.status, reply.content) == (MOODS[mood][0], MOODS[mood][2])
        assert all(seen.outcome in (Outcome.ERROR, Outcome.TRUNCATED) for seen in proxy.seen)
        assert learned(proxy) == 0


NOTES = {
    "half up": "without answering",
    "wrong key": "wants a key: set key_env",
    "loading": "it is loading",
    "html": "is this the right address?",
    "error line": "is this the right address?",
}


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("mood", NOTES)
async def test_what_is_wrong_with_a_deployment_is_said(kind: str, mood: str) -> None:
    """Its lanes are out of use with a reason, and are back when it is well again."""
    async with RudeServer(kind) as server:
        backend = ADAPTERS[kind](Deployed("d", server.url, "m"))
        server.mood = mood
        await backend.check()
        [status] = backend.lanes()
        assert status.health is Health.UNHEALTHY
        assert NOTES[mood] in status.note
        server.mood = ""
        await backend.check()
        assert [s.health for s in backend.lanes()] == [Health.READY]
        await backend.aclose()


@pytest.mark.parametrize("kind", ["lmstudio", "vllm", "sglang"])
async def test_a_deployment_without_the_model_is_out_of_use(kind: str) -> None:
    """What it has instead is said: a name is mistyped more often than a model is missing."""
    async with RudeServer(kind) as server:
        backend = ADAPTERS[kind](Deployed("d", server.url, "target", "M"))
        await backend.check()
        [status] = backend.lanes()
        assert (status.health, status.note) == (Health.UNHEALTHY, "it has no model M; it has m")
        await backend.aclose()


@pytest.mark.parametrize(
    ("answer", "note"),
    [
        (b"220 mail.example ESMTP\r\n", "takes connections, but does not answer in HTTP"),
        (None, "cannot be reached"),
    ],
)
async def test_what_is_no_server_of_ours_is_said(answer: bytes | None, note: str) -> None:
    """Something that speaks another protocol is told from nobody at all."""

    async def script(conn: Conn) -> None:
        await conn.send(answer or b"")
        conn.close()

    async with Upstream(script) as upstream:
        url = upstream.url if answer else f"http://127.0.0.1:{free_port()}"
        fleet = Sidecar([url], Prober(), weights=lambda *_: Weights())
        await fleet.start()
        try:
            (status,) = fleet.backends[0].lanes()
            assert (status.health, status.note) == (Health.UNHEALTHY, f"{url} {note}")
        finally:
            await fleet.aclose()
