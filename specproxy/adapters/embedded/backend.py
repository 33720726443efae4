"""The embedded engine as a Backend: one child process, one copy of the weights, a lane for each strategy."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from specproxy.adapters.ask import get_json
from specproxy.adapters.base import Exchange, ProbeResult, Sink, UpstreamRequest
from specproxy.adapters.embedded.environment import engine_environment
from specproxy.adapters.embedded.side_channel import REPORTS_PATH, STRATEGY_HEADER, decode_report
from specproxy.adapters.embedded.watchdog import Patience, stuck
from specproxy.adapters.gguf_facts import check_pair, read_facts
from specproxy.adapters.http import Endpoint, HttpTransport, fetch
from specproxy.adapters.machine import machine_id
from specproxy.adapters.refused import RefusedExchange
from specproxy.adapters.supervise import Backoff, Child, ChildSpec, keep
from specproxy.adapters.tasks import Tasks
from specproxy.errors import BackendError, ConfigError, LaneStartError, LaneUnavailable
from specproxy.records import Control, EngineReport, Health, Lane, LaneStatus, Strategy

__all__ = ["EmbeddedBackend", "EmbeddedOptions"]

log = logging.getLogger(__name__)

TOLD = frozenset({"strategies", "strategies_refused", "memory", "default_generation_settings", "total_slots"})
"""What is read of the engine's ``/props``."""


@dataclass(frozen=True, slots=True)
class EmbeddedOptions:
    """What the engine is started with. None means the engine's own default; `names` are the model's.

    `text_only` says that the model cannot be given tools here. `extra_args` are further arguments of
    `embedded.child`, for GPUs above all (``--n-gpu-layers 99``).
    """

    model: Path
    draft: Path | None = None
    names: tuple[str, ...] = ()
    ctx: int | None = None
    parallel: int | None = None
    threads: int | None = None
    n_gpu_layers: int | None = None
    idle_unload_s: float | None = None
    extra_args: tuple[str, ...] = ()
    log_dir: Path | None = None
    state_dir: Path | None = None
    backend: str = "embedded"
    text_only: bool = False

    def arguments(self) -> list[str]:
        """The child's arguments, without those that say where it listens."""
        given = {
            "--draft": self.draft,
            "--ctx": self.ctx,
            "--parallel": self.parallel,
            "--threads": self.threads,
            "--n-gpu-layers": self.n_gpu_layers,
            "--idle-unload": self.idle_unload_s,
            "--state": self.state_dir,
        }
        listed = [part for flag, value in given.items() if value is not None for part in (flag, str(value))]
        named = [part for name in self.names for part in ("--name", name)]
        return ["--model", str(self.model), *listed, *named, *self.extra_args]


class EmbeddedBackend:
    """The engine's child process and its lanes (a `Backend`).

    All lanes share the child, and so live and die together: a crash in native code ends the requests that run,
    then the child is started again with back-off, and given up after several failures in a row. One that hangs
    longer than `patience` allows is killed, with the same effect. `on_change` is called whenever the lanes'
    health changes.
    """

    def __init__(
        self,
        options: EmbeddedOptions,
        *,
        backoff: Backoff | None = None,
        patience: Patience | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = options.backend
        self.refused: dict[str, str] = {}  # strategy → why it cannot run on this model
        self.memory: dict[str, int] = {}  # bytes: weights, kv, states, and mtp, draft if any
        self.context = 0  # tokens of context that each sequence has
        self.slots = 0  # sequences that are decoded at once
        self._options = options
        self._backoff = backoff or Backoff()
        self._patience = patience or Patience()
        self._watch: asyncio.Task[None] | None = None
        self._changed = on_change
        self._health = Health.STOPPED
        self._since = time.time()
        self._note = ""
        self._lanes: tuple[Lane, ...] = ()
        self._base: tuple[str, str] = ("", "")  # target, fingerprint without the strategy
        self._child: Child | None = None
        self._transport: HttpTransport | None = None
        self._settled = asyncio.Event()
        self._tasks = Tasks()
        self._directory: Path | None = None

    async def start(self) -> None:
        """Start the child; returns once the model has been loaded.

        Raises:
            ConfigError: the model cannot be served; says why.
        """
        try:
            self._base = await asyncio.to_thread(_identity, self._options)
            self._directory = Path(tempfile.mkdtemp(prefix="specproxy-"))  # readable by its owner alone
            self._set(Health.STARTING)
            self._tasks.spawn(self._run(self._spec(self._directory)), name=f"engine of {self.name}")
            await self._settled.wait()
            if self._health is not Health.READY:
                raise ConfigError(f"the model cannot be served: {self._note}")
        except BaseException:
            await self.aclose()
            raise

    def _spec(self, directory: Path) -> ChildSpec:
        command = (
            sys.executable, "-m", "specproxy.adapters.embedded.child",
            "--socket", str(directory / "engine.sock"), *self._options.arguments(),
        )  # fmt: skip
        log_file = self._options.log_dir / f"{self.name}.log" if self._options.log_dir else None
        return ChildSpec(f"engine {self.name}", command, env=engine_environment(), log_file=log_file)

    def lanes(self) -> tuple[LaneStatus, ...]:
        return tuple(LaneStatus(lane, self._health, since=self._since, note=self._note) for lane in self._lanes)

    @property
    def pid(self) -> int | None:
        """Process id of the child, while it runs."""
        return self._child.pid if self._child is not None else None

    def output(self) -> str:
        """The last lines that the child has written."""
        return self._child.tail.text() if self._child is not None else ""

    async def probe(self) -> ProbeResult:
        """What the engine says about itself."""
        if self._transport is None:
            return ProbeResult(reachable=False, kind="specproxy-engine")
        try:
            props = await self._props(self._transport)
        except BackendError:
            return ProbeResult(reachable=False, kind="specproxy-engine")
        return ProbeResult(
            reachable=True,
            kind="specproxy-engine",
            version=str(props.get("build_info", "")),
            models=(str(props.get("model_alias", "")),),
            detail={"model_path": props.get("model_path", "")},
        )

    def open(self, request: UpstreamRequest, lane: Lane, sink: Sink) -> Exchange:
        if self._transport is None:
            return RefusedExchange(sink, LaneUnavailable(f"lane {lane.id} is not running: {self._note}"))
        return self._transport.open(request, sink)

    async def report(self, request_id: str) -> EngineReport | None:
        """The engine's report on a request that has ended; it can be had once. None if there is none.

        Raises:
            BackendError: the engine cannot be reached.
        """
        if self._transport is None:
            return None
        target = REPORTS_PATH + quote(request_id, safe="")
        reply = await fetch(
            self._transport.open, UpstreamRequest("GET", target, (), replayable=True), timeout_s=5.0
        )
        return decode_report(reply.body) if reply.head.status == 200 else None

    async def aclose(self) -> None:
        await self._disconnect()  # or the child waits for requests that nobody waits for
        await self._tasks.aclose()
        if self._health is not Health.DROPPED:
            self._set(Health.STOPPED)
        directory, self._directory = self._directory, None
        if directory is not None:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    async def _run(self, spec: ChildSpec) -> None:
        """Keep the child running until cancelled or given up."""
        try:
            await keep(spec, up=self._up, down=self._down, backoff=self._backoff)
        except (LaneStartError, BackendError) as error:
            if self._settled.is_set():  # or whoever starts it says so
                log.warning("the engine is given up: %s", error.message)
            self._set(Health.DROPPED, error.message)
        finally:
            self._child = None
            await self._disconnect()
            self._settled.set()

    async def _up(self, child: Child) -> None:
        self._child = child
        transport = HttpTransport(Endpoint.parse(await child.address()))
        try:
            props = await self._props(transport, self._patience.answer_s)
        except BaseException:
            await transport.aclose()
            raise
        self._transport = transport
        self.refused = dict(props["strategies_refused"])
        self.memory = dict(props["memory"])
        self.context = int(props["default_generation_settings"]["n_ctx"])
        self.slots = int(props["total_slots"])
        self._lanes = tuple(self._lane(name) for name in props["strategies"])
        self._set(Health.READY)
        self._settled.set()
        self._watch = self._tasks.spawn(self._guard(child, transport), name=f"watchdog of {self.name}")

    async def _guard(self, child: Child, transport: HttpTransport) -> None:
        """End the child when it hangs; `_run` starts another one."""
        reason = await stuck(transport.open, self._patience)
        if child is self._child and child.returncode is None:
            log.error("the engine is stuck: %s; it is killed and started again", reason)
            await child.stop(grace_s=0)

    async def _down(self, reason: str) -> None:
        self._child = None
        self._set(Health.UNHEALTHY, reason)
        await self._disconnect()

    async def _disconnect(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.aclose()

    @staticmethod
    async def _props(transport: HttpTransport, timeout_s: float = 5.0) -> dict[str, Any]:
        status, props = await get_json(transport.open, "/props", timeout_s=timeout_s)
        if status != 200 or not isinstance(props, dict):
            raise LaneStartError(f"the engine does not answer as expected: {props}")
        if missing := TOLD - props.keys():  # installed anew while this process went on
            told = ", ".join(sorted(missing))
            raise LaneStartError(
                f"the engine is of another version: it does not tell {told}", hint="start specproxy again"
            )
        return props

    def _lane(self, strategy: str) -> Lane:
        target, base = self._base
        parsed = Strategy.parse(strategy)
        return Lane(
            id=strategy,
            backend=self.name,
            target=target,
            strategy=parsed,
            control=Control.REQUEST,
            fingerprint=hashlib.sha256(f"{base}\0{strategy}".encode()).hexdigest()[:16],
            headers=((STRATEGY_HEADER, strategy),),
            memory_bytes=self._share(parsed),
            tools=not self._options.text_only,
        )

    def _share(self, strategy: Strategy) -> int:
        """Bytes that a lane costs: plain carries what all share, the others what their drafters add."""
        parts = ("weights", "kv", "states") if strategy.is_plain else strategy.drafters
        return sum(self.memory.get(part, 0) for part in parts)

    def _set(self, health: Health, note: str = "") -> None:
        self._health, self._since, self._note = health, time.time(), note
        self._changed()


def _identity(options: EmbeddedOptions) -> tuple[str, str]:
    """The target's name, and what speed depends on apart from the strategy. Reads the files.

    Raises:
        ModelFileError: a file cannot be used.
        PairError: the draft does not fit the model.
    """
    target = read_facts(options.model)
    draft = read_facts(options.draft) if options.draft is not None else None
    for warning in check_pair(target, draft) if draft is not None else ():
        log.warning("%s", warning)
    plain = replace(
        options, model=Path(), draft=None, names=(), idle_unload_s=None, state_dir=None
    )  # those are content, or no matter
    parts = (
        target.digest,
        draft.digest if draft is not None else "",
        f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}",
        *plain.arguments(),
        machine_id(),
    )
    name = options.names[0] if options.names else options.model.stem
    return f"{name}@{target.digest[:8]}", "\0".join(parts)
