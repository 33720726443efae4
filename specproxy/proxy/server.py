"""The client's side of the wire: HTTP/1.x connections that turn bytes into requests for a handler.

Our own instead of a framework's, because a relay has to know more than frameworks tell: raw heads and targets,
a client that has gone, a body that is broken. Parsing is httptools' (llhttp), strict.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections import deque
from collections.abc import Awaitable, Callable

import httptools

from specproxy.adapters.tasks import Tasks
from specproxy.errors import RequestError
from specproxy.proxy.client import RelayResponse
from specproxy.proxy.inbound import (
    ClientRequest,
    RequestBody,
    declares_body,
    host_fault,
    waits_for_invitation,
)
from specproxy.proxy.known_head import KnownHead
from specproxy.proxy.request_line import is_usual, may_go_on, stand_in
from specproxy.proxy.server_limits import ServerLimits

__all__ = ["SPARE_CONNECTIONS", "ClientConnection", "Handler"]

Handler = Callable[[ClientRequest, RelayResponse], Awaitable[None]]

_BODY_HIGH = 256 * 1024  # bytes of a body that are held before we stop reading
_MOST_WAITING = 32  # pipelined requests that are held before we stop reading
_LOOK_S = 0.05  # how often a client is looked at that we do not read from
SPARE_CONNECTIONS = 64
"""Connections above the limit whose first request is answered, with an error; further ones are closed."""

_GONE = getattr(select, "POLLRDHUP", 0)


class ClientConnection(asyncio.Protocol):
    """One client connection: requests are handled in turn, each in a task that ends when the client leaves."""

    def __init__(
        self, handler: Handler, tasks: Tasks, limits: ServerLimits, owner: set[ClientConnection]
    ) -> None:
        self._handler = handler
        self._tasks = tasks
        self._limits = limits
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[ClientRequest] = deque()
        self._task: asyncio.Task[None] | None = None  # handles the current request
        self._open: RequestBody | None = None  # a body that is still arriving
        self._line = b""  # a request line that has not come whole
        self._said: tuple[bytes, bytes] | None = None  # method and target that the parser was not told
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._known: KnownHead | None = None  # the last head, which may come again
        self._parsed: list[ClientRequest] = []  # requests that one read has shown to the parser
        self._head_bytes = 0
        self._in_head = False
        self._replayed_head = False  # the parser is being told a head again
        self._last = False  # the client wants no request after this one
        self._deaf = False  # what comes now is not looked at
        self._full = False  # a body holds as much as it may
        self._paused = False
        self._closing = False
        self._drained: asyncio.Future[None] | None = None  # there while the client reads slowly
        self._timer: asyncio.TimerHandle | None = None
        self._since = self._loop.time()  # when the connection became idle, the head began, or a body went on
        self._between = 0  # bytes that came since the last byte of a body
        self._begun = False  # a byte of the body that is arriving has come
        self._invited = False  # its client was told to send it
        self._peer = ""
        self._too_many = False  # this connection is one too many
        self.ended: asyncio.Future[None] = self._loop.create_future()

    # --- for the response ---

    @property
    def connected(self) -> bool:
        """Whether the client is still there, as far as is known."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def blocked(self) -> bool:
        """Whether the client reads more slowly than we write."""
        return self._drained is not None

    def write(self, data: bytes) -> None:
        """Send bytes to the client; dropped if it has gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def invite(self) -> None:
        """Tell the client to send the body that it has announced; from now on it should come."""
        self._invited = True
        self._since = self._loop.time()
        self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def drain(self) -> None:
        """Wait until the client has read what was written, or has gone."""
        if self._drained is not None:
            await asyncio.shield(self._drained)

    # --- for the server ---

    @property
    def busy(self) -> bool:
        """Whether a request is being handled."""
        return self._task is not None

    def expire(self, now: float) -> None:
        """Close if the client has been idle for too long; refuse a request that does not come."""
        waited = now - self._since
        if self._task is None:
            if self._in_head and waited > self._limits.patience_s:
                self._fault(self._limits.too_slow())
            elif not self._in_head and waited > self._limits.idle_s:
                self.close()
        elif self._open is not None and waited > self._limits.patience_s and not self._waits_for_us():
            self._fault(self._limits.too_slow())

    def _waits_for_us(self) -> bool:
        """Whether the client may not go on with its body, or waits to be invited."""
        asks = waits_for_invitation(self._headers)
        return self._paused or (asks and not self._begun and not self._invited)

    def close(self) -> None:
        """Close once what was written has been sent."""
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once; the request being handled is cancelled."""
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is no subclass of asyncio.Transport
        self._too_many = len(self._owner) >= self._limits.connections
        if len(self._owner) >= self._limits.connections + SPARE_CONNECTIONS:
            self.abort()
            return
        self._owner.add(self)
        peer = transport.get_extra_info("peername")
        self._peer = str(peer[0]) if peer else ""
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # notice a peer that vanished

    def eof_received(self) -> None:
        if self._task is not None:  # a client that has closed looks like one that is done sending
            self._task.cancel()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio calls it
        self._transport = None
        self._closing = True
        self._owner.discard(self)
        if not self.ended.done():
            self.ended.set_result(None)
        self._waiting.clear()
        self._stop_timer()
        self.resume_writing()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    def data_received(self, data: bytes) -> None:
        try:
            while data and not self._closing and not self._deaf:
                data = self._feed(data)
        except httptools.HttpParserError as error:
            self._fault(RequestError(f"the request is not valid HTTP: {error}"))
        if max(self._head_bytes if self._in_head else 0, self._between) > self._limits.head_bytes:
            self._fault(self._limits.head_too_long())

    def _feed(self, data: bytes) -> bytes:
        """Parse; returns what is left behind a head that offered another protocol."""
        read = data
        begins = self._open is None and not self._in_head
        if begins and self._known is not None:
            again = self._known.again(data, self._body_level)
            if again is not None:
                self._since = self._loop.time()
                self._dispatch(again[0])
                return data[again[1] :]
        if self._open is None and (begins or self._line):
            data = self._first_line(data)
            if not data:
                return b""
        self._parsed = []
        if self._in_head:
            self._head_bytes += len(data)
        elif self._open is not None:  # what is no byte of the body is for its framing, and trailers
            self._between += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            self._decline_upgrade()
            return data[stop.args[0] :]
        if begins and data is read and len(self._parsed) == 1:
            self._known = KnownHead.of(data, self._parsed[0])
        return b""

    def _first_line(self, data: bytes) -> bytes:
        """What to tell the parser where a request begins; empty until its first line has come.

        A relay passes on methods and targets that llhttp refuses, so it is told others in their place.
        (Not within a read: a pipelined request of that sort is refused.)
        """
        if not self._line and is_usual(data):
            return data
        data = (self._line + data).lstrip(b"\r\n")  # as servers should, RFC 9112 section 2.2
        if may_go_on(data):
            if not self._line:
                self._since = self._loop.time()
            self._line, self._head_bytes, self._in_head = data, len(data), bool(data)
            return b""
        self._line, self._in_head = b"", False
        data, self._said = stand_in(data)
        return data

    # --- httptools callbacks ---

    def on_message_begin(self) -> None:
        if not self._replayed_head:
            self._url = b""
            self._headers = []
            self._head_bytes = 0
            self._in_head = True
            self._since = self._loop.time()

    def on_url(self, url: bytes) -> None:
        if not self._replayed_head:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._headers.append((name, value))
        elif self._open is not None and not self._replayed_head:
            self._open.trailers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._replayed_head:
            return
        self._in_head = self._begun = self._invited = False
        self._between = 0
        self._since = self._loop.time()
        body = self._open = RequestBody(self._body_level)
        version = self._parser.get_http_version()
        method, target = self._said or (self._parser.get_method(), self._url)
        self._said = None
        request = ClientRequest(
            method.decode("ascii"),
            target.decode("utf-8", "surrogateescape"),
            tuple(self._headers),
            body,
            http10=version == "1.0",
            keep_alive=self._parser.should_keep_alive(),
            peer=self._peer,
        )
        size = len(target) + sum(len(name) + len(value) for name, value in self._headers)
        if size > self._limits.head_bytes or len(self._headers) > self._limits.headers:
            request.fault = self._limits.head_too_long()
        else:
            request.fault = host_fault(request.headers, http10=request.http10)
        if self._too_many:
            request.fault = self._limits.too_many_connections()
        if version not in ("1.0", "1.1"):
            request.fault = RequestError(f"HTTP/{version} is not spoken here", status=505, code="http_version")
        if request.fault is not None:
            request.keep_alive = False
        self._last = not request.keep_alive
        self._parsed.append(request)
        self._dispatch(request)

    def on_body(self, data: bytes) -> None:
        if self._open is not None:
            self._between = 0
            self._begun = True
            self._since = self._loop.time()
            self._open.feed(data)

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade() and declares_body(self._headers):
            return  # the parser takes the body for the new protocol; we go on with it as HTTP
        if self._open is not None:
            self._open.end()
            self._open = None

    # --- parts ---

    def _decline_upgrade(self) -> None:
        """Go on in HTTP/1.1 behind a head that offered another protocol.

        The parser believes that no body follows such a head. A fresh one is told the framing alone, so that it
        reads the body (clients that offer h2c send one).
        """
        if self._open is None:
            return
        framing = [
            name + b": " + value + b"\r\n"
            for name, value in self._headers
            if name.lower() in (b"content-length", b"transfer-encoding")
        ]
        self._parser = httptools.HttpRequestParser(self)
        self._replayed_head = True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")
        self._replayed_head = False

    def _fault(self, error: RequestError) -> None:
        """What came is not HTTP: break the body that is arriving, or answer in a request's place."""
        self._deaf = True
        if self._open is not None:
            self._open.fail(error)
        elif not self._last:  # bytes behind the last request do not matter
            target = self._url.decode("utf-8", "surrogateescape") if self._in_head and self._url else "/"
            self._in_head = False
            body = RequestBody(self._body_level)
            self._dispatch(ClientRequest("POST", target, (), body, keep_alive=False, fault=error))

    def _dispatch(self, request: ClientRequest) -> None:
        self._waiting.append(request)
        if self._task is None:
            self._next()
        self._balance()

    def _next(self) -> None:
        self._task = self._tasks.spawn(self._serve(self._waiting.popleft()), name="request")

    async def _serve(self, request: ClientRequest) -> None:
        response = RelayResponse(request, self)
        try:
            await self._handler(request, response)
        finally:
            self._task = None
            self._conclude(request, response)

    def _conclude(self, request: ClientRequest, response: RelayResponse) -> None:
        """Go on with the next request, or close."""
        if self._transport is None or self._closing:
            return
        if not request.body.complete:
            self._linger()
        elif not response.keep_alive:
            self.close()
        else:
            self._since = self._loop.time()
            self._full = self._open is not None and self._open.held > _BODY_HIGH
            if self._waiting:
                self._next()
            self._balance()

    def _linger(self) -> None:
        """Close behind an answer to a request that has not come whole.

        Closing with bytes unread would send a reset, which may destroy the answer on its way; so we say that
        we are done, and read on for a while.
        """
        assert self._transport is not None
        self._closing = True
        self._resume()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._stop_timer()
        self._timer = self._loop.call_later(self._limits.linger_s, self.abort)

    # --- back-pressure ---

    def _body_level(self, held: int) -> None:
        self._full = held > _BODY_HIGH
        self._balance()

    def _balance(self) -> None:
        """Read on or not, as bodies and waiting requests allow."""
        if self._full or len(self._waiting) >= _MOST_WAITING:
            self._pause()
        elif self._paused and not self._closing:
            self._resume()

    def _pause(self) -> None:
        if not self._paused and self.connected:
            assert self._transport is not None
            self._paused = True
            self._transport.pause_reading()
            self._look()

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._stop_timer()
            if self.connected:
                assert self._transport is not None
                self._transport.resume_reading()

    def _look(self) -> None:
        """Notice that the client has gone although we do not read: the kernel knows (where it tells)."""
        self._timer = None
        if not self._paused or self._transport is None:
            return
        sock = self._transport.get_extra_info("socket")
        if _GONE and sock is not None:
            poll = select.poll()
            poll.register(sock.fileno(), _GONE)
            if poll.poll(0):
                self.abort()
                return
            self._timer = self._loop.call_later(_LOOK_S, self._look)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
