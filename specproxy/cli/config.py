"""`specproxy config`: check, show, schema."""

from __future__ import annotations

import json
from pathlib import Path

import click

from specproxy.cli.groups import Group
from specproxy.cli.options import config_option
from specproxy.config import Settings, default_config_path, load

__all__ = ["config"]


@click.group(cls=Group, no_args_is_help=True)
def config() -> None:
    """Check, show or describe the configuration."""


@config.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
def check(file: Path | None) -> None:
    """Say whether FILE (default: the usual one, with the environment) can be used."""
    load(file)
    path = file or default_config_path()
    click.echo(
        f"{path}: fine"
        if path.is_file()
        else f"no config file at {path}; the defaults and environment are fine"
    )


@config.command()
@config_option
def show(config_path: Path | None) -> None:
    """Print the settings in force as YAML; a token is not shown."""
    import yaml

    settings = load(config_path)
    click.echo(
        yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, default_flow_style=False), nl=False
    )


@config.command()
def schema() -> None:
    """Print the JSON schema of the configuration file."""
    click.echo(json.dumps(Settings.model_json_schema(), indent=2))
