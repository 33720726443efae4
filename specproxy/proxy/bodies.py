"""Request bodies: read up to a limit, or sent on as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aiohttp import StreamReader, web

from specproxy.errors import RequestError

__all__ = ["BodyWriter", "pump", "read_up_to"]


class BodyWriter(Protocol):
    """The part of an exchange that takes a request body."""

    async def write(self, data: bytes) -> None: ...

    async def write_end(self) -> None: ...


async def read_up_to(content: StreamReader, limit: int) -> tuple[list[bytes], bool]:
    """Read a body; returns its pieces, and False if there is more of it than about `limit` bytes.

    Raises:
        RequestError: 400, the body is not well framed.
    """
    if content.is_eof():  # it came with the head, as small ones do
        body = content.read_nowait(-1)
        return ([body] if body else []), True
    pieces: list[bytes] = []
    held = 0
    while piece := await _read(content):
        pieces.append(piece)
        held += len(piece)
        if held > limit:
            return pieces, False
    return pieces, True


async def pump(first: Sequence[bytes], content: StreamReader, writer: BodyWriter, *, limit: int) -> None:
    """Send a body on as it comes, holding no more than one read of it.

    Raises:
        BackendError: the upstream takes no more.
        RequestError: 413, there are more than `limit` bytes, or 400, the body is not well framed; what was sent
            is incomplete then.
    """
    sent = 0
    for piece in first:
        sent += len(piece)
        await writer.write(piece)
    while piece := await _read(content):
        sent += len(piece)
        if sent > limit:
            raise too_long(limit)
        await writer.write(piece)
    await writer.write_end()


def too_long(limit: int) -> RequestError:
    """The error for a body above the limit."""
    hint = "limits.body in the configuration raises the limit"
    return RequestError(f"the request body is longer than {limit} bytes", status=413, code="too_large", hint=hint)


async def _read(content: StreamReader) -> bytes:
    try:
        return await content.readany()
    except web.RequestPayloadError as error:
        raise RequestError(f"the request body is malformed: {error}") from error
