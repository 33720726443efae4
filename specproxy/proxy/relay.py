"""The relay proper: one attempt to have a request answered by one backend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

from specproxy.adapters.base import Exchange, Headers, ResponseHead, Sink
from specproxy.errors import BackendError, SpecproxyError
from specproxy.proxy.client import RelayResponse
from specproxy.proxy.later import Later
from specproxy.proxy.rename import Renamer
from specproxy.proxy.tap import Tap

__all__ = ["Attempt", "HeldBack"]

_MOST_UNREAD = 64 * 1024  # bytes that wait for the tap


class HeldBack(Exception):
    """The upstream answered with a server error, which the client was not shown so that a retry may follow."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class Attempt:
    """Carries one response from an exchange to the client, in the read callback of the upstream (a `Sink`).

    `tap` is told of every byte a few milliseconds after it has been written, by way of `later`: many at a time
    cost less, and the client nothing. `read_on` tells it at once what it has not seen. `extra` are headers of
    ours. With `hold_errors` a head with a status of 500 or more is not written: `run` raises.
    `renamer` puts another model name into the reply, which then has no length beforehand.
    """

    def __init__(
        self,
        response: RelayResponse,
        later: Later,
        *,
        tap: Tap | None = None,
        extra: Headers = (),
        hold_errors: bool = False,
        renamer: Renamer | None = None,
    ) -> None:
        self.response = response
        self.tap = tap
        self.exchange: Exchange | None = None
        self.extra = extra
        self.complete = False  # the whole response has been passed on
        self._later = later
        self._unread: list[tuple[Sequence[bytes], float]] = []  # what the tap has not seen, and when it came
        self._unread_bytes = 0
        self._head: tuple[ResponseHead, float] | None = None  # which the tap has not seen
        self._hold_errors = hold_errors
        self._renamer = renamer
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Future[None] | None = None
        self._blocked = False
        self._over = False
        self._error: SpecproxyError | HeldBack | None = None

    def begin(self, opener: Callable[[Sink], Exchange]) -> Exchange:
        """Open the exchange."""
        self.exchange = opener(self)
        return self.exchange

    async def run(self) -> None:
        """Wait until the response has been passed on. Cancelling closes the upstream connection at once.

        Raises:
            BackendError: the exchange broke; `response.started` says whether the client has seen anything.
            SpecproxyError: what `give_up` was called with.
            HeldBack: a server error was held back.
        """
        exchange = self.exchange
        assert exchange is not None, "begin comes first"
        try:
            while not self._over:
                self._news = self._loop.create_future()
                await self._news
                if self._blocked:
                    await self.response.client.drain()
                    self._blocked = False
                    exchange.resume()
        finally:
            if not self._over:
                self._over = True
                exchange.abort()
        if self._error is not None:
            raise self._error

    def give_up(self, error: SpecproxyError) -> None:
        """Close the upstream connection and have `run` raise `error`, unless all is over already."""
        if not self._over:
            assert self.exchange is not None
            self.exchange.abort()
            self._conclude(error)

    def read_on(self) -> None:
        """Tell the tap what it has not seen."""
        tap, unread = self.tap, self._unread
        if tap is None:
            return
        self._unread, self._unread_bytes = [], 0
        if self._head is not None:
            (head, at), self._head = self._head, None
            tap.head(head.status, head.headers, at)
        for parts, at in unread:
            tap.feed(parts, at)

    # --- Sink ---

    def head(self, head: ResponseHead) -> None:
        if self._hold_errors and head.status >= 500:
            assert self.exchange is not None
            self.exchange.abort()
            self._conclude(HeldBack(head.status))
            return
        self.response.start(head if self._renamer is None else self._unmeasured(head), self.extra)
        if self.tap is not None:
            self._head = head, perf_counter()

    def data(self, parts: Sequence[bytes]) -> None:
        response = self.response
        passed_on = parts if self._renamer is None else self._renamer.feed(parts)
        if passed_on:
            response.body(passed_on)
        if self.tap is not None:
            if not self._unread:
                self._later.add(self.read_on)
            self._unread.append((parts, perf_counter()))
            self._unread_bytes += sum(map(len, parts))
            if self._unread_bytes > _MOST_UNREAD:
                self.read_on()
        if response.client.blocked and not self._blocked:
            assert self.exchange is not None
            self._blocked = True
            self.exchange.pause()
            self._wake()

    def end(self, trailers: Headers) -> None:
        if self._renamer is not None and (rest := self._renamer.end()):
            self.response.body((rest,))
        self.response.finish(trailers)
        self.complete = True
        self._conclude(None)

    def fail(self, error: BackendError) -> None:
        self._conclude(error)

    def _unmeasured(self, head: ResponseHead) -> ResponseHead:
        """The head of a reply whose length the renamer changes; one that is encoded is left as it is."""
        names = {name.lower(): value for name, value in head.headers}
        if names.get(b"content-encoding", b"identity").strip().lower() not in (b"", b"identity"):
            self._renamer = None
            return head
        kept = tuple(item for item in head.headers if item[0].lower() != b"content-length")
        return replace(head, headers=kept)

    def _conclude(self, error: SpecproxyError | HeldBack | None) -> None:
        self._over = True
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
