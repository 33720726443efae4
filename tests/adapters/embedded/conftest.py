"""A running application around a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import ClientSession, web

from specproxy.adapters.embedded.app import build_app, serve_site
from specproxy.adapters.embedded.types import Engine
from tests.support.calibrated import CalibratedPair, write_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> CalibratedPair:
    """A calibrated target with an MTP head, and its draft model."""
    return write_pair(tmp_path_factory.mktemp("calibrated"))


Serve = Callable[..., Awaitable[tuple[ClientSession, str]]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Start applications; each gives a client session and the base URL."""
    runners: list[web.AppRunner] = []
    sessions: list[ClientSession] = []

    async def start(engine: Engine, **options: object) -> tuple[ClientSession, str]:
        app = build_app(engine, **options)  # type: ignore[arg-type]  # options of the test's own choice
        runner = await serve_site(app, lambda r: web.TCPSite(r, "127.0.0.1", 0))
        runners.append(runner)
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        session = ClientSession(url)
        sessions.append(session)
        return session, url

    yield start
    for session in sessions:
        await session.close()
    for runner in runners:
        await runner.cleanup()
