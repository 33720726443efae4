"""Groups of commands that name the nearest one, and a choice that leaves judging to the settings."""

from __future__ import annotations

from typing import Any

import click

__all__ = ["Choice", "Group"]


class Group(click.Group):
    """A group whose unknown commands are told like unknown options."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if args[0] not in names and not args[0].startswith("-"):
            raise click.NoSuchOption(args[0], f"No such command {args[0]!r}.", names, ctx)
        return super().resolve_command(ctx, args)


class Choice(click.Choice[str]):
    """Known values for help and completion; whether a value is one of them is for the settings to say."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002 (click's signature)
        return value
