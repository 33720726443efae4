"""What the page is told while it is open: server-sent events with what has changed, about once a second.

One picture is taken for all pages at each tick, and only while somebody looks. A page that reads slowly misses
ticks and is sent the difference to the latest picture when it is ready again, so nothing piles up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import orjson

from specproxy.errors import RequestError

__all__ = ["Live"]

Sections = dict[str, bytes]

RETRY_MS = 2000  # after which a browser connects again
QUIET_S = 5.0  # without a change, after which a sign of life is sent
ALWAYS_NEW = "uptime_s"  # changes by itself: no news, but a sign of life


class Live:
    """Streams of changes of what `look` gives: named sections of JSON-serialisable data.

    At most `most` may be open; `every_s` is the length of a tick in seconds.
    """

    def __init__(
        self,
        look: Callable[[], Mapping[str, Any]],
        *,
        every_s: float = 1.0,
        most: int = 32,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.watching = 0
        self._look = look
        self._every_s = every_s
        self._most = most
        self._clock = clock
        self._sleep = sleep
        self._tick = -1
        self._latest: Sections = {}

    def open(self) -> AsyncGenerator[bytes, None]:
        """A stream of events: everything first, then what has changed. It ends only by being closed.

        Raises:
            RequestError: 503, as many are open as may be.
        """
        if self.watching >= self._most:
            raise RequestError(
                f"{self._most} pages are watching already", status=503, code="too_many", hint="close one"
            )
        return self._events()

    async def _events(self) -> AsyncGenerator[bytes, None]:
        self.watching += 1
        try:
            sent: Sections = {}
            last = self._clock()
            yield b"retry: %d\n\n" % RETRY_MS
            while True:
                now = self._picture()
                news = {name: data for name, data in now.items() if sent.get(name) != data}
                if set(news) - {ALWAYS_NEW} or self._clock() - last >= QUIET_S:
                    sent, last = now, self._clock()
                    yield _event(news)
                await self._sleep(self._every_s - self._clock() % self._every_s)
        finally:
            self.watching -= 1

    def _picture(self) -> Sections:
        """What there is to see at this tick, each section as JSON."""
        tick = int(self._clock() / self._every_s)
        if tick != self._tick:
            self._tick = tick
            self._latest = {name: orjson.dumps(data) for name, data in self._look().items()}
        return self._latest


def _event(sections: Sections) -> bytes:
    members = b",".join(b'"%b":%b' % (name.encode(), data) for name, data in sections.items())
    return b"data: {%b}\n\n" % members
