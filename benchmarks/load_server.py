"""The upstream of `bench_load`: streams of stamped events at a steady rate, and streams without end.

    python -m benchmarks.load_server PORT

A chat request's `user` field says what to send: ``rate|30|600`` is 600 events at 30 a second, each with the
instant (CLOCK_MONOTONIC, nanoseconds) at which it was sent; ``flood`` is events without pause.
``GET /flooded`` tells the bytes that the last flood could hand over.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from typing import Any

import uvloop

__all__ = ["STAMP"]

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"object":"chat.completion.chunk","choices":[{"delta":{"content":" word"}}],"t":%020d}\n\n'
CHUNK = b"%x\r\n" % len(EVENT % 0) + EVENT + b"\r\n"
LAST = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
END = b"%x\r\n%b\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n" % (len(LAST), LAST)
STAMP = re.compile(rb'"t":(\d{20})')
FLOOD = b"%x\r\n%b\r\n" % (16384, b"data: " + b"x" * 16376 + b"\n\n")
_WANTED = re.compile(rb'"user": "([^"]*)"')
flooded = 0


class Connection(asyncio.Protocol):
    """One connection; requests come one at a time."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.got = b""
        self.paused = False
        self.flooding = False

    def connection_made(self, transport: Any) -> None:  # uvloop's is no subclass of asyncio.Transport
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (asyncio calls it)
        self.flooding = False

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if self.flooding:
            self.flood()

    def data_received(self, data: bytes) -> None:
        self.got += data
        head, found, body = self.got.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        if not found or (length is not None and len(body) < int(length[1])):
            return
        self.got = b""
        wanted = _WANTED.search(body)
        if head.startswith(b"GET"):
            self.answer(head)
        elif wanted is not None and wanted[1] == b"flood":
            self.transport.write(HEAD)
            self.flooding = True
            self.flood()
        elif wanted is not None:
            _, rate, events = wanted[1].split(b"|")
            self.transport.write(HEAD)
            begin = self.loop.time() + random.random() / int(rate)
            self.loop.call_at(begin, self.tick, begin, 1.0 / int(rate), int(events))

    def answer(self, head: bytes) -> None:
        data: object = {"flooded": flooded}
        if b"/v1/models" in head:
            data = {"object": "list", "data": [{"id": "m", "object": "model"}]}
        text = json.dumps(data).encode()
        self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text))

    def tick(self, due: float, pause: float, left: int) -> None:
        if self.transport.is_closing():
            return
        if not left:
            self.transport.write(END)
            return
        self.transport.write(CHUNK % time.monotonic_ns())
        self.loop.call_at(due + pause, self.tick, due + pause, pause, left - 1)

    def flood(self) -> None:
        global flooded
        for _ in range(16):
            if self.paused or self.transport.is_closing():
                return
            self.transport.write(FLOOD)
            flooded += len(FLOOD)
        self.loop.call_soon(self.flood)


async def serve(port: int) -> None:
    """Serve until killed."""
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
