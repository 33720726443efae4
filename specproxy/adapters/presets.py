"""A preset file for llama-server's router, with a section for each lane of a model; written, and tried."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from specproxy.adapters.ask import get_json
from specproxy.adapters.http import Endpoint, HttpTransport
from specproxy.adapters.llama_router import read_sections
from specproxy.adapters.managed import ManagedPlan
from specproxy.adapters.supervise import Child, ChildSpec
from specproxy.errors import BackendError, ConfigError, LaneStartError

__all__ = ["PRESET_FLAG", "check_presets", "preset_text", "router_command", "section_names"]

PRESET_FLAG = "--models-preset"

LONG = {
    "-m": "model",
    "-np": "parallel",
    "-c": "ctx-size",
    "-t": "threads",
    "-ngl": "n-gpu-layers",
    "-md": "model-draft",
}
THE_ROUTERS = frozenset({"--host", "--port", "--alias"})
"""What the router sets for each section itself."""

LISTED_S = 30.0


def section_names(plan: ManagedPlan) -> dict[str, str]:
    """The name of each lane's section by the lane's id: plain's is the model's own."""
    base = re.sub(r"[^\w.-]+", "-", plan.options.alias or plan.options.model.stem)
    suffix = {p.lane.id: p.lane.id.replace(":", "-").replace("+", "-") for p in plan.lanes}
    return {p.lane.id: base if p.lane.strategy.is_plain else f"{base}-{suffix[p.lane.id]}" for p in plan.lanes}


def preset_text(plan: ManagedPlan) -> str:
    """The file. Its sections differ in how they decode and in nothing else.

    Raises:
        ConfigError: a path or argument cannot be written in such a file.
    """
    names = section_names(plan)
    lines = ["; written by specproxy init: one section for each way to decode the same model", "version = 1"]
    for planned in plan.lanes:
        arguments = planned.spec.command[len(plan.program.command) :]
        lines += ["", f"[{names[planned.lane.id]}]", *_entries(arguments)]
    return "\n".join(lines) + "\n"


def router_command(plan: ManagedPlan, file: Path, *, port: int) -> tuple[str, ...]:
    """The command that serves the file, with room for all of its sections."""
    most = ("--models-max", str(len(plan.lanes)))
    return (*plan.program.command, PRESET_FLAG, str(file), *most, "--port", str(port))


def _entries(arguments: Sequence[str]) -> Iterator[str]:
    words = list(arguments)
    while words:
        flag = words.pop(0)
        value = words.pop(0) if words and not _is_flag(words[0]) else None
        if flag in THE_ROUTERS:
            continue
        if value is not None and (set(value) & set("#;\n") or value != value.strip()):
            raise ConfigError(
                f"{value!r} cannot be written in a preset file", hint="move the file, or rename it"
            )
        yield f"{LONG.get(flag, flag.lstrip('-'))} = {'true' if value is None else value}"


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit()


async def check_presets(plan: ManagedPlan, file: Path) -> None:
    """Have the router read the file, and see that it finds in it what was meant. Loads no model.

    Raises:
        ConfigError: it does not start, or understands the sections differently.
    """
    child = await Child.start(ChildSpec("router", router_command(plan, file, port=0), family=True))
    try:
        transport = HttpTransport(Endpoint.parse(await child.address()))
        try:
            _, listed = await get_json(transport.open, "/models", timeout_s=LISTED_S)
        finally:
            await transport.aclose()
    except (BackendError, LaneStartError) as error:
        raise ConfigError(f"llama-server does not serve {file}: {error.message}") from error
    finally:
        await child.stop()
    entries = listed.get("data") if isinstance(listed, dict) else None
    found = {m.name: m for m in read_sections([e for e in entries or () if isinstance(e, dict)])}
    names = section_names(plan)
    if missing := [name for name in names.values() if name not in found]:
        raise ConfigError(f"llama-server lists no {', '.join(missing)} from {file}")
    if len({found[name].group for name in names.values()}) != 1:
        raise ConfigError(f"llama-server takes the sections of {file} for different models")
    for planned in plan.lanes:
        told = found[names[planned.lane.id]].strategy
        if told is None or told.drafters != planned.lane.strategy.drafters:
            raise ConfigError(f"llama-server takes {names[planned.lane.id]} of {file} for {told and told.name}")
