"""An exchange of which somebody wants to know how it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specproxy.adapters.base import Exchange, Headers, ResponseHead, Sink
from specproxy.errors import BackendError

__all__ = ["Watched", "watch"]

SERVER_ERROR = 500


class Watched:
    """An `Exchange` and its `Sink` at once, between the two.

    `over` is called once, before the sink hears of the end: with an empty text if the response came whole, with
    what went wrong if it broke or the server could not answer (5xx), and with None if it was given up here.
    """

    def __init__(self, sink: Sink, over: Callable[[str | None], None]) -> None:
        self.exchange: Exchange | None = None
        self._sink, self._over = sink, over
        self._trouble = ""

    # --- Sink ---

    def head(self, head: ResponseHead) -> None:
        if head.status >= SERVER_ERROR:
            self._trouble = f"it answered {head.status}"
        self._sink.head(head)

    def data(self, parts: Sequence[bytes]) -> None:
        self._sink.data(parts)

    def end(self, trailers: Headers) -> None:
        self._conclude(self._trouble)
        self._sink.end(trailers)

    def fail(self, error: BackendError) -> None:
        self._conclude(error.message)
        self._sink.fail(error)

    # --- Exchange ---

    async def write(self, data: bytes) -> None:
        await self._inner.write(data)

    async def write_end(self, trailers: Headers = ()) -> None:
        await self._inner.write_end(trailers)

    def pause(self) -> None:
        self._inner.pause()

    def resume(self) -> None:
        self._inner.resume()

    def abort(self) -> None:
        self._conclude(None)
        self._inner.abort()

    @property
    def _inner(self) -> Exchange:
        assert self.exchange is not None, "it is set before anybody has this"
        return self.exchange

    def _conclude(self, how: str | None) -> None:
        over, self._over = self._over, lambda _: None
        over(how)


def watch(begin: Callable[[Sink], Exchange], sink: Sink, over: Callable[[str | None], None]) -> Exchange:
    """Begin an exchange that tells `over` how it ended."""
    watched = Watched(sink, over)
    watched.exchange = begin(watched)
    return watched
