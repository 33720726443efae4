"""Every command of README and docs/ is run, or says why it cannot be.

    make docs-test

Blocks marked `sh` are run in order, page by page, with real lanes on tiny models. Commands within the text are
held against the command line and the Makefile.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from specproxy.cli import COMMANDS, cli
from tests.docs.pages import EXCEPTIONS, PAGES, ROOT, Page, exception
from tests.docs.sandbox import Sandbox
from tests.support.calibrated import CalibratedPair, write_pair

pytestmark = [pytest.mark.docs, pytest.mark.engine, pytest.mark.timeout(900)]

RUNNING = "specproxy start --model model.gguf --engine managed"
PROXY_RUNS = {
    "docs/cli.md",
    "docs/adopting.md",
    "docs/howto/coding-agents.md",
}  # pages for a reader whose proxy runs already
FORGETS = "specproxy bench"  # in cli.md it follows verify, which has sent the same prompts
ANY_CODE = re.compile(r"specproxy service (status|uninstall)")  # its exit code is an answer


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> CalibratedPair:
    return write_pair(tmp_path_factory.mktemp("pair"), seed=5)


@pytest.mark.parametrize("page", [page for page in PAGES if page.commands], ids=lambda page: page.name)
def test_a_page_can_be_followed(page: Page, pair: CalibratedPair, tmp_path: Path) -> None:
    """From its first command to its last."""
    sandbox = Sandbox(tmp_path, pair)
    for name, text in page.files:
        sandbox.write(name, text)
    with sandbox.servers():
        if page.name in PROXY_RUNS:
            sandbox.run(RUNNING)
        for command in page.commands:
            if command == FORGETS:
                sandbox.restart()
            found = exception(command)
            if found is None:
                sandbox.run(f"{command} || true" if ANY_CODE.match(command) else command)
            elif found.instead.startswith("make"):
                sandbox.run(f"cd {ROOT} && {found.instead.format(command.split()[-1])}")
            elif found.instead:
                sandbox.run(found.instead)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_within_the_text_are_there(page: Page) -> None:
    """They name a command and options that this version has, or a target of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for text in page.inline:
        program, name, *rest = shlex.split(text)
        if program == "make":
            assert name in targets, text
            continue
        if name.startswith("-") or name == "COMMAND":
            continue
        assert name in COMMANDS, text
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        if isinstance(command, click.Group) and rest:
            inner = command.commands[rest[0].split("|")[0]]
            command = inner
        flags = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)} | {"--help"}
        own = rest[: rest.index("--")] if "--" in rest else rest
        assert {word for word in own if word.startswith("--")} <= flags, text


def test_every_exception_is_needed_and_has_a_reason() -> None:
    """One that matches no command is out of date."""
    for one in EXCEPTIONS:
        assert one.why
        assert any(exception(command) is one for page in PAGES for command in page.commands), one.pattern
