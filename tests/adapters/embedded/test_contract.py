"""The contract checks over the embedded engine: its own child process, with a model in it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from specproxy.adapters.base import Backend
from specproxy.adapters.embedded.backend import EmbeddedBackend, EmbeddedOptions
from specproxy.adapters.supervise import ChildSpec
from specproxy.records import Health
from tests.adapters.contract import BackendContract
from tests.support.calibrated import CalibratedPair

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]


class Engine(EmbeddedBackend):
    """Its child answers the targets of the contract beside its own routes."""

    def _spec(self, directory: Path) -> ChildSpec:
        spec = super()._spec(directory)
        command = [
            "tests.support.contract_engine" if c.endswith(".embedded.child") else c for c in spec.command
        ]
        return replace(spec, command=tuple(command))


async def started(pair: CalibratedPair) -> EmbeddedBackend:
    options = EmbeddedOptions(pair.target, threads=1, ctx=256, parallel=1, extra_args=("--profile", "0"))
    engine = Engine(options)
    await engine.start()
    return engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(pair: CalibratedPair) -> AsyncIterator[list[EmbeddedBackend]]:
    """One child for all checks, as far as they leave it alive: loading takes a second."""
    engines = [await started(pair)]
    yield engines
    for engine in engines:
        await engine.aclose()


class TestEmbedded(BackendContract):
    @pytest_asyncio.fixture(loop_scope="module")
    async def backend(self, running: list[EmbeddedBackend], pair: CalibratedPair) -> Backend:
        if running[-1].lanes()[0].health is not Health.READY:
            running.append(await started(pair))
        return running[-1]
