"""`make docs`: writes what comes from the code into configuration.md and help.md, below a mark.

python docs/generate.py [--check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

from specproxy.cli import COMMANDS, cli
from specproxy.cli.start import FLAGS, NESTED
from specproxy.config import ENV_PREFIX, Settings
from specproxy.proxy.reload import LIVE

__all__ = ["PAGES", "configuration", "help_pages", "page"]

HERE = Path(__file__).parent
WIDTH = 100

MARK = "<!-- What follows is written by `make docs` from the code: change that, not this. -->\n"


def configuration() -> str:
    """The table of settings."""
    flags = {NESTED.get(option.name, option.name): option for option in _options()}
    rows = [_row(path, info, flags.get(path)) for path, info in _keys(Settings)]
    head = ["key", "default", "environment", "flag", "live", "means"]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def _options() -> Iterator[click.Parameter]:
    @click.command()
    def nothing() -> None:
        """Carries the flags."""

    command: Any = nothing
    for flag in FLAGS:
        command = flag(command)
    yield from command.params


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _keys(info.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, info


def _row(path: str, info: Any, flag: click.Parameter | None) -> list[str]:
    default = "the XDG state directory" if path == "state_dir" else f"`{json.dumps(info.default)}`"
    variable = ENV_PREFIX + path.upper().replace(".", "__")
    flag_name = f"`{flag.opts[0]}`" if flag is not None else ""
    live = "live" if path in LIVE else ""
    return [f"`{path}`", default, f"`{variable}`", flag_name, live, " ".join(info.description.split())]


def help_pages() -> str:
    """All help texts."""
    return "\n".join(f"## {name}\n\n```\n{text}\n```\n" for name, text in _helps())


def _helps() -> Iterator[tuple[str, str]]:
    settings = {**cli.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    root = click.Context(cli, info_name="specproxy", **settings)
    yield "specproxy", cli.get_help(root).rstrip()
    for name in COMMANDS:
        command = cli.get_command(root, name)
        assert command is not None
        yield from _help(command, f"specproxy {name}", click.Context(command, root, info_name=name))


def _help(command: click.Command, name: str, context: click.Context) -> Iterator[tuple[str, str]]:
    yield name, command.get_help(context).rstrip()
    if isinstance(command, click.Group):
        for inner, one in command.commands.items():
            yield from _help(one, f"{name} {inner}", click.Context(one, context, info_name=inner))


PAGES = {"configuration.md": configuration, "help.md": help_pages}


def page(name: str) -> str:
    """A page as it should be: what people wrote down to the mark, then what comes from the code."""
    written = (HERE / name).read_text(encoding="utf-8").partition(MARK)[0]
    return f"{written}{MARK}\n{PAGES[name]()}"


def main() -> int:
    """Write the pages, or with --check say which are out of date."""
    stale = [name for name in PAGES if (HERE / name).read_text(encoding="utf-8") != page(name)]
    if "--check" in sys.argv:
        for name in stale:
            print(f"docs/{name} is out of date: run `make docs`", file=sys.stderr)
        return int(bool(stale))
    for name in stale:
        (HERE / name).write_text(page(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
