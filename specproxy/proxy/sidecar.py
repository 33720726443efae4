"""Servers that somebody else runs: found, watched, lost and found again.

A server that cannot be reached keeps its place, so that the first request after it has come up finds it. What
it is and which models it has is asked again and again: models come and go, servers are replaced by newer ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import structlog

from specproxy.adapters.base import Backend, Exchange, ProbeResult, ServedModel, Sink, UpstreamRequest
from specproxy.adapters.endpoint import Endpoint
from specproxy.adapters.http import HttpBackend
from specproxy.adapters.ollama_twin import refusal
from specproxy.adapters.refused import RefusedExchange
from specproxy.adapters.tasks import Tasks
from specproxy.adapters.weights import Weights, find_weights
from specproxy.errors import BackendError, UpstreamConnectError
from specproxy.proxy.beside import Beside, Wish
from specproxy.proxy.ladder import Standing, climb, focus, model_facts, own_strategy
from specproxy.proxy.status import Upstream
from specproxy.records import Control, Health, Lane, LaneStatus
from specproxy.strategies.cost import LaneFacts

__all__ = ["USUAL_URLS", "Probe", "Sidecar"]

USUAL_URLS = tuple(f"http://127.0.0.1:{port}" for port in (11434, 8080, 9931, 1234))
"""Where Ollama, llama-server (old and new default) and LM Studio listen unless told otherwise."""

RETRY_S = 2.0  # between looks at servers that cannot be reached
REFRESH_S = 30.0  # between looks at servers that can: models come and go
CLOSE_S = 5.0  # and where our lanes answer in a server's place, which must not be those of an earlier model
PLAN_WAIT_S = 10.0  # how long the start waits to be able to say which further lanes there will be
SINGLE_MODEL_KINDS = ("llama-server", "unknown")  # answer for one model, whatever name a request gives
STRIP_ORIGIN_KINDS = ("ollama",)

Probe = Callable[[str], Awaitable[ProbeResult]]
MakeBeside = Callable[[str, str, Callable[[], None]], Beside]

log = structlog.get_logger("specproxy")


@dataclass(slots=True)
class _Server:
    upstream: Upstream
    backend: HttpBackend
    beside: Beside | None = None
    surveyed: tuple[str, ServedModel] | None = None  # what `weights` is of
    weights: Weights | None = None


class Sidecar:
    """Backends for running servers.

    Args:
        urls: base URLs to stand in front of; each keeps its place while it is away. Empty: those of
            `USUAL_URLS` that answer, the first one first.
        probe: finds out what is at a URL; an unreachable one is a result, not an error.
        weights: looks for the file of a server's model; it may block.
        beside: makes what starts further lanes beside a server, from a backend's name, a suffix of lane ids
            and a listener; None where nobody has consented to that.
    """

    def __init__(
        self,
        urls: Sequence[str],
        probe: Probe,
        *,
        weights: Callable[[str, ServedModel], Weights] = find_weights,
        beside: MakeBeside | None = None,
    ) -> None:
        self._fixed = bool(urls)
        self._urls = tuple(urls) or USUAL_URLS
        self._probe, self._find_weights, self._make_beside = probe, weights, beside
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
    def survey(self) -> list[tuple[str, ProbeResult]]:
        """The usual places and what was found there; empty where servers were named."""
        return [] if self._fixed else [(url, server.upstream.found) for url, server in self._servers.items()]

    @property
    def backends(self) -> tuple[Backend, ...]:
        """One for each server that counts; where nobody has answered yet, one that says so."""
        found: list[Backend] = []
        for server in self._servers.values():
            if self._fixed or server.upstream.found.reachable:
                found.append(server.backend)
                if server.beside is not None and server.beside.backend is not None:
                    found.append(server.beside.backend)
        return tuple(found) or (self._nobody,)

    def facts(self) -> Mapping[str, LaneFacts]:
        """What the learner may know beforehand, by lane id."""
        known: dict[str, LaneFacts] = {}
        for server in self._servers.values():
            known |= _own_facts(server)
            known |= server.beside.facts() if server.beside is not None else {}
        return known

    def address(self, lane: Lane) -> str:
        """Base URL at which a lane can be reached; empty where there is none."""
        for url, server in self._servers.items():
            if server.backend.name == lane.backend:
                return url
            if server.beside is not None and server.beside.name == lane.backend:
                return server.beside.address(lane)
        return ""

    async def start(self) -> None:
        """Look once at every server, and go on looking in the background."""
        await asyncio.gather(*(self._look(server) for server in self._servers.values()))
        await self._planned()
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
            if server.beside is not None:
                await server.beside.aclose()
            await server.backend.aclose()

    async def _planned(self) -> None:
        """Wait until it is known which further lanes there will be, so that this can be said at the start."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PLAN_WAIT_S):
                await asyncio.gather(
                    *(s.beside.planned() for s in self._servers.values() if s.beside is not None)
                )

    # --- looking ---------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            ready = [
                s.upstream.found.reachable and not s.upstream.found.loading for s in self._servers.values()
            ]
            settled = all(ready) if self._fixed else any(ready)
            try:
                pause = CLOSE_S if self._make_beside is not None else REFRESH_S
                async with asyncio.timeout(pause if settled else RETRY_S):
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
        if found.reachable and not found.loading:
            await self._survey(server)
            self._renew_lanes(server)
        elif server.beside is not None:
            server.beside.away()
        health, note = _health(url, found)
        for status in server.backend.lanes():
            server.backend.mark(status.lane.id, health, note)
        self._stand(server)
        if (found.reachable, found.loading, found.models) != (before.reachable, before.loading, before.models):
            log.info(
                "upstream " + ("found" if found.reachable else "lost"),
                url=url,
                kind=found.kind,
                version=found.version,
            )
            self._changed()

    async def _survey(self, server: _Server) -> None:
        """Choose the model to look after, and look for its file if it is another one than last time."""
        upstream = server.upstream
        current = upstream.model.name if upstream.model is not None else ""
        upstream.model = model = focus(upstream.found, current)
        key = (upstream.found.version, replace(model, loaded=True)) if model is not None else None
        if key != server.surveyed:
            server.surveyed = key
            server.weights = (
                await asyncio.to_thread(self._find_weights, upstream.url, model) if model is not None else None
            )

    def _renew_lanes(self, server: _Server) -> None:
        """Bring a server's own lanes, and those beside it, up to what was found."""
        upstream, found = server.upstream, server.upstream.found
        endpoint = server.backend.transport.endpoint
        server.backend.transport.endpoint = replace(endpoint, strip_origin=found.kind in STRIP_ORIGIN_KINDS)
        lanes = _lanes(server, alone=len(self._servers) == 1)
        server.backend.set_lanes(lanes.values())
        model = upstream.model
        lane = lanes.get(model.name) if model is not None else None
        if server.beside is None and self._make_beside is not None:
            suffix = "" if len(self._servers) == 1 else f"@{upstream.backend}"
            server.beside = self._make_beside(
                f"beside {upstream.backend}", suffix, lambda: self._beside_changed(server)
            )
        if server.beside is not None and not _waits(server.beside, model):
            server.beside.follow(*_wish(server, lane))

    def _beside_changed(self, server: _Server) -> None:
        self._stand(server)
        self._changed()

    def _stand(self, server: _Server) -> None:
        """Work out the rung that a server stands on."""
        upstream, beside = server.upstream, server.beside
        upstream.rung = climb(
            Standing(
                upstream.url,
                upstream.found,
                upstream.model,
                server.weights,
                consent=self._make_beside is not None,
                plan=beside.plan if beside is not None else None,
                trouble=beside.trouble if beside is not None else "",
            )
        )

    def _server(self, url: str) -> _Server:
        parts = urlsplit(url)
        upstream = Upstream(url, parts.netloc if len(self._urls) > 1 else "upstream")
        backend = HttpBackend(upstream.backend, Endpoint.parse(url), [_lane(upstream, upstream.backend)])
        for status in backend.lanes():
            backend.mark(status.lane.id, Health.UNHEALTHY, f"{url} was not reached yet")
        return _Server(upstream, backend)


def _waits(beside: Beside, model: ServedModel | None) -> bool:
    """Whether the model that lanes are beside has only been put out of memory: they serve on."""
    known = beside.model
    return model is not None and known is not None and not model.loaded and _same(known, model)


def _same(one: ServedModel, other: ServedModel) -> bool:
    return (one.name, one.digest) == (other.name, other.digest)


def _wish(server: _Server, lane: Lane | None) -> tuple[Wish | None, str]:
    """The lanes that should be beside a server, or None and as a clause why there can be none."""
    found, model = server.upstream.found, server.upstream.model
    if lane is None or model is None:
        return None, ""
    if found.kind == "ollama":
        if reason := refusal(model, found.version):
            return None, reason
        if not model.loaded:
            return None, "Ollama has no model loaded; they come with the first one"
    return Wish.of(server.upstream.url, found.kind, lane, model, server.weights), ""


def _health(url: str, found: ProbeResult) -> tuple[Health, str]:
    """Of a server's own lanes, with a note."""
    if not found.reachable:
        return Health.UNHEALTHY, f"{url} cannot be reached"
    return (Health.UNHEALTHY, "it is loading") if found.loading else (Health.READY, "")


def _lanes(server: _Server, *, alone: bool) -> dict[str, Lane]:
    """By model: one lane for each that the server names and that has a choice, or one for all."""
    upstream, found = server.upstream, server.upstream.found
    served = {model.name: model for model in found.served} | {
        name: ServedModel(name) for name in found.models if name not in {m.name for m in found.served}
    }
    if found.kind in SINGLE_MODEL_KINDS or not served:
        model = next(iter(served.values()), ServedModel(""))
        return {model.name: _lane(upstream, upstream.backend, model, weights=server.weights)}
    lanes = {}
    for name, model in served.items():
        if not model.unrouted:
            names = {name, name.removesuffix(":latest")} if found.kind == "ollama" else {name}
            lane_id = name if alone else f"{name}@{upstream.backend}"
            weights = server.weights if upstream.model == model else None
            lanes[name] = _lane(upstream, lane_id, model, frozenset(names), weights)
    return lanes


def _lane(
    upstream: Upstream,
    lane_id: str,
    model: ServedModel | None = None,
    names: frozenset[str] = frozenset(),
    weights: Weights | None = None,
) -> Lane:
    """Statistics belong to this server: another address may be another machine."""
    model = model or ServedModel("")
    strategy = own_strategy(model, weights)
    digest = weights.facts.digest if weights is not None and weights.facts is not None else model.digest
    found = upstream.found
    facts = "\0".join((upstream.url, found.kind, found.version, model.name, digest, strategy.name))
    fingerprint = hashlib.sha256(facts.encode()).hexdigest()[:16]
    return Lane(lane_id, upstream.backend, model.name, strategy, Control.OBSERVE, fingerprint, models=names)


def _own_facts(server: _Server) -> dict[str, LaneFacts]:
    """What is known of the models on a server's own lanes."""
    upstream = server.upstream
    models = {model.name: model for model in upstream.found.served}
    weights = server.weights.facts if server.weights is not None else None
    return {
        status.lane.id: model_facts(models[name], weights if models[name] == upstream.model else None)
        for status in server.backend.lanes()
        if (name := status.lane.target) in models
    }


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
