"""From the decode thread to those who wait for text: streams, and the thread that carries events to them.

A step's events are rendered and sent while the next decode runs, by a thread that does nothing else: what it
needs has been swept out of the processor's caches by the weights, so it takes longer than all else between two
decodes. Waking the event loop for a token would take twice as long again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from specproxy.adapters.embedded.scheduler import Event
from specproxy.adapters.embedded.types import Outlet, TokenEvent
from specproxy.errors import BackendError

__all__ = ["QUEUE", "Courier", "Stream", "call"]

log = logging.getLogger(__name__)

QUEUE = 64  # events that may wait for a reader before its sequence pauses


class Stream:
    """Events of one request on their way from the decode thread to a task, or past it through an outlet.

    Each counter has one thread that writes it, so no lock is needed to see how far the reader is behind.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, resume: Callable[[], None], outlet: Outlet | None = None
    ) -> None:
        self.loop = loop
        self.made = 0  # by the decode thread
        self.short = 0  # sent by the courier through the outlet
        self.given = 0  # by the courier to the event loop
        self.read = 0  # on the event loop
        self.broken = False  # what comes now is not carried any more
        self._outlet = outlet
        self._resume = resume
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def full(self) -> bool:
        """See `sequence.Sink`."""
        return self.made - self.short - self.read >= QUEUE

    def put(self, event: Event) -> None:
        """Add an event; on the event loop."""
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Event:
        """The next event, in order."""
        while not self._events:
            self._waiter = self.loop.create_future()
            await self._waiter
        was_full = self.full
        if self._outlet is not None:
            self._outlet.send = None  # before the courier can see that nothing waits any more
        self.read += 1
        if was_full:
            self._resume()
        return self._events.popleft()

    def send(self, event: Event) -> bool:
        """Send an event past the event loop, if that is possible; on the courier's thread.

        Raises:
            Exception: of any kind, if it cannot be rendered.
        """
        # the loop shuts the outlet before it counts an event as read, so it has to be asked in this order
        if self._outlet is None or self.given != self.read or not isinstance(event, TokenEvent):
            return False
        send = self._outlet.send
        if send is None or not send(event):
            return False
        was_full = self.full
        self.short += 1
        if was_full:  # the sequence has paused, and nothing may be left for the loop to read
            self._resume()
        return True


class Courier:
    """A thread that carries events to their streams, in order.

    Args:
        give_up: called on the thread with a stream whose events cannot be rendered.
    """

    def __init__(self, give_up: Callable[[Stream], None]) -> None:
        self._give_up = give_up
        self._batches: SimpleQueue[list[tuple[Stream, Event]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="specproxy courier", daemon=True)
        self._thread.start()

    def carry(self, batch: list[tuple[Stream, Event]]) -> None:
        """Take over events; never waits."""
        self._batches.put(batch)

    def close(self) -> None:
        """Carry what is left, and end."""
        self._batches.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            for stream, event in batch:
                if not stream.broken:
                    self._hand_over(stream, event)

    def _hand_over(self, stream: Stream, event: Event) -> None:
        try:
            if stream.send(event):
                return
        except Exception as error:
            log.exception("an event cannot be sent")
            stream.broken = True
            self._give_up(stream)
            event = BackendError(f"the reply cannot be written: {error!r}")
        stream.given += 1
        call(stream.loop, stream.put, event)


def call(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> None:
    """Call a function on an event loop, if that still runs."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        log.debug("the event loop has been closed")
