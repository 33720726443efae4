"""Servers that somebody else runs: found, watched, lost and found again.

A server that cannot be reached keeps its place, so that the first request after it has come up finds it. What
it is and which models it has is asked again and again: models come and go, servers are replaced by newer ones.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import structlog

from specproxy.adapters.base import Backend, Exchange, ProbeResult, Sink, UpstreamRequest
from specproxy.adapters.endpoint import Endpoint
from specproxy.adapters.http import HttpBackend
from specproxy.adapters.refused import RefusedExchange
from specproxy.adapters.tasks import Tasks
from specproxy.errors import BackendError, UpstreamConnectError
from specproxy.proxy.status import Upstream
from specproxy.records import Control, Health, Lane, LaneStatus, Strategy

__all__ = ["USUAL_URLS", "Probe", "Sidecar"]

USUAL_URLS = tuple(f"http://127.0.0.1:{port}" for port in (11434, 8080, 9931, 1234))
"""Where Ollama, llama-server (old and new default) and LM Studio listen unless told otherwise."""

RETRY_S = 2.0  # between looks at servers that cannot be reached
REFRESH_S = 30.0  # between looks at servers that can: models come and go
SINGLE_MODEL_KINDS = ("llama-server", "unknown")  # answer for one model, whatever name a request gives
STRIP_ORIGIN_KINDS = ("ollama",)

Probe = Callable[[str], Awaitable[ProbeResult]]

log = structlog.get_logger("specproxy")


@dataclass(slots=True)
class _Server:
    upstream: Upstream
    backend: HttpBackend


class Sidecar:
    """Backends for running servers.

    Args:
        urls: base URLs to stand in front of; each keeps its place while it is away. Empty: those of
            `USUAL_URLS` that answer, the first one first.
        probe: finds out what is at a URL; an unreachable one is a result, not an error.
    """

    def __init__(self, urls: Sequence[str], probe: Probe) -> None:
        self._fixed = bool(urls)
        self._urls = tuple(urls) or USUAL_URLS
        self._probe = probe
        self._servers = {url: self._server(url) for url in self._urls}
        self._tasks = Tasks()
        self._hurry = asyncio.Event()
        self._changed: Callable[[], None] = lambda: None
        self._nobody = NobodyHome(self._urls)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever `backends` may have changed."""
        self._changed = listener

    @property
    def upstreams(self) -> list[Upstream]:
        """The servers as last seen: all that were named, or those of the usual places that answered."""
        servers = [server.upstream for server in self._servers.values()]
        found = [upstream for upstream in servers if upstream.found.reachable]
        return servers if self._fixed or not found else found

    @property
    def backends(self) -> tuple[Backend, ...]:
        """One for each server that counts; where nobody has answered yet, one that says so."""
        found = [s.backend for s in self._servers.values() if self._fixed or s.upstream.found.reachable]
        return tuple(found) or (self._nobody,)

    async def start(self) -> None:
        """Look once at every server, and go on looking in the background."""
        await asyncio.gather(*(self._look(server) for server in self._servers.values()))
        away = [url for url, server in self._servers.items() if not server.upstream.found.reachable]
        if self._fixed and away:
            log.warning("upstream not reachable; trying again in the background", probed=", ".join(away))
        elif len(away) == len(self._servers):
            log.warning("no server found; looking again in the background", probed=", ".join(away))
        self._tasks.spawn(self._watch(), name="watch upstreams")

    def lane_failed(self, lane: Lane, error: BackendError) -> None:
        """A lane of ours may have failed: mark it and look at its server at once."""
        for server in self._servers.values():
            if server.backend.name == lane.backend and isinstance(error, UpstreamConnectError):
                for status in server.backend.lanes():
                    server.backend.mark(status.lane.id, Health.UNHEALTHY, error.message)
                self._hurry.set()

    async def aclose(self) -> None:
        """Stop looking, close connections; idempotent."""
        await self._tasks.aclose()
        for server in self._servers.values():
            await server.backend.aclose()

    # --- looking ---------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            ready = [
                s.upstream.found.reachable and not s.upstream.found.loading for s in self._servers.values()
            ]
            settled = all(ready) if self._fixed else any(ready)
            try:
                async with asyncio.timeout(REFRESH_S if settled else RETRY_S):
                    await self._hurry.wait()
            except TimeoutError:
                pass
            self._hurry.clear()
            await asyncio.gather(*(self._look(server) for server in self._servers.values()))

    async def _look(self, server: _Server) -> None:
        """Probe one server and bring its lanes up to date."""
        url, before = server.upstream.url, server.upstream.found
        found = await self._probe(url)
        if found.silent and before.reachable:
            return  # busy with a request, as far as can be told
        server.upstream.found = found
        if not found.reachable:
            for status in server.backend.lanes():
                server.backend.mark(status.lane.id, Health.UNHEALTHY, f"{url} cannot be reached")
        else:
            endpoint = server.backend.transport.endpoint
            strip = found.kind in STRIP_ORIGIN_KINDS
            server.backend.transport.endpoint = replace(endpoint, strip_origin=strip)
            if not found.loading:
                server.backend.set_lanes(_lanes(server.upstream, alone=len(self._servers) == 1))
            health, note = (Health.UNHEALTHY, "it is loading") if found.loading else (Health.READY, "")
            for status in server.backend.lanes():
                server.backend.mark(status.lane.id, health, note)
        if (found.reachable, found.loading, found.models) != (before.reachable, before.loading, before.models):
            log.info(
                "upstream " + ("found" if found.reachable else "lost"),
                url=url,
                kind=found.kind,
                version=found.version,
            )
            self._changed()

    def _server(self, url: str) -> _Server:
        parts = urlsplit(url)
        upstream = Upstream(url, parts.netloc if len(self._urls) > 1 else "upstream")
        backend = HttpBackend(upstream.backend, Endpoint.parse(url), _lanes(upstream, alone=True))
        for status in backend.lanes():
            backend.mark(status.lane.id, Health.UNHEALTHY, f"{url} was not reached yet")
        return _Server(upstream, backend)


def _lanes(upstream: Upstream, *, alone: bool) -> list[Lane]:
    """One lane for each model that the server names, or one for all."""
    found = upstream.found
    if found.kind in SINGLE_MODEL_KINDS or not found.models:
        return [_lane(upstream, upstream.backend, "".join(found.models[:1]), frozenset())]
    lanes = []
    for model in found.models:
        names = {model, model.removesuffix(":latest")} if found.kind == "ollama" else {model}
        lane_id = model if alone else f"{model}@{upstream.backend}"
        lanes.append(_lane(upstream, lane_id, model, frozenset(names)))
    return lanes


def _lane(upstream: Upstream, lane_id: str, target: str, names: frozenset[str]) -> Lane:
    """Statistics belong to this server: another address may be another machine."""
    facts = "\0".join((upstream.url, upstream.found.kind, upstream.found.version, target))
    fingerprint = hashlib.sha256(facts.encode()).hexdigest()[:16]
    return Lane(lane_id, upstream.backend, target, Strategy(), Control.OBSERVE, fingerprint, models=names)


class NobodyHome:
    """Answers for servers that were not found: every exchange fails, saying where was looked (a `Backend`)."""

    name = "nobody"

    def __init__(self, urls: Iterable[str]) -> None:
        places = ", ".join(urls)
        self._message = (
            f"no server answers at {places}: start Ollama or llama-server, or name one with --upstream"
        )

    async def start(self) -> None:
        """Nothing to bring up."""

    def lanes(self) -> tuple[LaneStatus, ...]:
        """None."""
        return ()

    async def probe(self) -> ProbeResult:
        """Unreachable."""
        return ProbeResult(False)

    def open(self, request: UpstreamRequest, lane: Lane, sink: Sink) -> Exchange:  # noqa: ARG002 (nothing is sent)
        """Fail, once the caller has the exchange in hand."""
        return RefusedExchange(sink, UpstreamConnectError(self._message))

    async def aclose(self) -> None:
        """Nothing to close."""
