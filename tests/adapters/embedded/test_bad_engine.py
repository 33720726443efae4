"""The embedded engine, going wrong in each way that it can: its socket is a private one, so nobody else is ever
behind it, and it asks for no key."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from specproxy.adapters.embedded.backend import EmbeddedBackend, EmbeddedOptions
from specproxy.adapters.embedded.watchdog import Patience
from specproxy.adapters.supervise import Backoff, ChildSpec
from specproxy.errors import ConfigError
from specproxy.records import Outcome
from specproxy.strategies.learner import Learner
from tests.proxy.test_bad_servers import CHAT, ROUTES, ask, learned, nobody_answers
from tests.support.calibrated import CalibratedPair
from tests.support.client import RawClient, RawReply, post
from tests.support.proxy import Proxy, running_proxy

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(120)]

BROKEN = {
    "/v1/chat/completions": b'data: {"error":{"code":',
    "/v1/messages": b'event: error\ndata: {"type":"error","error":{',
    "/api/chat": b'\n{"error":"out of memory"',
}
"""How an error within a stream begins in each dialect."""


class Moody(EmbeddedBackend):
    """Its child is `tests.support.rude_engine`; the file is a real model's, and is not loaded."""

    def __init__(self, pair: CalibratedPair, mood: str, patience: Patience | None = None) -> None:
        backoff = Backoff(first_s=3600, chances_unproven=1)  # what has died stays away
        super().__init__(EmbeddedOptions(pair.target, names=("m",)), backoff=backoff, patience=patience)
        self.mood = mood

    def _spec(self, directory: Path) -> ChildSpec:
        spec = super()._spec(directory)
        python, flag, _, *others = spec.command
        return replace(spec, command=(python, flag, "tests.support.rude_engine", "--mood", self.mood, *others))


@asynccontextmanager
async def before(pair: CalibratedPair, mood: str) -> AsyncIterator[Proxy]:
    """A proxy with such an engine, and with the learner that is used in earnest."""
    backend = Moody(pair, mood)
    await backend.start()
    async with running_proxy(backend, policy=Learner()) as proxy:  # type: ignore[arg-type]  # any Policy will do
        yield proxy


async def stream(proxy: Proxy, path: str) -> RawReply:
    client = await RawClient.connect(proxy.port)
    reply = await client.ask(post(path, json.dumps(CHAT | {"stream": True}).encode()))
    client.close()
    return reply


@pytest.mark.parametrize("path", ROUTES)
async def test_an_engine_that_is_well(pair: CalibratedPair, path: str) -> None:
    """Or the others would show nothing. Anthropic's reply in one piece tells no times to learn from."""
    async with before(pair, "") as proxy:
        for _ in range(2):
            assert (await ask(proxy, path)).status == 200
        assert [seen.outcome for seen in proxy.seen] == [Outcome.COMPLETE] * 2
        assert (learned(proxy) > 0) is (path != "/v1/messages")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("mood", ["down", "half up"])
async def test_an_engine_that_does_not_answer(pair: CalibratedPair, path: str, mood: str) -> None:
    """Its process has died, or ends connections: 503 or 502 in the client's dialect, nothing learned."""
    async with before(pair, mood.replace("down", "")) as proxy:
        [backend] = proxy.router.backends
        assert isinstance(backend, Moody)
        await nobody_answers(proxy, path, backend.pid if mood == "down" else None)


@pytest.mark.parametrize("path", ROUTES)
async def test_an_engine_that_is_still_loading(path: str) -> None:
    """It has no lanes yet: 503 in the client's dialect."""
    backend = EmbeddedBackend(EmbeddedOptions(Path("m.gguf")))
    async with running_proxy(backend, policy=Learner()) as proxy:  # type: ignore[arg-type]  # any Policy will do
        reply = await ask(proxy, path)
        assert (reply.status, {seen.outcome for seen in proxy.seen}) == (503, {Outcome.UNREACHABLE})
        assert reply.content.startswith(ROUTES[path])


@pytest.mark.parametrize("path", ROUTES)
async def test_an_engine_that_cannot_load_its_model_again(pair: CalibratedPair, path: str) -> None:
    """As after it was unloaded when idle: a 500 in the client's dialect, nothing learned."""
    async with before(pair, "fails to load") as proxy:
        for request in (ask, stream):
            reply = await request(proxy, path)
            assert reply.status == 500
            assert reply.content.startswith(ROUTES[path].replace(b'"message":', b""))
            assert b"out of memory" in reply.content
        assert {seen.outcome for seen in proxy.seen} == {Outcome.ERROR}
        assert learned(proxy) == 0


@pytest.mark.parametrize("path", ROUTES)
async def test_an_engine_that_breaks_down_within_an_answer(pair: CalibratedPair, path: str) -> None:
    """The status was sent long ago: the stream ends with an error in its dialect, and nothing is learned."""
    async with before(pair, "breaks down") as proxy:
        for _ in range(2):
            reply = await stream(proxy, path)
            assert reply.status == 200
            assert BROKEN[path] in reply.content
            assert b"out of memory" in reply.content[reply.content.index(BROKEN[path]) :]
        assert {seen.outcome for seen in proxy.seen} == {Outcome.ERROR}
        assert learned(proxy) == 0


async def test_a_model_that_the_engine_does_not_have(pair: CalibratedPair) -> None:
    """Ollama's clients are told, as by Ollama; nothing is learned from it."""
    async with before(pair, "") as proxy:
        client = await RawClient.connect(proxy.port)
        reply = await client.ask(post("/api/chat", json.dumps(CHAT | {"model": "other"}).encode()))
        client.close()
        assert (reply.status, reply.content) == (404, b'{"error":"model \'other\' not found"}')
        assert {seen.outcome for seen in proxy.seen} == {Outcome.ERROR}
        assert learned(proxy) == 0


async def test_an_engine_of_another_version(pair: CalibratedPair) -> None:
    """As after an upgrade under a running proxy: it is refused with a reason."""
    with pytest.raises(ConfigError, match="the engine is of another version: it does not tell"):
        await Moody(pair, "another version").start()


async def test_an_engine_that_is_slow_to_say_what_it_is(pair: CalibratedPair) -> None:
    """It is given as long as at any later time: on a busy machine the first answer may take a while."""
    with pytest.raises(ConfigError, match="no whole reply to /props"):
        await Moody(pair, "slow", Patience(answer_s=0.1)).start()
    patient = Moody(pair, "slow")
    await patient.start()
    await patient.aclose()
