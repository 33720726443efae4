"""Request bodies: read up to a limit, or sent on as they come."""

from __future__ import annotations

from typing import Protocol

from specproxy.adapters.base import Headers
from specproxy.errors import RequestError
from specproxy.proxy.headers import end_to_end
from specproxy.proxy.inbound import RequestBody

__all__ = ["BodyWriter", "pump", "read_up_to", "too_long"]


class BodyWriter(Protocol):
    """The part of an exchange that takes a request body."""

    async def write(self, data: bytes) -> None: ...

    async def write_end(self, trailers: Headers = ()) -> None: ...


async def read_up_to(body: RequestBody, limit: int) -> tuple[bytes, bool]:
    """Read a body; returns what was read, and False if there is more of it than about `limit` bytes.

    Raises:
        RequestError: 400, the body is not well framed.
    """
    if body.complete:  # it came with the head, as small ones do
        data = body.take()
        return data, len(data) <= limit
    pieces: list[bytes] = []
    held = 0
    while piece := await body.read():
        pieces.append(piece)
        held += len(piece)
        if held > limit:
            return b"".join(pieces), False
    return b"".join(pieces), True


async def pump(first: bytes, body: RequestBody, writer: BodyWriter, *, limit: int) -> None:
    """Send a body on as it comes, `first` being its beginning; holds no more than one read of it.

    Raises:
        BackendError: the upstream takes no more.
        RequestError: 413, there are more than `limit` bytes, or 400, the body is not well framed; what was sent
            is incomplete then.
    """
    sent = 0
    piece = first or await body.read()
    while piece:
        sent += len(piece)
        if sent > limit:
            raise too_long(limit)
        await writer.write(piece)
        piece = await body.read()
    await writer.write_end(end_to_end(body.trailers))


def too_long(limit: int) -> RequestError:
    """The error for a body above the limit."""
    hint = "limits.body in the configuration raises the limit"
    return RequestError(
        f"the request body is longer than {limit} bytes",
        status=413,
        code="too_large",
        hint=hint,
        limit="limits.body",
    )
