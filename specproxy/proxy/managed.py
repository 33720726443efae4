"""Lanes of our own on a model file: llama-server processes, planned and started."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from specproxy.adapters.ask import get_json
from specproxy.adapters.http import Endpoint, HttpTransport
from specproxy.adapters.llama_server import ManagedLlamaServer
from specproxy.adapters.managed import ManagedOptions, ManagedPlan, plan_managed
from specproxy.adapters.ollama_setup import PROBES, ModelSetup, read_setup, settle
from specproxy.adapters.ollama_store import is_file_name, locate_model, store_folders
from specproxy.adapters.twin import TIMEOUT_S, made_by
from specproxy.config import Settings
from specproxy.errors import BackendError, ConfigError
from specproxy.proxy.facts import lane_facts
from specproxy.proxy.status import Rung
from specproxy.records import Lane
from specproxy.strategies.cost import LaneFacts

__all__ = ["ManagedLanes", "managed_options"]

log = structlog.get_logger("specproxy")


class ManagedLanes:
    """Plans and starts one llama-server a strategy for the configured model."""

    def __init__(self, settings: Settings, options: ManagedOptions | None = None) -> None:
        self._setup: ModelSetup | None = None
        if options is None:
            options, self._setup = _own_options(settings)
        self._options = options
        self._plan: ManagedPlan | None = None
        self._backend: ManagedLlamaServer | None = None

    @property
    def backend(self) -> ManagedLlamaServer | None:
        """The lanes, once they have been planned."""
        return self._backend

    @property
    def rung(self) -> Rung | None:
        """Rung 2 of the ladder, with what was left out and why."""
        plan = self._plan
        if plan is None:
            return None
        names = ", ".join(p.lane.id for p in plan.lanes)
        used = f"{plan.memory.ram / 2**30:.1f} of {plan.memory.budget.ram / 2**30:.1f} GiB"
        why = f"{names} fit together ({used} of memory, {plan.ctx} tokens of context each)"
        advice = [*plan.warnings, *(f"No lane {r.id}: {r.reason}." for r in plan.refused)]
        return Rung(2, "lanes of our own", why, tuple(advice))

    async def plan(self, on_change: Callable[[], None]) -> None:
        """Decide which lanes to start.

        Raises:
            ConfigError: the model, the draft or the llama-server cannot be used.
        """
        plan = await asyncio.to_thread(plan_managed, self._options)
        if self._setup is not None:
            plan = with_parameters(plan, self._setup)
        self._plan = plan
        self._backend = plan.backend(on_change)
        log.info(
            "lanes planned",
            program=plan.program.build,
            ctx=plan.ctx,
            lanes=" ".join(p.lane.id for p in plan.lanes),
        )

    async def start(self) -> None:
        """Start them; returns when plain is ready.

        Raises:
            ConfigError: plain does not come up.
        """
        assert self._backend is not None, "plan comes first"
        await self._backend.start()
        if self._setup is not None:
            try:
                await _check_prompts(self._setup, self._backend.address(self._plain))
            except BaseException:
                await self._backend.aclose()
                raise

    @property
    def _plain(self) -> str:
        assert self._plan is not None, "plan comes first"
        return self._plan.lanes[0].lane.id

    def facts(self) -> Mapping[str, LaneFacts]:
        """What the learner may know beforehand, by lane id."""
        if (plan := self._plan) is None:
            return {}
        slots = plan.options.slots
        return {p.lane.id: lane_facts(p.lane, plan.target, plan.draft, slots) for p in plan.lanes}

    def address(self, lane: Lane) -> str:
        """Base URL of one of these lanes, empty while it is not ready."""
        return self._backend.address(lane.id) if self._backend is not None else ""

    async def aclose(self) -> None:
        """Stop all children; idempotent."""
        if self._backend is not None:
            await self._backend.aclose()


def _own_options(settings: Settings) -> tuple[ManagedOptions, ModelSetup | None]:
    """The settings for the configured model, and what it sets besides its weights if it is one of Ollama's."""
    named = settings.model or ""
    if is_file_name(named):
        return managed_options(settings, locate_model(named)[0]), None
    setup = read_setup(named, store_folders())
    if setup.system or setup.messages or "num_predict" in dict(setup.parameters):
        raise ConfigError(
            f"model: {named} has a SYSTEM, a MESSAGE or a num_predict, which llama-server cannot be given",
            hint="--engine embedded honours it",
        )
    options = replace(managed_options(settings, setup.model), alias=named)
    return replace(options, ctx=options.ctx or setup.ctx), setup


def with_parameters(plan: ManagedPlan, setup: ModelSetup) -> ManagedPlan:
    """Lanes with the sampling defaults that a model has in Ollama, as fields of each request."""
    fields: dict[str, Any] = {"top_k": 40, "min_p": 0.0, **dict(setup.parameters)}
    fields |= {"temperature": 1.0, "top_p": 1.0}  # on OpenAI's routes, whatever the parameters are
    overrides = tuple((name, tuple(v) if isinstance(v, list) else v) for name, v in fields.items())
    lanes = [replace(p, lane=replace(p.lane, overrides=overrides)) for p in plan.lanes]
    return replace(plan, lanes=tuple(lanes))


async def _check_prompts(setup: ModelSetup, address: str) -> None:
    """See that a lane makes the prompts that the model's template makes in Ollama.

    Raises:
        ConfigError: it does not, or that cannot be told.
    """
    lane = HttpTransport(Endpoint.parse(address))
    try:
        _, props = await get_json(lane.open, "/props", timeout_s=TIMEOUT_S)
        made = [await made_by(lane, {"messages": [dict(m) for m in probe]}) or "" for probe in PROBES]
    except BackendError as error:
        raise ConfigError(f"model: the prompts of {setup.name} could not be compared: {error}") from error
    finally:
        await lane.aclose()
    bos = str(props.get("bos_token") or "") if isinstance(props, dict) else ""
    prompts = dict(zip(map(str, PROBES), made, strict=True))
    settled = settle(setup, lambda probe: prompts[str(tuple(probe))], bos=bos)
    if settled.template is not None:
        raise ConfigError(
            f"model: {setup.name} has a TEMPLATE that makes other prompts than the one in its file",
            hint="--engine embedded honours it",
        )


def managed_options(settings: Settings, model: Path) -> ManagedOptions:
    """The settings that concern managed lanes, for a model file."""
    return ManagedOptions(
        model=model.expanduser(),
        draft=settings.draft,
        strategies=settings.strategies,
        threads=settings.threads,
        ctx=settings.ctx,
        slots=settings.slots or 1,
        n_gpu_layers=settings.n_gpu_layers,
        memory=settings.memory,
        llama_server=settings.llama_server,
        extra_args=settings.llama_args,
        log_dir=settings.state_dir / "logs",
    )
