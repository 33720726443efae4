"""The client's side of a response: raw head and body, nothing added but framing and what we say ourselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specproxy.adapters.base import Headers, ResponseHead
from specproxy.proxy.cors import ALLOW_ORIGIN
from specproxy.proxy.headers import response_headers
from specproxy.proxy.inbound import ClientRequest

__all__ = ["ClientWriter", "RelayResponse"]


class ClientWriter(Protocol):
    """The connection to a client, as a response sees it."""

    @property
    def connected(self) -> bool:
        """Whether the client is still there, as far as is known."""
        ...

    @property
    def blocked(self) -> bool:
        """Whether the client reads more slowly than we write."""
        ...

    def write(self, data: bytes) -> None:
        """Send bytes; dropped if the client has gone."""
        ...

    def invite(self) -> None:
        """Tell the client to send the body that it has announced."""
        ...

    async def drain(self) -> None:
        """Wait until the client has read what was written, or has gone."""
        ...


class RelayResponse:
    """One response. Bytes leave in the order of the calls, one write a call.

    `keep_alive` says whether the connection can take another request afterwards.
    """

    def __init__(self, request: ClientRequest, client: ClientWriter) -> None:
        self.client = client
        self.keep_alive = request.keep_alive
        self.reader: Headers = ()  # by which a page may read the response, unless the upstream says who may
        self.started = False
        self.status_sent = 0
        self._http10 = request.http10
        self._head_only = request.method == "HEAD"
        self._chunks = False
        self._bodiless = False

    def invite(self) -> None:
        """Answer ``Expect: 100-continue``; HTTP/1.0 clients get no such answer."""
        if not self._http10:
            self.client.invite()

    def start(self, head: ResponseHead, extra: Headers = ()) -> None:
        """Write the head: status and end-to-end headers as they came, ours and `extra`, then our framing."""
        self.started = True
        self.status_sent = head.status
        headers = response_headers(head.headers)
        lines = [b"HTTP/1.1 %d %b\r\n" % (head.status, head.reason)]
        names = {name.lower() for name, _ in headers}
        measured = b"content-length" in names
        shared = () if ALLOW_ORIGIN in names else self.reader
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        for name, value in (*shared, *extra):
            lines += (name, b": ", value, b"\r\n")
        lines.append(self._framing(head.status, measured))
        self.client.write(b"".join(lines))

    def body(self, parts: Sequence[bytes]) -> None:
        """Write body bytes, one chunk a part where the body is chunked."""
        if self._bodiless:
            return
        if self._chunks:
            pieces: list[bytes] = []
            for part in parts:
                pieces += (b"%x\r\n" % len(part), part, b"\r\n")
            self.client.write(b"".join(pieces))
        else:
            self.client.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def finish(self, trailers: Headers = ()) -> None:
        """Write the end of the body."""
        if self._chunks:
            lines = [b"0\r\n"]
            for name, value in trailers:
                lines += (name, b": ", value, b"\r\n")
            lines.append(b"\r\n")
            self.client.write(b"".join(lines))

    def send(self, status: int, reason: bytes, headers: Headers, body: bytes) -> None:
        """Write a whole response of our own."""
        length = (b"Content-Length", b"%d" % len(body))
        self.start(ResponseHead(status, reason, (*headers, length)))
        if body:
            self.body((body,))
        self.finish()

    def cut(self) -> None:
        """End without an ending: the connection closes after what was written, and the client can tell."""
        self.keep_alive = False

    def _framing(self, status: int, measured: bool) -> bytes:
        """Decide how the body's end is told; returns the header lines that say so, and the empty line."""
        self._bodiless = self._head_only or status in (204, 304)
        lines = b""
        if not measured and not self._bodiless:
            if self._http10:
                self.keep_alive = False
            else:
                self._chunks = True
                lines = b"Transfer-Encoding: chunked\r\n"
        if self._http10 and self.keep_alive:
            lines += b"Connection: keep-alive\r\n"
        elif not self._http10 and not self.keep_alive:
            lines += b"Connection: close\r\n"
        return lines + b"\r\n"
