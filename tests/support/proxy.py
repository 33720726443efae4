"""A real proxy in the test's event loop, with a policy that does as it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specproxy.adapters.base import Backend
from specproxy.adapters.http import Endpoint, HttpBackend
from specproxy.errors import LaneUnavailable
from specproxy.proxy.app import ProxyServer
from specproxy.proxy.handlers import Handlers
from specproxy.proxy.router import Router
from specproxy.proxy.server_limits import ServerLimits
from specproxy.records import Control, Decision, Lane, Observation, Situation, Strategy

__all__ = ["Proxy", "ScriptedPolicy", "lane", "running_proxy"]


def lane(backend: str, strategy: str = "plain", **fields: Any) -> Lane:
    """A lane with a strategy on a backend; its id is ``backend/strategy``."""
    given: dict[str, Any] = {
        "target": "m",
        "fingerprint": f"fp-{backend}",
        "control": Control.INSTANCE,
    } | fields
    return Lane(id=f"{backend}/{strategy}", backend=backend, strategy=Strategy.parse(strategy), **given)


@dataclass
class ScriptedPolicy:
    """Chooses the lane with the wanted strategy (or the pinned one), and remembers everything."""

    wanted: str = "plain"
    name: str = "scripted"
    situations: list[Situation] = field(default_factory=list)
    learned: list[Observation] = field(default_factory=list)
    error: Exception | None = None

    def choose(self, situation: Situation, rng: np.random.Generator) -> Decision:
        self.situations.append(situation)
        if self.error is not None:
            raise self.error
        wanted = situation.pin or self.wanted
        for status in situation.lanes:
            if status.lane.strategy.name == wanted:
                return Decision(
                    status.lane, situation.workload, "scripted", f"{wanted} is wanted", propensity=0.5
                )
        names = ", ".join(s.lane.strategy.name for s in situation.lanes)
        raise LaneUnavailable(f"no lane has {wanted}", hint=f"available strategies: {names}")

    def learn_one(self, observation: Observation) -> None:
        self.learned.append(observation)

    def dump(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        del state


@dataclass
class Proxy:
    """A running proxy and what it has seen."""

    port: int
    router: Router
    policy: ScriptedPolicy
    handlers: Handlers
    server: ProxyServer
    seen: list[Observation] = field(default_factory=list)
    decisions: list[Decision | None] = field(default_factory=list)
    lane_errors: list[tuple[Lane, Exception]] = field(default_factory=list)


@asynccontextmanager
async def running_proxy(
    *backends: Backend | str,
    policy: ScriptedPolicy | None = None,
    server_limits: ServerLimits | None = None,
    **options: Any,
) -> AsyncIterator[Proxy]:
    """A proxy on a free port. A backend given as a URL gets one lane, plain or what follows ``#``."""
    built = [_backend(i, b) if isinstance(b, str) else b for i, b in enumerate(backends)]
    policy = policy or ScriptedPolicy()
    router = Router(built, policy, rng=np.random.default_rng(7))
    handlers = Handlers(router, **options)
    server = ProxyServer(handlers, server_limits)
    await server.start("127.0.0.1", 0)
    proxy = Proxy(server.addresses[0][1], router, policy, handlers, server)
    router.on_observation(lambda seen, _: proxy.seen.append(seen))
    router.on_observation(lambda _, decision: proxy.decisions.append(decision))
    router.on_lane_error(lambda lane, error: proxy.lane_errors.append((lane, error)))
    try:
        yield proxy
    finally:
        await server.stop(0.0)
        for backend in built:
            await backend.aclose()


def _backend(number: int, url: str) -> HttpBackend:
    address, _, strategy = url.partition("#")
    name = f"b{number}"
    return HttpBackend(name, Endpoint.parse(address), [lane(name, strategy or "plain")])
