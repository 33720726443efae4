"""docs/cli.md names the commands, options and verdicts that there are."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from specproxy.cli import COMMANDS, cli
from specproxy.strategies.verify import TIE_GAP, Verdict
from tests.test_docs import ROOT, named

TEXT = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


def options(name: str) -> set[str]:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    params = [param for one in (command, *inner) for param in one.params]
    return {flag for param in params for flag in (*param.opts, *param.secondary_opts) if flag.startswith("--")}


def test_every_command_has_a_row_and_no_other() -> None:
    """In the table of commands."""
    rows = re.search(r"\| command \| does \|\n\|---\|---\|\n((?:\|.*\n)+)", TEXT)
    assert rows is not None
    assert set(re.findall(r"^\| `(\w+)` \|", rows[1], re.M)) == set(COMMANDS)


@pytest.mark.parametrize(
    "name", ["status", "top", "explain", "verify", "logs", "bench", "report", "service", "doctor"]
)
def test_every_option_is_named(name: str) -> None:
    """Those of commands that this page describes in full."""
    assert options(name) - {"--config"} <= set(re.findall(r"--[a-z][a-z-]+", TEXT))


def test_no_other_option_is_named() -> None:
    """Whatever looks like an option is one."""
    there = {flag for name in COMMANDS for flag in options(name)}
    there |= {"--help", "--user"}  # the latter is systemctl's
    assert set(re.findall(r"--[a-z][a-z-]+", TEXT)) <= there


def test_example_commands_can_be_parsed() -> None:
    """They are accepted up to the point where they would run."""
    blocks = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    lines = [shlex.split(line) for block in blocks for line in block.splitlines()]
    assert len(lines) >= 3
    for program, name, *arguments in lines:
        command = cli.get_command(click.Context(cli), name)
        assert program == "specproxy"
        assert command is not None
        command.make_context(name, arguments)


def test_every_verdict_and_the_threshold_are_documented() -> None:
    """As they are printed."""
    assert {str(verdict) for verdict in Verdict} <= named(TEXT)
    assert f"`--tie` ({TIE_GAP:g})" in TEXT
