"""The client's side of a relayed response: the raw head and body, written without aiohttp adding anything."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter

from specproxy.adapters.base import Headers, ResponseHead
from specproxy.proxy.headers import response_headers

__all__ = ["RelayResponse"]


class RelayResponse(web.StreamResponse):
    """A response that is written straight to the client's transport.

    aiohttp goes on to see a response object, from which it takes only `keep_alive`; its own head and body
    writing (`prepare`, `write_eof`) does nothing. Writes to a client that has gone are dropped: the handler is
    cancelled anyway. Bytes leave in the order of the calls, one write a call.
    """

    def __init__(self, request: web.BaseRequest) -> None:
        super().__init__()
        self._request = request
        self._transport = request.transport
        self._http10 = request.version < HttpVersion11
        self._headless_method = request.method == "HEAD"
        self._keep_alive = request.keep_alive
        self._chunks = False
        self._bodiless = False
        self.started = False
        self.status_sent = 0

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:  # noqa: ARG002 - aiohttp calls it
        """Nothing to do: `start` has written the head."""
        return None

    async def write_eof(self, data: bytes | bytearray | memoryview = b"") -> None:  # noqa: ARG002 - aiohttp calls it
        """Nothing to do: `finish` has written the end."""
        self._eof_sent = True

    @property
    def connected(self) -> bool:
        """Whether the client is still there, as far as is known."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def blocked(self) -> bool:
        """Whether the client reads more slowly than we write, so that the upstream has to wait."""
        return self._request.protocol.writing_paused

    async def drained(self) -> None:
        """Wait until the client has caught up.

        Raises:
            ConnectionError: it has gone.
        """
        await self._request.writer.drain()

    def interim(self, response: bytes) -> None:
        """Write a 1xx response; HTTP/1.0 clients get none."""
        if not self._http10:
            self._write(response)

    def start(self, head: ResponseHead, extra: Headers = ()) -> None:
        """Write the head: status and end-to-end headers as they came, then `extra`, then our framing."""
        self.started = True
        self.status_sent = head.status
        headers = response_headers(head.headers)
        lines = [b"HTTP/1.1 %d %b\r\n" % (head.status, head.reason)]
        measured = False
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
            measured = measured or name.lower() == b"content-length"
        for name, value in extra:
            lines += (name, b": ", value, b"\r\n")
        lines.append(self._framing(head.status, measured))
        self._write(b"".join(lines))

    def body(self, parts: Sequence[bytes]) -> None:
        """Write body bytes, one chunk a part where the body is chunked."""
        if self._bodiless:
            return
        if self._chunks:
            pieces: list[bytes] = []
            for part in parts:
                pieces += (b"%x\r\n" % len(part), part, b"\r\n")
            self._write(b"".join(pieces))
        else:
            self._write(parts[0] if len(parts) == 1 else b"".join(parts))

    def finish(self, trailers: Headers = ()) -> None:
        """Write the end of the body."""
        if self._chunks:
            lines = [b"0\r\n"]
            for name, value in trailers:
                lines += (name, b": ", value, b"\r\n")
            lines.append(b"\r\n")
            self._write(b"".join(lines))

    def send(self, status: int, reason: bytes, headers: Headers, body: bytes) -> None:
        """Write a whole response of our own."""
        length = (b"Content-Length", b"%d" % len(body))
        self.start(ResponseHead(status, reason, (*headers, length)))
        if body:
            self.body((body,))
        self.finish()

    def cut(self) -> None:
        """End without an ending: the connection closes after what was written, and the client can tell."""
        self.force_close()

    def _framing(self, status: int, measured: bool) -> bytes:
        """Decide how the body's end is told; returns the header lines that say so, and the empty line."""
        self._bodiless = self._headless_method or status in (204, 304)
        lines = b""
        if not measured and not self._bodiless:
            if self._http10:
                self.force_close()
            else:
                self._chunks = True
                lines = b"Transfer-Encoding: chunked\r\n"
        if self._http10 and self._keep_alive:
            lines += b"Connection: keep-alive\r\n"
        elif not self._http10 and not self._keep_alive:
            lines += b"Connection: close\r\n"
        return lines + b"\r\n"

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
