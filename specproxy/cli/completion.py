"""`specproxy completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

__all__ = ["completion"]


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a shell completion script.

    \b
    For one session:  source <(specproxy completion bash)
    For every one:    specproxy completion fish > ~/.config/fish/completions/specproxy.fish
    """
    from specproxy.cli import cli

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "specproxy", "_SPECPROXY_COMPLETE").source())
