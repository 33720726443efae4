"""`specproxy status`: lanes, and what was measured on each kind of request."""

from __future__ import annotations

import json
from pathlib import Path

import click

from specproxy.cli.options import ask, config_option, json_option, url_option

__all__ = ["status"]

WIDE = 76  # columns from which intervals are shown


@click.command()
@url_option
@config_option
@json_option
@click.option("--temperatures", is_flag=True, help="Keep temperature buckets of a kind apart.")
@click.option("--all", "everything", is_flag=True, help="Also kinds and lanes of earlier set-ups.")
def status(
    url: str | None, config_path: Path | None, as_json: bool, temperatures: bool, everything: bool
) -> None:
    """Show what a running proxy has learned."""
    data = ask(url, config_path, "/specproxy/api/status" + ("?all=1" if everything else ""))
    if as_json:
        click.echo(json.dumps(data, indent=2))
        return
    from specproxy.cli.tables import print_status

    print_status(data, by_temperature=temperatures)
