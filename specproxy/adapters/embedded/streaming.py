"""Streamed and whole replies: the part that all dialects share."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from aiohttp import web

from specproxy.adapters.embedded.output import Part
from specproxy.adapters.embedded.replies import Family, error_body

__all__ = ["EVENTS", "NDJSON", "StreamWriter", "stream_reply"]

EVENTS = "text/event-stream"
NDJSON = "application/x-ndjson"

log = logging.getLogger(__name__)


class StreamWriter(Protocol):
    """A dialect's way to write a streamed reply. All methods return the bytes to send."""

    content_type: str
    family: Family

    def begin(self) -> bytes:
        """Before the first part."""
        ...

    def part(self, part: Part) -> bytes:
        """One part; the last one of a reply has `finished`."""
        ...

    def end(self) -> bytes:
        """After the last part."""
        ...

    def fail(self, body: dict[str, object]) -> bytes:
        """An error in mid-stream; `body` is its JSON object."""
        ...


async def stream_reply(
    request: web.Request, parts: AsyncGenerator[Part, None], writer: StreamWriter
) -> web.StreamResponse:
    """Send `parts` as they come. The client's leaving cancels this, which closes `parts`.

    An error before the first part is raised, to be answered by its status; a later one is written.
    """
    response = web.StreamResponse(
        headers={"Content-Type": writer.content_type, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    )
    async with aclosing(parts):
        first = await anext(parts)
        await response.prepare(request)
        try:
            await response.write(writer.begin() + writer.part(first))
            async for part in parts:
                data = writer.part(part)
                if data:
                    await response.write(data)
            await response.write(writer.end())
        except ConnectionError:
            raise  # the client has gone: there is nobody to tell
        except Exception as error:
            log.exception("generation failed in mid-stream")
            await response.write(writer.fail(error_body(writer.family, error)[1]))
    await response.write_eof()
    return response
