"""Log lines: their two forms, and that writing them never waits."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator

import pytest
import structlog

from specproxy import logs
from specproxy.records import Outcome
from tests.proxy.samples import NGRAM, decision, observation


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger()
    level = root.level
    yield
    structlog.reset_defaults()
    root.setLevel(level)
    for handler in [h for h in root.handlers if type(h).__module__ == logs.__name__]:
        root.removeHandler(handler)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(stream: io.StringIO, writer: logs.LineWriter) -> list[str]:
    writer.close()
    return stream.getvalue().splitlines()


def test_json_lines() -> None:
    """One object a line, from structlog and from the standard library, with the fields given."""
    stream = io.StringIO()
    writer = logs.configure(as_json=True, stream=stream)
    structlog.get_logger().info("lane ready", lane="ngram", memory=5)
    logging.getLogger("some.module").warning("it %s", "failed")
    first, second = map(json.loads, lines(stream, writer))
    assert (first["event"], first["level"], first["lane"], first["memory"]) == (
        "lane ready",
        "info",
        "ngram",
        5,
    )
    assert (second["event"], second["level"]) == ("it failed", "warning")
    assert "time" in first


def test_human_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without colour where NO_COLOR is set; level only where it is not info."""
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    writer = logs.configure(stream=stream)
    structlog.get_logger().warning("lane died", lane="ngram", note="exit code 1")
    structlog.get_logger().info("started")
    first, second = lines(stream, writer)
    assert first[8:] == " warning lane died lane=ngram note='exit code 1'"
    assert second[8:] == " started"


def test_colour_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal gets colour unless told otherwise."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    writer = logs.configure(stream=stream)
    structlog.get_logger().warning("x")
    assert "\x1b[33m" in lines(stream, writer)[0]


def test_level_is_respected() -> None:
    """Both sources drop what is below the level."""
    stream = io.StringIO()
    writer = logs.configure(level="warning", as_json=True, stream=stream)
    structlog.get_logger().info("no")
    logging.getLogger("m").info("no")
    structlog.get_logger().error("yes")
    assert len(lines(stream, writer)) == 1


def test_an_exception_is_one_json_line() -> None:
    """The trace is a field, without local variables."""
    stream = io.StringIO()
    writer = logs.configure(as_json=True, stream=stream)
    secret = "canary"  # a local variable that must not be printed
    try:
        raise ValueError(len(secret))
    except ValueError:
        structlog.get_logger().exception("oops")
    [line] = lines(stream, writer)
    assert "ValueError: 6" in json.loads(line)["exception"]
    assert "secret" not in line.replace("len(secret)", "")


def test_the_request_line_for_people() -> None:
    """One readable line; what is unknown is left out."""
    stream = Terminal()
    writer = logs.configure(stream=stream)
    seen = observation(NGRAM, 0.01, draft_tokens=100, accepted_tokens=74)
    structlog.get_logger().info("request", **logs.request_fields(seen, decision()))
    failed = observation(NGRAM, outcome=Outcome.ERROR, status=500, output_tokens=0, decode_s=None, ttft_s=None)
    structlog.get_logger().info("request", **logs.request_fields(failed))
    first, second = lines(stream, writer)
    assert "code/greedy → ngram  101 tok  100.0 tok/s  acc 74%  ttft 30 ms  1.03 s (exploit)" in first
    assert "code/greedy → ngram  error 500  0 tok  2.03 s (exploit)" in second


def test_request_fields_name_everything_that_is_known() -> None:
    """The JSON form carries lane, strategy, workload, rule, reason, numbers and outcome."""
    fields = logs.request_fields(observation(NGRAM, 0.01, draft_tokens=4, accepted_tokens=3), decision())
    assert fields == {
        "id": "r1", "workload": "code/greedy", "lane": "ngram", "strategy": "ngram", "rule": "exploit",
        "status": 200, "outcome": "complete", "tokens": 101, "tok_s": 100.0, "acceptance": 0.75,
        "ttft_ms": 30.0, "total_s": 1.03, "reason": "ngram is expected to be fastest",
    }  # fmt: skip


class Stuck(io.StringIO):
    """A stream whose reader does not read until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.release = threading.Event()

    def write(self, text: str) -> int:
        self.entered.set()
        self.release.wait(10)
        return super().write(text)


def test_a_stuck_reader_does_not_hold_up_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines beyond the backlog are dropped and counted, and writing goes on without waiting."""
    monkeypatch.setattr(logs, "BACKLOG", 5)
    stream = Stuck()
    writer = logs.LineWriter(stream)
    writer.write("first")
    assert stream.entered.wait(5)
    for n in range(8):
        writer.write(str(n))  # returns although nothing is being read
    stream.release.set()
    written = lines(stream, writer)
    assert written[:6] == ["first", "0", "1", "2", "3", "4"]
    assert json.loads(written[6]) == {"event": "log lines dropped", "count": 3}


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_reader_that_left_is_no_error() -> None:
    """A closed pipe ends logging, not the proxy."""
    writer = logs.LineWriter(Gone())
    writer.write("x")
    writer.close()


@pytest.mark.parametrize(
    ("choice", "terminal", "expected"),
    [("auto", True, False), ("auto", False, True), ("json", True, True), ("human", False, False)],
)
def test_choice_of_form(choice: str, terminal: bool, expected: bool) -> None:
    """auto looks at the stream; the other two don't."""
    assert logs.wants_json(choice, Terminal() if terminal else io.StringIO()) is expected
