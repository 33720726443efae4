"""Which lanes of a model fit in memory on this machine now, and at which length of context. Starts nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specproxy.adapters.gguf_facts import read_facts
from specproxy.adapters.managed import ManagedOptions, measure_budget, plan_managed
from specproxy.adapters.memory import SMALLEST_CTX, lane_need
from specproxy.adapters.server_program import find_program
from specproxy.errors import ConfigError
from specproxy.records import Strategy

__all__ = ["fit", "shortened"]

Row = dict[str, Any]

NOTHING: Row = {
    "lanes": [], "refused": [], "ctx": None, "full_ctx": None, "ram": 0, "ram_of": 0, "bound": "", "gpu": 0,
    "gpu_of": None, "trouble": "",
}  # fmt: skip


def fit(
    model: Path,
    draft: Path | None,
    *,
    llama_server: Path | None = None,
    memory: int | None = None,
    beside_ctx: int | None = None,
    beside: bool = False,
) -> Row:
    """Plan lanes as they would be started; blocks for a second.

    `beside` a server that has the model, plain is not planned again and `beside_ctx` is what the server has.
    """
    options = ManagedOptions(
        model,
        draft,
        llama_server=llama_server,
        memory=memory,
        exclude=("plain",) if beside else (),
        max_ctx=beside_ctx,
    )
    try:
        find_program(llama_server)
    except ConfigError:
        return _weights_alone(options)
    try:
        plan = plan_managed(options)
    except ConfigError as error:
        return NOTHING | {"trouble": error.message}
    budget = plan.memory.budget
    return {
        "lanes": [planned.lane.strategy.name for planned in plan.lanes],
        "refused": [{"name": refused.id, "why": refused.reason} for refused in plan.refused],
        "ctx": plan.ctx if plan.lanes else None,
        "full_ctx": beside_ctx or plan.target.context_length,
        "ram": plan.memory.ram,
        "ram_of": budget.ram,
        "bound": budget.bound,
        "gpu": plan.memory.gpu,
        "gpu_of": budget.gpu,
        "trouble": "",
    }


def _weights_alone(options: ManagedOptions) -> Row:
    """Whether plain decoding fits, where there is no llama-server to plan for."""
    budget, _ = measure_budget(options)
    target = read_facts(options.model)
    need = lane_need("plain", Strategy(), target, None, ctx=SMALLEST_CTX, slots=1).total
    if need > budget.ram:
        why = f"plain needs {need >> 20} MiB of memory, {budget.ram >> 20} MiB are left ({budget.bound})"
        return NOTHING | {"trouble": f"{options.model.name} does not fit: {why}"}
    told = {"ram": need, "ram_of": budget.ram, "bound": budget.bound}
    return NOTHING | told | {"lanes": [] if options.exclude else ["plain"]}


def shortened(row: Row) -> str:
    """What has to be said about the context of a set-up, as a clause; empty where nothing is lost."""
    if row["ctx"] is None or row["full_ctx"] is None or row["ctx"] >= row["full_ctx"]:
        return ""
    return f"with {row['ctx']} tokens of context instead of {row['full_ctx']}, since no more fits for all lanes"
