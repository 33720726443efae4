"""The engine's child process, with the routes of `BackendContract` added to its own.

python -m tests.support.contract_engine ARGUMENTS OF specproxy.adapters.embedded.child
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from aiohttp import web

from specproxy.adapters.embedded import child
from specproxy.adapters.embedded.app import build_app


async def whole(_: web.Request) -> web.StreamResponse:
    return web.Response(body=b"whole", headers={"X-Kind": "whole"})


async def echo(request: web.Request) -> web.StreamResponse:
    return web.Response(body=await request.read())


async def error(_: web.Request) -> web.StreamResponse:
    return web.Response(status=500, body=b"wrong")


async def begun(request: web.Request, *parts: bytes) -> web.StreamResponse:
    """A response in chunks that has begun with these."""
    response = web.StreamResponse()
    response.enable_chunked_encoding()
    await response.prepare(request)
    for part in parts:
        await response.write(part)
    return response


async def parts(request: web.Request) -> web.StreamResponse:
    return await begun(request, b"one", b"two")


async def broken(request: web.Request) -> web.StreamResponse:
    response = await begun(request, b"some")
    return cut(request, response)


async def closed(request: web.Request) -> web.StreamResponse:
    return cut(request, web.Response())


def cut(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """End the connection; what is returned is not sent."""
    assert request.transport is not None
    request.transport.close()
    return response


async def wait(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("nothing sets it")


async def flood(request: web.Request) -> web.StreamResponse:
    response = await begun(request)
    while True:
        await response.write(b"x" * 4096)
        await asyncio.sleep(0)  # a write does not yield as long as all was taken


ROUTES = {
    "/whole": whole, "/parts": parts, "/echo": echo, "/error": error, "/break": broken, "/close": closed,
    "/wait": wait, "/flood": flood,
}  # fmt: skip


def build(*given: Any, **options: Any) -> web.Application:
    """The engine's application with further routes."""
    app = build_app(*given, **options)
    for path, handler in ROUTES.items():
        app.router.add_route("*", path, handler)
    return app


if __name__ == "__main__":
    child.build_app = build
    sys.exit(child.main())
