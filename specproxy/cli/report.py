"""`specproxy report`: what was really served lately, against plain."""

from __future__ import annotations

import contextlib
import json
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specproxy.cli.options import ask, base_of, config_option, json_option, token_headers, url_option
from specproxy.cli.text import counted, duration
from specproxy.config import Settings, load
from specproxy.errors import ConfigError, SpecproxyError

if TYPE_CHECKING:
    from specproxy.store import Store

__all__ = ["report", "sentence"]

MOST = 100_000  # requests that are looked at; the store keeps fewer
DAY_S = 86_400.0
STATE_FILE = "state.db"

Row = dict[str, Any]
OUT = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.option(
    "--days", type=click.FloatRange(0, min_open=True), default=7.0, show_default=True, metavar="N",
    help="How far to look back.",
)  # fmt: skip
@click.option("--markdown", "markdown_file", type=OUT, metavar="FILE", help="Write a Markdown page.")
@click.option("--png", "png_file", type=OUT, metavar="FILE", help="Write a picture of the speeds.")
@url_option
@config_option
@json_option
def report(
    days: float,
    markdown_file: Path | None,
    png_file: Path | None,
    url: str | None,
    config_path: Path | None,
    as_json: bool,
) -> None:
    """Report what was really served, against plain.

    Reads the stored statistics, with or without a running proxy. Each request on another lane is compared with
    the plain request of the same model, kind and temperature that comes nearest in context, load and time.
    Models and lanes are told by the proxy, if it runs.
    """
    settings = load(config_path)
    data = _data(settings, days, url, config_path)
    from specproxy.cli import bench_text
    from specproxy.cli.bench_setup import setup_lines

    rows, notes, setup = [*data["arms"], *data["kinds"]], _notes(data), setup_lines(data["setup"])
    try:
        drawn = png_file is not None and bench_text.draw(png_file, "SPEED AGAINST PLAIN, AS SERVED", rows)
        if markdown_file is not None:
            picture = png_file.name if png_file is not None and drawn else ""
            title = f"specproxy report, {data['at']}"
            page = bench_text.markdown(title, rows, [data["summary"], *notes], setup, picture)
            markdown_file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from error
    if as_json:
        click.echo(json.dumps(data, indent=2))
        return
    click.echo(data["summary"])
    click.echo()
    bench_text.print_table(rows, [*notes, *setup])


def _data(settings: Settings, days: float, url: str | None, config_path: Path | None) -> Row:
    """The report as JSON-serialisable data.

    Raises:
        SpecproxyError: nothing is stored, or it cannot be read.
    """
    from specproxy.cli.bench_setup import fetch_json, setup_facts
    from specproxy.cli.report_figures import match, report_rows

    store = _store(settings)
    try:
        since = time.time() - days * DAY_S
        recent = [seen for seen in store.recent(MOST) if seen.at >= since]
    finally:
        store.close()
    status, base = None, base_of(url, settings)
    with contextlib.suppress(SpecproxyError):
        status = ask(url, config_path, "/specproxy/api/status")
    matched, left_out = match(recent)
    data: Row = {
        "kind": "report",
        "at": datetime.now().astimezone().isoformat(timespec="seconds"),
        "days": days,
        "requests": len(recent),
        "used": len(matched),
        "left_out": dict(left_out),
        "setup": setup_facts(status, base, fetch_json(base, token_headers(settings))),
        **report_rows(matched),
    }
    return data | {"summary": sentence(data)}


def _store(settings: Settings) -> Store:
    """Where the proxy of these settings keeps what it has measured.

    Raises:
        SpecproxyError: there is nothing yet, or it cannot be read.
    """
    if settings.store is not None:
        from specproxy.store.redis import RedisStore

        return RedisStore(settings.store.get_secret_value())
    from specproxy.store.sqlite import SqliteStore

    path = settings.state_dir / STATE_FILE
    if not path.is_file():
        raise SpecproxyError(
            f"nothing was served yet: there is no {path}",
            hint="start a proxy with `specproxy start`, and point a client at it",
        )
    return SqliteStore(path)


def sentence(data: Row) -> str:
    """What it all comes to, and how sure that is."""
    span = f"Last {data['days']:g} days: {counted(data['requests'], 'request')}"
    gain = data["arms"][-1]["end_to_end"]
    if gain is None:
        return f"{span}, none of which can be compared with plain."
    verb = "saved" if gain["saved_s"] >= 0 else "lost"
    told = f"{span}. Against always plain, specproxy {verb} about {duration(abs(gain['saved_s']))}"
    if gain["sure"] is None:
        return f"{told}; too few to tell how sure that is."
    return (
        f"{told} (95% interval: {_saved(gain['saved_low_s'])} to {_saved(gain['saved_high_s'])}), end to end "
        f"{gain['speed']:.2f}x ({gain['low']:.2f}–{gain['high']:.2f}). "
        f"That it gained at all is {gain['sure']:.0%} sure."
    )


def _saved(seconds: float) -> str:
    return duration(seconds) if seconds >= 0 else f"{duration(-seconds)} lost"


def _notes(data: Row) -> list[str]:
    """What must be known beside the figures."""
    found = [
        "Each request is compared with the plain request of the same model, kind and temperature that comes "
        "nearest in context, load and time; what came before decoding counts as it was. Partners are not the "
        "same prompts, so `specproxy bench` is the sharper test."
    ]
    if data["left_out"]:
        counts = ", ".join(f"{count} {why}" for why, count in sorted(data["left_out"].items()))
        found.append(f"Left out: {counts}.")
    if unmatched := sum(row["unmatched"] for row in data["arms"][:-1]):
        found.append(f"Without a plain partner, and in no comparison: {counted(unmatched, 'request')}.")
    return found
