"""Work that nobody waits for."""

from __future__ import annotations

import asyncio

from specproxy.proxy.later import Later


async def test_work_is_done_together_and_in_order() -> None:
    """Not at once; what is added meanwhile comes with the next turn."""
    later, done = Later(), asyncio.Event()
    log: list[str] = []

    def first() -> None:
        log.append("first")
        later.add(lambda: log.append("third"))
        later.add(done.set)

    later.add(first)
    later.add(lambda: log.append("second"))
    assert log == []
    await done.wait()
    assert log == ["first", "second", "third"]


async def test_a_failure_keeps_no_other_from_its_turn() -> None:
    """It is logged, and the rest is done."""
    later, done = Later(), asyncio.Event()
    later.add(lambda: [].pop())
    later.add(done.set)
    await asyncio.wait_for(done.wait(), 5)
