"""An exchange that begins when its backend is ready for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from specproxy.adapters.base import Exchange, Headers, Sink
from specproxy.adapters.tasks import Tasks
from specproxy.errors import BackendError, UpstreamClosed

__all__ = ["DeferredExchange"]


class DeferredExchange:
    """Waits for `ready`, then calls `begin` and passes everything on to what that returns (an `Exchange`).

    The sink hears of a `BackendError` of `ready` as if the exchange had failed, and of `UpstreamClosed` where
    `tasks` end before.
    """

    def __init__(
        self, ready: Callable[[], Awaitable[None]], begin: Callable[[], Exchange], sink: Sink, tasks: Tasks
    ) -> None:
        self._begin, self._sink = begin, sink
        self._inner: Exchange | None = None
        self._paused = False
        self._aborted = False
        self._decided = asyncio.Event()  # it has begun, or never will
        self._waiting = tasks.spawn(self._wait(ready), name="wait for a lane")
        self._waiting.add_done_callback(self._ended)

    async def _wait(self, ready: Callable[[], Awaitable[None]]) -> None:
        try:
            await ready()
        except BackendError as error:
            self._sink.fail(error)
            return
        self._inner = self._begin()
        if self._paused:
            self._inner.pause()

    def _ended(self, waiting: asyncio.Task[None]) -> None:
        self._decided.set()
        if waiting.cancelled() and not self._aborted:
            self._sink.fail(UpstreamClosed("the request was given up while it waited for its lane"))

    async def write(self, data: bytes) -> None:
        await (await self._begun()).write(data)

    async def write_end(self, trailers: Headers = ()) -> None:
        await (await self._begun()).write_end(trailers)

    def pause(self) -> None:
        self._paused = True
        if self._inner is not None:
            self._inner.pause()

    def resume(self) -> None:
        self._paused = False
        if self._inner is not None:
            self._inner.resume()

    def abort(self) -> None:
        self._aborted = True
        if self._inner is None:
            self._waiting.cancel()
        else:
            self._inner.abort()

    async def _begun(self) -> Exchange:
        await self._decided.wait()
        if self._inner is None:
            raise UpstreamClosed("the lane was not there to take the request")
        return self._inner
