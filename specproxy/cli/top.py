"""`specproxy top`: a running proxy, live."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from specproxy.cli.options import ask, config_option, url_option
from specproxy.errors import SpecproxyError

__all__ = ["top", "watch"]

RECENT = 40  # latest requests that are asked for
QUIT = frozenset("qQ\x03\x1b")

Row = dict[str, Any]
Look = Callable[[], tuple[Row, list[Row]]]
Wait = Callable[[float], bool]


@click.command()
@click.option("--once", is_flag=True, help="Print it once; so too where output is no terminal.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Seconds between looks.",
)
@url_option
@config_option
def top(once: bool, interval: float, url: str | None, config_path: Path | None) -> None:
    """Watch a running proxy: lanes, what was measured, and the latest requests.

    q or Ctrl-C ends it. Scripts want `specproxy status --json`.
    """

    def look() -> tuple[Row, list[Row]]:
        status = ask(url, config_path, "/specproxy/api/status")
        return status, ask(url, config_path, f"/specproxy/api/recent?limit={RECENT}")["recent"]

    from rich.console import Console

    from specproxy.cli.top_view import TopView

    console = Console(highlight=False)
    if once or not console.is_terminal:
        console.print(TopView(*look()))
        return
    with _keys() as wait:
        watch(look, wait, console, interval)


def watch(look: Look, wait: Wait, console: Any, interval: float) -> None:
    """Draw what `look` gives on a rich console again and again, until `wait`, which gets the seconds to pass,
    returns True, or Ctrl-C. A proxy that goes away is said to be away, and looked for again.

    Raises:
        SpecproxyError: there is no proxy to begin with.
    """
    from rich.live import Live

    from specproxy.cli.top_view import TopView

    status, recent = look()
    trouble = ""
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            view = TopView(status, recent, trouble=trouble, height=console.size.height - 1, keys=True)
            live.update(view, refresh=True)
            if wait(interval):
                return
            try:
                (status, recent), trouble = look(), ""
            except SpecproxyError as error:
                trouble = error.message


@contextlib.contextmanager
def _keys() -> Iterator[Wait]:
    """A wait that ends with True when a key to quit is pressed; the terminal's mode is put back afterwards."""
    try:
        import termios
        import tty

        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (ImportError, OSError, ValueError, termios.error):  # no terminal to read keys from: Ctrl-C is left
        never = threading.Event()
        yield never.wait
        return
    tty.setcbreak(descriptor)
    try:
        yield lambda seconds: _pressed(descriptor, seconds)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _pressed(descriptor: int, seconds: float) -> bool:
    """Whether a key to quit comes within these seconds; other keys only end the wait."""
    ready, _, _ = select.select([descriptor], [], [], seconds)
    if not ready:
        return False
    keys = os.read(descriptor, 64).decode("latin-1")
    return not keys or keys[0] in QUIT
