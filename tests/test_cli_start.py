"""`specproxy start` and `status` as processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.command import COMMAND, clean_env, run, settled, started, wait_healthy
from tests.support.ports import free_port
from tests.support.server import openai_like

pytestmark = pytest.mark.timeout(60)  # processes of a busy machine take their time


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An environment without the user's settings."""
    return clean_env(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(env: dict[str, str], number: signal.Signals) -> None:
    """Exit code 0, JSON log lines only, nothing on stderr, no process left."""
    with started(env, "--upstream", f"http://127.0.0.1:{free_port()}") as (child, _):
        process = psutil.Process(child.pid)
        assert child.stdout is not None
        while json.loads(child.stdout.readline())["event"] != "started":
            pass
        child.send_signal(number)
        out, err = child.communicate(timeout=20)
        assert (child.returncode, err) == (0, "")
        assert [json.loads(line)["event"] for line in out.splitlines()][-1] == "stopped"
        assert not process.is_running()


def test_a_taken_port_ends_it_with_exit_code_2(env: dict[str, str]) -> None:
    """The message names the address and what to do; nothing is left running."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run(env, "start", "--port", str(port), "--upstream", "http://127.0.0.1:9")
    assert done.returncode == 2
    assert done.stderr.startswith(f"specproxy: cannot listen on 127.0.0.1:{port}: ")
    assert "already in use\n" in done.stderr
    assert "choose another --port" in done.stderr
    assert "specproxy status" in done.stderr
    assert len(done.stderr.splitlines()) <= 2


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_an_address_of_another_machine_ends_it_with_exit_code_2(host: str, env: dict[str, str]) -> None:
    """Another port would not help."""
    done = run(env | {"SPECPROXY_TOKEN": "t"}, "start", "--host", host, "--port", str(free_port()))
    assert done.returncode == 2
    assert f"cannot listen on {host}:" in done.stderr
    assert "choose a --host that this machine has" in done.stderr


def test_an_absent_upstream_is_said_and_answered(env: dict[str, str]) -> None:
    """The log names what was probed; requests get 503; status says that it cannot be reached."""
    upstream = f"http://127.0.0.1:{free_port()}"
    with started(env, "--upstream", upstream) as (child, url):
        request = urllib.request.Request(f"{url}/v1/chat/completions", data=b'{"messages":[]}')
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=5)
        assert caught.value.code == 503
        caught.value.close()
        done = run(env, "status", "--url", url)
        assert done.returncode == 0
        assert f"Upstream {upstream}: not reachable" in done.stdout
        assert psutil.Process(child.pid).memory_info().rss < 90e6
        child.terminate()
        out, _ = child.communicate(timeout=20)
        assert upstream in out


async def test_status_shows_what_was_measured(env: dict[str, str]) -> None:
    """As a table and as JSON, for a request that went through."""

    def session(upstream: str) -> tuple[str, dict[str, Any]]:
        with started(env, "--upstream", upstream) as (_, url):
            settled(url)  # what is measured before the server is known is not shown among what it does
            body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
            with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/chat/completions", data=body)):
                pass
            table = run(env | {"COLUMNS": "80", "NO_COLOR": "1"}, "status", "--url", url).stdout
            return table, json.loads(run(env, "status", "--url", url, "--json").stdout)

    async with openai_like() as upstream:
        table, data = await asyncio.to_thread(session, upstream.url)
    assert data["requests"]["total"] == 1
    [row] = data["kinds"]
    assert f"{row['workload']} " in table
    assert "100%" in table
    assert max(map(len, table.splitlines())) <= 80


def test_on_a_terminal_it_says_where_it_listens(env: dict[str, str]) -> None:
    """A terminal gets a banner for people instead of JSON."""
    port, upstream = free_port(), f"http://127.0.0.1:{free_port()}"
    leader, follower = pty.openpty()
    command = [*COMMAND, "start", "--port", str(port), "--upstream", upstream]
    child = subprocess.Popen(command, env=env | {"NO_COLOR": "1"}, stdout=follower, stderr=follower, text=True)
    os.close(follower)
    try:
        wait_healthy(child, f"http://127.0.0.1:{port}")
        text = b""
        while b"Point your client at" not in text:
            text += os.read(leader, 4096)
        assert f"listens at http://127.0.0.1:{port}".encode() in text
        assert f"{upstream}: not reachable".encode() in text
        assert b'{"' not in text
    finally:
        child.kill()
        child.wait()
        os.close(leader)
