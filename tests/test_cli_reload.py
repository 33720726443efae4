"""A running proxy takes a changed configuration in, and no request notices."""

from __future__ import annotations

import http.server
import json
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import clean_env, started


class Slow(http.server.BaseHTTPRequestHandler):
    """Says that a request has arrived, and answers when the test lets it."""

    server: Any

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.arrived.set()
        self.server.go.wait(20)
        body = b'{"choices": [{"message": {"content": "done"}}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def slow_server() -> Iterator[Any]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        server.arrived, server.go = threading.Event(), threading.Event()  # type: ignore[attr-defined]  # for the handler
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.go.set()  # type: ignore[attr-defined]  # for the handler
            server.shutdown()
            thread.join()


def said(child: subprocess.Popen[str], event: str) -> dict[str, Any]:
    """The next log line of this event."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("{") and (data := json.loads(line))["event"].startswith(event):
            return dict(data)
    raise AssertionError(f"it ended without saying: {event}")


def ask(url: str, answers: list[int]) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    request = urllib.request.Request(f"{url}/v1/chat/completions", body)
    with urllib.request.urlopen(request, timeout=30) as reply:
        answers.append(reply.status)


@pytest.mark.timeout(60)
def test_settings_change_under_a_request_in_flight(tmp_path: Path) -> None:
    """A slip keeps the old ones; a good file counts from the next request on, and says what needs a restart."""
    config = tmp_path / "config.yaml"
    config.write_text("threads: 1\nlog: {format: json}\n")
    with slow_server() as server:
        upstream = f"http://127.0.0.1:{server.server_port}"
        more = ["--config", str(config), "--upstream", upstream]
        with started(clean_env(tmp_path) | {"TOKEN_HERE": "s3cret"}, *more) as (child, url):
            answers: list[int] = []
            client = threading.Thread(target=ask, args=(url, answers))
            client.start()
            assert server.arrived.wait(20)
            config.write_text("tokn: x\n")
            child.send_signal(signal.SIGHUP)
            kept = said(child, "configuration not taken")
            assert f"{config}: tokn: no such key; did you mean token?" in kept["error"]
            config.write_text("threads: 2\ntoken: ${TOKEN_HERE}\nlog: {format: json}\n")
            child.send_signal(signal.SIGHUP)
            assert said(child, "configuration read again")["changed"] == ["token"]
            assert said(child, "some settings need a restart")["settings"] == ["threads"]
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(f"{url}/v1/models", timeout=10)
            server.go.set()
            client.join(20)
            assert answers == [200]
            child.send_signal(signal.SIGTERM)
            assert child.wait(30) == 0
