"""The command line: thin commands over the package.

Exit codes: 0 all went well, 1 something failed while running, 2 the command or the configuration cannot be
used. Errors are a line or two on stderr; a traceback is a fault of ours.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import click

from specproxy import __version__
from specproxy.cli.errors import report as tell
from specproxy.cli.groups import Group
from specproxy.errors import ConfigError, SpecproxyError

__all__ = ["cli", "main"]

# name → (module, attribute, help line); modules are imported when their command runs, so that --help is instant
COMMANDS = {
    "start": ("specproxy.cli.start", "start", "Run the proxy."),
    "status": ("specproxy.cli.status", "status", "Show what a running proxy has learned."),
    "top": ("specproxy.cli.top", "top", "Watch a running proxy."),
    "explain": (
        "specproxy.cli.explain",
        "explain",
        "Say where a request would go, and why, without running it.",
    ),
    "verify": ("specproxy.cli.verify", "verify", "Check that every lane says what plain decoding says."),
    "bench": ("specproxy.cli.bench", "bench", "Measure every lane and adaptive routing against plain."),
    "report": ("specproxy.cli.report", "report", "Report what was really served, against plain."),
    "quarantine": (
        "specproxy.cli.quarantine",
        "quarantine",
        "Show, add or lift lanes that are out of service.",
    ),
    "logs": ("specproxy.cli.logs", "logs", "Show what the proxy has said."),
    "doctor": ("specproxy.cli.doctor", "doctor", "Look at this machine, and say what would help."),
    "init": ("specproxy.cli.init", "init", "Write the files for a model with every lane that it supports."),
    "config": ("specproxy.cli.config", "config", "Check, show or describe the configuration."),
    "service": ("specproxy.cli.service", "service", "Let the system run the proxy, or stop doing so."),
    "completion": ("specproxy.cli.completion", "completion", "Print a shell completion script."),
    "version": ("specproxy.cli.version", "version", "Print the versions of specproxy and its engines."),
}


class LazyGroup(Group):
    """A group that knows its commands' names and help lines without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 (click's)
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 (click's)
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "-V", "--version", prog_name="specproxy")
def cli() -> None:
    """Put each LLM request on the decoding strategy that measures fastest on this machine.

    Start it in front of a running Ollama or llama-server, or give it a model, and point your client at it:

    \b
      specproxy start --upstream http://127.0.0.1:11434
      specproxy start --model model.gguf --draft small.gguf
    """


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    try:
        code = cli.main(args=None if args is None else list(args), prog_name="specproxy", standalone_mode=False)
    except click.ClickException as error:
        return tell(_message(error), error.exit_code, hint=_usage_hint(error))
    except click.exceptions.Abort:
        return 130
    except ConfigError as error:
        return tell(error.message, 2, hint=error.hint)
    except SpecproxyError as error:
        return tell(error.message, 1, hint=error.hint)
    except BrokenPipeError:  # the reader of a pipe has left, as `| head` does
        sys.stderr.close()
        return 0
    return code if isinstance(code, int) else 0


def _message(error: click.ClickException) -> str:
    """One line, with the nearest name where one is meant."""
    if not isinstance(error, click.NoSuchOption):
        return error.format_message()
    close = f"; did you mean {error.possibilities[0]}?" if error.possibilities else ""
    return error.message.rstrip(".") + close


def _usage_hint(error: click.ClickException) -> str:
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    return f"see {ctx.command_path} --help" if ctx is not None else ""
