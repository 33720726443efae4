"""Logging: for people on a terminal, JSON lines elsewhere, and never a word of a prompt.

Lines are rendered by the caller and written by one thread, so that a slow terminal or a full pipe cannot hold
up the event loop. If the reader falls behind by more than `BACKLOG` lines, lines are dropped and counted.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, MutableMapping
from datetime import datetime
from typing import Any, Protocol, TextIO

import orjson
import structlog

from specproxy.records import Decision, Observation

__all__ = ["BACKLOG", "Human", "LineWriter", "configure", "request_fields", "set_level", "wants_json"]

BACKLOG = 10_000

Event = MutableMapping[str, Any]


Render = Callable[[Any, str, Event], str]


class Stream(Protocol):
    """Where lines are written."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


_COLOURS = {"debug": "2", "info": "32", "warning": "33", "error": "31", "critical": "31;1"}


class LineWriter:
    """Writes lines to a stream from a thread of its own; `write` never blocks."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._lines: deque[str] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Queue one line (without its newline)."""
        with self._wake:
            if len(self._lines) >= BACKLOG:
                self._dropped += 1
                return
            self._lines.append(line)
            self._wake.notify()

    def close(self, timeout: float = 1.0) -> None:
        """Write what is queued and stop; gives up after `timeout` seconds. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._lines and not self._closing:
                    self._wake.wait()
                lines = list(self._lines)
                self._lines.clear()
                dropped, self._dropped = self._dropped, 0
                closing = self._closing
            if dropped:
                lines.append(orjson.dumps({"event": "log lines dropped", "count": dropped}).decode())
            try:
                self._stream.write("".join(line + "\n" for line in lines))
                self._stream.flush()
            except (OSError, ValueError):  # the reader has gone: logging must not end the proxy
                pass
            if closing:
                return


def wants_json(choice: str, stream: TextIO) -> bool:
    """Whether to log JSON on `stream`, given the setting (auto, human or json)."""
    return choice == "json" or (choice == "auto" and not stream.isatty())


def configure(
    *,
    level: str = "info",
    as_json: bool = False,
    stream: TextIO | None = None,
    record: Callable[[str], None] | None = None,
) -> LineWriter:
    """Send structlog and the standard library's logging to `stream` (default stdout).

    `record` gets every line too, as JSON. Returns the writer; close it at exit, or the last lines are lost.
    """
    stream = stream or sys.stdout
    writer = LineWriter(stream)
    colour = not as_json and stream.isatty() and "NO_COLOR" not in os.environ
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.format_exc_info,
    ]
    render: Render = _render_json if as_json else Human(colour)
    if record is not None:
        render = _Recorded(render, record)
    threshold = getattr(logging, level.upper())
    structlog.configure(
        processors=[*shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=lambda *_: _Target(writer),
        cache_logger_on_first_use=False,
    )
    handler = _Handler(writer)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(threshold)
    for noisy in ("asyncio", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(max(threshold, logging.WARNING))
    return writer


def set_level(level: str) -> None:
    """Change the least severe level that is written, after `configure`."""
    threshold = getattr(logging, level.upper())
    known = structlog.get_config()
    structlog.configure(**known | {"wrapper_class": structlog.make_filtering_bound_logger(threshold)})
    logging.getLogger().setLevel(threshold)


class _Target:
    """What a structlog logger ends in: every level is one more line."""

    def __init__(self, writer: LineWriter) -> None:
        self._write = writer.write

    def msg(self, message: str) -> None:
        self._write(message)

    log = debug = info = warn = warning = error = critical = fatal = exception = failure = err = msg


class _Handler(logging.Handler):
    """The standard library's way into the same writer."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        self._writer.write(self.format(record))


def _now() -> datetime:
    return datetime.now().astimezone()


def _render_json(_: Any, __: str, event: Event) -> str:
    """One JSON object: time, level, event first, then the rest."""
    head = {"time": _now().isoformat(timespec="milliseconds"), "level": event.pop("level", "info")}
    head["event"] = str(event.pop("event", ""))
    return orjson.dumps(head | dict(event), default=str, option=orjson.OPT_NON_STR_KEYS).decode()


class _Recorded:
    """Renders a line, and gives it to `record` as JSON too."""

    def __init__(self, render: Render, record: Callable[[str], None]) -> None:
        self._render = render
        self._record = record

    def __call__(self, logger: Any, name: str, event: Event) -> str:
        self._record(_render_json(logger, name, dict(event)))
        return self._render(logger, name, event)


class Human:
    """``12:03:04 warning lane died lane=ngram``: time, a word for anything but info, event, fields."""

    def __init__(self, colour: bool) -> None:
        self._colour = colour

    def _paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text

    def __call__(self, _: Any, __: str, event: Event) -> str:
        level = str(event.pop("level", "info"))
        trace = event.pop("exception", None)
        name = str(event.pop("event", ""))
        written = event.pop("time", None)  # by whoever reads a log of JSON lines
        at = datetime.fromisoformat(str(written)) if written else _now()
        parts = [self._paint(at.strftime("%H:%M:%S"), "2")]
        if name == "request":
            return " ".join([*parts, _request_line(event)])
        if level != "info":
            parts.append(self._paint(level, _COLOURS.get(level, "0")))
        parts.append(name if level == "info" else self._paint(name, "1"))
        parts += [
            f"{self._paint(key + '=', '2')}{_value(value)}" for key, value in event.items() if value is not None
        ]
        line = " ".join(parts)
        return f"{line}\n{trace}" if trace else line


def _request_line(event: Event) -> str:
    """``code/greedy → ngram 212 tok 87.3 tok/s acc 74% ttft 31 ms 2.4 s (exploit)``, less what is unknown."""
    parts = [f"{event.get('workload', '?')} → {event.get('lane') or 'no lane'}"]
    if event.get("outcome") != "complete":
        parts.append(f"{event.get('outcome')} {event.get('status') or ''}".strip())
    for key, form in (("tokens", "{} tok"), ("tok_s", "{} tok/s"), ("acceptance", "acc {:.0%}")):
        if event.get(key) is not None:
            parts.append(form.format(event[key]))
    if "ttft_ms" in event:
        parts.append(f"ttft {event['ttft_ms']:.0f} ms")
    parts.append(f"{event.get('total_s', 0.0):.2f} s ({event.get('rule') or 'no rule'})")
    return "  ".join(parts)


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return repr(text) if " " in text else text


def request_fields(observation: Observation, decision: Decision | None = None) -> dict[str, object]:
    """What the `request` line says of a finished request: names and numbers only."""
    seen = observation
    per_token = seen.time_per_token
    fields: dict[str, object] = {
        "id": seen.request_id,
        "workload": seen.workload.key,
        "lane": seen.lane,
        "strategy": seen.strategy,
        "rule": seen.rule,
        "status": seen.status,
        "outcome": str(seen.outcome),
        "tokens": seen.output_tokens,
        "tok_s": round(1 / per_token, 1) if per_token else None,
        "acceptance": round(seen.acceptance, 3) if seen.acceptance is not None else None,
        "ttft_ms": round(seen.ttft_s * 1e3, 1) if seen.ttft_s is not None else None,
        "total_s": round(seen.total_s, 3),
        "reason": decision.reason if decision else None,
    }
    return {key: value for key, value in fields.items() if value is not None}
