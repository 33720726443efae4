"""From a model file to lanes: read facts, check the draft, budget memory, plan one process a strategy."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specproxy.adapters import machine, memory
from specproxy.adapters.gguf_facts import ModelFacts, check_pair, read_facts
from specproxy.adapters.llama_server import LanePlan, ManagedLlamaServer
from specproxy.adapters.memory import Budget, LaneNeed, MemoryPlan, Refusal
from specproxy.adapters.server_program import (
    DRAFT_FILE,
    NGRAM_MAX,
    SAMPLED,
    SAMPLING_FLAG,
    LaneOptions,
    ServerProgram,
    drafter_in,
    find_program,
    kinds_of,
    lane_arguments,
    uses_draft_file,
)
from specproxy.adapters.supervise import ChildSpec
from specproxy.errors import ConfigError
from specproxy.records import Control, Lane, Strategy

__all__ = ["ManagedOptions", "ManagedPlan", "measure_budget", "plan_managed"]

DRAFT_N_MAX = 3
MAX_PROMPT_CACHE_MIB = 8192  # llama-server's default for each process
VOLATILE_FLAGS = {"--port", "--host", "--alias", "-c", "--cache-ram", "-m", "--spec-draft-model"}
"""Arguments with a value that say nothing about speed, or are in the fingerprint by content."""


@dataclass(frozen=True, slots=True)
class ManagedOptions:
    """What to run. None means: whatever fits, or the server's own default.

    `strategies` are names as in `Strategy.parse`. `memory` bounds what the lanes take together, in bytes.
    `program` overrides the search for a llama-server. `log_dir` collects each lane's output. `exclude` names
    strategies that somebody else runs on the model already: with plain among them no lane is a must.
    `max_ctx` is the longest context that is of use where `ctx` is None.
    """

    model: Path
    draft: Path | None = None
    strategies: tuple[str, ...] | None = None
    threads: int | None = None
    ctx: int | None = None
    slots: int = 1
    n_gpu_layers: int | None = None
    memory: int | None = None
    llama_server: Path | None = None
    extra_args: tuple[str, ...] = ()
    alias: str | None = None
    draft_p_min: float | None = None
    log_dir: Path | None = None
    backend: str = "managed"
    exclude: tuple[str, ...] = ()
    max_ctx: int | None = None


@dataclass(frozen=True, slots=True)
class ManagedPlan:
    """What will be started, what not and why; `warnings` are full sentences."""

    options: ManagedOptions
    program: ServerProgram
    target: ModelFacts
    draft: ModelFacts | None
    ctx: int
    lanes: tuple[LanePlan, ...]
    memory: MemoryPlan
    refused: tuple[Refusal, ...]
    warnings: tuple[str, ...] = ()

    def backend(self, on_change: Callable[[], None] = lambda: None) -> ManagedLlamaServer:
        """The lanes as a backend, not yet started; call it in the event loop."""
        return ManagedLlamaServer(
            self.options.backend,
            self.lanes,
            needs_plain="plain" not in self.options.exclude,
            on_change=on_change,
        )


def measure_budget(options: ManagedOptions) -> tuple[Budget, tuple[machine.Gpu, ...]]:
    """What lanes may use on this machine now. Blocks (nvidia-smi)."""
    free = machine.available_memory()
    devices = machine.gpus() if options.n_gpu_layers != 0 else ()
    gpu = sum(device.free for device in devices) * 9 // 10 if devices else None
    return Budget.of(free.available, limit=options.memory, gpu=gpu, bound=free.bound), devices


def plan_managed(options: ManagedOptions) -> ManagedPlan:
    """Decide which lanes to start. Blocks for a second: reads files, runs ``llama-server --help``.

    Raises:
        ModelFileError: the model or the draft cannot be used.
        PairError: the draft does not fit the model.
        ConfigError: no llama-server, a strategy that nothing can serve, or not even plain fits.
    """
    target = read_facts(options.model)
    draft = read_facts(options.draft) if options.draft is not None else None
    warnings = check_pair(target, draft) if draft is not None else ()
    program = find_program(options.llama_server)
    budget, devices = measure_budget(options)
    on_gpu = bool(devices) and program.kind == "binary"
    budget = budget if on_gpu else Budget(budget.ram, None, budget.bound)
    wanted, refused = _strategies(options, program, target, draft)
    ids = _lane_ids(wanted)

    def needs_at(ctx: int) -> list[LaneNeed]:
        return [
            memory.lane_need(
                lane_id, strategy, target, draft,
                ctx=ctx, slots=options.slots, on_gpu=on_gpu, repack="--no-repack" not in options.extra_args,
            )
            for lane_id, strategy in zip(ids, wanted, strict=True)
        ]  # fmt: skip

    longest = min(filter(None, (target.context_length, options.max_ctx)), default=None)
    ctx = options.ctx or memory.choose_ctx(longest, needs_at, budget)
    fitting = memory.plan(needs_at(ctx), budget)
    refused += fitting.refused
    if "plain" not in options.exclude and (not fitting.started or fitting.started[0].id != ids[0]):
        reason = next(item.reason for item in fitting.refused if item.id == ids[0])
        raise ConfigError(
            f"{options.model.name} does not fit: plain {reason}", hint="a smaller model, --ctx or quantisation"
        )
    lane_options = _lane_options(options, draft, ctx, fitting)
    plans: list[LanePlan] = []
    by_id = dict(zip(ids, wanted, strict=True))
    for need in fitting.started:
        try:
            arguments = lane_arguments(program, lane_options, by_id[need.id])
        except ConfigError as error:
            if by_id[need.id].is_plain or options.extra_args:
                raise
            refused.append(Refusal(need.id, error.message))
            continue
        plans.append(_lane_plan(options, program, target, draft, by_id[need.id], need, arguments, devices))
    return ManagedPlan(options, program, target, draft, ctx, tuple(plans), fitting, tuple(refused), warnings)


def _strategies(
    options: ManagedOptions, program: ServerProgram, target: ModelFacts, draft: ModelFacts | None
) -> tuple[list[Strategy], list[Refusal]]:
    """Plain first, then what was asked for or everything, as far as target and draft support it; without
    what is excluded.

    Raises:
        ConfigError: a strategy was asked for that the model cannot do.
    """
    asked = [Strategy.parse(name) for name in options.strategies or ()]
    drafters = ["ngram", "mtp", drafter_in(draft.sidecar_type if draft is not None else None)]
    if program.flag(SAMPLING_FLAG) is not None:  # last, as a variant of what comes before
        drafters += [name + SAMPLED for name in ("mtp", "draft") if _impossible(name, target, draft) is None]
    candidates = asked or [Strategy((name,)) for name in drafters]
    wanted, refused = [Strategy()] if "plain" not in options.exclude else [], []
    for strategy in candidates:
        if strategy.is_plain or strategy.name in options.exclude:
            continue
        found = (_impossible(kind, target, draft) for kind in sorted(kinds_of(strategy)))
        if reason := next(filter(None, found), None):
            if asked:
                raise ConfigError(f"strategies: {strategy.name} is not possible: {reason}")
            refused.append(Refusal(strategy.name, reason))
            continue
        default = NGRAM_MAX if strategy.drafters[0].startswith("ngram") else DRAFT_N_MAX
        wanted.append(strategy if strategy.n_max else Strategy(strategy.drafters, default))
    return list(dict.fromkeys(wanted)), refused


def _impossible(drafter: str, target: ModelFacts, draft: ModelFacts | None) -> str | None:
    """Why this target cannot be decoded so; None if it can."""
    there = drafter_in(draft.sidecar_type) if draft is not None else None
    if there == drafter:
        return None
    if drafter in DRAFT_FILE:
        return f"the draft file is for {there}" if there else "no draft model was given"
    if drafter == "mtp" and not target.has_mtp:
        if target.mtp_layers:
            return f"llama.cpp has no MTP graph for architecture {target.architecture}"
        return "the model file has no MTP layers"
    return None


def _lane_ids(strategies: Sequence[Strategy]) -> list[str]:
    """Strategy names, with the draft length where one name stands for two lanes."""
    names = [strategy.name for strategy in strategies]
    return [
        f"{strategy.name}:{strategy.n_max}" if names.count(strategy.name) > 1 else strategy.name
        for strategy in strategies
    ]


def _lane_options(
    options: ManagedOptions, draft: ModelFacts | None, ctx: int, fitting: MemoryPlan
) -> LaneOptions:
    spare = max(0, fitting.budget.ram - fitting.ram) // max(1, len(fitting.started))
    return LaneOptions(
        model=options.model,
        alias=options.alias or options.model.stem,
        ctx=ctx,
        slots=options.slots,
        threads=options.threads,
        n_gpu_layers=options.n_gpu_layers,
        cache_ram_mib=min(MAX_PROMPT_CACHE_MIB, spare // 2 >> 20),
        draft=options.draft,
        draft_type=(draft.sidecar_type if draft is not None else None) or "draft-simple",
        draft_p_min=options.draft_p_min,
        extra_args=options.extra_args,
    )


def _lane_plan(
    options: ManagedOptions,
    program: ServerProgram,
    target: ModelFacts,
    draft: ModelFacts | None,
    strategy: Strategy,
    need: LaneNeed,
    arguments: tuple[str, ...],
    devices: tuple[machine.Gpu, ...],
) -> LanePlan:
    uses_draft = draft is not None and uses_draft_file(strategy, draft.sidecar_type)
    fingerprint = _fingerprint(
        target.digest,
        draft.digest if draft is not None and uses_draft else "",
        program.build,
        *_lasting(arguments),
        machine.machine_id(devices),
    )
    lane = Lane(
        id=need.id,
        backend=options.backend,
        target=f"{options.alias or options.model.stem}@{target.digest[:8]}",
        strategy=strategy,
        control=Control.INSTANCE,
        fingerprint=fingerprint,
        memory_bytes=need.total + need.gpu,
        seeded=not any(name.endswith(SAMPLED) for name in strategy.drafters),
    )
    log_file = (
        options.log_dir / f"{options.backend}-{need.id.replace(':', '-')}.log" if options.log_dir else None
    )
    return LanePlan(lane, ChildSpec(f"lane {need.id}", (*program.command, *arguments), log_file=log_file))


def _lasting(arguments: Sequence[str]) -> list[str]:
    """Arguments that bear on speed."""
    lasting, skip = [], False
    for argument in arguments:
        if not skip and argument not in VOLATILE_FLAGS:
            lasting.append(argument)
        skip = not skip and argument in VOLATILE_FLAGS
    return lasting


def _fingerprint(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
