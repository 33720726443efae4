"""Lanes of our own beside a running server, on the weights that it has loaded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from specproxy.adapters import machine
from specproxy.adapters.ask import get_json
from specproxy.adapters.base import ServedModel
from specproxy.adapters.gguf_facts import ModelFacts
from specproxy.adapters.http import Endpoint, HttpTransport
from specproxy.adapters.llama_server import LanePlan, ManagedLlamaServer
from specproxy.adapters.managed import ManagedOptions, ManagedPlan, plan_managed
from specproxy.adapters.ollama_serve import ManagedOllama, OllamaPlan, find_ollama, plan_ollama
from specproxy.adapters.tasks import Tasks
from specproxy.adapters.twin import Twin
from specproxy.adapters.twin_llama import compare_servers
from specproxy.adapters.twin_ollama import compare_prompts
from specproxy.adapters.weights import Listener, Weights
from specproxy.config import Settings
from specproxy.errors import BackendError, ConfigError, PairError
from specproxy.proxy.facts import lane_facts
from specproxy.proxy.managed import managed_options
from specproxy.records import Dialect, Health, Lane
from specproxy.strategies.cost import LaneFacts

__all__ = ["Beside", "Shared", "Wish"]

DIALECTS = {
    "llama-server": frozenset(Dialect) - {Dialect.OLLAMA_CHAT, Dialect.OLLAMA_GENERATE},
    "ollama": frozenset({Dialect.OPENAI_CHAT}),
}
"""What lanes beside a server can answer in its place, by the server's kind: those routes of Ollama are left out
for which it is not known that a llama-server would make the same of them."""

AWAY_S = 30.0  # how long lanes outlive their server, so that a restart of it does not cost theirs
COMPARE_AGAIN_S = 5.0  # after a server did not answer
IDLE_POLL_S, IDLE_WAIT_S = 0.2, 30.0  # how long lanes that are no longer wanted may finish what they answer

log = structlog.get_logger("specproxy")


@dataclass(frozen=True, slots=True)
class Wish:
    """What lanes are to be beside: a server at `url`, its own lane there, its model and the files of that.

    `on_gpu` is whether the server may be using one, `plain_there` whether it has a plain lane besides its own.
    `version` is the server's, `listener` its process as far as it can be seen. `trouble` says, as a clause, why
    llama-servers could not stand in for it.
    """

    url: str
    kind: str
    lane: Lane
    model: ServedModel
    facts: ModelFacts
    draft: ModelFacts | None = None
    on_gpu: bool = True
    plain_there: bool = False
    version: str = ""
    listener: Listener | None = None
    trouble: str = ""

    @classmethod
    def of(
        cls, url: str, kind: str, lane: Lane, model: ServedModel, weights: Weights | None, version: str = ""
    ) -> Wish | None:
        """What lanes beside a server's lane should be; None where there can be none."""
        if weights is None or weights.facts is None or kind not in DIALECTS:
            return None
        listener = weights.listener
        layers = listener.behind("-ngl", "--gpu-layers", "--n-gpu-layers") if listener is not None else ""
        return cls(
            url, kind, lane, model, weights.facts, weights.draft,
            on_gpu=layers != "0", version=version, listener=listener,
        )  # fmt: skip


class Shared:
    """What lanes beside different servers share: the machine's memory. They are planned one after another, each
    once the lanes before it have taken theirs."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.taken: dict[str, int] = {}  # bytes by backend

    def left(self, limit: int | None, name: str) -> int | None:
        """What of a limit for all lanes together is left for the backend `name`."""
        if limit is None:
            return None
        return max(0, limit - sum(taken for other, taken in self.taken.items() if other != name))


class Beside:
    """Plans, starts and replaces further lanes as the server's model comes and goes.

    Args:
        name: of the backend that the lanes are.
        suffix: what is put behind a strategy's name to make a lane's id.
        shared: what it shares with those of other servers.
        settings: of the proxy; `manage` is taken as given.
        changed: called when `backend`, `plan` or `trouble` has changed, or a lane's health.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        changed: Callable[[], None],
        *,
        suffix: str = "",
        shared: Shared | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self._settings, self._changed = name, settings, changed
        self._suffix, self._clock = suffix, clock
        self._shared = shared or Shared()
        self._wish: Wish | None = None
        self._away_since: float | None = None
        self._tasks = Tasks()
        self._replacing: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # one replacement at a time
        self._planned = asyncio.Event()
        self._news = asyncio.Event()  # of a lane's health
        self._facts: dict[str, LaneFacts] = {}
        self._running: ManagedLlamaServer | None = None  # offered or not
        self.backend: ManagedLlamaServer | None = None
        self.plan: ManagedPlan | None = None
        self.trouble = ""

    @property
    def model(self) -> ServedModel | None:
        """The model that lanes are, or will be, beside."""
        return self._wish.model if self._wish is not None else None

    def follow(self, wish: Wish | None, trouble: str = "") -> None:
        """Have lanes as wished, or none because of `trouble`; returns at once. A wish like the last one changes
        nothing."""
        self._away_since = None
        self._want(wish)
        if wish is None:
            self.trouble = trouble

    def away(self) -> None:
        """The server cannot be reached: lanes stay for `AWAY_S`, then they are given up."""
        now = self._clock()
        if self._away_since is None:
            self._away_since = now
        if now - self._away_since >= AWAY_S:
            self._want(None)

    async def planned(self) -> None:
        """Wait until the last wish has been planned for, or found impossible."""
        if self._wish is not None:
            await self._planned.wait()

    def facts(self) -> Mapping[str, LaneFacts]:
        """What the learner may know beforehand, by lane id."""
        return self._facts

    def address(self, lane: Lane) -> str:
        """Base URL of one of these lanes, empty while it is not ready."""
        return self.backend.address(lane.id) if self.backend is not None else ""

    async def aclose(self) -> None:
        """Stop all lanes; idempotent."""
        await self._tasks.aclose()
        await self._stop()

    # --- replacing -------------------------------------------------------------------------------

    def _want(self, wish: Wish | None) -> None:
        if wish != self._wish:
            self._wish = wish
            self._planned.clear()
            if self._replacing is not None:
                self._replacing.cancel()
            self._replacing = self._tasks.spawn(self._replace(wish), name=f"lanes of {self.name}")

    async def _replace(self, wish: Wish | None) -> None:
        async with self._turn:
            if wish is not self._wish:
                return  # a later wish waits for its turn
            await self._retire()
            self.plan, self._facts = None, {}
            try:
                if wish is not None:
                    self.trouble = ""
                    async with self._shared.turn:
                        await self._start(wish)
            except ConfigError as error:
                self.trouble = str(error)
                log.warning("no further lanes", beside=wish.lane.target if wish else None, reason=self.trouble)
            finally:
                if wish is self._wish:
                    self._planned.set()
                    self._changed()

    async def _start(self, wish: Wish) -> None:
        """Plan and start the lanes of a wish, and offer them once they are known to say the same.

        Raises:
            ConfigError: there can be none.
        """
        options = self._options(wish)
        plan = await asyncio.to_thread(_plan, options, wish)
        plan = replace(plan, lanes=tuple(self._beside(wish, plan, planned) for planned in plan.lanes))
        self._shared.taken[self.name] = plan.memory.ram
        self._facts = {
            p.lane.id: lane_facts(p.lane, plan.target, plan.draft, options.slots) for p in plan.lanes
        }
        if not plan.lanes:
            self.plan = plan
            return
        names = " ".join(planned.lane.id for planned in plan.lanes)
        log.info("further lanes planned", beside=wish.lane.target, program=plan.program.build, lanes=names)
        running = self._running = plan.backend(self._lane_changed)
        self.plan = plan
        self._planned.set()
        self._changed()
        try:
            await running.start()
            twin = await self._compare(wish, running, same=isinstance(plan, OllamaPlan))
            if twin.reason:
                raise ConfigError(twin.reason)
        except ConfigError:
            self.plan = None
            await self._stop()
            raise
        for status in running.lanes() if not isinstance(plan, OllamaPlan) else ():
            running.describe(replace(status.lane, tools=twin.tools, overrides=twin.overrides))
        self.backend = running
        self._changed()
        await running.settled()

    async def _compare(self, wish: Wish, running: ManagedLlamaServer, *, same: bool) -> Twin:
        """See whether lanes say what the server says, by the first one that is ready, before any is offered.

        Where they are the `same` program with the same models, there is nothing to compare.
        """
        while not (ready := [s.lane.id for s in running.lanes() if s.health is Health.READY]):
            if all(status.health is Health.DROPPED for status in running.lanes()):
                return Twin("; ".join(f"{s.lane.id} {s.health}: {s.note}" for s in running.lanes()))
            self._news.clear()
            await self._news.wait()
        if same:
            return Twin()
        try:
            address = running.address(ready[0])
            if wish.kind == "ollama":
                return await compare_prompts(wish.url, wish.model, address)
            return await compare_servers(wish.url, address)
        except BackendError as error:
            log.info("comparing lanes with their server again later", beside=wish.lane.target, error=str(error))
            await asyncio.sleep(COMPARE_AGAIN_S)
            return await self._compare(wish, running, same=same)

    def _lane_changed(self) -> None:
        self._news.set()
        self._changed()

    def _options(self, wish: Wish) -> ManagedOptions:
        there = {wish.lane.strategy.name} | ({"plain"} if wish.plain_there else set())
        draft = self._settings.draft or (wish.draft.path if wish.draft is not None else None)
        return replace(
            managed_options(self._settings, wish.facts.path),
            backend=self.name,
            memory=self._shared.left(self._settings.memory, self.name),
            draft=draft,
            alias=wish.model.name.removesuffix(":latest") or None,
            exclude=tuple(sorted(there)),
            max_ctx=wish.model.ctx,
        )

    def _beside(self, wish: Wish, plan: ManagedPlan, planned: LanePlan) -> LanePlan:
        """A planned lane as one that stands for the server's model."""
        if isinstance(plan, OllamaPlan):
            own = replace(planned.lane, id=planned.lane.id + self._suffix)
            return replace(planned, lane=replace(own, target=wish.lane.target, models=wish.lane.models))
        lane = replace(
            planned.lane,
            id=planned.lane.id + self._suffix,
            target=wish.lane.target,
            models=wish.lane.models,
            dialects=DIALECTS[wish.kind],
            ctx=0 if wish.kind == "llama-server" and plan.ctx == wish.model.ctx else plan.ctx,
            media=False,
        )
        return replace(planned, lane=lane)

    async def _retire(self) -> None:
        """Offer the lanes to nobody any more, let them finish, and stop them."""
        backend = self._running
        if backend is None:
            return
        self.backend, self.plan = None, None
        self._changed()
        addresses = [backend.address(status.lane.id) for status in backend.lanes()]
        try:
            async with asyncio.timeout(IDLE_WAIT_S):
                if isinstance(backend, ManagedOllama):
                    await _answered(backend)
                else:
                    await asyncio.gather(*(_idle(address) for address in addresses if address))
        except TimeoutError:
            log.warning("lanes are stopped while they answer", backend=self.name)
        finally:
            await self._stop()
        log.info("further lanes stopped", backend=self.name)

    async def _stop(self) -> None:
        self._shared.taken.pop(self.name, None)
        backend, self._running, self.backend = self._running, None, None
        if backend is not None:
            await backend.aclose()


def _plan(options: ManagedOptions, wish: Wish) -> ManagedPlan:
    """Plan lanes; a draft that does not fit is left out, and said. Blocks.

    Beside Ollama they are further Ollama servers where its program and its store can be used, and else
    llama-servers, which take fewer requests.

    Raises:
        ConfigError: there can be none.
    """
    program = find_ollama(wish.listener) if wish.kind == "ollama" and options.llama_server is None else None
    if program is not None:
        return plan_ollama(options, program, wish.model, wish.version, wish.listener)
    if wish.trouble:
        raise ConfigError(wish.trouble)
    try:
        plan = plan_managed(options)
    except PairError as error:
        plan = plan_managed(replace(options, draft=None))
        plan = replace(plan, warnings=(*plan.warnings, f"{error.message}."))
    if plan.program.kind == "wheel" and wish.on_gpu and options.n_gpu_layers != 0 and machine.gpus():
        raise ConfigError(
            "the llama-server of the wheel runs on the processor only, and this machine has a GPU",
            hint="put a llama-server with GPU support on the PATH",
        )
    return plan


async def _answered(backend: ManagedOllama) -> None:
    """Wait until Ollama servers of ours answer nobody. They do not say so, but all requests are ours."""
    while backend.busy():  # noqa: ASYNC110 - nobody says when, and it is a matter of seconds
        await asyncio.sleep(IDLE_POLL_S)


async def _idle(address: str) -> None:
    """Wait until a llama-server answers nobody, or has gone."""
    transport = HttpTransport(Endpoint.parse(address))
    try:
        while True:
            status, slots = await get_json(transport.open, "/slots")
            if status != 200 or not _busy(slots):
                return
            await asyncio.sleep(IDLE_POLL_S)
    except BackendError:
        return
    finally:
        await transport.aclose()


def _busy(slots: object) -> bool:
    entries: Sequence[object] = slots if isinstance(slots, list) else ()
    return any(isinstance(slot, dict) and slot.get("is_processing") is True for slot in entries)
