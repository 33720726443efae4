"""The writer: never blocks the loop, loses no more than its interval, and flushes on close."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from specproxy.errors import StoreError
from specproxy.records import Observation
from specproxy.store import Event, MemoryStore, SqliteStore, StoreWriter
from tests.store.test_store import SEEN


class Stuck(MemoryStore):
    """A store whose disk hangs until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.release = threading.Event(), threading.Event()

    def append(self, observations: Sequence[Observation]) -> None:
        self.entered.set()
        self.release.wait(10)
        super().append(observations)


class Failing(MemoryStore):
    """A store that fails a number of times, then works."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.left = times

    def append(self, observations: Sequence[Observation]) -> None:
        if self.left:
            self.left -= 1
            raise StoreError("disk full")
        super().append(observations)


async def test_what_was_queued_is_there_when_asked_for() -> None:
    """A read runs after all that was queued before it."""
    writer = StoreWriter(MemoryStore(), interval=60)
    for i in range(10):
        writer.append(replace(SEEN, request_id=str(i)))
    writer.add_event(Event(1.0, "drift", "m"))
    writer.save_policy("p", {"n": 1}, 1.0)
    writer.save_policy("p", {"n": 2}, 2.0)
    assert len(await writer.run(lambda s: s.recent(100))) == 10
    assert await writer.run(lambda s: s.load_policy("p")) == {"n": 2}
    assert len(await writer.run(lambda s: s.events(9))) == 1
    await writer.aclose()


async def test_close_writes_everything(tmp_path: Path) -> None:
    """Nothing queued is lost by a clean stop, and closing twice is harmless."""
    writer = StoreWriter(SqliteStore(tmp_path / "s.db"), interval=60)
    for i in range(100):
        writer.append(replace(SEEN, request_id=str(i)))
    await writer.aclose()
    await writer.aclose()
    store = SqliteStore(tmp_path / "s.db")
    assert len(store.recent(1000)) == 100
    store.close()


async def test_a_stuck_disk_neither_blocks_nor_grows() -> None:
    """While the disk hangs, appending goes on, memory is bounded, and drops are counted."""
    store = Stuck()
    writer = StoreWriter(store, interval=0.001, bound=50)
    writer.append(SEEN)
    assert store.entered.wait(10)
    for i in range(80):
        writer.append(replace(SEEN, request_id=str(i)))
    assert writer.dropped == 30
    store.release.set()
    kept = await writer.run(lambda s: s.recent(1000))
    assert [o.request_id for o in kept] == [*map(str, range(79, 29, -1)), "a"]
    await writer.aclose()


async def test_failures_are_reported_once_and_survived() -> None:
    """Three failures in a row are one report; a later write works."""
    errors: list[StoreError] = []
    writer = StoreWriter(Failing(3), interval=0.001, on_error=errors.append)
    for i in range(3):
        writer.append(replace(SEEN, request_id=str(i)))
        await writer.run(lambda s: None)
    writer.append(SEEN)
    assert [o.request_id for o in await writer.run(lambda s: s.recent(5))] == ["a"]
    assert [e.message for e in errors] == ["disk full"]
    await writer.aclose()


async def test_an_error_of_a_read_reaches_the_reader() -> None:
    """What a read raises, the waiting caller gets; a closed writer says so."""
    writer = StoreWriter(MemoryStore())

    def fail(_: object) -> None:
        raise StoreError("no such thing")

    with pytest.raises(StoreError, match="no such thing"):
        await writer.run(fail)
    await writer.aclose()
    with pytest.raises(StoreError, match="closed"):
        await writer.run(lambda s: s.recent(1))


CHILD = """
import asyncio, sys, time
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from specproxy.store import SqliteStore, StoreWriter
from tests.store.test_store import SEEN

async def main():
    writer = StoreWriter(SqliteStore(Path(sys.argv[1])))
    while True:
        writer.append(replace(SEEN, at=time.time()))
        print(time.time(), flush=True)
        await asyncio.sleep(0.002)

asyncio.run(main())
"""


def test_kill_9_loses_no_more_than_a_second(tmp_path: Path) -> None:
    """A child that writes through the writer is killed; all but the last second is in the file."""
    path = tmp_path / "state.db"
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), root], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        times = [float(child.stdout.readline())]
        while times[-1] < times[0] + 1.5:
            times.append(float(child.stdout.readline()))
        os.kill(child.pid, 9)
    store = SqliteStore(path)
    kept = {o.at for o in store.recent(100_000)}
    store.close()
    old = [t for t in times if t < times[-1] - 1.0]
    assert len(old) > 20
    assert len(kept) >= len(old)
    assert max(kept) >= times[-1] - 1.0
