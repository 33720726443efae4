"""How long the event loop is held up by one of its turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

__all__ = ["Longest", "watched_loop"]


@dataclass
class Longest:
    """Seconds of processor time that the longest turn took."""

    seconds: float = 0.0


@asynccontextmanager
async def watched_loop() -> AsyncIterator[Longest]:
    """Watch the running loop; time of its own thread, so that other processes do not count."""
    longest = Longest()

    async def watch() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            longest.seconds = max(longest.seconds, time.thread_time() - before)

    watcher = asyncio.create_task(watch())
    try:
        yield longest
    finally:
        watcher.cancel()
