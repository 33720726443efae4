"""The event loops that the relay's tests run on: asyncio's own, and uvloop where it is installed."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

__all__ = ["LIMIT_S", "both_loops"]

LIMIT_S = 15.0

AsyncTest = Callable[..., Coroutine[Any, Any, None]]


def _factories() -> list[Any]:
    found = [pytest.param(asyncio.new_event_loop, id="asyncio")]
    if importlib.util.find_spec("uvloop"):
        import uvloop

        found.append(pytest.param(uvloop.new_event_loop, id="uvloop"))
    return found


def both_loops(test: AsyncTest) -> Callable[..., None]:
    """Run an async test once on each loop. Its fixtures have to be synchronous.

    It has a time limit of its own, since the signal of pytest-timeout does not get out of uvloop.
    """

    async def limited(args: tuple[Any, ...], given: dict[str, Any]) -> None:
        async with asyncio.timeout(LIMIT_S):
            await test(*args, **given)

    @functools.wraps(test)
    def run(*args: Any, loop_factory: Callable[[], asyncio.AbstractEventLoop], **given: Any) -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(limited(args, given))

    signature = inspect.signature(test)
    loop = inspect.Parameter("loop_factory", inspect.Parameter.KEYWORD_ONLY)
    del run.__dict__["__wrapped__"]  # pytest would look through it, at an async function
    run.__dict__["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), loop])
    marked: Callable[..., None] = pytest.mark.parametrize("loop_factory", _factories())(run)
    return marked
