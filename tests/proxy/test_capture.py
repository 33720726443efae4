"""Keeping requests: off by default, private, capped, and never in the way."""

from __future__ import annotations

import json
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from specproxy.adapters.tasks import Tasks
from specproxy.config import Settings
from specproxy.proxy.capture import Capture
from specproxy.proxy.headers import read_inbound

PATH = "/v1/chat/completions"


@pytest.fixture
async def tasks() -> AsyncIterator[Tasks]:
    tasks = Tasks()
    yield tasks
    await tasks.aclose()


async def keep(capture: Capture, tasks: Tasks, *bodies: bytes) -> list[object]:
    """Offer bodies one after the other; what is in the file then."""
    for body in bodies:
        await capture._keep(PATH, body)
    if not capture.path.exists():
        return []
    return [json.loads(line)["body"] for line in capture.path.read_text().splitlines()]


def test_it_is_off_by_default() -> None:
    """Nothing is kept unless somebody asks for it."""
    assert Settings().capture.requests == 0


async def test_the_file_is_private_and_capped(tmp_path: Path, tasks: Tasks) -> None:
    """By number; what an earlier run has kept counts."""
    path = tmp_path / "state" / "captured.jsonl"
    kept = await keep(Capture(path, 3, 10_000, tasks), tasks, b'{"a": 1}', b'{"a": 2}')
    assert kept == [{"a": 1}, {"a": 2}]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(await keep(Capture(path, 3, 10_000, tasks), tasks, b'{"a": 3}', b'{"a": 4}')) == 3


async def test_size_is_capped_too(tmp_path: Path, tasks: Tasks) -> None:
    """A request that would go beyond it is not kept."""
    capture = Capture(tmp_path / "c.jsonl", 100, 120, tasks)
    kept = await keep(capture, tasks, b'{"a": 1}', json.dumps({"a": "x" * 200}).encode())
    assert kept == [{"a": 1}]
    assert capture.path.stat().st_size <= 120


async def test_a_disk_that_fails_costs_nothing(tmp_path: Path, tasks: Tasks) -> None:
    """No exception reaches whoever answers."""
    (tmp_path / "file").write_text("in the way")
    assert await keep(Capture(tmp_path / "file" / "c.jsonl", 3, 10_000, tasks), tasks, b"{}") == []


async def test_zero_keeps_nothing(tmp_path: Path, tasks: Tasks) -> None:
    """No task and no file."""
    capture = Capture(tmp_path / "c.jsonl", 0, 10_000, tasks)
    capture.offer(PATH, b"{}")
    assert capture._waiting == 0


def test_a_client_can_keep_a_request_private() -> None:
    """By a header, which no upstream sees."""
    inbound = read_inbound(((b"X-Specproxy-Capture", b" No"), (b"A", b"b")))
    assert (inbound.private, inbound.headers) == (True, ((b"A", b"b"),))
    assert not read_inbound(((b"X-Specproxy-Capture", b"yes"),)).private
