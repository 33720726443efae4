"""Streamed and whole replies: the part that all dialects share."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from aiohttp import web

from specproxy.adapters.embedded.output import Part, ShortCut
from specproxy.adapters.embedded.replies import Family, error_body
from specproxy.adapters.embedded.types import TokenEvent

__all__ = ["EVENTS", "NDJSON", "StreamWriter", "stream_reply"]

EVENTS = "text/event-stream"
NDJSON = "application/x-ndjson"

log = logging.getLogger(__name__)


class StreamWriter(Protocol):
    """A dialect's way to write a streamed reply. All methods return the bytes to send.

    `part` is called on the courier's thread too, while the event loop has nothing to write.
    """

    content_type: str
    family: Family

    def begin(self) -> bytes:
        """Before the first part."""
        ...

    def part(self, part: Part) -> bytes:
        """One part; the last one of a reply has `finished`."""
        ...

    def end(self) -> bytes:
        """After the last part."""
        ...

    def fail(self, body: dict[str, object]) -> bytes:
        """An error in mid-stream; `body` is its JSON object."""
        ...


class _Wire:
    """A connection as the courier writes to it, over a file descriptor of its own.

    What the socket does not take at once is left to the event loop, and so is all that follows, until that has
    been sent.
    """

    def __init__(self, request: web.Request, response: web.StreamResponse, short_cut: ShortCut) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = request.transport
        self._chunked = response.headers.get("Transfer-Encoding") == "chunked"
        self._short_cut = short_cut
        self._lock = threading.Lock()  # or a descriptor might be closed, and be another's, while it is used
        self._socket: socket.socket | None = None
        transport = request.transport
        if transport is not None and transport.get_extra_info("sslcontext") is None:
            self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
            self._socket.setblocking(False)

    async def lend(self, writer: StreamWriter) -> None:
        """Let the courier write from now on, if all that was written here is on its way."""
        part, transport = self._short_cut.part, self._transport
        if self._socket is None or part is None or transport is None:
            return
        await asyncio.sleep(0)  # uvloop writes at the end of a turn
        if transport.is_closing() or transport.get_write_buffer_size():
            return

        def send(event: TokenEvent) -> bool:
            return self._send(writer.part(part(event)))

        self._short_cut.send = send

    def close(self) -> None:
        """The event loop writes again, for good."""
        self._short_cut.send = None
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def _send(self, data: bytes) -> bool:
        if not data:
            return True
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        with self._lock:
            if self._socket is None:
                return True  # the reply has been given up
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return True  # the client has gone; the event loop finds out by itself
        if sent < len(data):
            self._short_cut.send = None
            self._loop.call_soon_threadsafe(self._leave, data[sent:])
        return True

    def _leave(self, rest: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(rest)


async def stream_reply(
    request: web.Request, parts: AsyncGenerator[Part, None], writer: StreamWriter, short_cut: ShortCut
) -> web.StreamResponse:
    """Send `parts` as they come. The client's leaving cancels this, which closes `parts`.

    Most of them never come here: while nothing waits to be sent, the courier renders and sends them
    through the short cut.

    An error before the first part is raised, to be answered by its status; a later one is written.
    """
    response = web.StreamResponse(
        headers={"Content-Type": writer.content_type, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    )
    async with aclosing(parts):
        first = await anext(parts)
        await response.prepare(request)
        wire = _Wire(request, response, short_cut)
        try:
            await response.write(writer.begin() + writer.part(first))
            await wire.lend(writer)
            async for part in parts:
                data = writer.part(part)
                if data:
                    await response.write(data)
                if part.finished is None:
                    await wire.lend(writer)
            await response.write(writer.end())
        except ConnectionError:
            raise  # the client has gone: there is nobody to tell
        except Exception as error:
            log.exception("generation failed in mid-stream")
            await response.write(writer.fail(error_body(writer.family, error)[1]))
        finally:
            wire.close()
    await response.write_eof()
    return response
