"""The engine's child process with a scripted engine in it, which is well when asked how it is, and only then.

python -m tests.support.rude_engine --mood M ARGUMENTS OF specproxy.adapters.embedded.child
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from aiohttp import web

from specproxy.adapters.embedded import child
from specproxy.adapters.embedded.app import build_app
from specproxy.adapters.embedded.options import EngineOptions
from specproxy.errors import LaneStartError
from tests.support.fake_engine import FakeEngine


def engine(mood: str) -> FakeEngine:
    """One that fails at the start of an answer or within it, or not at all."""
    if mood == "fails to load":
        return FakeEngine([LaneStartError("out of memory")])
    if mood == "breaks down":
        return FakeEngine(["one", " two", LaneStartError("out of memory")])
    return FakeEngine()


def build(mood: str, *given: Any, **options: Any) -> web.Application:
    """The engine's application in a mood."""

    @web.middleware
    async def moody(request: web.Request, handler: Any) -> web.StreamResponse:
        if mood == "half up" and request.method == "POST":
            assert request.transport is not None
            request.transport.close()
        if mood == "slow" and request.path == "/props":
            await asyncio.sleep(1.0)
        if mood == "another version" and request.path == "/props":
            return web.json_response({"build_info": "of another time"})
        response: web.StreamResponse = await handler(request)
        return response

    app = build_app(*given, **options)
    app.middlewares.insert(0, moody)
    return app


def main() -> int:
    """Run as the child does."""
    parser = argparse.ArgumentParser()
    moods = ("", "half up", "slow", "another version", "fails to load", "breaks down")
    parser.add_argument("--mood", choices=moods)
    given, sys.argv[1:] = parser.parse_known_args()
    mood = given.mood

    def made(_: EngineOptions) -> FakeEngine:
        return engine(mood)

    child.LlamaEngine = made  # type: ignore[misc,assignment]  # an Engine like the real one
    child.build_app = lambda *given, **options: build(mood, *given, **options)
    return child.main()


if __name__ == "__main__":
    sys.exit(main())
