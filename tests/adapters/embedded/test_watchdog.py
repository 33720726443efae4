"""When a child counts as stuck."""

from __future__ import annotations

import asyncio

import pytest

from specproxy.adapters.embedded.watchdog import Patience, stuck
from specproxy.adapters.http import Endpoint, HttpTransport
from tests.adapters.embedded.conftest import Serve
from tests.support.fake_engine import FakeEngine

SHORT = Patience(every_s=0.01, answer_s=5.0, step_s=100.0)


async def test_a_decode_that_does_not_return_is_told(serve: Serve) -> None:
    """Nothing is said while decodes are short; one beyond the limit is, with its time."""
    engine = FakeEngine()
    engine.step_s = 99.0
    _, url = await serve(engine)
    transport = HttpTransport(Endpoint.parse(url))
    watching = asyncio.ensure_future(stuck(transport.open, SHORT))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(watching), 0.2)
    engine.step_s = 101.0
    assert await asyncio.wait_for(watching, 10) == "one decode has been running for 101 s"
    await transport.aclose()


async def test_silence_is_told(serve: Serve) -> None:
    """An address at which nobody answers any more."""
    _, url = await serve(FakeEngine())
    transport = HttpTransport(Endpoint.parse(url.replace("127.0.0.1", "127.0.0.2")))
    reason = await asyncio.wait_for(stuck(transport.open, SHORT), 10)
    assert reason.startswith("it does not answer")
    await transport.aclose()
