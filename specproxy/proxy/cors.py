"""Cross-origin sharing with pages that may call: those of this machine, and origins that the settings name.

Ollama answers 403 to pages that it does not know, so Origin is kept from it, and with that it no longer says
that a page may read the answer. Where a token is needed, browsers ask beforehand without one. Both are ours to
answer.
"""

from __future__ import annotations

from collections.abc import Mapping

from specproxy.adapters.base import Headers

__all__ = ["ALLOW_ORIGIN", "preflight", "sharing"]

ALLOW_ORIGIN = b"access-control-allow-origin"
METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
MAX_AGE_S = 600


def sharing(origin: str) -> Headers:
    """Headers by which the page of `origin` may read a response."""
    return (
        (b"Access-Control-Allow-Origin", origin.encode("utf-8", "surrogateescape")),
        (b"Vary", b"Origin"),
    )


def preflight(method: str, headers: Mapping[str, str]) -> Headers | None:
    """What to answer, beside `sharing`, where a browser asks if it may send a request; None elsewhere."""
    if method != "OPTIONS" or "Access-Control-Request-Method" not in headers:
        return None
    wanted = headers.get("Access-Control-Request-Headers", "").encode("utf-8", "surrogateescape")
    answer: Headers = (
        (b"Access-Control-Allow-Methods", METHODS),
        (b"Access-Control-Max-Age", b"%d" % MAX_AGE_S),
    )
    if wanted:
        answer += ((b"Access-Control-Allow-Headers", wanted),)
    if headers.get("Access-Control-Request-Private-Network") == "true":
        answer += ((b"Access-Control-Allow-Private-Network", b"true"),)
    return answer
