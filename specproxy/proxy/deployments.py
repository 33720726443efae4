"""Lanes on servers that are named in the configuration, here or elsewhere: watched, and left while ill."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import structlog

from specproxy.adapters.base import Backend, ProbeResult
from specproxy.adapters.llama_deployed import LlamaServerBackend
from specproxy.adapters.lmstudio import LmStudioBackend
from specproxy.adapters.mlx_lm import MlxBackend
from specproxy.adapters.mlx_vlm import MlxVlmBackend
from specproxy.adapters.openai_compat import Deployed, OpenAiBackend
from specproxy.adapters.sglang import SglangBackend
from specproxy.adapters.tasks import Tasks
from specproxy.adapters.vllm import VllmBackend
from specproxy.config import Deployment
from specproxy.errors import BackendError, UpstreamConnectError
from specproxy.proxy.status import Upstream
from specproxy.records import Health, Lane, Strategy
from specproxy.strategies.cost import LaneFacts

__all__ = ["ADAPTERS", "Deployments", "deployed"]

ADAPTERS: Mapping[str, type[OpenAiBackend]] = {
    adapter.kind: adapter
    for adapter in (
        OpenAiBackend,
        LlamaServerBackend,
        LmStudioBackend,
        MlxBackend,
        MlxVlmBackend,
        VllmBackend,
        SglangBackend,
    )
}

LOOK_S = 10.0  # between looks at servers that are well
RETRY_S = 2.0  # and where one is not

log = structlog.get_logger("specproxy")


def deployed(
    deployments: Sequence[Deployment], environ: Mapping[str, str] | None = None
) -> list[OpenAiBackend]:
    """A backend for each server of each deployment; names are hosts, with a number where one occurs twice."""
    environ = os.environ if environ is None else environ
    made: list[OpenAiBackend] = []
    taken: dict[str, int] = {}
    for number, deployment in enumerate(deployments):
        for index, url in enumerate(deployment.urls):
            host = urlsplit(url).netloc
            taken[host] = taken.get(host, 0) + 1
            name = host if taken[host] == 1 else f"{host}#{taken[host]}"
            made.append(ADAPTERS[deployment.kind](_server(deployment, number, index, url, name, environ)))
    return made


def _server(
    deployment: Deployment, number: int, index: int, url: str, name: str, environ: Mapping[str, str]
) -> Deployed:
    several = len(deployment.urls) > 1
    return Deployed(
        name,
        url,
        deployment.target,
        deployment.model or "",
        deployment.aliases,
        Strategy.parse(deployment.strategy),
        deployment.drafts,
        deployment.draft_tokens,
        deployment.report_drafts,
        environ.get(deployment.key_env, "") if deployment.key_env else "",
        deployment.verify_tls,
        deployment.weights[index] if deployment.weights else 1.0,
        f"{number} {' '.join(sorted(deployment.urls))}" if several else "",
        deployment.load_s,
    )


class Deployments:
    """All configured servers."""

    def __init__(self, deployments: Sequence[Deployment]) -> None:
        self._servers = deployed(deployments)
        self._upstreams = {server.name: Upstream(server.spec.url, server.name) for server in self._servers}
        self._tasks = Tasks()
        self._hurry = asyncio.Event()

    @property
    def backends(self) -> tuple[Backend, ...]:
        """One for each server, in the order of the configuration."""
        return tuple(self._servers)

    @property
    def upstreams(self) -> list[Upstream]:
        """The servers as last seen."""
        return list(self._upstreams.values())

    def address(self, lane: Lane) -> str:
        """Base URL of a lane's server; empty for lanes of others."""
        return next((server.spec.url for server in self._servers if server.name == lane.backend), "")

    def facts(self) -> Mapping[str, LaneFacts]:
        """What the learner may know beforehand, by lane id."""
        lanes = [(server, status.lane) for server in self._servers for status in server.lanes()]
        return {lane.id: LaneFacts(slots=slots) for server, lane in lanes if (slots := server.slots(lane))}

    def lane_failed(self, lane: Lane, error: BackendError) -> None:
        """A server may be away: leave it, and look at it at once."""
        for server in self._servers:
            if server.name == lane.backend and isinstance(error, UpstreamConnectError):
                for status in server.lanes():
                    server.mark(status.lane.id, Health.UNHEALTHY, error.message)
                self._hurry.set()

    async def start(self) -> None:
        """Look once at every server, and go on looking in the background."""
        for server in self._servers:
            await server.start()
        await self._look()
        self._tasks.spawn(self._watch(), name="watch deployments")

    async def aclose(self) -> None:
        """Stop looking, close connections; idempotent."""
        await self._tasks.aclose()
        for server in self._servers:
            await server.aclose()

    async def _watch(self) -> None:
        while True:
            well = all(s.health is Health.READY for server in self._servers for s in server.lanes())
            try:
                async with asyncio.timeout(LOOK_S if well else RETRY_S):
                    await self._hurry.wait()
            except TimeoutError:
                pass
            self._hurry.clear()
            await self._look()

    async def _look(self) -> None:
        found = await asyncio.gather(*(server.check() for server in self._servers), return_exceptions=True)
        for server, result in zip(self._servers, found, strict=True):
            if isinstance(result, ProbeResult):
                self._upstreams[server.name].found = result
            else:
                log.error("looking at a deployment failed", url=server.spec.url, error=repr(result))
