"""A client that writes and reads raw bytes."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass

__all__ = ["RawClient", "RawReply", "post"]


@dataclass
class RawReply:
    """A response as it came over the wire."""

    head: bytes
    body: bytes = b""  # as on the wire, chunk framing included

    @property
    def status_line(self) -> bytes:
        return self.head.split(b"\r\n", 1)[0]

    @property
    def status(self) -> int:
        return int(self.head.split(b" ", 2)[1])

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        lines = self.head.split(b"\r\n")[1:-2]
        return [(name, value) for name, _, value in (line.partition(b": ") for line in lines)]

    def values(self, name: bytes) -> list[bytes]:
        """All values of a header."""
        return [value for key, value in self.headers if key.lower() == name.lower()]

    @property
    def content(self) -> bytes:
        """The body without chunk framing."""
        if self.values(b"transfer-encoding") != [b"chunked"]:
            return self.body
        content, rest = b"", self.body
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            n = int(size, 16)
            content, rest = content + rest[:n], rest[n + 2 :]
            if not n:
                break
        return content


class RawClient:
    """One connection to the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int, *, limit: int = 1 << 16) -> RawClient:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=limit))

    async def __aenter__(self) -> RawClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.writer.transport.abort()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> RawReply:
        """The next response head."""
        return RawReply(await self.reader.readuntil(b"\r\n\r\n"))

    async def exactly(self, n: int) -> bytes:
        return await self.reader.readexactly(n)

    async def until(self, mark: bytes) -> bytes:
        """Bytes up to and with a mark."""
        return await self.reader.readuntil(mark)

    async def rest(self) -> bytes:
        """Everything until the proxy closes."""
        return await self.reader.read()

    async def reply(self, *, head_only: bool = False) -> RawReply:
        """The next response with its body."""
        reply = await self.head()
        if head_only or reply.status in (204, 304):
            return reply
        if reply.values(b"transfer-encoding") == [b"chunked"]:
            while True:
                line = await self.reader.readuntil(b"\r\n")
                reply.body += line
                n = int(line, 16)
                reply.body += await self.reader.readexactly(n + 2 if n else 0)
                if not n:
                    while line != b"\r\n":
                        line = await self.reader.readuntil(b"\r\n")
                        reply.body += line
                    return reply
        elif length := reply.values(b"content-length"):
            reply.body = await self.reader.readexactly(int(length[0]))
        else:
            reply.body = await self.reader.read()
        return reply

    async def ask(self, data: bytes, *, head_only: bool = False) -> RawReply:
        """Send a request and read its response."""
        await self.send(data)
        return await self.reply(head_only=head_only)

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


def post(path: str, body: bytes, *headers: bytes) -> bytes:
    """A POST request as bytes."""
    lines = b"".join(header + b"\r\n" for header in headers)
    return b"POST %b HTTP/1.1\r\nHost: proxy\r\n%bContent-Length: %d\r\n\r\n%b" % (
        path.encode(),
        lines,
        len(body),
        body,
    )
