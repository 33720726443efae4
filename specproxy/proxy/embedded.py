"""Lanes of our own on a model file: the embedded engine, one copy of the weights for all strategies."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from specproxy.adapters.embedded.backend import EmbeddedBackend, EmbeddedOptions
from specproxy.adapters.embedded.pair_facts import describe
from specproxy.adapters.gguf_facts import ModelFacts, read_facts
from specproxy.adapters.ollama_store import is_file_name, locate_model
from specproxy.config import Settings
from specproxy.errors import ConfigError
from specproxy.proxy.facts import lane_facts
from specproxy.proxy.status import Rung
from specproxy.records import Dialect, Lane, LaneStatus, Strategy
from specproxy.strategies.cost import LaneFacts

__all__ = ["EngineLanes"]


AS_OLLAMA = frozenset(Dialect) - {Dialect.OPENAI_COMPLETIONS}
"""What the engine makes the same of as Ollama, which writes plain completions into its template too."""


class EngineLanes:
    """The engine's process for the configured model."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._backend: _Engine | None = None
        self._models: tuple[ModelFacts, ModelFacts | None] | None = None
        self._described: tuple[str, ...] = ()

    @property
    def backend(self) -> EmbeddedBackend | None:
        """The engine, once it has been planned."""
        return self._backend

    @property
    def rung(self) -> Rung | None:
        """Rung 1 of the ladder: the strategy is a header of the request."""
        engine = self._backend
        if engine is None:
            return None
        names = ", ".join(status.lane.id for status in engine.lanes())
        why = f"the embedded engine runs {names or 'none yet'} on one copy of the weights"
        if engine.memory:
            used = sum(engine.memory.values()) / 2**30
            why += f" ({used:.1f} GiB of memory, {engine.slots} × {engine.context} tokens of context)"
        refused = (f"No lane {name}: {reason}." for name, reason in engine.refused.items())
        return Rung(1, "a strategy per request", why, (*self._described, *refused))

    async def plan(self, on_change: Callable[[], None]) -> None:
        """Look at the files.

        Raises:
            ConfigError: the engine is not installed, or a file cannot be used.
        """
        if importlib.util.find_spec("llama_cpp") is None:
            raise ConfigError(
                "engine: the embedded engine is not installed",
                hint="pip install 'specproxy[embedded]' compiles it, or choose --engine managed",
            )
        options = await self._options()
        self._models = await asyncio.to_thread(_read, options)
        self._described = describe(*self._models)
        names = _names(options.names) if self._settings.upstream else frozenset()
        self._backend = _Engine(options, self._settings.strategies, on_change, names)

    async def _options(self) -> EmbeddedOptions:
        """What the engine is started with; for a model of Ollama's with what that sets besides its weights."""
        settings = self._settings
        if is_file_name(settings.model or ""):
            return _options(settings, locate_model(settings.model or "")[0])
        from specproxy.proxy.takeover import take_over  # imports Jinja, which the engine has

        setup = await take_over(settings)
        folder = settings.state_dir / "engine"
        folder.mkdir(parents=True, exist_ok=True)
        setup.save(kept := folder / "setup.json")
        options = _options(settings, setup.model, setup.name)
        arguments = ("--setup", str(kept), *options.extra_args)
        return replace(
            options, ctx=options.ctx or setup.ctx, extra_args=arguments, text_only=setup.template is not None
        )

    async def start(self) -> None:
        """Load the model; returns when it is ready.

        Raises:
            ConfigError: it cannot be served.
        """
        assert self._backend is not None, "plan comes first"
        await self._backend.start()

    def facts(self) -> Mapping[str, LaneFacts]:
        """What the learner may know beforehand, by lane id."""
        if self._backend is None or self._models is None:
            return {}
        target, draft = self._models
        slots = self._backend.slots
        return {s.lane.id: lane_facts(s.lane, target, draft, slots) for s in self._backend.lanes()}

    def address(self, lane: Lane) -> str:  # noqa: ARG002 (a socket that only we may use)
        """None that others could use."""
        return ""

    async def aclose(self) -> None:
        """Stop the engine's process; idempotent."""
        if self._backend is not None:
            await self._backend.aclose()


class _Engine(EmbeddedBackend):
    """The engine with the configured strategies only; plain stays, to fall back on and to compare with.

    `names` are those that ask for its model (empty: any). A server beside it has other models, or the same one.
    """

    def __init__(
        self,
        options: EmbeddedOptions,
        strategies: tuple[str, ...] | None,
        on_change: Callable[[], None],
        names: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(options, on_change=on_change)
        self._asked_as = names
        self._wanted = None if strategies is None else {Strategy.parse(name).drafters for name in strategies}

    def lanes(self) -> tuple[LaneStatus, ...]:
        lanes = super().lanes()
        if self._asked_as:
            lanes = tuple(
                replace(s, lane=replace(s.lane, models=self._asked_as, dialects=AS_OLLAMA)) for s in lanes
            )
        if self._wanted is None:
            return lanes
        return tuple(s for s in lanes if s.lane.strategy.is_plain or s.lane.strategy.drafters in self._wanted)


def _names(names: tuple[str, ...]) -> frozenset[str]:
    """Names of a model of Ollama's as clients may write them."""
    tagged = {name if ":" in name.rpartition("/")[2] else f"{name}:latest" for name in names}
    return frozenset(tagged | {name.removesuffix(":latest") for name in tagged})


def _options(settings: Settings, model: Path, name: str = "") -> EmbeddedOptions:
    return EmbeddedOptions(
        model=model,
        names=(name,) if name else (),
        draft=settings.draft,
        ctx=settings.ctx,
        parallel=settings.slots,
        threads=settings.threads,
        n_gpu_layers=settings.n_gpu_layers,
        idle_unload_s=settings.idle_unload,
        extra_args=settings.engine_args,
        log_dir=settings.state_dir / "logs",
        state_dir=settings.state_dir / "engine",
    )


def _read(options: EmbeddedOptions) -> tuple[ModelFacts, ModelFacts | None]:
    return read_facts(options.model), read_facts(options.draft) if options.draft is not None else None
