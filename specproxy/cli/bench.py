"""`specproxy bench`: every lane and adaptive routing against plain, on the user's own prompts."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from specproxy.cli.bench_run import ROUTED, Result, measure
from specproxy.cli.lane_client import Prompt
from specproxy.cli.options import (
    ask,
    base_of,
    config_option,
    json_option,
    prompts_option,
    token_headers,
    url_option,
)
from specproxy.cli.prompts import BUILT_IN, read_prompts
from specproxy.config import Settings, load
from specproxy.errors import ConfigError, SpecproxyError

__all__ = ["bench", "notes"]

MAX_TOKENS = 128
START_S, BETWEEN_S = 300.0, 0.2  # lanes that are starting are waited for so long, looked at so often
SHOWN = 5  # failures that are told one by one

Row = dict[str, Any]
OUT = click.Path(path_type=Path, dir_okay=False)


@click.command()
@prompts_option
@click.option(
    "--captured", is_flag=True, help="Use the requests that the proxy has captured (setting capture)."
)
@click.option(
    "--lane", "only", multiple=True, metavar="ID", help="Lane or strategy to measure; repeatable. Default: all."
)
@click.option(
    "--tokens", "max_tokens", type=click.IntRange(2), default=MAX_TOKENS, show_default=True, metavar="N",
    help="Longest answer, where the prompt does not say.",
)  # fmt: skip
@click.option("--minutes", type=click.FloatRange(0, min_open=True), metavar="M", help="Stop after so long.")
@click.option("--again", is_flag=True, help="Also send prompts that were sent before; they count for nothing.")
@click.option("--seed", type=int, metavar="N", help="Order of the lanes.  [default: a new one]")
@click.option("--markdown", "markdown_file", type=OUT, metavar="FILE", help="Write a Markdown page.")
@click.option("--png", "png_file", type=OUT, metavar="FILE", help="Write a picture of the speeds.")
@url_option
@config_option
@json_option
def bench(
    file: Path | None,
    captured: bool,
    only: tuple[str, ...],
    max_tokens: int,
    minutes: float | None,
    again: bool,
    seed: int | None,
    markdown_file: Path | None,
    png_file: Path | None,
    url: str | None,
    config_path: Path | None,
    as_json: bool,
) -> int:
    """Measure every lane and adaptive routing against plain, on your own prompts.

    Each prompt goes once to where the proxy routes it, and once to every other lane, one request at a time and
    lanes in random order. No lane gets a prompt twice, since it could copy its earlier answer: repeats in the
    file, and prompts that the proxy has seen before, are left out and named.

    Exit code: 0 if every lane gave figures, 1 if one did not.
    """
    settings = load(config_path)
    prompts = _prompts(file, captured, settings)
    status = _settled(lambda: ask(url, config_path, "/specproxy/api/status"))
    lanes = _lanes(status["lanes"], only)
    base, headers = base_of(url, settings), token_headers(settings)
    seed = random.SystemRandom().randrange(1, 1_000_000) if seed is None else seed
    from specproxy.cli.bench_client import BenchClient

    result = measure(
        BenchClient(base, headers),
        [lane["id"] for lane in lanes],
        (lanes[0].get("models") or [lanes[0]["target"]])[0],
        prompts,
        max_tokens=max_tokens,
        again=again,
        seconds=float("inf") if minutes is None else 60 * minutes,
        seed=seed,
        progress=_progress,
    )
    data = _data(
        result,
        lanes,
        status,
        base,
        headers,
        {"file": _source(file, captured), "seed": seed, "max_tokens": max_tokens},
    )
    _write(data, as_json, markdown_file, png_file)
    return 0 if all(row["prompts"] for row in data["arms"]) else 1


def _prompts(file: Path | None, captured: bool, settings: Settings) -> tuple[Prompt, ...]:
    if not captured:
        return read_prompts(file) if file is not None else BUILT_IN
    if file is not None:
        raise ConfigError("--prompts and --captured exclude each other")
    from specproxy.proxy.capture import CAPTURE_FILE

    path = settings.state_dir / CAPTURE_FILE
    if not path.is_file():
        raise ConfigError(
            f"nothing was captured: there is no {path}",
            hint="set capture.requests in the configuration, restart the proxy, and use it",
        )
    return read_prompts(path)


def _settled(look: Callable[[], Row], seconds: float = START_S) -> Row:
    """The status once no lane is starting any more, or after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        status = look()
        starting = any(lane["health"] == "starting" for lane in status["lanes"])
        if not starting or time.monotonic() > deadline:
            return status
        time.sleep(BETWEEN_S)


def _source(file: Path | None, captured: bool) -> str:
    return "captured requests" if captured else str(file) if file is not None else "built-in prompts"


def _lanes(rows: Sequence[Row], only: Sequence[str]) -> list[Row]:
    """A ready plain lane first, then the others of its target that are wanted.

    Raises:
        ConfigError: `only` names a lane that is not ready.
        SpecproxyError: there is no plain lane to compare with.
    """
    ready = [row for row in rows if row["health"] == "ready"]
    plain = next((row for row in ready if row["strategy"] == "plain"), None)
    if plain is None:
        raise SpecproxyError("no plain lane is ready to compare with", hint="specproxy status")
    others = [row for row in ready if row["target"] == plain["target"] and row is not plain]
    names = {name for row in (plain, *others) for name in (row["id"], row["strategy"])}
    if unknown := sorted(set(only) - names):
        raise ConfigError(
            f"no ready lane is called {unknown[0]}", hint=f"there are: {', '.join(sorted(names))}"
        )
    return [plain, *(row for row in others if not only or row["id"] in only or row["strategy"] in only)]


def _data(
    result: Result, lanes: Sequence[Row], status: Row, base: str, headers: dict[str, str], how: Row
) -> Row:
    """The outcome as JSON-serialisable data."""
    from specproxy.cli.bench_figures import figures
    from specproxy.cli.bench_setup import fetch_json, setup_facts

    arms = [*((lane["id"], lane["strategy"]) for lane in lanes), (ROUTED, "")]
    return {
        "kind": "bench",
        "at": datetime.now().astimezone().isoformat(timespec="seconds"),
        **how,
        "used": sum(not one.seen_before for one in result.rounds),
        "not_run": result.not_run,
        "in_flight": int(status["requests"].get("in_flight") or 0),
        "repeated_lines": result.repeated,
        "seen_before_lines": result.seen_before,
        "marked_lines": [one.line for one in result.rounds if one.seen_before],
        "failures": result.failures,
        "not_ready": [
            f"{lane['id']} is {lane['health']}" + (f" ({lane['note']})" if lane["note"] else "")
            for lane in status["lanes"]
            if lane["health"] != "ready"
        ],
        "setup": setup_facts(status, base, fetch_json(base, headers)),
        **figures(result, arms, lanes[0]["id"]),
    }


def notes(data: Row) -> list[str]:
    """What must be known beside the figures."""
    found = [
        f"{data['used']} prompts from {data['file']}, at most {data['max_tokens']} tokens each unless they say "
        f"otherwise, one request at a time, lanes in random order (seed {data['seed']}), no prompt cache. "
        "Adaptive is what the proxy chose, exploring included; it was sent first."
    ]
    for name, why in (
        ("repeated_lines", "repeats in the file, left out"),
        ("seen_before_lines", "sent to this proxy before, left out: a lane could copy its earlier answer"),
        ("marked_lines", "sent to this proxy before: sent again, and in no figure"),
    ):
        if data[name]:
            found.append(f"Lines {', '.join(map(str, data[name]))}: {why}.")
    if data["not_run"]:
        found.append(f"Time was up before {data['not_run']} prompts were run.")
    if data["in_flight"]:
        found.append(f"{data['in_flight']} other requests were in flight at the start.")
    found += [f"Lane {told}: not measured." for told in data["not_ready"]]
    if not data["used"]:
        found.append("No figure: restart the proxy, so that its lanes forget, or bring other prompts.")
    found += data["failures"][:SHOWN]
    if len(data["failures"]) > SHOWN:
        found.append(f"and {len(data['failures']) - SHOWN} more failures")
    return found


def _write(data: Row, as_json: bool, markdown_file: Path | None, png_file: Path | None) -> None:
    from specproxy.cli import bench_text
    from specproxy.cli.bench_setup import setup_lines

    rows = [*data["arms"], *data["kinds"]]
    said, setup = notes(data), setup_lines(data["setup"])
    try:
        drawn = png_file is not None and bench_text.draw(png_file, "SPEED AGAINST PLAIN", rows)
        if markdown_file is not None:
            picture = png_file.name if png_file is not None and drawn else ""
            title = f"specproxy bench, {data['at']}"
            markdown_file.write_text(bench_text.markdown(title, rows, said, setup, picture), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from error
    if as_json:
        click.echo(json.dumps(data, indent=2))
    else:
        bench_text.print_table(rows, [*said, *setup])


def _progress(prompts: Sequence[Prompt]) -> Iterable[Prompt]:
    """The prompts, with a bar on stderr where that is a terminal."""
    if not sys.stderr.isatty():
        yield from prompts
        return
    with click.progressbar(prompts, label="Measuring", file=sys.stderr) as bar:
        yield from bar
