"""The upstream that misbehaves as each request's tag says; for everything else it looks like a llama-server.

python -m benchmarks.chaos.upstream --port N [--drafts]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections import Counter

from benchmarks.chaos.faults import FAULTS, SHAPES, Answer, Then
from tests.support.fakes import fake_llama_server
from tests.support.upstream import Conn, Received, Upstream

__all__ = ["ChaosUpstream", "tag_of"]

_TAG = re.compile(rb'"user": "([^"]*)"')
_BY_PATH = {shape.path: shape for shape in SHAPES.values()}


def tag_of(body: bytes) -> list[str]:
    """The parts of a request's tag: the fault, the server it is for (``all`` or a name), the request's id."""
    found = _TAG.search(body)
    return found[1].decode().split("|") if found else []


class ChaosUpstream:
    """One misbehaving server in this event loop. `seen` counts the requests to the model by their id."""

    def __init__(self, name: str, *, drafts: bool = False, port: int = 0) -> None:
        self.name = name
        self.seen: Counter[str] = Counter()
        self._routes = fake_llama_server(speculative=drafts).routes
        self.server = Upstream(self._script, port=port)

    async def open(self) -> None:
        """Listen, at the same port as before."""
        self.server = Upstream(self._script, port=self.server.port)
        await self.server.__aenter__()

    async def close(self) -> None:
        """Stop listening, and break off every connection."""
        await self.server.__aexit__(None, None, None)

    async def _script(self, conn: Conn) -> None:
        try:
            await self._serve(conn)
        except RuntimeError as error:  # uvloop's for a connection that has gone
            raise ConnectionError(str(error)) from error

    async def _serve(self, conn: Conn) -> None:
        while True:
            seen = await conn.head()
            method, path, _ = seen.request_line.decode().split(" ")
            shape = _BY_PATH.get(path)
            if shape is None:
                await self._other(conn, seen, f"{method} {path}")
                continue
            length = int((seen.values(b"content-length") or [b"0"])[0])
            body = await conn.reader.readexactly(min(length, 512))
            tag = tag_of(body)
            if len(tag) != 3:
                tag = ["well", "all", "none"]
            fault = tag[0] if tag[1] in ("all", self.name) else "well"
            answer = FAULTS[fault](shape)
            self.seen[tag[2]] += 1
            if not answer.unread:
                await conn.reader.readexactly(length - len(body))
            if not await _send(conn, answer):
                return

    async def _other(self, conn: Conn, seen: Received, route: str) -> None:
        if length := seen.values(b"content-length"):
            await conn.reader.readexactly(int(length[0]))
        status, data = (
            (200, self._routes[route]) if route in self._routes else (404, {"error": "no such route"})
        )
        text = json.dumps(data if not callable(data) else {}).encode()
        head = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        await conn.send(head % (status, len(text)) + text)


async def _send(conn: Conn, answer: Answer) -> bool:
    """Send an answer as it says; returns whether the connection goes on."""
    await asyncio.sleep(answer.pauses.get(-1, 0.0))
    await _write(conn, answer.begins, answer)
    for number in range(len(answer.content)):
        await asyncio.sleep(answer.pauses.get(number, 0.0))
        await _write(conn, answer.piece(number) if answer.content[number] else b"", answer)
    await _write(conn, answer.ends, answer)
    if answer.then is Then.CLOSE:
        conn.close()
    elif answer.then is Then.RESET:
        conn.reset()
    elif answer.then is Then.SILENT:
        await conn.gone()
    return answer.then is Then.KEEP


async def _write(conn: Conn, data: bytes, answer: Answer) -> None:
    if not answer.by_byte:
        await conn.send(data)
        return
    for i in range(len(data)):
        await conn.send(data[i : i + 1])
        if i % 16 == 0:
            await asyncio.sleep(0)


async def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--drafts", action="store_true")
    args = parser.parse_args()
    upstream = ChaosUpstream("child", drafts=args.drafts, port=args.port)
    await upstream.open()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
