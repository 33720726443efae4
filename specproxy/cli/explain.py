"""`specproxy explain`: a decision without running it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from specproxy.cli.options import ask, config_option, json_option, url_option
from specproxy.errors import ConfigError

__all__ = ["explain"]


@click.command()
@click.argument("request_file", metavar="REQUEST.json", type=click.Path(path_type=Path, allow_dash=True))
@click.option(
    "--path", default="/v1/chat/completions", show_default=True, help="Route that it would be sent to."
)
@click.option("--strategy", metavar="NAME", help="As if the client had pinned this strategy.")
@url_option
@config_option
@json_option
def explain(
    request_file: Path,
    path: str,
    strategy: str | None,
    url: str | None,
    config_path: Path | None,
    as_json: bool,
) -> None:
    """Say where a request would go, and why, without running it.

    REQUEST.json holds the body of the request; - is standard input.
    """
    body = _read(request_file)
    headers = {"X-Path": path} | ({"X-Specproxy-Strategy": strategy} if strategy else {})
    data = ask(url, config_path, "/specproxy/api/explain", body, headers)
    if as_json:
        click.echo(json.dumps(data, indent=2))
        return
    from specproxy.cli.tables import print_decision

    print_decision(data)


def _read(file: Path) -> bytes:
    """The request's bytes.

    Raises:
        ConfigError: it cannot be read, or is not JSON.
    """
    try:
        body = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    try:
        json.loads(body)
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    return body
