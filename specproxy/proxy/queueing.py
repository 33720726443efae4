"""Fair waiting: a bounded number of requests run, a bounded number wait, and clients take turns.

A client that sends a hundred requests at once waits for its own; another one's single request is next but one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable

from specproxy.errors import LaneUnavailable

__all__ = ["FairQueue"]


class FairQueue:
    """Lets `width` requests run at a time and `length` wait; the longest waiting clients take turns."""

    def __init__(self, width: int, length: int) -> None:
        self.running = 0
        self.waiting = 0
        self._width, self._length = width, length
        self._lines: dict[
            Hashable, deque[asyncio.Future[None]]
        ] = {}  # the client whose turn is next comes first

    @property
    def is_free(self) -> bool:
        """Whether a request may run at once."""
        return self.running < self._width and not self.waiting

    def start(self) -> None:
        """A request runs at once: there is a free place, or it is none that has to wait."""
        self.running += 1

    async def wait(self, client: Hashable) -> None:
        """Wait for a free place; `leave` has to follow. Cancelling gives the turn up.

        Raises:
            LaneUnavailable: too many wait already.
        """
        if self.waiting >= self._length:
            raise self.full()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(client, deque()).append(turn)
        self.waiting += 1
        self._call_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()  # it was called in the same moment
            else:
                self._forget(client, turn)
            raise

    def leave(self) -> None:
        """A request has ended: the next one's turn."""
        self.running -= 1
        self._call_next()

    def resize(self, width: int, length: int) -> None:
        """Other limits from now on; what runs or waits already goes on."""
        self._width, self._length = width, length
        self._call_next()

    def full(self) -> LaneUnavailable:
        """The error for a request that can neither run nor wait."""
        waiting = f", and {self.waiting} wait" if self.waiting else ""
        return LaneUnavailable(
            f"{self.running} requests are in flight already{waiting}",
            hint="limits.requests and limits.queue raise the limit",
            limit="limits.requests and limits.queue",
        )

    def _call_next(self) -> None:
        while self.waiting and self.running < self._width:
            client = next(iter(self._lines))
            line = self._lines.pop(client)
            turn = line.popleft()
            if line:
                self._lines[client] = line  # behind all other clients
            self.waiting -= 1
            self.running += 1
            turn.set_result(None)

    def _forget(self, client: Hashable, turn: asyncio.Future[None]) -> None:
        self.waiting -= 1
        line = self._lines[client]
        line.remove(turn)
        if not line:
            del self._lines[client]
