"""`specproxy doctor`: what is here, what it could do, and what to type."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from specproxy.cli.options import config_option, json_option
from specproxy.cli.text import columns, size, wrapped
from specproxy.config import load

__all__ = ["doctor", "lines"]

SHOWN = 5  # models and drafts that are told one by one

Row = dict[str, Any]


@click.command()
@click.option("--model", metavar="MODEL", help="GGUF file, or name of a model that Ollama has, to look at.")
@click.option("--draft", metavar="MODEL", help="Draft model that would be used with it.")
@click.option(
    "--upstream",
    "urls",
    multiple=True,
    metavar="URL",
    help="Server to look at; repeatable. Default: usual ports.",
)
@config_option
@json_option
def doctor(
    model: str | None, draft: str | None, urls: tuple[str, ...], config_path: Path | None, as_json: bool
) -> None:
    """Look at this machine, and say what would help.

    Tells which servers run at the usual ports, how each can be controlled and what is known to go wrong with
    its version, what is installed, how much memory there is, and of --model, or of what a server has loaded,
    how it could be decoded, which draft models for it are at hand and what fits. Nothing is started or changed.
    """
    from specproxy.cli.diagnosis import diagnose
    from specproxy.proxy.sidecar import USUAL_URLS

    settings = load(config_path)
    named = str(settings.model) if settings.model is not None else None
    chosen = urls or tuple(settings.upstream or ()) or USUAL_URLS
    data = diagnose(model or named, draft, urls=chosen, llama_server=settings.llama_server)
    if as_json:
        click.echo(json.dumps(data, indent=2))
        return
    typed = {f"  {item['command']}" for item in data["commands"]}  # in one piece, to be copied
    width = columns()
    for line in lines(data):
        parts = [line] if width is None or line in typed else wrapped(line, width)
        click.echo("\n".join(parts))


def lines(data: Row) -> Iterator[str]:
    """The findings as people read them."""
    parts, engines, here = data["versions"], data["engines"], data["machine"]
    yield f"specproxy {parts['specproxy']}, Python {parts['python']}"
    gpus = ", ".join(f"{gpu['name']} ({size(gpu['free'])} free)" for gpu in here["gpus"]) or "no NVIDIA GPU"
    yield f"Machine: {here['processor']}, {here['cores']} cores, {gpus}"
    memory = f"{size(here['memory_available'])} available ({here['memory_bound']})"
    yield f"Memory: {memory}, {size(here['memory_for_lanes'])} of it for lanes"
    embedded = f"llama-cpp-python {engines['embedded']}" if engines["embedded"] else "not installed"
    yield f"Embedded engine: {embedded}" + _install("embedded", engines["embedded"])
    yield f"Managed lanes: {engines['managed'] or engines['managed_trouble']}" + _install(
        "managed", engines["managed"]
    )
    if engines["managed_kind"] == "wheel":
        yield "  made for any processor: one compiled for this machine, on the PATH, checks drafts faster"
    yield ""
    for server in data["servers"]:
        yield _server(server)
        yield from _server_details(server)
    if data["ollama_models"]:
        yield f"Ollama's models on disk: {_some(data['ollama_models'])}"
    if data["model"] is not None:
        yield ""
        yield from _model(data["model"])
    yield ""
    for index, item in enumerate(data["commands"]):
        yield ("Best: " if index == 0 else "Or: ") + item["why"]
        yield f"  {item['command']}"


def _install(extra: str, present: str | None) -> str:
    return "" if present else f" (pip install 'specproxy[{extra}]')"


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _server(row: Row) -> str:
    if not row["reachable"]:
        return f"{row['url']}: " + (
            "takes connections, but does not answer in HTTP" if row["silent"] else "nobody"
        )
    models = f", {_some(row['models'])}" if row["models"] else ""
    loaded = f"; loaded: {_some(row['loaded'])}" if row["loaded"] else ""
    return (
        f"{row['url']}: {row['kind']} {row['version']}".rstrip()
        + models
        + loaded
        + ("; it drafts" if row["drafting"] else "")
    )


def _server_details(row: Row) -> Iterator[str]:
    """How it can be controlled, what goes wrong there, and what would fit beside its model."""
    if not row["reachable"]:
        return
    if row.get("gpu_used"):
        yield f"  Its models take {size(row['gpu_used'])} of GPU memory, by its own account"
    if row["control"]:
        yield f"  Control: {row['control']}"
    yield from (f"  Hazard: {hazard}" for hazard in row["hazards"])
    if row["path_trouble"] and row["kind"] in ("ollama", "llama-server", "llama-router"):
        yield f"  Its weights: {row['path_trouble']}"


def _fitting(row: Row) -> Iterator[str]:
    """What of a model fits in memory now."""
    if row["trouble"]:
        yield f"  Memory: {row['trouble']}. It is not recommended to run it here: it would swap."
        return
    lanes = ", ".join(row["lanes"]) or "none"
    gpu = f", {size(row['gpu'])} of {size(row['gpu_of'])} on the GPU" if row["gpu_of"] is not None else ""
    yield f"  Lanes that fit: {lanes} ({size(row['ram'])} of {size(row['ram_of'])} of {row['bound']}{gpu})"
    yield from (f"  No lane {refused['name']}: {refused['why']}" for refused in row["refused"])
    if row["ctx"] is not None:
        full = row["full_ctx"]
        less = f" of {full} that it was trained for" if full is not None and row["ctx"] < full else ""
        yield f"  Context: {row['ctx']} tokens{less}"


def _model(row: Row) -> Iterator[str]:
    yield f"Model {row['model']}" + ("" if row["path"] == row["model"] else f" ({row['path']})")
    yield from (f"  {fact}" for fact in row["facts"])
    yield from _fitting(row["fit"])
    if row["draft_trouble"]:
        yield f"  The draft cannot be used: {row['draft_trouble']}"
    yield "  Strategies, and by rule of thumb their speed against plain on edits, JSON and open writing:"
    for strategy in row["strategies"]:
        speed = ", ".join(f"{value:.1f}x" for value in strategy["speed"].values())
        yield f"    {strategy['name']:<6} {strategy['why'] or speed or 'always'}"
    if row["drafts"]:
        yield "  Drafts at hand:"
    for draft in row["drafts"][:SHOWN]:
        what = "fits" if draft["fits"] else "does not fit"
        what = f"{draft['kind']}, {what}" if draft["kind"] != "draft" else what
        yield f"    {draft['name']}: {draft['share']:.0%} of the target's size, {what}"
        yield from (f"      {note}" for note in draft["notes"])
