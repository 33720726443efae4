"""A child process that looks like ``ollama serve`` to its manager: what it says in its log, and a few routes.

It takes a free port where OLLAMA_HOST names port 0, and drafts as its environment tells its llama-server.
STUB_OLLAMA, a word each: ``deaf`` (does not draft), ``sorry`` (cannot load), ``old`` (another version).
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from tests.support.fakes import Fake
from tests.support.stub_server import contract
from tests.support.upstream import Conn

__all__ = ["main"]

ACCEPTANCE = "draft acceptance = 0.75000 (    9 accepted /    12 generated), mean len =  3.00"


def say(line: str) -> None:
    print(line, flush=True)


class Stub(Fake):
    """Its routes, and those that the contract checks of backends ask for."""

    async def _answer(self, conn: Conn) -> None:
        while True:
            seen = await conn.request()
            method, path, _ = seen.request_line.decode().split(" ")
            if f"{method} {path}" in self.routes:
                await self.reply(conn, seen)
            elif not await contract(conn, path.encode(), seen.body):
                return


async def main() -> None:
    """Serve until killed."""
    moods = os.environ.get("STUB_OLLAMA", "").split()
    kind = os.environ.get("LLAMA_ARG_SPEC_TYPE", "")
    bodies: list[Any] = []

    def generate(body: Any) -> Any:
        bodies.append(body)
        if "sorry" in moods:
            return 500, {"error": "model requires more system memory"}
        if len(bodies) == 1:
            if kind and "deaf" not in moods:
                say(f"spec common_specu: adding speculative implementation '{kind}'")
            return {"model": body["model"], "response": "", "done": True, "done_reason": "load"}
        if kind:
            say(f"slot print_timing: id  0 | task 5 | {ACCEPTANCE}")
        return {
            "model": body["model"],
            "response": "text",
            "done": True,
            "eval_count": 16,
            "eval_duration": 10**9,
        }

    version = "0.1.0" if "old" in moods else "0.33.0"
    routes = {
        "GET /api/version": {"version": version},
        "POST /api/generate": generate,
        "GET /environ": lambda _: dict(os.environ),
        "GET /bodies": lambda _: list(bodies),
    }
    async with Stub(routes) as server:
        where = f"Listening on 127.0.0.1:{server.port} (version {version})"
        say(f'time=now level=INFO source=routes.go:2008 msg="{where}"')
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
