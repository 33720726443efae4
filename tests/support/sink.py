"""A sink that writes down what it hears."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from specproxy.adapters.base import Exchange, Headers, ResponseHead
from specproxy.errors import BackendError

__all__ = ["RecordingSink"]


class RecordingSink:
    """Calls in order, with what they brought: ``("head", ResponseHead)``, ``("data", (part, …))`` and so on."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []
        self.exchange: Exchange | None = None
        self.abort_at: str | None = None  # give up from within this call
        self._news = asyncio.Event()

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def parts(self) -> list[bytes]:
        return [part for name, value in self.calls if name == "data" for part in value]  # type: ignore[attr-defined]  # parts of data

    def value(self, name: str) -> object:
        """What the one call of this name brought."""
        (found,) = [value for called, value in self.calls if called == name]
        return found

    async def heard(self, name: str) -> object:
        """Wait for a call of this name; returns what the first one brought."""
        while True:
            for called, value in self.calls:
                if called == name:
                    return value
            self._news.clear()
            await self._news.wait()

    async def more(self, calls: int) -> None:
        """Wait until there have been more calls than that."""
        while len(self.calls) <= calls:
            self._news.clear()
            await self._news.wait()

    async def over(self) -> str:
        """Wait for the last call: end or fail."""
        while not self.calls or self.calls[-1][0] not in ("end", "fail"):
            self._news.clear()
            await self._news.wait()
        return self.calls[-1][0]

    def head(self, head: ResponseHead) -> None:
        self._note("head", head)

    def data(self, parts: Sequence[bytes]) -> None:
        self._note("data", tuple(parts))

    def end(self, trailers: Headers) -> None:
        self._note("end", trailers)

    def fail(self, error: BackendError) -> None:
        self._note("fail", error)

    def _note(self, name: str, value: object) -> None:
        self.calls.append((name, value))
        self._news.set()
        if self.abort_at == name and self.exchange is not None:
            self.exchange.abort()
