"""A child process that looks like a llama-server to its manager, and answers as the contract checks want.

python -m tests.support.stub_server [--drafts] [--no-slots] [--loading N] [--fail] [--exit-after N] [--mood M]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys

from tests.support.rude import MOODS
from tests.support.upstream import Conn, Upstream

__all__ = ["contract"]

HEAD = b"HTTP/1.1 200 OK\r\n"


class Stub:
    """State of one stub: how many health checks still find it loading, and requests until it exits."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.loading = args.loading
        self.left = args.exit_after

    async def answer(self, conn: Conn) -> None:
        """Serve one connection."""
        while True:
            seen = await conn.request()
            target = seen.request_line.split(b" ")[1]
            if target == b"/health":
                await self.health(conn)
            elif target == b"/slots" and not self.args.no_slots:
                await self.json(conn, [{"id": 0, "speculative": self.args.drafts}])
            elif target == b"/props":
                await self.json(conn, {"build_info": "b1-stub", "model_alias": "stub", "model_path": "/m.gguf"})
            elif self.args.mood:
                if not await self.rude(conn):
                    return
            else:
                await self.count()
                if not await contract(conn, target, seen.body):
                    return

    async def health(self, conn: Conn) -> None:
        if self.loading > 0:
            self.loading -= 1
            body = b'{"error":{"message":"Loading model"}}'
            await conn.send(b"HTTP/1.1 503 No\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        else:
            await self.json(conn, {"status": "ok"})

    async def rude(self, conn: Conn) -> bool:
        """Answer as `RudeServer` does in this mood; False ends the connection."""
        if self.args.mood == "half up":
            conn.close()
            return False
        status, kind, body = MOODS[self.args.mood]
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        await conn.send(head.encode() + body)
        return True

    async def json(self, conn: Conn, data: object) -> None:
        body = json.dumps(data).encode()
        await conn.send(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))

    async def count(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                os._exit(3)


async def contract(conn: Conn, target: bytes, body: bytes) -> bool:
    """Answer one target of `BackendContract`; False ends the connection."""
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    match target:
        case b"/parts":
            await conn.send(chunked + b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
        case b"/echo":
            await conn.send(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        case b"/error":
            await conn.send(b"HTTP/1.1 500 No\r\nContent-Length: 5\r\n\r\nwrong")
        case b"/break":
            await conn.send(chunked + b"4\r\nsome\r\n")
            conn.close()
            return False
        case b"/close":
            conn.close()
            return False
        case b"/wait":
            await conn.gone()
        case b"/flood":
            await conn.send(chunked)
            await conn.flood(b"1000\r\n" + b"x" * 4096 + b"\r\n")
        case _:
            await conn.send(HEAD + b"X-Kind: whole\r\nContent-Length: 5\r\n\r\nwhole")
    return True


async def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--drafts", action="store_true")
    parser.add_argument("--no-slots", action="store_true")
    parser.add_argument("--loading", type=int, default=0)
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--exit-after", type=int, default=None)
    parser.add_argument("--mood", default="")
    args = parser.parse_args()
    if args.fail:
        sys.exit("E load_model: error loading model: unknown architecture")
    async with Upstream(Stub(args).answer) as upstream:
        print(f"srv: listening on {upstream.url}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
