"""Groups that name the nearest command, a choice that leaves judging to the settings, and help that fits."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from typing import Any

import click

__all__ = ["Choice", "Group", "HelpFormatter"]


NARROW = 60  # columns below which options and what they do share a line less evenly


class HelpFormatter(click.HelpFormatter):
    """Click's, for narrow terminals too: its own wraps at 50 columns at least."""

    def __init__(
        self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None
    ) -> None:
        columns = shutil.get_terminal_size().columns
        super().__init__(indent_increment, columns if width is None and columns < NARROW else width, max_width)

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Two columns; in a narrow terminal what does not fit the first one stands above the second."""
        super().write_dl(rows, 14 if self.width < NARROW else col_max, col_spacing)


click.Context.formatter_class = HelpFormatter


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
