"""Small JSON questions to an upstream, off the hot path: health, slots, properties."""

from __future__ import annotations

from typing import Any

import orjson

from specproxy.adapters.base import UpstreamRequest
from specproxy.adapters.http import Opener, fetch
from specproxy.errors import UpstreamProtocolError

__all__ = ["get_json", "patch_json", "post_json"]

HEADERS = ((b"Accept", b"application/json"), (b"User-Agent", b"specproxy"))
JSON_HEADERS = (*HEADERS, (b"Content-Type", b"application/json"))


async def get_json(opener: Opener, target: str, *, timeout_s: float = 5.0) -> tuple[int, Any]:
    """GET; returns the status and the parsed body (None if it is empty or not JSON).

    Raises:
        BackendError: no reply.
    """
    return await _ask(opener, UpstreamRequest("GET", target, HEADERS, replayable=True), timeout_s)


async def post_json(opener: Opener, target: str, body: object, *, timeout_s: float = 5.0) -> tuple[int, Any]:
    """POST a JSON body; returns like `get_json`.

    Raises:
        BackendError: no reply.
    """
    request = UpstreamRequest("POST", target, JSON_HEADERS, orjson.dumps(body), replayable=True)
    return await _ask(opener, request, timeout_s)


async def patch_json(opener: Opener, target: str, body: object, *, timeout_s: float = 5.0) -> tuple[int, Any]:
    """PATCH with a JSON body; returns like `get_json`.

    Raises:
        BackendError: no reply.
    """
    request = UpstreamRequest("PATCH", target, JSON_HEADERS, orjson.dumps(body), replayable=True)
    return await _ask(opener, request, timeout_s)


async def _ask(opener: Opener, request: UpstreamRequest, timeout_s: float) -> tuple[int, Any]:
    reply = await fetch(opener, request, timeout_s=timeout_s)
    try:
        return reply.head.status, orjson.loads(reply.body) if reply.body else None
    except orjson.JSONDecodeError:
        return reply.head.status, None
    except RecursionError as error:
        raise UpstreamProtocolError(f"the reply to {request.target} is nested too deeply") from error
