"""The one place that turns errors into replies, in the dialect of the route, and writes streamed replies."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from enum import Enum
from typing import Any

import orjson
from aiohttp import web

from specproxy.adapters.embedded.body import FieldError
from specproxy.errors import ConfigError, RequestError, SpecproxyError

__all__ = ["Family", "Frames", "error_body", "error_response", "event", "family_of", "json_response", "line"]


class Family(Enum):
    """Dialects that share the form of their errors."""

    OPENAI = "openai"  # llama.cpp's own routes too
    OLLAMA = "ollama"
    ANTHROPIC = "anthropic"


def family_of(path: str) -> Family:
    """The family whose clients use a path."""
    if path.startswith("/api/"):
        return Family.OLLAMA
    return Family.ANTHROPIC if path.startswith("/v1/messages") else Family.OPENAI


# llama-server's names for statuses; RequestError's own code wins
_TYPES = {404: "not_found_error", 503: "unavailable_error", 500: "server_error"}
_ANTHROPIC_TYPES = {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error", 500: "api_error"}


def _status_and_type(error: Exception) -> tuple[int, str]:
    if isinstance(error, RequestError):
        generic = error.code == "invalid_request_error" and error.status in _TYPES
        return error.status, _TYPES[error.status] if generic else error.code
    return (503, "unavailable_error") if isinstance(error, ConfigError) else (500, "server_error")


def error_body(family: Family, error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and JSON body for an error. Only our own errors' messages are shown."""
    status, kind = _status_and_type(error)
    message = str(error) if isinstance(error, SpecproxyError) else "internal error"
    if family is Family.OLLAMA:
        return status, {"error": message}
    if family is Family.ANTHROPIC:
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error")
        return status, {"type": "error", "error": {"type": kind, "message": message}}
    detail: dict[str, Any] = {"code": status, "message": message, "type": kind}
    if isinstance(error, FieldError):
        detail |= {"param": error.param or None, **error.extra}
    return status, {"error": detail}


def error_response(family: Family, error: Exception) -> web.Response:
    """An error as a whole reply."""
    status, body = error_body(family, error)
    return json_response(body, status=status)


def json_response(body: Any, *, status: int = 200) -> web.Response:
    """A JSON reply."""
    return web.Response(
        body=orjson.dumps(body), status=status, content_type="application/json", charset="utf-8"
    )


def event(body: Any, name: str = "") -> bytes:
    """One server-sent event."""
    head = b"event: %b\n" % name.encode() if name else b""
    return head + b"data: " + orjson.dumps(body) + b"\n\n"


def line(body: Any) -> bytes:
    """One line of NDJSON."""
    return orjson.dumps(body) + b"\n"


class Frames:
    """Chunks of text, in each of which all but the text is as in the one before: the rest is rendered once.

    Args:
        render: makes the chunk of a reply's index and its text, which is to be in it once, as JSON.
    """

    def __init__(self, render: Callable[[int, str], bytes]) -> None:
        self._render = render
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def chunk(self, index: int, text: str) -> bytes:
        """The bytes that `render` makes."""
        around = self._around.get(index)
        if around is None:
            mark = uuid.uuid4().hex
            before, _, after = self._render(index, mark).partition(orjson.dumps(mark))
            around = self._around[index] = before, after
        return around[0] + orjson.dumps(text) + around[1]
