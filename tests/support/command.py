"""`specproxy` as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.ports import free_port

__all__ = ["COMMAND", "clean_env", "get", "leaks", "run", "settled", "started", "wait_healthy"]

COMMAND = [sys.executable, "-m", "specproxy"]


def clean_env(tmp_path: Path) -> dict[str, str]:
    """An environment without the user's settings and statistics."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPECPROXY_")}
    return kept | {"XDG_CONFIG_HOME": str(tmp_path / "config"), "XDG_STATE_HOME": str(tmp_path / "state")}


@contextmanager
def started(env: Mapping[str, str], *args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A proxy that answers, and its URL; stopped at the end, and its children with it.

    It measures no lanes by itself, unless `env` says so.
    """
    port = free_port()
    command = [*COMMAND, "start", "--port", str(port), *args]
    env = {"SPECPROXY_PROFILE": "false"} | dict(env)
    child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_healthy(child, url)
        yield child, url
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate()


def wait_healthy(child: subprocess.Popen[str], url: str) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise AssertionError(f"ended with {child.returncode}: {child.communicate()}")
        try:
            with urllib.request.urlopen(f"{url}/specproxy/health", timeout=5):
                return
        except OSError:
            time.sleep(0.02)
    raise AssertionError("the proxy did not come up")


def run(env: Mapping[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], env=env, capture_output=True, text=True, timeout=30, check=False)


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as reply:
        return json.load(reply)


def settled(url: str) -> dict[str, Any]:
    """The status once no lane is starting any more, and every server has been looked at."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        data: dict[str, Any] = get(f"{url}/specproxy/api/status")
        known = all(server["reachable"] for server in data["upstreams"])
        if known and data["lanes"] and all(lane["health"] != "starting" for lane in data["lanes"]):
            return data
        time.sleep(0.05)
    raise AssertionError("the lanes did not settle")


def leaks(text: str, output: str, env: Mapping[str, str]) -> list[str]:
    """Where a text from a prompt has been left: the output, or files below the state directory."""
    found = ["output"] if text in output else []
    files = [path for path in Path(env["XDG_STATE_HOME"]).rglob("*") if path.is_file()]
    assert files, "nothing was kept at all"
    return found + [str(path) for path in files if text.encode() in path.read_bytes()]
