"""`specproxy init`: write what is needed to run a model with every lane that it supports."""

from __future__ import annotations

import asyncio
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from specproxy.cli.options import config_option
from specproxy.config import load
from specproxy.errors import ConfigError, PairError

__all__ = ["init"]

PRESETS, CONFIG = "presets.ini", "specproxy.yaml"


@click.command()
@click.option("--model", required=True, metavar="MODEL", help="GGUF file, or name of a model that Ollama has.")
@click.option("--draft", type=click.Path(path_type=Path), metavar="FILE", help="Draft model for it.")
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path), default=Path(), help="Where to write. Default: here."
)
@click.option(
    "--router-port", type=click.IntRange(1, 65535), default=9931, show_default=True, help="Of llama-server."
)
@click.option("--force", is_flag=True, help="Replace files that are there.")
@config_option
def init(
    model: str, draft: Path | None, folder: Path, router_port: int, force: bool, config_path: Path | None
) -> None:
    """Write the files for a model with every lane that it supports.

    With a llama-server binary that can be a router: its preset file, a section for each lane that fits in
    memory, and a configuration of specproxy in front of it. Otherwise a configuration with lanes of specproxy's
    own. What is written is tried before this ends; no model is loaded.
    """
    from specproxy.adapters.managed import plan_managed
    from specproxy.adapters.ollama_store import locate_model
    from specproxy.adapters.presets import PRESET_FLAG, preset_text
    from specproxy.proxy.managed import managed_options

    settings = load(config_path)
    path, name = locate_model(model)
    path, draft = path.absolute(), (draft or settings.draft)
    draft = draft.absolute() if draft is not None else None
    options = replace(managed_options(settings, path), draft=draft, alias=name or None)
    try:
        plan = plan_managed(options)
    except PairError as error:
        raise ConfigError(error.message, hint=error.hint) from error
    for planned in plan.lanes:
        click.echo(f"{planned.lane.id}: yes")
    for refused in plan.refused:
        click.echo(f"{refused.id}: no, {refused.reason}")
    for warning in plan.warnings:
        click.echo(warning)
    if options.ctx is None and plan.target.context_length and plan.ctx < plan.target.context_length:
        click.echo(
            f"Context: {plan.ctx} of the model's {plan.target.context_length} tokens, for all lanes to fit."
        )
    if PRESET_FLAG in plan.program.flags:
        given: dict[str, Any] = {"upstream": [f"http://127.0.0.1:{router_port}"]}
        files = {PRESETS: preset_text(plan), CONFIG: _yaml(given)}
    else:
        given = {
            "model": str(path),
            "draft": str(draft) if draft else None,
            "engine": "managed",
            "ctx": plan.ctx,
        }
        files = {CONFIG: _yaml({key: value for key, value in given.items() if value is not None})}
        click.echo(f"{plan.program.build} cannot be a router, so the lanes will be specproxy's own.")
    written = _write(folder, files, force=force)
    load(written[CONFIG])
    if PRESETS in written:
        _try_router(plan, written[PRESETS], router_port)
    click.echo(shlex.join(["specproxy", "start", "--config", str(written[CONFIG])]))


def _try_router(plan: Any, file: Path, port: int) -> None:
    """Have the router read its file, and say how to start it."""
    from specproxy.adapters.presets import check_presets, router_command

    asyncio.run(check_presets(plan, file))
    click.echo(f"{file}: llama-server has read it and understands it. Run both:")
    click.echo(shlex.join(router_command(plan, file, port=port)))


def _yaml(values: dict[str, Any]) -> str:
    import yaml

    return "# written by specproxy init\n" + yaml.safe_dump(values, sort_keys=False)


def _write(folder: Path, files: dict[str, str], *, force: bool) -> dict[str, Path]:
    """Write all of them or none.

    Raises:
        ConfigError: one is there already, or cannot be written.
    """
    paths = {name: (folder / name).absolute() for name in files}
    there = [str(path) for path in paths.values() if path.exists()]
    if there and not force:
        raise ConfigError(f"{', '.join(there)}: there already", hint="--force replaces, --dir writes elsewhere")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            paths[name].write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written to: {error.strerror}") from error
    return paths
