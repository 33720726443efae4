"""A real llama-server behind ``--api-prefix`` and ``--api-key``, in front of which we stand in both ways."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from specproxy.adapters.probe import Prober
from specproxy.adapters.supervise import Child, ChildSpec
from specproxy.adapters.weights import Weights
from specproxy.config import Deployment
from specproxy.proxy.deployments import deployed
from specproxy.proxy.sidecar import Sidecar
from specproxy.records import Health, Outcome
from tests.support.calibrated import CalibratedPair
from tests.support.client import RawClient, RawReply, post
from tests.support.proxy import Proxy, running_proxy

pytestmark = [pytest.mark.engine, pytest.mark.timeout(60)]

KEY = "s3cret"


@pytest.fixture
async def server(pair: CalibratedPair) -> AsyncIterator[str]:
    """Its base URL, prefix included."""
    flags = ("-m", str(pair.target), "--port", "0", "-c", "512", "-np", "1", "-t", "1", "--slots")
    command = (sys.executable, "-m", "specproxy.adapters.xllama_child", *flags, "--spec-type", "ngram-simple")
    child = await Child.start(ChildSpec("server", (*command, "--api-prefix", "/llm", "--api-key", KEY)))
    url = f"{await child.address()}/llm"
    try:
        while not (found := await Prober()(url)).reachable or found.loading:  # noqa: ASYNC110 - a process
            await asyncio.sleep(0.05)
        yield url
    finally:
        await child.stop()


async def ask(proxy: Proxy, pair: CalibratedPair, *headers: bytes) -> RawReply:
    chat: dict[str, Any] = {"model": "m", "max_tokens": 8, "temperature": 0}
    chat["messages"] = [{"role": "user", "content": pair.marker("json", 1)}]
    client = await RawClient.connect(proxy.port)
    reply = await client.ask(post("/v1/chat/completions", orjson.dumps(chat), *headers))
    client.close()
    return reply


async def test_in_front_of_it_the_clients_key_counts(server: str, pair: CalibratedPair) -> None:
    """It is known by its public list of models; with the key it answers, without it it says so."""
    fleet = Sidecar([server], Prober(), weights=lambda *_: Weights())
    await fleet.start()
    assert fleet.upstreams[0].found.kind == "llama-server"
    async with running_proxy(*fleet.backends) as proxy:
        refused = await ask(proxy, pair)
        assert (refused.status, b"Invalid API Key" in refused.content) == (401, True)
        assert (await ask(proxy, pair, b"Authorization: Bearer " + KEY.encode())).status == 200
        assert (await ask(proxy, pair, b"x-api-key: " + KEY.encode())).status == 200
    assert [seen.outcome for seen in proxy.seen] == [Outcome.ERROR, Outcome.COMPLETE, Outcome.COMPLETE]
    await fleet.aclose()


async def test_as_a_deployment_the_key_is_ours(server: str, pair: CalibratedPair) -> None:
    """Its slots bear out that it drafts, and clients need no key of it."""
    one = Deployment(kind="llama-server", urls=(server,), target="m", strategy="ngram", key_env="KEY")
    [backend], [other] = deployed([one], {"KEY": KEY}), deployed([one], {"KEY": "wrong"})
    await backend.check()
    assert [s.health for s in backend.lanes()] == [Health.READY]
    async with running_proxy(backend) as proxy:
        proxy.policy.wanted = "ngram"
        assert (await ask(proxy, pair)).status == 200
    await other.check()
    async with running_proxy(other) as proxy:
        assert (await ask(proxy, pair)).status == 401
