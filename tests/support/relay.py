"""What several of the relay's tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.support.upstream import Conn, Received

__all__ = ["CHAT", "EVENTS", "GET", "Recorder", "settled"]

CHAT = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}'
GET = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Recorder:
    """A script that keeps every request and gives the same answer."""

    def __init__(self, answer: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok") -> None:
        self.answer = answer
        self.seen: list[Received] = []

    async def __call__(self, conn: Conn) -> None:
        while True:
            self.seen.append(await conn.request())
            await conn.send(self.answer)


async def settled(condition: Callable[[], bool]) -> None:
    """Let the loop turn until a condition holds; the test's time-out is the limit."""
    while not condition():  # noqa: ASYNC110 - the condition is about sockets, which set no event
        await asyncio.sleep(0.001)
