"""The one renderer that turns an error into a reply in the client's dialect."""

from __future__ import annotations

import orjson

from specproxy.adapters.base import Headers
from specproxy.errors import RequestError, SpecproxyError
from specproxy.records import Dialect

__all__ = ["render_error"]

RETRY_AFTER_S = 1  # a lane that restarts or a queue that drains is worth asking again soon

_OLLAMA = frozenset({Dialect.OLLAMA_CHAT, Dialect.OLLAMA_GENERATE})
_LLAMACPP = frozenset({Dialect.LLAMACPP, Dialect.LLAMACPP_INFILL})

# Anthropic's error types by status; llama.cpp's likewise.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_LLAMACPP_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


def render_error(
    dialect: Dialect | None, path: str, error: SpecproxyError, status: int
) -> tuple[int, Headers, bytes]:
    """Render an error as (status, headers, body) in the shape that the client's own server would use.

    Where the dialect is unknown the path chooses: ``/api/…`` is Ollama's, ``/v1/messages…`` Anthropic's, all
    else OpenAI's. Content-Length is left to the one who writes the response. A 503 says when to try again.
    """
    body = orjson.dumps(_body(_shape(dialect, path), error, status))
    headers: Headers = ((b"Content-Type", b"application/json"),)
    if status == 503:
        headers += ((b"Retry-After", str(RETRY_AFTER_S).encode()),)
    return status, headers, body


def _shape(dialect: Dialect | None, path: str) -> str:
    if dialect in _OLLAMA:
        return "ollama"
    if dialect in _LLAMACPP:
        return "llamacpp"
    if dialect is Dialect.ANTHROPIC:
        return "anthropic"
    if dialect is None and path.startswith("/api/"):
        return "ollama"
    if dialect is None and path.startswith("/v1/messages"):
        return "anthropic"
    return "openai"


def _body(shape: str, error: SpecproxyError, status: int) -> dict[str, object]:
    message = str(error)
    if shape == "ollama":
        return {"error": message}
    if shape == "anthropic":
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    if shape == "llamacpp":
        kind = _LLAMACPP_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        return {"error": {"code": status, "message": message, "type": kind}}
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = error.code if isinstance(error, RequestError) else type(error).__name__
    return {"error": {"message": message, "type": kind, "code": code, "param": None}}
