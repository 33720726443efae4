"""Which backends there are, by the settings: running servers, lanes of our own on a model, or both."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from specproxy.adapters.base import Backend
from specproxy.adapters.probe import Prober
from specproxy.config import Settings
from specproxy.errors import BackendError
from specproxy.proxy.beside import Beside, Shared
from specproxy.proxy.deployments import Deployments
from specproxy.proxy.hosts import host_of, own_names
from specproxy.proxy.load import THIS_MACHINE
from specproxy.proxy.sidecar import Sidecar
from specproxy.proxy.status import Rung, Upstream
from specproxy.proxy.trials import Trials
from specproxy.records import Decision, Lane, Observation
from specproxy.strategies.cost import LaneFacts

if TYPE_CHECKING:
    from specproxy.adapters.embedded.backend import EmbeddedBackend
    from specproxy.proxy.embedded import EngineLanes
    from specproxy.proxy.managed import ManagedLanes

__all__ = ["Fleet"]

TRIALS_FILE = "request_fields.json"


class Fleet:
    """All backends of one proxy, and what there is to say about how they came about.

    With a model the lanes on it come first; a server that is named beside it gets what no lane of the model
    answers for.
    """

    def __init__(self, settings: Settings) -> None:
        self._own = _own_lanes(settings) if settings.model is not None else None
        self._deployments = Deployments(settings.deployments) if settings.deployments else None
        alone = self._own is None
        beside = partial(_beside, settings, Shared()) if alone and settings.manage else None
        trials = Trials(settings.state_dir / TRIALS_FILE) if alone and settings.probe_fields else None
        self._sidecar = (
            Sidecar(
                settings.upstream,
                Prober(),
                beside=beside,
                trials=trials,
                alone=alone,
                may_reload=alone and settings.reload,
            )
            if settings.upstream or (alone and self._deployments is None)
            else None
        )
        self._own_names = own_names()
        self._frees = settings.idle_unload is not None
        self._changed: Callable[[], None] = lambda: None

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever `backends` or their lanes may have changed."""
        self._changed = listener
        if self._sidecar is not None:
            self._sidecar.on_change(listener)

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The backends in force, the first one to be asked first."""
        own = self._own.backend if self._own is not None else None
        others = self._sidecar.backends if self._sidecar is not None else ()
        others += self._deployments.backends if self._deployments is not None else ()
        return (own, *others) if own is not None else others

    @property
    def primary(self) -> str | None:
        """Backend to which everything goes that is not routed: a server beside the lanes of a model."""
        if self._own is None or self._sidecar is None:
            return None
        return self._sidecar.backends[0].name

    @property
    def upstreams(self) -> list[Upstream]:
        """Servers that others run."""
        named = self._deployments.upstreams if self._deployments is not None else []
        return [*(self._sidecar.upstreams if self._sidecar is not None else []), *named]

    @property
    def survey(self) -> dict[str, str]:
        """What was found at each of the usual URLs: a kind, or nothing; empty where servers were named."""
        looked = self._sidecar.survey if self._sidecar is not None else []
        return {url: found.kind if found.reachable else "" for url, found in looked}

    @property
    def rung(self) -> Rung | None:
        """The rung of the start-up ladder that was taken; of several servers, the first one's that is there."""
        if self._own is not None:
            return self._own.rung
        return next((server.rung for server in self.upstreams if server.rung is not None), None)

    def facts(self) -> Mapping[str, LaneFacts]:
        """What the learner may know beforehand, by lane id."""
        parts = (self._sidecar, self._deployments, self._own)
        return {name: facts for part in parts if part is not None for name, facts in part.facts().items()}

    def address(self, lane: Lane) -> str:
        """Base URL at which a lane itself can be reached; empty where there is none."""
        if self._sidecar is not None and (address := self._sidecar.address(lane)):
            return address
        if self._deployments is not None and (address := self._deployments.address(lane)):
            return address
        return self._own.address(lane) if self._own is not None else ""

    def hosts(self) -> Mapping[str, str]:
        """The hosts of backends that run on other machines, by name."""
        return {
            backend.name: host
            for backend in self.backends
            for status in backend.lanes()
            if (host := host_of(self.address(status.lane), self._own_names)) != THIS_MACHINE
        }

    def at_hand(self, lane: Lane) -> bool:
        """Whether a lane may be used without anybody asking: it runs on this machine, and loads nothing for it.

        A deployment may cost money, and an engine that frees its model when idle would not come to that.
        """
        if self._own is not None and self._own.backend is not None and self._own.backend.name == lane.backend:
            return not self._frees
        near = host_of(self.address(lane), self._own_names) == THIS_MACHINE
        return near and self._sidecar is not None and self._sidecar.at_hand(lane)

    @property
    def engine(self) -> EmbeddedBackend | None:
        """The embedded engine, if it runs the model."""
        from specproxy.adapters.embedded.backend import EmbeddedBackend

        own = self._own.backend if self._own is not None else None
        return own if isinstance(own, EmbeddedBackend) else None

    def lane_failed(self, lane: Lane, error: BackendError) -> None:
        """A lane could not be reached, or broke off."""
        if self._sidecar is not None:
            self._sidecar.lane_failed(lane, error)
        if self._deployments is not None:
            self._deployments.lane_failed(lane, error)

    def observed(self, seen: Observation, decision: Decision | None) -> None:
        """A request is over, and may have shown how long a load takes."""
        if self._sidecar is not None and decision is not None and seen.load_s > 0.0:
            self._sidecar.loaded(decision.lane, seen.load_s)

    async def start(self) -> None:
        """Bring everything up, as far as it is ours; returns once requests can be served, or a server is away.

        Raises:
            ConfigError: the model cannot be served as configured.
        """
        if self._sidecar is not None:
            await self._sidecar.start()
        if self._deployments is not None:
            await self._deployments.start()
        if self._own is not None:
            await self._own.plan(self._changed)
            self._changed()
            await self._own.start()

    async def aclose(self) -> None:
        """Stop what was started; idempotent."""
        if self._own is not None:
            await self._own.aclose()
        if self._sidecar is not None:
            await self._sidecar.aclose()
        if self._deployments is not None:
            await self._deployments.aclose()


def _beside(settings: Settings, shared: Shared, name: str, suffix: str, changed: Callable[[], None]) -> Beside:
    return Beside(name, settings, changed, suffix=suffix, shared=shared)


def _own_lanes(settings: Settings) -> EngineLanes | ManagedLanes:
    """What runs the model: as configured, or the engine where it is installed. Imports only what that needs."""
    installed = importlib.util.find_spec("llama_cpp") is not None
    if settings.engine == "embedded" or (settings.engine == "auto" and installed):
        from specproxy.proxy.embedded import EngineLanes

        return EngineLanes(settings)
    from specproxy.proxy.managed import ManagedLanes

    return ManagedLanes(settings)
