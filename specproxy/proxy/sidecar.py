"""Servers that somebody else runs: found, watched, lost and found again.

A server that cannot be reached keeps its place, so that the first request after it has come up finds it. What
it is and which models it has is asked again and again: models come and go, servers are replaced by newer ones.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

import structlog

from specproxy.adapters.base import Backend, ProbeResult, ServedModel
from specproxy.adapters.endpoint import Endpoint
from specproxy.adapters.llama_router import watch_load
from specproxy.adapters.request_field import FIELD, Finding
from specproxy.adapters.running_server import RunningServer
from specproxy.adapters.tasks import Tasks
from specproxy.adapters.weights import Weights, find_weights
from specproxy.errors import BackendError, UpstreamConnectError
from specproxy.proxy.beside import Beside
from specproxy.proxy.ladder import Standing, climb, focus
from specproxy.proxy.nobody import NobodyHome
from specproxy.proxy.reload_lanes import reload_lanes
from specproxy.proxy.router_lanes import guess_load_s
from specproxy.proxy.server_lanes import (
    Server,
    drafting_lane,
    lane_of,
    lanes_of,
    mark_lanes,
    note_ngrams,
    own_facts,
    plain_by_field,
    waits,
    wish_of,
)
from specproxy.proxy.status import Upstream
from specproxy.proxy.trials import Trials
from specproxy.records import Control, Health, Lane
from specproxy.strategies.cost import LaneFacts

__all__ = ["USUAL_URLS", "Probe", "Sidecar"]

USUAL_URLS = tuple(f"http://127.0.0.1:{port}" for port in (11434, 8080, 9931, 1234))
"""Where Ollama, llama-server (old and new default) and LM Studio listen unless told otherwise."""

RETRY_S = 2.0  # between looks at servers that cannot be reached
REFRESH_S = 30.0  # between looks at servers that can: models come and go
CLOSE_S = 5.0  # and where our lanes answer in a server's place, which must not be those of an earlier model
PLAN_WAIT_S = 10.0  # how long the start waits to be able to say which further lanes there will be
LOAD_RATE = 0.3  # weight of the newest load in the running mean
STRIP_ORIGIN_KINDS = ("ollama",)

Probe = Callable[[str], Awaitable[ProbeResult]]
MakeBeside = Callable[[str, str, Callable[[], None]], Beside]

log = structlog.get_logger("specproxy")


class Sidecar:
    """Backends for running servers.

    Args:
        urls: base URLs to stand in front of; each keeps its place while it is away. Empty: those of
            `USUAL_URLS` that answer, the first one first.
        probe: finds out what is at a URL; an unreachable one is a result, not an error.
        weights: looks for the file of a server's model; it may block.
        beside: makes what starts further lanes beside a server, from a backend's name, a suffix of lane ids
            and a listener; None where nobody has consented to that.
        trials: tries whether a request field switches drafting; None where that is not wanted.
        may_reload: whether an Ollama may be made to load its model anew, to draft or not to.
        alone: whether these servers are all there is: beside lanes on a model of our own they stand on no rung.
    """

    def __init__(
        self,
        urls: Sequence[str],
        probe: Probe,
        *,
        weights: Callable[[str, ServedModel], Weights] = find_weights,
        beside: MakeBeside | None = None,
        trials: Trials | None = None,
        alone: bool = True,
        may_reload: bool = False,
    ) -> None:
        self._fixed, self._alone, self._may_reload = bool(urls), alone, may_reload
        self._urls = tuple(urls) or USUAL_URLS
        self._probe, self._find_weights, self._make_beside = probe, weights, beside
        self._trials = trials
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
            known |= own_facts(server)
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

    def at_hand(self, lane: Lane) -> bool:
        """Whether a lane's server is one of ours, or has the lane's model in memory as far as it says."""
        for server in self._servers.values():
            if server.beside is not None and server.beside.name == lane.backend:
                return True
            if server.backend.name == lane.backend:
                loaded = (model for model in server.upstream.found.served if model.loaded)
                return any(not lane.models or model.name in lane.models for model in loaded)
        return False

    async def start(self) -> None:
        """Look once at every server, and go on looking in the background."""
        await self._look(*self._servers.values())
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
                server.doubted = True  # until it answers: a look at a busy server tells nothing
                self._hurry.set()

    async def aclose(self) -> None:
        """Stop looking, close connections; idempotent."""
        await self._tasks.aclose()
        if self._trials is not None:
            await self._trials.aclose()
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
                s.upstream.found.reachable and not s.upstream.found.loading and not s.doubted
                for s in self._servers.values()
            ]
            settled = all(ready) if self._fixed else any(ready)
            try:
                pause = CLOSE_S if self._make_beside is not None else REFRESH_S
                async with asyncio.timeout(pause if settled else RETRY_S):
                    await self._hurry.wait()
            except TimeoutError:
                pass
            self._hurry.clear()
            await self._look(*self._servers.values())

    async def _look(self, *servers: Server) -> None:
        """Probe servers, all at once, and bring their lanes up to date in order; a failure costs one look."""
        found = await asyncio.gather(*(self._ask(server) for server in servers), return_exceptions=True)
        for server, result in zip(servers, found, strict=True):
            try:
                if isinstance(result, BaseException):
                    raise result
                if result is not None:
                    self._take(server, result)
            except Exception:
                log.exception("looking at an upstream failed", url=server.upstream.url)
        for server in servers:
            self._stand(server)  # once more, now that its peers are known

    async def _ask(self, server: Server) -> ProbeResult | None:
        """What is at a server now, with its model surveyed; None where that cannot be told."""
        found = await self._probe(server.upstream.url)
        if found.silent and server.upstream.found.reachable:
            return None  # busy with a request, as far as can be told
        if found.reachable and not found.loading:
            await self._survey(server, found)
        return found

    def _take(self, server: Server, found: ProbeResult) -> None:
        """Make what was found at a server its state."""
        url, before = server.upstream.url, server.upstream.found
        lanes = [status.lane for status in server.backend.lanes()]
        server.upstream.found, server.doubted = found, False
        server.backend.kind = found.kind
        if found.reachable and not found.loading:
            self._renew_lanes(server)
            self._try_field(server)
        elif server.beside is not None:
            server.beside.away()
        mark_lanes(server)
        self._stand(server)
        if (found.reachable, found.loading, found.models) != (before.reachable, before.loading, before.models):
            news = "found" if found.reachable else "lost"
            log.info(f"upstream {news}", url=url, kind=found.kind, version=found.version)
            self._changed()
        elif lanes != [status.lane for status in server.backend.lanes()]:
            self._changed()

    async def _survey(self, server: Server, found: ProbeResult) -> None:
        """Choose the model to look after, and look for its file if it is another one than last time."""
        url, current = server.upstream.url, server.upstream.model
        model = focus(found, current.name if current is not None else "")
        key = (found.version, replace(model, loaded=True)) if model is not None else None
        if key != server.surveyed:
            weights = await asyncio.to_thread(self._find_weights, url, model) if model is not None else None
            server.surveyed, server.weights = key, weights
        server.upstream.model = model

    def _renew_lanes(self, server: Server) -> None:
        """Bring a server's own lanes, and those beside it, up to what was found."""
        upstream, found = server.upstream, server.upstream.found
        endpoint = server.backend.transport.endpoint
        server.backend.transport.endpoint = replace(endpoint, strip_origin=found.kind in STRIP_ORIGIN_KINDS)
        first, model = self._first_model(), upstream.model
        named = first is not None and model is not None and model.name != first.name
        lanes = lanes_of(server, alone=len(self._servers) == 1, named=named)
        lane = lanes.get(model.name) if model is not None else None
        by_field = [plain_by_field(lane)] if lane is not None and self._switches(lane) else []
        own = [variant for lane in lanes.values() for variant in self._variants(server, lane)]
        before = {status.lane.id for status in server.backend.lanes()}
        server.backend.set_lanes([*own, *by_field])
        note_ngrams(server)
        for variant in own:
            if variant.control is Control.RELOAD and variant.overrides and variant.id not in before:
                server.backend.mark(variant.id, Health.READY, resident=False)
        if server.beside is None and self._make_beside is not None:
            suffix = "" if len(self._servers) == 1 else f"@{upstream.backend}"
            server.beside = self._make_beside(
                f"beside {upstream.backend}", suffix, lambda: self._beside_changed(server)
            )
        if server.beside is not None and not waits(server.beside, model):
            server.beside.follow(*wish_of(server, lane, plain_there=bool(by_field)))

    def _variants(self, server: Server, lane: Lane) -> list[Lane]:
        """A lane of a server and, where reloading is what is left and allowed, the other one on its model."""
        model, beside = server.upstream.model, server.beside
        others = beside is not None and beside.plan is not None and beside.plan.lanes
        if not self._may_reload or others or model is None or model.name != lane.target:
            return [lane]
        if server.upstream.found.kind != "ollama":
            return [lane]
        facts = server.weights.facts if server.weights is not None else None
        return reload_lanes(lane, model, facts, server.loads.get(model.name) or guess_load_s(facts))

    def _first_model(self) -> ServedModel | None:
        """The model of the first server that was ever seen: that takes what nobody names, while away too."""
        models = (server.upstream.model for server in self._servers.values())
        return next((model for model in models if model is not None), None)

    def _switches(self, lane: Lane) -> bool:
        """Whether a request field is known to switch a server's drafting off."""
        return self._trials is not None and self._trials.verdict(lane.fingerprint) is Finding.HONOURED

    def _try_field(self, server: Server) -> None:
        """Find out about the request field where a server drafts, and nothing is known yet."""
        lane = drafting_lane(server)
        if self._trials is None or lane is None:
            return

        def done() -> None:
            self._renew_lanes(server)
            self._beside_changed(server)

        self._trials.consider(server.upstream.url, lane.fingerprint, done)

    def _field_note(self, server: Server) -> str:
        """What is known about the request field, as a clause; empty where it does not matter."""
        lane = drafting_lane(server)
        if lane is None:
            return ""
        if self._trials is None:
            return "trying whether a request field switches drafting is turned off (probe_fields)"
        match self._trials.verdict(lane.fingerprint):
            case Finding.HONOURED:
                return f"{FIELD[0]} in a request switches its {lane.strategy.name} off: two lanes on it"
            case Finding.IGNORED:
                return f"this build was tried and ignores the request field {FIELD[0]}"
            case Finding.UNCLEAR:
                return f"a trial of the request field {FIELD[0]} told nothing"
        return f"whether it honours the request field {FIELD[0]} is tried while it is idle"

    def _beside_changed(self, server: Server) -> None:
        self._stand(server)
        self._changed()

    def _stand(self, server: Server) -> None:
        """Work out the rung that a server stands on."""
        upstream, beside = server.upstream, server.beside
        if not self._alone:
            return
        upstream.rung = climb(
            Standing(
                upstream.url,
                upstream.found,
                upstream.model,
                server.weights,
                consent=self._make_beside is not None,
                peers=self._peers(server),
                plan=beside.plan if beside is not None else None,
                offered=beside is not None and beside.backend is not None,
                trouble=beside.trouble if beside is not None else "",
                field=self._field_note(server),
                may_reload=self._may_reload,
                by_reload=any(s.lane.control is Control.RELOAD for s in server.backend.lanes()),
                by_field=any(s.lane.control is Control.REQUEST for s in server.backend.lanes()),
            )
        )

    def _peers(self, server: Server) -> tuple[tuple[str, str], ...]:
        """Other servers that have the same model and decode it in another way."""
        own = {(s.lane.target, s.lane.strategy.name) for s in server.backend.lanes()}
        targets = {target for target, _ in own}
        return tuple(
            (other.upstream.url, status.lane.strategy.name)
            for other in self._servers.values()
            for status in other.backend.lanes()
            if other.upstream.found.reachable
            and status.lane.target in targets
            and (status.lane.target, status.lane.strategy.name) not in own
        )

    def _server(self, url: str) -> Server:
        parts = urlsplit(url)
        upstream = Upstream(url, parts.netloc if len(self._urls) > 1 else "upstream")
        backend = RunningServer(
            upstream.backend,
            Endpoint.parse(url),
            [lane_of(upstream, upstream.backend)],
            on_load=lambda lane: self._loading(url, lane),
        )
        for status in backend.lanes():
            backend.mark(status.lane.id, Health.UNHEALTHY, f"{url} was not reached yet")
        return Server(upstream, backend)

    # --- models that come into memory ------------------------------------------------------------

    def _loading(self, url: str, lane: Lane) -> None:
        """A request goes to a lane that is not in memory: see how long it takes, and what had to go for it."""
        server = self._servers[url]
        if server.upstream.found.kind == "ollama":
            for status in server.backend.lanes():
                other = status.lane
                if other.control is Control.RELOAD and other.target == lane.target and other.id != lane.id:
                    server.backend.mark(other.id, status.health, status.note, resident=False)
            return
        self._tasks.spawn(self._follow_load(self._servers[url], lane), name=f"load of {lane.id}")

    def loaded(self, lane: Lane, seconds: float) -> None:
        """A request on a lane has shown how long a load takes; the next look takes that over."""
        for server in self._servers.values():
            if server.backend.name == lane.backend and server.upstream.found.kind == "ollama":
                known = server.loads.get(lane.target, seconds)
                server.loads[lane.target] = known + LOAD_RATE * (seconds - known)

    async def _follow_load(self, server: Server, lane: Lane) -> None:
        name = lane.upstream_model or lane.target
        took = await watch_load(server.backend.transport, name)
        if took is not None:
            server.loads[name] = took
            log.info("model loaded", lane=lane.id, seconds=round(took, 2))
        await self._look(server)
