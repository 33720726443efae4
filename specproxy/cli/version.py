"""`specproxy version`."""

from __future__ import annotations

import json
import platform
from importlib import metadata

import click

from specproxy import __version__
from specproxy.cli.options import json_option

__all__ = ["version"]

PARTS = {"llama-cpp-python": "embedded", "xllamacpp": "managed", "redis": "redis"}


def versions() -> dict[str, str | None]:
    """specproxy, Python, and the optional engines; None where one is not installed."""
    found: dict[str, str | None] = {"specproxy": __version__, "python": platform.python_version()}
    for name in PARTS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


@click.command()
@json_option
def version(as_json: bool) -> None:
    """Print the versions of specproxy and its engines."""
    found = versions()
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, number in found.items():
        note = f"not installed (pip install 'specproxy[{PARTS[name]}]')" if number is None else number
        click.echo(f"{name:<17} {note}")
