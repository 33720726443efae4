"""llama-server processes that we start and supervise: one for each strategy, all on the same model."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import quote

from specproxy.adapters.ask import get_json, post_json
from specproxy.adapters.base import Exchange, NgramDrafts, ProbeResult, Sink, UpstreamRequest
from specproxy.adapters.http import Endpoint, HttpTransport
from specproxy.adapters.refused import RefusedExchange
from specproxy.adapters.server_program import NGRAM_MAX, NGRAM_SIZE
from specproxy.adapters.supervise import Backoff, Child, ChildSpec, keep
from specproxy.adapters.tasks import Tasks
from specproxy.adapters.watched import watch
from specproxy.errors import BackendError, ConfigError, LaneStartError, LaneUnavailable
from specproxy.records import Health, Lane, LaneStatus

__all__ = ["LanePlan", "ManagedLlamaServer", "Misfit", "speculates", "wait_for_status"]

log = logging.getLogger(__name__)

POLL_S = 0.05  # first pause between questions while a model loads; grows to twenty times that
LOAD_TIMEOUT_S = 900.0
MOST_FAILURES = 3  # in a row, until a lane is out of service although its process runs
PROBE_FIRST_S, PROBE_LONGEST_S, PROBE_TIMEOUT_S = 5.0, 120.0, 60.0
"""Pause before a lane in quarantine is asked for a token, the longest pause, and how long it may take."""


Ask = Callable[[Lane, HttpTransport], Awaitable[int]]
Prove = Callable[[Lane, Child, HttpTransport], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class LanePlan:
    """A lane, and the process that will be it."""

    lane: Lane
    spec: ChildSpec


class Misfit(BackendError):
    """The server runs, but is not what the lane says."""


class ManagedLlamaServer:
    """Lanes that are processes of our own (a `Backend`). The first plan is the plain lane, and the one needed,
    unless `needs_plain` is false: then plain is somewhere else, and none of these lanes is a must.

    A lane that dies is started again with back-off, and dropped after several failures in a row. A lane that
    claims to speculate and does not is dropped at once: it would be plain with a better name. `on_change` is
    called whenever a lane's health changes.

    A lane that fails several requests in a row while its process runs is put in quarantine: it takes none,
    until it has made a token when asked by us. Where plain is needed it is not, since there is nothing better.
    """

    def __init__(
        self,
        name: str,
        plans: Sequence[LanePlan],
        *,
        needs_plain: bool = True,
        backoff: Backoff | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        if not plans or (needs_plain and not plans[0].lane.strategy.is_plain):
            raise ValueError("the first lane must be plain")
        self.name = name
        self._needs_plain = needs_plain
        gate = asyncio.Semaphore(1)  # loading is bound by disk and cores: one at a time, plain first
        self._runners = {
            plan.lane.id: _Runner(plan, gate, replace(backoff or Backoff()), on_change, self.prove)
            for plan in plans
        }
        self._tasks = Tasks()

    async def start(self) -> None:
        """Start all lanes; returns once plain is ready, or at once where it is not needed. The others come up
        one after another meanwhile.

        Raises:
            ConfigError: plain does not come up.
        """
        try:
            for lane_id, runner in self._runners.items():
                self._tasks.spawn(runner.run(), name=f"lane {lane_id} of {self.name}")
            if not self._needs_plain:
                return
            plain = next(iter(self._runners.values()))
            await plain.settled.wait()
            if plain.status.health is not Health.READY:
                raise ConfigError(f"the model cannot be served: {plain.status.note}")
        except BaseException:
            await self.aclose()
            raise

    async def prove(self, lane: Lane, child: Child, transport: HttpTransport) -> None:
        """Wait until a lane's process is of use, and see whether it is what the lane says.

        Raises:
            LaneStartError: it ended meanwhile, or did not load its model.
            Misfit: it decodes in another way.
        """
        await wait_for_status(child, transport, "/health")
        _check(lane, await speculates(transport))

    async def settled(self) -> None:
        """Wait until every lane has come up or been given up."""
        for runner in self._runners.values():
            await runner.settled.wait()

    def lanes(self) -> tuple[LaneStatus, ...]:
        return tuple(runner.status for runner in self._runners.values())

    def describe(self, lane: Lane) -> None:
        """Say of a lane that is known here by its id what else has come to light about it."""
        runner = self._runners[lane.id]
        runner.plan = replace(runner.plan, lane=lane)
        runner.status = replace(runner.status, lane=lane)

    def address(self, lane_id: str) -> str:
        """Base URL of a lane that is ready; empty otherwise. It changes when the lane is started again."""
        transport = self._runners[lane_id].transport
        return transport.endpoint.url if transport is not None else ""

    def pid(self, lane_id: str) -> int | None:
        """Process id of a lane that runs."""
        child = self._runners[lane_id].child
        return child.pid if child is not None else None

    def output(self, lane_id: str) -> str:
        """The last lines that a lane's process has written."""
        child = self._runners[lane_id].child
        return child.tail.text() if child is not None else ""

    async def probe(self) -> ProbeResult:
        """What plain says about itself."""
        plain = next(iter(self._runners.values()))
        if plain.transport is None:
            return ProbeResult(reachable=False, kind="llama-server")
        try:
            _, props = await get_json(plain.transport.open, "/props")
        except BackendError:
            return ProbeResult(reachable=False, kind="llama-server")
        properties = props if isinstance(props, dict) else {}
        return ProbeResult(
            reachable=True,
            kind="llama-server",
            version=str(properties.get("build_info", "")),
            models=(str(properties.get("model_alias", "")),),
            detail={"model_path": properties.get("model_path", "")},
        )

    def ngrams(self, lane: Lane) -> NgramDrafts | None:
        """How a lane drafts by n-grams, None where it does not, or not as ``ngram-simple``."""
        if lane.strategy.drafters != ("ngram",):
            return None
        return NgramDrafts(NGRAM_SIZE, lane.strategy.n_max or NGRAM_MAX)

    def open(self, request: UpstreamRequest, lane: Lane, sink: Sink) -> Exchange:
        runner = self._runners.get(lane.id)
        if runner is None or runner.transport is None:
            return RefusedExchange(sink, LaneUnavailable(f"lane {lane.id} is not running"))
        return watch(partial(runner.transport.open, request), sink, partial(self._over, runner))

    def _over(self, runner: _Runner, how: str | None) -> None:
        """A request to a lane has ended."""
        needed = self._needs_plain and runner.plan.lane.strategy.is_plain
        if how is not None and runner.ended(how) and not needed:
            self._tasks.spawn(runner.quarantine(how, self.ask_little), name=f"probe {runner.plan.lane.id}")

    async def ask_little(self, lane: Lane, transport: HttpTransport) -> int:  # noqa: ARG002 - all are alike
        """Have a lane make one token; returns the status.

        Raises:
            BackendError: it does not answer.
        """
        body = {"prompt": "1", "n_predict": 1, "cache_prompt": False}
        return (await post_json(transport.open, "/completion", body, timeout_s=PROBE_TIMEOUT_S))[0]

    async def aclose(self) -> None:
        await self._tasks.aclose()
        for runner in self._runners.values():
            runner.stopped()


class _Runner:
    """One lane: its process, its address and its health."""

    def __init__(
        self,
        plan: LanePlan,
        gate: asyncio.Semaphore,
        backoff: Backoff,
        changed: Callable[[], None],
        prove: Prove,
    ) -> None:
        self.plan = plan
        self.status = LaneStatus(plan.lane, Health.STARTING, since=time.time())
        self.settled = asyncio.Event()  # has been ready or given up, once
        self.child: Child | None = None
        self.transport: HttpTransport | None = None
        self._gate = gate
        self._backoff = backoff
        self._changed = changed
        self._prove = prove
        self._failures = 0  # in a row

    def ended(self, trouble: str) -> bool:
        """A request has ended; returns whether that was one failure too many."""
        self._failures = self._failures + 1 if trouble else 0
        return self._failures >= MOST_FAILURES and self.status.health is Health.READY

    async def quarantine(self, why: str, ask: Ask) -> None:
        """Be out of service until the lane has made a token, or its process has gone."""
        transport = self.transport
        self._set(Health.QUARANTINED, f"{self._failures} requests in a row failed, the last one so: {why}")
        log.warning("lane %s is in quarantine: %s", self.plan.lane.id, why)
        pause = PROBE_FIRST_S
        while transport is not None and transport is self.transport:
            await asyncio.sleep(pause)
            pause = min(PROBE_LONGEST_S, 2 * pause)
            try:
                well = await ask(self.plan.lane, transport) == 200
            except BackendError:
                continue
            if well and transport is self.transport and self.status.health is Health.QUARANTINED:
                self._failures = 0
                self._set(Health.READY)
                return

    async def run(self) -> None:
        """Keep the lane running until cancelled or given up."""
        try:
            await keep(self.plan.spec, up=self._up, down=self._down, backoff=self._backoff, gate=self._gate)
        except (LaneStartError, Misfit) as error:
            log.warning("lane %s is dropped: %s", self.plan.lane.id, error.message)
            self._set(Health.DROPPED, error.message)
        finally:
            self.child = None
            await self._disconnect()
            self.settled.set()

    def stopped(self) -> None:
        """The backend has been closed."""
        if self.status.health is not Health.DROPPED:
            self._set(Health.STOPPED)

    async def _up(self, child: Child) -> None:
        self.child = child
        transport = HttpTransport(Endpoint.parse(await child.address()))
        try:
            await self._prove(self.plan.lane, child, transport)
        except BaseException:
            await transport.aclose()
            raise
        self.transport = transport
        self._failures = 0
        self._set(Health.READY)
        self.settled.set()

    async def _down(self, reason: str) -> None:
        self.child = None
        self._set(Health.UNHEALTHY, reason)
        await self._disconnect()

    async def _disconnect(self) -> None:
        transport, self.transport = self.transport, None
        if transport is not None:
            await transport.aclose()

    def _set(self, health: Health, note: str = "") -> None:
        self.status = replace(self.status, health=health, since=time.time(), note=note)
        self._changed()


def _check(lane: Lane, speculating: bool | None) -> None:
    if speculating is None:
        log.warning("lane %s: /slots does not answer, so whether it drafts is unknown", lane.id)
    elif speculating and lane.strategy.is_plain:
        raise Misfit("the plain lane speculates, so there is nothing to compare with")
    elif not speculating and not lane.strategy.is_plain:
        raise Misfit(f"it claims {lane.strategy.name} but does not draft: the drafter does not fit the model")


async def wait_for_status(child: Child, transport: HttpTransport, path: str) -> None:
    """Wait until a server answers `path` with 200, which says that it is ready.

    Raises:
        LaneStartError: it ended meanwhile, or took longer than `LOAD_TIMEOUT_S`.
    """
    pause, deadline = POLL_S, time.monotonic() + LOAD_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            status, _ = await get_json(transport.open, path)
            if status == 200:
                return
        except BackendError as error:
            log.debug("%s: %s", child.spec.name, error)
        try:
            async with asyncio.timeout(pause):
                await child.wait()
        except TimeoutError:
            pause = min(20 * POLL_S, pause * 1.5)
        else:
            raise LaneStartError(child.ending())
    raise LaneStartError(f"{child.spec.name} has not loaded its model within {LOAD_TIMEOUT_S:g} s")


async def speculates(transport: HttpTransport, model: str = "") -> bool | None:
    """Whether a llama-server has a live drafter, by its own ``/slots``; None if it does not say, or answer."""
    try:
        return await ask_slots(transport, model)
    except BackendError:
        return None


async def ask_slots(transport: HttpTransport, model: str = "") -> bool | None:
    """Whether a llama-server has a live drafter; None if it does not say.

    ``/props`` always says no, and a drafter that does not fit is loaded and never asked: only the slots know.
    Of a router's `model` it is only asked where it is loaded: the question alone would load it.

    Raises:
        BackendError: it did not answer.
    """
    target = f"/slots?model={quote(model, safe='')}&autoload=false" if model else "/slots"
    status, slots = await get_json(transport.open, target)
    return _any_slot_speculates(slots) if status == 200 else None


def _any_slot_speculates(slots: Any) -> bool | None:
    if not isinstance(slots, list) or not slots or not all(isinstance(slot, dict) for slot in slots):
        return None
    told = [slot["speculative"] for slot in slots if isinstance(slot.get("speculative"), bool)]
    return any(told) if told else None
