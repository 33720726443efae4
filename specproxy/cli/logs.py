"""`specproxy logs`: what a proxy has said, from the log file that it writes."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, get_args

import click
import orjson

from specproxy.cli.groups import Choice
from specproxy.cli.options import config_option
from specproxy.config import LogSettings, load
from specproxy.errors import ConfigError, SpecproxyError
from specproxy.logfile import LOG_FILE, Tail

__all__ = ["logs", "moment", "wanted"]

LEVELS = get_args(LogSettings.model_fields["level"].annotation)
LOOK_S = 0.25  # between looks while following
Row = dict[str, Any]

_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(0), default=50, show_default=True, metavar="N",
              help="Latest lines to begin with; 0 for all.")  # fmt: skip
@click.option("--level", type=Choice(LEVELS), default="debug", help="Least severe level to show.")
@click.option("--since", metavar="WHEN", help="Not before: 90s, 10m, 2h, 3d ago, 14:30, or 2026-05-01T14:30.")
@click.option("--json", "as_json", is_flag=True, help="Print lines as they were written, in JSON.")
@click.option("--path", "only_path", is_flag=True, help="Print where the file is.")
@config_option
def logs(
    follow: bool,
    lines: int,
    level: str,
    since: str | None,
    as_json: bool,
    only_path: bool,
    config_path: Path | None,
) -> None:
    """Show what the proxy has said: requests, lanes, drift, errors.

    It reads the file that `specproxy start` writes into the state directory, whether the proxy runs or not.
    """
    if level not in LEVELS:
        raise ConfigError(f"--level: {level} is no level", hint=f"one of {', '.join(LEVELS)}")
    fits = wanted(level, moment(since, datetime.now().astimezone()) if since else None)
    path = load(config_path).state_dir / LOG_FILE
    if only_path:
        click.echo(str(path))
        return
    if not path.exists():
        raise SpecproxyError(
            f"there is no log at {path}", hint="`specproxy start` writes it, unless log.file is off"
        )
    show: Callable[[Row, str], None] = _print_raw if as_json else _printer()
    tail = Tail(path)
    try:
        for row, line in deque(_parsed((*tail.earlier(), *tail.new()), fits), maxlen=lines or None):
            show(row, line)
        while follow:
            time.sleep(LOOK_S)
            for row, line in _parsed(tail.new(), fits):
                show(row, line)
    except KeyboardInterrupt:
        return
    except OSError as error:
        raise SpecproxyError(f"{path} cannot be read: {error.strerror}") from error
    finally:
        tail.close()


def _parsed(lines: Iterable[str], fits: Callable[[Row], bool]) -> Iterator[tuple[Row, str]]:
    for line in lines:
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue  # cut off by a full disk or a power cut
        if isinstance(row, dict) and fits(row):
            yield row, line


def wanted(level: str, since: datetime | None) -> Callable[[Row], bool]:
    """Whether a line is at least as severe as `level`, and not from before `since`."""
    severity = {name: number for number, name in enumerate([*LEVELS, "critical"])}

    def fits(row: Row) -> bool:
        if severity.get(str(row.get("level")), 1) < severity[level]:
            return False
        if since is None:
            return True
        try:
            return datetime.fromisoformat(str(row.get("time"))) >= since
        except ValueError:
            return False

    return fits


def moment(text: str, now: datetime) -> datetime:
    """A time: so long ago, a time of day (the last one that was), or a date with or without a time.

    Raises:
        ConfigError: it is none of these.
    """
    if ago := _AGO.fullmatch(text.strip().removesuffix("ago").strip()):
        return now - timedelta(**{_UNITS[ago[2]]: float(ago[1])})
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}(:\d{2})?", text):
            hour, minute, *rest = map(int, text.split(":"))
            today = now.replace(hour=hour, minute=minute, second=rest[0] if rest else 0, microsecond=0)
            return today if today <= now else today - timedelta(days=1)
        given = datetime.fromisoformat(text)
    except ValueError:
        hint = "such as 10m, 2h, 14:30 or 2026-05-01T14:30"
        raise ConfigError(f"--since: {text} is no time", hint=hint) from None
    return given if given.tzinfo is not None else given.replace(tzinfo=now.tzinfo)


def _print_raw(row: Row, line: str) -> None:
    del row
    click.echo(line)


def _printer() -> Callable[[Row, str], None]:
    """Prints lines as a terminal shows them, with the day where it changes."""
    from specproxy.logs import Human

    human = Human(sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    today = [datetime.now().astimezone().date().isoformat()]

    def show(row: Row, line: str) -> None:
        del line
        day = str(row.get("time"))[:10]
        if day != today[0]:
            today[0] = day
            click.echo(f"-- {day} --")
        click.echo(human(None, "", row))

    return show
