"""Requests as they came, kept in a file for `specproxy bench --captured`: off unless it is asked for.

The file can be read by its owner alone, never leaves the machine, and stops growing at its cap. What clients
mark with ``X-Specproxy-Capture: no`` is not kept; headers and answers never are.
"""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import orjson
import structlog

from specproxy.adapters.tasks import Tasks

__all__ = ["CAPTURE_FILE", "Capture"]

CAPTURE_FILE = "captured.jsonl"
MOST_WAITING = 64  # requests that wait for the disk; further ones are not kept

log = structlog.get_logger("specproxy")


class Capture:
    """Keeps requests in `path`, at most `requests` of them and `size` bytes, what is there already included."""

    def __init__(self, path: Path, requests: int, size: int, tasks: Tasks) -> None:
        self.path = path
        self.requests = requests
        self.size = size
        self._tasks = tasks
        self._lock = threading.Lock()
        self._waiting = 0
        self._kept: tuple[int, int] | None = None  # requests and bytes in the file, once it was looked at

    def offer(self, path: str, body: bytes) -> None:
        """Keep a request in the background; a disk that fails is told in the log and costs nobody an answer."""
        if self.requests and self._waiting < MOST_WAITING:
            self._waiting += 1
            self._tasks.spawn(self._keep(path, body), name="capture")

    async def _keep(self, path: str, body: bytes) -> None:
        try:
            await asyncio.to_thread(self._append, path, body)
        except (OSError, ValueError) as error:
            log.warning("a request could not be captured", error=str(error))
        finally:
            self._waiting -= 1

    def _append(self, path: str, body: bytes) -> None:
        line = orjson.dumps({"path": path, "body": orjson.loads(body)}) + b"\n"
        with self._lock:
            count, size = self._kept or self._look()
            if count >= self.requests or size + len(line) > self.size:
                self._kept = count, size
                return
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "ab") as file:
                os.fchmod(descriptor, 0o600)
                file.write(line)
            self._kept = count + 1, size + len(line)

    def _look(self) -> tuple[int, int]:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return 0, 0
        return data.count(b"\n"), len(data)
