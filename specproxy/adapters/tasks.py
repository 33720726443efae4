"""The one place that creates background tasks: each is named, its failure is logged, all end before we do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Generator
from typing import Any

__all__ = ["Tasks"]

log = logging.getLogger(__name__)


class Tasks:
    """Background tasks of one owner. `aclose` cancels what still runs and waits for it."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Run `work` in the background. An exception that leaves it is logged, not raised."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def begin(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None] | None:
        """Run `work` up to where it first waits in this very call, and what is left of it in the background.

        Up to there it runs in no task, so it must not ask for the current one, as time-outs do.
        """
        try:
            awaited = work.send(None)
        except StopIteration:
            return None
        except Exception:
            log.exception("background task %s failed", name)
            return None
        return self.spawn(_Begun(work, awaited), name=name)

    async def aclose(self) -> None:
        """Cancel every task and wait until all have ended; idempotent."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background task %s failed", task.get_name(), exc_info=error)


class _Begun(Coroutine[Any, Any, None]):
    """A coroutine that has begun, for a task to go on with: what it waits for comes first.

    A task that is cancelled before its first step throws into a coroutine that has not begun, so that none of
    its clauses would run; those of this one do.
    """

    def __init__(self, work: Coroutine[Any, Any, None], awaited: Any) -> None:
        self._work = work
        self._awaited = awaited
        self._is_known = False  # the task knows what is waited for

    def send(self, value: Any) -> Any:
        if self._is_known:
            return self._work.send(value)
        self._is_known = True
        return self._awaited

    def throw(self, kind: Any, value: Any = None, trace: Any = None, /) -> Any:
        self._is_known = True
        return self._work.throw(kind, value, trace) if value is not None else self._work.throw(kind)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, None]:
        raise NotImplementedError("a task calls the others")
