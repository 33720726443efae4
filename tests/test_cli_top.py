"""`specproxy top`: what it draws, when it ends, and what it does without a proxy."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specproxy.cli.top import watch
from specproxy.cli.top_view import TopView
from specproxy.errors import SpecproxyError
from specproxy.proxy.board import Board
from tests.proxy.samples import NGRAM, decision, observation
from tests.support.command import COMMAND, clean_env, run, started
from tests.support.ports import free_port
from tests.test_cli_tables import status

ANSI = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def recent(count: int = 30) -> list[dict[str, Any]]:
    board = Board()
    for _ in range(count):
        board.observe(observation(NGRAM, 0.01, draft_tokens=10, accepted_tokens=7), decision())
    return board.recent()


def data() -> dict[str, Any]:
    event = {"at": 1.0, "kind": "drift", "message": "got slower", "subject": "ngram"}
    shown = status() | {"events": [event]}
    shown["requests"]["in_flight"] = 3
    return shown


def drawn(view: TopView, width: int, height: int = 50, *, terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=terminal, highlight=False)
    console.print(view)
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_it_fits_any_width(width: int) -> None:
    """No line is longer than the terminal; head, lanes, events and requests are there."""
    text = drawn(TopView(data(), recent(5)), width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    for part in ("3 in flight", "unhealthy", "drift ngram: got slower", "Workload", " 101 "):
        assert part in flat
    assert ("exploit" in flat or "expected" in flat) or width < 76


def test_long_lane_names_leave_room_for_figures() -> None:
    """Names are cut, times and numbers are not; an event without words is its kind and subject."""
    rows = [
        row | {"lane": "ngram+draft", "tok_s": 4567.8, "workload": "json_schema/greedy"} for row in recent(3)
    ]
    event = {"at": 2.0, "kind": "lane_ready", "message": "", "subject": "mtp"}
    text = drawn(TopView(data() | {"events": [event]}, rows), 80)
    assert len(re.findall(r"^\d\d:\d\d:\d\d .* 4567\.8 .*70%", text, re.M)) == 3
    assert "lane_ready mtp\n" in text.replace(" \n", "\n")


def test_a_long_reason_leaves_room_for_names() -> None:
    """Which lane and which kind can be read; the reason takes what is left."""
    reason = "exploit: " + "ngram is expected to take less time than any other lane " * 4
    rows = [row | {"lane": "127.0.0.1:9982", "workload": "prose/greedy", "reason": reason} for row in recent(3)]
    for width in (76, 110):
        assert drawn(TopView(data(), rows), width).count("prose/greedy  127.0.0.1:9982") == 3


def test_it_is_cut_to_the_height() -> None:
    """Latest requests are left out first, since they stand last."""
    text = drawn(TopView(data(), recent(), height=20), 80)
    assert len(text.splitlines()) == 20
    assert "unhealthy" in text
    assert len(drawn(TopView(data(), recent()), 80).splitlines()) > 40


def test_nothing_measured_yet() -> None:
    """A fresh proxy without lanes or requests is drawn too."""
    empty = data() | {"lanes": [], "kinds": [], "events": []}
    assert "No request yet." in drawn(TopView(empty, []), 60)


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bold and dim may stay, colours may not."""
    colours = re.compile(r"\x1b\[[0-9;]*3[0-9]m")
    assert colours.search(drawn(TopView(data(), recent(3)), 80, terminal=True))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colours.search(drawn(TopView(data(), recent(3)), 80, terminal=True))


def scripted(*steps: Any) -> Callable[[], Any]:
    queue: Iterator[Any] = iter(steps)

    def look() -> Any:
        step = next(queue)
        if isinstance(step, Exception):
            raise step
        return step

    return look


def test_a_proxy_that_goes_is_said_to_be_away_until_it_is_back() -> None:
    """The last picture stays meanwhile."""
    out = io.StringIO()
    console = Console(file=out, width=80, height=30, force_terminal=True)
    seen: list[str] = []

    def wait(seconds: float) -> bool:
        seen.append(ANSI.sub("", out.getvalue()))
        out.seek(0)
        out.truncate()
        return len(seen) == 3

    good = (data(), recent(1))
    watch(scripted(good, SpecproxyError("no proxy is running at x"), good), wait, console, 1.0)
    assert ["trying again" in text for text in seen] == [False, True, False]
    assert "no proxy is running at x" in seen[1]
    assert "unhealthy" in seen[1]


def test_ctrl_c_ends_it_quietly() -> None:
    """The terminal is put back: rich leaves the other screen."""
    out = io.StringIO()

    def wait(seconds: float) -> bool:
        raise KeyboardInterrupt

    watch(scripted((data(), [])), wait, Console(file=out, force_terminal=True), 1.0)
    assert out.getvalue().endswith("\x1b[?1049l\x1b[?25h") or "\x1b[?1049l" in out.getvalue()


def test_without_a_proxy_it_says_how_to_start_one(tmp_path: Path) -> None:
    """Exit code 1, as for status."""
    done = run(clean_env(tmp_path), "top", "--url", f"http://127.0.0.1:{free_port()}")
    assert (done.returncode, done.stdout) == (1, "")
    assert "`specproxy start`" in done.stderr


def test_on_a_real_proxy(tmp_path: Path) -> None:
    """Once for scripts; on a terminal until q."""
    env = clean_env(tmp_path) | {"COLUMNS": "80", "TERM": "xterm"}
    with started(env, "--upstream", f"http://127.0.0.1:{free_port()}") as (_, url):
        done = run(env, "top", "--once", "--url", url)
        assert (done.returncode, done.stderr) == (0, "")
        assert "0 requests, 0 in flight" in " ".join(done.stdout.split())
        ours, theirs = pty.openpty()
        command = [*COMMAND, "top", "--url", url, "--interval", "60"]
        with subprocess.Popen(command, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as child:
            os.close(theirs)
            try:
                text = b""
                while b"in flight" not in text:
                    text += os.read(ours, 4096)
                os.write(ours, b"q")
                assert child.wait(10) == 0
            finally:
                child.kill()
        os.close(ours)
