"""A client's request as it comes in: head, and a body that arrives piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from specproxy.adapters.base import Headers
from specproxy.errors import RequestError

T = TypeVar("T")
_LENGTH_CHARS = len("content-length")

__all__ = [
    "ClientRequest",
    "HeaderView",
    "Notes",
    "RequestBody",
    "declares_body",
    "host_fault",
    "waits_for_invitation",
]


class RequestBody:
    """Bytes of one request body. The connection feeds it; one reader reads it.

    `on_level` is called with the number of bytes held whenever that changes, for back-pressure. `whole` is all
    of a body that came with its head.
    """

    __slots__ = ("_error", "_on_level", "_pieces", "_waiter", "complete", "held", "trailers")

    def __init__(self, on_level: Callable[[int], None], whole: bytes | None = None) -> None:
        self.complete = whole is not None  # the last byte has arrived
        self.trailers: list[tuple[bytes, bytes]] = []  # all of them, once it is complete
        self._pieces: list[bytes] = [whole] if whole else []
        self.held = len(whole) if whole else 0  # bytes that were not read yet
        self._on_level = on_level
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def read(self) -> bytes:
        """What has arrived since the last call, at least a byte; empty at the end.

        Raises:
            RequestError: 400, the body is not well framed.
        """
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.complete:
                return b""
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self.take()

    def take(self) -> bytes:
        """What has arrived since the last call, without waiting."""
        pieces = self._pieces
        if not pieces:
            return b""
        self._pieces = []
        self.held = 0
        self._on_level(0)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def feed(self, data: bytes) -> None:
        """A piece has arrived."""
        self._pieces.append(data)
        self.held += len(data)
        self._on_level(self.held)
        self._wake()

    def end(self) -> None:
        """The last piece has arrived."""
        self.complete = True
        self._wake()

    def fail(self, error: RequestError) -> None:
        """No more can be read."""
        if not self.complete:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class HeaderView(Mapping[str, str]):
    """Headers as text, looked up without regard to case; of a repeated header the first one.

    Nearly always one or two of them are asked for, so a look-up goes through them all.
    """

    __slots__ = ("_headers",)

    def __init__(self, headers: Headers) -> None:
        self._headers = headers

    def __getitem__(self, name: str) -> str:
        value = self.get(name)
        if value is None:
            raise KeyError(name)
        return value

    @overload
    def get(self, name: str, /) -> str | None: ...

    @overload
    def get(self, name: str, /, default: str | T) -> str | T: ...

    def get(self, name: str, /, default: object = None) -> object:
        """The value of a header, or `default` without one."""
        wanted = name.lower().encode("latin-1", "replace")
        for given, value in self._headers:
            if given.lower() == wanted:
                return value.decode("utf-8", "surrogateescape")
        return default

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name.decode("latin-1").lower() for name, _ in self._headers))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def declares_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a head says that a body follows, be its protocol what it may."""
    names = {name.lower(): value for name, value in headers}
    return b"transfer-encoding" in names or names.get(b"content-length", b"0").strip(b"0") != b""


def waits_for_invitation(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a body comes only after 100 Continue."""
    return any((name.lower(), value.lower()) == (b"expect", b"100-continue") for name, value in headers)


def host_fault(headers: Headers, *, http10: bool) -> RequestError | None:
    """Why a request's Host headers cannot be right (RFC 9112 section 3.2), if they cannot."""
    given = sum(len(name) == 4 and name.lower() == b"host" for name, _ in headers)
    if given == 1 or (given == 0 and http10):
        return None
    return RequestError(
        "the request has no Host header" if given == 0 else "the request has several Host headers"
    )


class Notes:
    """What a handler has worked out of a head, in `read`: the same head comes with the same notes again.

    Only what follows from the head alone may be there, and not the length of the body.
    """

    __slots__ = ("read",)

    def __init__(self) -> None:
        self.read: Any = None


@dataclass(slots=True)
class ClientRequest:
    """One request. `target` is the raw request target; a `fault` is why it cannot be served at all."""

    method: str
    target: str
    headers: Headers
    body: RequestBody
    http10: bool = False
    keep_alive: bool = True
    fault: RequestError | None = field(default=None)
    peer: str = ""  # the client's address
    notes: Notes = field(default_factory=Notes)

    @property
    def length(self) -> int | None:
        """Bytes of the body by Content-Length; None without one."""
        for name, value in self.headers:
            if len(name) == _LENGTH_CHARS and name.lower() == b"content-length":
                return int(value)
        return None
