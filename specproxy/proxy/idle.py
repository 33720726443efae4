"""Uses idle time for reloads that are due: a lane comes into memory before it is asked for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import Protocol

import structlog

from specproxy.adapters.base import LoadsLanes
from specproxy.errors import BackendError
from specproxy.proxy.router import Router
from specproxy.records import Control, Health, Lane, LaneStatus

__all__ = ["IdleLoader", "SwitchesIdle"]

LOOK_S = 1.0  # between looks
LEAST_IDLE_S = 2.0  # nothing in flight for so long, or for as long as a load takes, counts as idle
RETRY_S = 300.0  # after a load that failed

log = structlog.get_logger("specproxy")


class SwitchesIdle(Protocol):
    """The part of a policy that idle time is for."""

    def idle_switch(self, lanes: Sequence[LaneStatus], at: float) -> Lane | None:
        """The lane to load now, of all ready lanes of one target, or None."""
        ...

    def loaded(self, lane: Lane, at: float) -> None:
        """It was loaded."""
        ...


class IdleLoader:
    """Looks now and then whether the machine is idle and a load is due. Requests don't wait for a look.

    Whoever has been idle for as long as a load takes will probably be for as long again; a request that comes
    all the same waits for what is left of the load, as it would have for one of its own.

    Args:
        router: knows lanes and what is in flight.
        policy: says what is due.
        on_load: is called with a lane that was loaded.
        wall: seconds since the epoch, as in the policy's situations.
        clock: the clock of the router's instants.
        pause: waits for so many seconds.
    """

    def __init__(
        self,
        router: Router,
        policy: SwitchesIdle,
        *,
        on_load: Callable[[Lane], None] = lambda _: None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = perf_counter,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._router = router
        self._policy = policy
        self._on_load = on_load
        self._wall = wall
        self._clock = clock
        self._pause = pause
        self._not_before = 0.0

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await self._pause(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Load what is due, if the machine is idle; one lane at most."""
        idle_s = self._router.load.idle_s(self._clock())
        if idle_s < LEAST_IDLE_S or self._wall() < self._not_before:
            return
        groups: dict[str, list[LaneStatus]] = {}
        for status in self._router.lanes():
            if status.health is Health.READY:
                groups.setdefault(status.lane.target, []).append(status)
        for lanes in groups.values():
            if not any(s.lane.control is Control.RELOAD for s in lanes):
                continue
            lane = self._policy.idle_switch(lanes, self._wall())
            if lane is not None and idle_s >= lane.load_s:
                await self._load(lane)
                return

    async def _load(self, lane: Lane) -> None:
        backend = next((b for b in self._router.backends if b.name == lane.backend), None)
        if not isinstance(backend, LoadsLanes):
            return
        try:
            await backend.load(lane)
        except BackendError as error:
            log.warning("a load in idle time failed", lane=lane.id, error=str(error))
            self._not_before = self._wall() + RETRY_S
            return
        self._policy.loaded(lane, self._wall())
        self._on_load(lane)
