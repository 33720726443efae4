"""Exchanges with one upstream over HTTP/1.1: the pool of connections, and an exchange on one of them.

There is no time-out but the one for connecting: silence is normal while a model thinks.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl

from specproxy.adapters.base import Headers, Sink, UpstreamRequest
from specproxy.adapters.connection import Connection
from specproxy.adapters.endpoint import Endpoint
from specproxy.adapters.tasks import Tasks
from specproxy.errors import BackendError, UpstreamClosed, UpstreamConnectError

__all__ = ["HttpExchange", "HttpTransport"]


class HttpTransport:
    """Exchanges with one endpoint over kept-alive connections.

    A connection idles for at most `idle_s` seconds: cpp-httplib (llama-server) gives up after 5, and has a
    thread waiting for each idle connection, which is why only `max_idle` are kept.
    """

    def __init__(self, endpoint: Endpoint, *, max_idle: int = 8, idle_s: float = 4.0) -> None:
        self.endpoint = endpoint
        self.max_idle = max_idle
        self.idle_s = idle_s
        self._tasks = Tasks()
        self._connections: set[Connection] = set()
        self._idle: list[tuple[float, Connection]] = []  # (idle since, connection), oldest first
        self._sweeper: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None

    @property
    def connections(self) -> int:
        """Open connections, idle ones included."""
        return len(self._connections)

    @property
    def idle(self) -> int:
        """Idle connections."""
        return len(self._idle)

    def open(self, request: UpstreamRequest, sink: Sink) -> HttpExchange:
        """Start an exchange and return at once; the sink hears nothing before that.

        A replayable request may go out on a kept-alive connection; if that turns out to be dead, it is sent
        once more on a fresh one. Others get a fresh connection.
        """
        exchange = HttpExchange(self, request, sink)
        connection = self._take_idle() if request.replayable and request.body is not None else None
        if connection is None:
            exchange.connecting = self.spawn_connect(exchange)
        else:
            exchange.attach(connection)
        return exchange

    async def aclose(self) -> None:
        """Close all connections; exchanges in progress fail with UpstreamClosed. Idempotent."""
        await self._tasks.aclose()
        open_now = list(self._connections)
        for connection in open_now:
            connection.abort()
        await asyncio.gather(*(connection.ended for connection in open_now))
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    def spawn_connect(self, exchange: HttpExchange) -> asyncio.Task[None]:
        """Connect in the background, then attach the exchange to the new connection."""
        return self._tasks.spawn(self._connect_for(exchange), name=f"connect {self.endpoint.url}")

    # --- connection.Owner ---

    def made(self, connection: Connection) -> None:
        self._connections.add(connection)

    def free(self, connection: Connection) -> None:
        if len(self._idle) >= self.max_idle:
            self._idle.pop(0)[1].abort()
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._idle.append((now, connection))
        if self._sweeper is None:
            self._sweeper = loop.call_at(now + self.idle_s, self._sweep)

    def gone(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._idle = [entry for entry in self._idle if entry[1] is not connection]

    def _take_idle(self) -> Connection | None:
        while self._idle:
            _, connection = self._idle.pop()
            if connection.alive:
                return connection
        return None

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        expired = loop.time() - self.idle_s
        while self._idle and self._idle[0][0] <= expired:
            self._idle.pop(0)[1].abort()
        self._sweeper = loop.call_at(self._idle[0][0] + self.idle_s, self._sweep) if self._idle else None

    async def _connect_for(self, exchange: HttpExchange) -> None:
        try:
            connection = await self._connect()
        except UpstreamConnectError as error:
            exchange.failed(error)
        except asyncio.CancelledError:
            exchange.failed(UpstreamClosed(f"the connection to {self.endpoint.url} was given up"))
            raise
        else:
            exchange.attach(connection)

    async def _connect(self) -> Connection:
        endpoint = self.endpoint
        connection = Connection(self)
        try:
            async with asyncio.timeout(endpoint.connect_timeout_s):
                await self._establish(connection)
        except TimeoutError as error:
            message = f"no connection to {endpoint.url} within {endpoint.connect_timeout_s:g} s"
            raise UpstreamConnectError(message) from error
        except OSError as error:
            message = f"cannot connect to {endpoint.url}: {_reason(error)}"
            raise UpstreamConnectError(message) from error
        return connection

    async def _establish(self, connection: Connection) -> None:
        endpoint = self.endpoint
        loop = asyncio.get_running_loop()
        try:
            if endpoint.scheme == "unix":
                await loop.create_unix_connection(lambda: connection, endpoint.socket_path)
            else:
                host, port, tls = endpoint.host, endpoint.port, self._tls_context()
                await loop.create_connection(lambda: connection, host, port, ssl=tls)
        except BaseException:
            connection.drop()
            connection.connection_lost(None)  # uvloop does not say so if it is cancelled behind connection_made
            raise

    def _tls_context(self) -> ssl.SSLContext | None:
        if self._tls is None and self.endpoint.scheme == "https":
            context = ssl.create_default_context()
            context.set_alpn_protocols(["http/1.1"])
            if not self.endpoint.verify_tls:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            self._tls = context
        return self._tls


class HttpExchange:
    """One request and its response (an `Exchange`)."""

    def __init__(self, transport: HttpTransport, request: UpstreamRequest, sink: Sink) -> None:
        self.request = request
        self.sink = sink
        self.sent = request.body is not None
        self.connecting: asyncio.Task[None] | None = None
        self._transport = transport
        self._connection: Connection | None = None
        self._waiter: asyncio.Future[None] | None = None  # a writer that waits for a connection
        self._paused = False
        self._resent = False
        self._over = False  # the sink has heard its last
        self._unsent = request.length or 0  # bytes of a streamed body that are still to come

    async def write(self, data: bytes) -> None:
        if self.request.length is None:
            if data:
                await self._send(b"%x\r\n%b\r\n" % (len(data), data))
            return
        self._unsent -= len(data)
        self.sent = self._unsent <= 0
        await self._send(data)

    async def write_end(self, trailers: Headers = ()) -> None:
        if not self.sent:
            self.sent = self._unsent <= 0
            lines = b"".join(name + b": " + value + b"\r\n" for name, value in trailers)
            await self._send(b"0\r\n%b\r\n" % lines if self.request.length is None else b"")

    def pause(self) -> None:
        self._paused = True
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        self._paused = False
        if self._connection is not None:
            self._connection.resume()

    def abort(self) -> None:
        if self._over:
            return
        connection = self._connection
        self._close()
        if self.connecting is not None:
            self.connecting.cancel()
        if connection is not None:
            connection.drop()

    def attach(self, connection: Connection) -> None:
        """Send the request on this connection."""
        self.connecting = None
        if self._over:
            connection.abort()
            return
        if not connection.alive:
            self.lost(heard=False, reused=False)
            return
        self._connection = connection
        connection.carry(self, self._transport.endpoint.head_of(self.request))
        if self._paused:
            connection.pause()
        self._wake()

    # --- connection.Rider ---

    def complete(self, trailers: Headers) -> None:
        self._close()
        self.sink.end(trailers)

    def failed(self, error: BackendError) -> None:
        if not self._over:
            self._close()
            self.sink.fail(error)

    def lost(self, *, heard: bool, reused: bool) -> None:
        self._connection = None
        if reused and not heard and not self._resent:
            self._resent = True
            self.connecting = self._transport.spawn_connect(self)
            return
        when = "before the response was complete" if heard else "without answering"
        self.failed(UpstreamClosed(f"{self._transport.endpoint.url} closed the connection {when}"))

    def _close(self) -> None:
        self._over = True
        self._connection = None
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _send(self, data: bytes) -> None:
        if self._connection is None and not self._over:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._connection is not None:
            await self._connection.send(data)
        if self._over:
            raise UpstreamClosed(f"{self._transport.endpoint.url} does not take the rest of the request")


def _reason(error: OSError) -> str:
    """The reason in words. TLS and look-up errors have numbers of their own."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError | socket.gaierror):
        return error.strerror or str(error)
    return os.strerror(error.errno) if error.errno else str(error)
