"""Fair waiting: who runs, who waits, whose turn it is, and who is turned away."""

from __future__ import annotations

import asyncio

import pytest

from specproxy.errors import LaneUnavailable
from specproxy.proxy.queueing import FairQueue


class Crowd:
    """Requests that wait, and the order in which they got their turn."""

    def __init__(self, queue: FairQueue) -> None:
        self.queue = queue
        self.order: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str) -> None:
        """One request each; a name begins with its client's letter."""
        for name in names:
            self.tasks[name] = asyncio.create_task(self._one(name))
            await asyncio.sleep(0)

    async def _one(self, name: str) -> None:
        await self.queue.wait(name[0])
        self.order.append(name)

    async def end(self, times: int) -> None:
        """So many requests that run come to their end."""
        for _ in range(times):
            self.queue.leave()
            await asyncio.sleep(0)


async def test_clients_take_turns() -> None:
    """One with many requests does not keep another one's single request waiting."""
    crowd = Crowd(FairQueue(1, 100))
    crowd.queue.start()
    await crowd.come("a1", "a2", "a3", "a4", "b1", "c1", "b2")
    assert not crowd.queue.is_free
    await crowd.end(7)
    assert crowd.order == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


async def test_no_more_than_the_width_run() -> None:
    """A place is given on once, and all places are free at the end."""
    crowd = Crowd(FairQueue(2, 100))
    await crowd.come("a1", "a2", "a3", "b1")
    assert (crowd.queue.running, crowd.queue.waiting, crowd.order) == (2, 2, ["a1", "a2"])
    await crowd.end(4)
    assert (crowd.queue.running, crowd.queue.waiting) == (0, 0)
    assert crowd.queue.is_free


async def test_above_the_length_nobody_waits() -> None:
    """The error names both limits and the numbers."""
    crowd = Crowd(FairQueue(1, 1))
    await crowd.come("a1", "a2")
    with pytest.raises(LaneUnavailable, match="1 requests are in flight already, and 1 wait") as raised:
        await crowd.queue.wait("b")
    assert "limits.queue" in raised.value.limit
    assert "limits.requests" in raised.value.hint


async def test_one_that_leaves_gives_its_turn_up() -> None:
    """While it waits, and in the moment in which it is called."""
    crowd = Crowd(FairQueue(1, 100))
    await crowd.come("a1", "b1", "b2", "c1")
    crowd.tasks["b1"].cancel()
    await asyncio.sleep(0)
    assert crowd.queue.waiting == 2
    crowd.queue.leave()  # calls b2, which is cancelled before it knows
    crowd.tasks["b2"].cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert crowd.order == ["a1", "c1"]
    await crowd.end(1)
    assert (crowd.queue.running, crowd.queue.waiting) == (0, 0)


async def test_a_wider_queue_calls_those_that_wait() -> None:
    """Other limits hold at once."""
    crowd = Crowd(FairQueue(1, 100))
    await crowd.come("a1", "a2", "a3")
    crowd.queue.resize(3, 0)
    await asyncio.sleep(0)
    assert crowd.order == ["a1", "a2", "a3"]
    with pytest.raises(LaneUnavailable):
        await crowd.queue.wait("b")
