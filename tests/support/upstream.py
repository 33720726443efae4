"""An upstream that does exactly what a test tells it, byte by byte, over real sockets."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["CERTIFICATE", "Conn", "Received", "Upstream", "chunk", "chunked", "tls_context"]

CERTIFICATE = Path(__file__).with_name("localhost.pem")


@dataclass
class Received:
    """A request as it came over the wire."""

    head: bytes  # up to and with the empty line
    body: bytes = b""

    @property
    def request_line(self) -> bytes:
        return self.head.split(b"\r\n", 1)[0]

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        lines = self.head.split(b"\r\n")[1:-2]
        return [(name, value) for name, _, value in (line.partition(b": ") for line in lines)]

    def values(self, name: bytes) -> list[bytes]:
        """All values of a header."""
        return [value for key, value in self.headers if key.lower() == name.lower()]


class Conn:
    """One accepted connection, as a script drives it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def head(self) -> Received:
        """The next request up to its empty line; the body is left on the wire."""
        return Received(await self.reader.readuntil(b"\r\n\r\n"))

    async def request(self) -> Received:
        """The next request with its body."""
        seen = await self.head()
        if length := seen.values(b"content-length"):
            seen.body = await self.reader.readexactly(int(length[0]))
        elif b"chunked" in b"".join(seen.values(b"transfer-encoding")):
            while size := int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16):
                seen.body += await self.reader.readexactly(size)
                await self.reader.readexactly(2)
            await self.reader.readuntil(b"\r\n")
        return seen

    async def send(self, data: bytes) -> None:
        """Write, and wait while the proxy reads slowly."""
        self.writer.write(data)
        await self.writer.drain()

    async def flood(self, data: bytes) -> None:
        """Send the same again and again; the others are served in between, however fast it is read."""
        while True:
            await self.send(data)
            await asyncio.sleep(0)  # a drain does not yield as long as all was taken

    async def gone(self) -> None:
        """Wait until the proxy has closed its side."""
        with suppress(ConnectionError):
            while await self.reader.read(65536):
                pass

    def stall(self) -> None:
        """Stop reading, so that the kernel's buffers fill."""
        self.writer.transport.pause_reading()  # type: ignore[attr-defined]  # it is a whole transport

    def read_on(self) -> None:
        """Read again."""
        self.writer.transport.resume_reading()  # type: ignore[attr-defined]  # it is a whole transport

    def close(self) -> None:
        """Close in an orderly way."""
        self.writer.close()

    def reset(self) -> None:
        """Close with a TCP reset."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Script = Callable[[Conn], Awaitable[None]]


@dataclass
class Upstream:
    """Listens on a free port of 127.0.0.1, or on a Unix socket, and runs `script` on every connection.

    A script that returns leaves the connection open; one that raises fails the test at exit, apart from
    errors of a connection that the proxy has closed.
    """

    script: Script
    path: str = ""  # of a Unix socket
    tls: ssl.SSLContext | None = None
    connections: int = 0
    open_now: int = 0
    port: int = 0
    errors: list[BaseException] = field(default_factory=list)
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Upstream:
        if self.path:
            self._server = await asyncio.start_unix_server(self._accept, self.path)
        else:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, ssl=self.tls)
            self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.errors and exc[0] is None:
            raise self.errors[0]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        self.open_now += 1
        conn = Conn(reader, writer)
        try:
            await self.script(conn)
            await conn.gone()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            pass
        except Exception as error:
            self.errors.append(error)
        finally:
            self.open_now -= 1
            writer.transport.abort()
            self._tasks.discard(task)


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunked(*parts: bytes, trailers: bytes = b"") -> bytes:
    """A whole chunked body."""
    return b"".join(map(chunk, parts)) + b"0\r\n" + trailers + b"\r\n"


def tls_context() -> ssl.SSLContext:
    """TLS with the certificate of the tests, which nobody trusts by default."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    return context
