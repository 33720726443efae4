"""`specproxy logs`: what is shown, from when, and how."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from specproxy.cli import main
from specproxy.cli.logs import moment
from specproxy.errors import ConfigError
from specproxy.logfile import LOG_FILE, older
from tests.support.command import COMMAND, clean_env, run, started
from tests.support.ports import free_port

NOW = datetime.fromisoformat("2026-05-02T12:00:00+02:00")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", "2026-05-02T11:58:30+02:00"),
        ("10m ago", "2026-05-02T11:50:00+02:00"),
        ("1.5h", "2026-05-02T10:30:00+02:00"),
        ("2d", "2026-04-30T12:00:00+02:00"),
        ("11:30", "2026-05-02T11:30:00+02:00"),
        ("14:30", "2026-05-01T14:30:00+02:00"),
        ("2026-05-01", "2026-05-01T00:00:00+02:00"),
        ("2026-05-01T10:00Z", "2026-05-01T12:00:00+02:00"),
    ],
)
def test_times(text: str, expected: str) -> None:
    """So long ago, a time of day that was, a date."""
    assert moment(text, NOW) == datetime.fromisoformat(expected)


@pytest.mark.parametrize("text", ["", "soon", "25:00", "10", "-3h", "2026-13-01"])
def test_what_is_no_time(text: str) -> None:
    """With what would be one."""
    with pytest.raises(ConfigError, match="is no time"):
        moment(text, NOW)


def line(event: str, level: str = "info", ago: float = 0.0, **fields: Any) -> str:
    at = (datetime.now().astimezone() - timedelta(seconds=ago)).isoformat(timespec="milliseconds")
    return json.dumps({"time": at, "level": level, "event": event, **fields})


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECPROXY_STATE_DIR", str(tmp_path))
    older(tmp_path / LOG_FILE, 1).write_text(line("started", ago=7200) + "\n")
    lines = [
        line(
            "request",
            ago=60,
            workload="code/greedy",
            lane="ngram",
            outcome="complete",
            total_s=2.4,
            rule="only",
        ),
        line("lane unhealthy", "warning", 30, lane="ngram"),
        "not JSON",
        line("a detail", "debug", 10),
    ]
    (tmp_path / LOG_FILE).write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("args", "events"),
    [
        ([], ["started", "request", "lane unhealthy", "a detail"]),
        (["-n", "2"], ["lane unhealthy", "a detail"]),
        (["--level", "warning"], ["lane unhealthy"]),
        (["--since", "45s"], ["lane unhealthy", "a detail"]),
        (["-n", "0", "--level", "info"], ["started", "request", "lane unhealthy"]),
    ],
)
def test_lines_are_chosen(
    state: Path, capsys: pytest.CaptureFixture[str], args: list[str], events: list[str]
) -> None:
    """By number, level and time; rotated files count; what is no JSON is left out."""
    assert main(["logs", "--json", *args]) == 0
    assert [json.loads(text)["event"] for text in capsys.readouterr().out.splitlines()] == events


def test_they_look_as_on_the_proxys_terminal(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the time when they were written, and no colour into a pipe."""
    assert main(["logs", "-n", "3"]) == 0
    shown = [text for text in capsys.readouterr().out.splitlines() if not text.startswith("-- ")]
    assert [text[9:] for text in shown] == [
        "code/greedy → ngram  2.40 s (only)",
        "warning lane unhealthy lane=ngram",
        "debug a detail",
    ]
    written = json.loads((state / LOG_FILE).read_text().splitlines()[0])["time"]
    assert shown[0][:8] == written[11:19]


def test_where_there_is_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Exit code 1 and what writes one; 2 for what is no level."""
    monkeypatch.setenv("SPECPROXY_STATE_DIR", str(tmp_path))
    assert main(["logs"]) == 1
    assert "`specproxy start` writes it" in capsys.readouterr().err
    assert main(["logs", "--path"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / LOG_FILE}\n"
    assert main(["logs", "--level", "loud"]) == 2
    assert main(["logs", "--since", "soon"]) == 2


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Children do not ignore SIGINT, which shells have background jobs do."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_real_proxy_writes_it_and_it_can_be_followed(tmp_path: Path) -> None:
    """From another process, until Ctrl-C, which is no error; --no-log-file writes none."""
    env = clean_env(tmp_path)
    upstream = ("--upstream", f"http://127.0.0.1:{free_port()}")
    with (
        started(env, *upstream),
        subprocess.Popen(
            [*COMMAND, "logs", "--follow", "--json"], env=env, stdout=subprocess.PIPE, text=True
        ) as follower,
    ):
        assert follower.stdout is not None
        while json.loads(follower.stdout.readline())["event"] != "started":
            pass
        follower.send_signal(signal.SIGINT)
        assert follower.wait(10) == 0
    path = Path(run(env, "logs", "--path").stdout.strip())
    assert path.is_file()
    path.unlink()
    with started(env, *upstream, "--no-log-file"):
        pass
    assert not path.exists()
