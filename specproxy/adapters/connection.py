"""One HTTP/1.1 connection to an upstream, as an asyncio protocol.

Response bytes go from the read callback to the sink in the same call: no task switch, no queue.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol

from specproxy.adapters.base import Headers, Sink, UpstreamRequest
from specproxy.adapters.reader import ResponseReader
from specproxy.errors import BackendError, UpstreamProtocolError

__all__ = ["Connection", "Owner", "Rider"]

_JOIN_BELOW = 64 * 1024  # a body up to this size is copied behind its head, which saves a write


class Rider(Protocol):
    """The exchange that a connection carries."""

    request: UpstreamRequest
    sink: Sink
    sent: bool  # the whole request has been written

    def complete(self, trailers: Headers) -> None:
        """The response has ended, and the connection is free again."""
        ...

    def failed(self, error: BackendError) -> None:
        """The response cannot be read."""
        ...

    def lost(self, *, heard: bool, reused: bool) -> None:
        """The connection went before the response was complete; `heard`: after its first byte."""
        ...


class Owner(Protocol):
    """The pool that a connection belongs to."""

    def made(self, connection: Connection) -> None:
        """The connection is up."""
        ...

    def free(self, connection: Connection) -> None:
        """The connection can carry another exchange."""
        ...

    def gone(self, connection: Connection) -> None:
        """The connection has ended."""
        ...


class Connection(asyncio.Protocol):
    """Carries one exchange at a time, and closes itself when it cannot carry another."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._rider: Rider | None = None
        self._reader = ResponseReader()
        self._rides = 0
        self._announced = False  # the sink has the head
        self._paused = False
        self._writable: asyncio.Future[None] | None = None  # there while the peer reads slowly
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        """Whether a request may be sent on it."""
        return self._transport is not None and not self._transport.is_closing()

    def carry(self, rider: Rider, head: bytes) -> None:
        """Send a request head, and its body if that is whole. The connection must be alive."""
        assert self._transport is not None
        request = rider.request
        self._rider = rider
        self._rides += 1
        self._announced = False
        self._reader.begin(bodiless=request.method == "HEAD")
        body = request.body
        if body and len(body) > _JOIN_BELOW:
            self._transport.write(head)
            self._transport.write(body)
        else:
            self._transport.write(head + body if body else head)

    async def send(self, data: bytes) -> None:
        """Write a piece of a request body, then wait while the peer reads slowly or until it has gone."""
        if not self.alive:
            return
        assert self._transport is not None
        self._transport.write(data)
        if self._writable is not None:
            await asyncio.shield(self._writable)

    def pause(self) -> None:
        """Stop reading; idempotent."""
        if not self._paused and self.alive:
            assert self._transport is not None
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on; idempotent."""
        if self._paused:
            self._paused = False
            if self.alive:
                assert self._transport is not None
                self._transport.resume_reading()

    def drop(self) -> None:
        """Close at once; the rider hears nothing more."""
        self._rider = None
        self.abort()

    def abort(self) -> None:
        """Close at once; the rider hears that the connection was lost."""
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is no subclass of asyncio.Transport
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # notice a peer that vanished
        self._owner.made(self)

    def data_received(self, data: bytes) -> None:
        rider = self._rider
        if rider is None:  # bytes that nobody asked for
            self.abort()
            return
        reader = self._reader
        reader.feed(data)
        if reader.head is not None and not self._announced:
            self._announced = True
            rider.sink.head(reader.head)
        parts = reader.take_parts()
        if parts and self._rider is rider:
            rider.sink.data(parts)
        if self._rider is not rider:  # given up from within the sink
            return
        if reader.complete:
            self._finish(rider)
        elif reader.error:
            self.drop()
            rider.failed(UpstreamProtocolError(f"the upstream's response is not HTTP/1.x: {reader.error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.resume_writing()
        self._owner.gone(self)
        if not self.ended.done():
            self.ended.set_result(None)
        rider, self._rider = self._rider, None
        if rider is None:
            return
        if exc is None and self._reader.eof():
            rider.complete(())
        else:
            rider.lost(heard=self._reader.heard, reused=self._rides > 1)

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    def _finish(self, rider: Rider) -> None:
        assert self._transport is not None
        self._rider = None
        self.resume()
        if self._reader.reusable and rider.sent and not self._transport.get_write_buffer_size():
            self._owner.free(self)
        else:
            self._transport.abort()
        rider.complete(self._reader.trailers)
