"""An exchange that fails at once, for lanes that are not running."""

from __future__ import annotations

import asyncio

from specproxy.adapters.base import Headers, Sink
from specproxy.errors import BackendError, UpstreamConnectError

__all__ = ["RefusedExchange"]


class RefusedExchange:
    """Tells its sink about an error in the next turn of the event loop (an `Exchange`).

    To the sink it is `UpstreamConnectError`: nothing was sent, so another lane may be tried.
    """

    def __init__(self, sink: Sink, error: BackendError) -> None:
        self._error = UpstreamConnectError(error.message)
        self._handle = asyncio.get_running_loop().call_soon(sink.fail, self._error)

    async def write(self, data: bytes) -> None:  # noqa: ARG002 - nowhere to write to
        raise self._error

    async def write_end(self, trailers: Headers = ()) -> None:
        """Nothing to end."""

    def pause(self) -> None:
        """Nothing to hold back."""

    def resume(self) -> None:
        """Nothing held back."""

    def abort(self) -> None:
        self._handle.cancel()
