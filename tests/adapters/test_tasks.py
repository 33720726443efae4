"""Background tasks: one that begins at once, and how it ends."""

from __future__ import annotations

import asyncio

import pytest

from specproxy.adapters.tasks import Tasks
from tests.support.loops import both_loops


@both_loops
async def test_work_begins_in_the_call() -> None:
    """It has gone as far as it could when `begin` returns, and goes on once what it waits for is there."""
    tasks, said = Tasks(), []
    gate: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        said.append("begun")
        said.append(await gate)
        await asyncio.sleep(0)
        said.append("ended")

    task = tasks.begin(work(), name="work")
    assert said == ["begun"]
    assert task is not None
    gate.set_result("gone on")
    await task
    assert said == ["begun", "gone on", "ended"]
    assert len(tasks) == 0


async def test_work_that_never_waits_needs_no_task(caplog: pytest.LogCaptureFixture) -> None:
    """It is over when `begin` returns; so is one that fails, and the log says so."""
    tasks = Tasks()

    async def work() -> None:
        pass

    async def broken() -> None:
        raise ZeroDivisionError

    assert tasks.begin(work(), name="work") is None
    assert tasks.begin(broken(), name="broken work") is None
    assert "broken work failed" in caplog.text
    assert len(tasks) == 0


@both_loops
async def test_begun_work_can_be_cancelled_at_once() -> None:
    """Its clauses run even if its task never took a step."""
    tasks, said = Tasks(), []

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            said.append("cleaned up")

    task = tasks.begin(work(), name="work")
    assert task is not None
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert said == ["cleaned up"]
