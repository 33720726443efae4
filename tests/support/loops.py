"""The event loops that the relay's tests run on: asyncio's own, and uvloop where it is installed."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

__all__ = ["both_loops"]

AsyncTest = Callable[..., Coroutine[Any, Any, None]]


def _factories() -> list[Any]:
    found = [pytest.param(asyncio.new_event_loop, id="asyncio")]
    if importlib.util.find_spec("uvloop"):
        import uvloop

        found.append(pytest.param(uvloop.new_event_loop, id="uvloop"))
    return found


def both_loops(test: AsyncTest) -> Callable[..., None]:
    """Run an async test once on each loop. Its fixtures have to be synchronous."""

    @functools.wraps(test)
    def run(*args: Any, loop_factory: Callable[[], asyncio.AbstractEventLoop], **given: Any) -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(test(*args, **given))

    signature = inspect.signature(test)
    loop = inspect.Parameter("loop_factory", inspect.Parameter.KEYWORD_ONLY)
    del run.__wrapped__  # type: ignore[attr-defined]  # pytest would look through it, at an async function
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), loop])  # type: ignore[attr-defined]  # pytest reads it
    return pytest.mark.parametrize("loop_factory", _factories())(run)
