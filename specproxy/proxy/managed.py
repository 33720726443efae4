"""Lanes of our own on a model file: llama-server processes, planned and started."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import structlog

from specproxy.adapters.llama_server import ManagedLlamaServer
from specproxy.adapters.managed import ManagedOptions, ManagedPlan, plan_managed
from specproxy.adapters.ollama_store import locate_model
from specproxy.config import Settings
from specproxy.proxy.facts import lane_facts
from specproxy.proxy.status import Rung
from specproxy.records import Lane
from specproxy.strategies.cost import LaneFacts

__all__ = ["ManagedLanes", "managed_options"]

log = structlog.get_logger("specproxy")


class ManagedLanes:
    """Plans and starts one llama-server a strategy for the configured model."""

    def __init__(self, settings: Settings, options: ManagedOptions | None = None) -> None:
        self._options = options or _own_options(settings)
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
        self._plan = plan = await asyncio.to_thread(plan_managed, self._options)
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


def _own_options(settings: Settings) -> ManagedOptions:
    model, name = locate_model(settings.model or "")
    return replace(managed_options(settings, model), alias=name or None)


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
