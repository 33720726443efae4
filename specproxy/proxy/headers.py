"""Which headers go on, and which belong to one connection only. Names and values stay raw bytes throughout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from specproxy.adapters.base import Headers
from specproxy.records import Lane

__all__ = [
    "CAPTURE_HEADER",
    "OWN_PREFIX",
    "PIN_HEADER",
    "REQUEST_ID",
    "Inbound",
    "end_to_end",
    "header_value",
    "headers_for",
    "read_inbound",
    "response_headers",
]

OWN_PREFIX = b"x-specproxy-"  # headers of ours: requests keep them from the upstream
PIN_HEADER = b"x-specproxy-strategy"
CAPTURE_HEADER = b"x-specproxy-capture"
VERIFY_HEADER = b"x-specproxy-verify"
REQUEST_ID = b"X-Specproxy-Request-Id"  # to clients, and to an engine of our own
_PRIORS = b"X-Specproxy-Priors"

# RFC 9110 section 7.6.1. Trailer stays: trailers are passed on.
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"transfer-encoding",
        b"upgrade",
    }
)
_WRITTEN_BY_TRANSPORT = frozenset({b"host", b"content-length"})
_NEVER_NAMED = frozenset({b"content-length", b"content-type"})  # a Connection header cannot take these away


@dataclass(frozen=True, slots=True)
class Inbound:
    """A client's request headers, sorted out. `headers` are for the upstream."""

    headers: Headers
    pin: str | None = None
    expects_continue: bool = False
    encoded: bool = False  # the body has a Content-Encoding
    private: bool = False  # the client does not want it captured
    verifying: bool = False  # a pinned lane is asked although it is in quarantine
    coded: bool = False  # the body has a transfer coding besides chunks

    def without(self, name: bytes) -> Inbound:
        """The same, with the header `name` (lower case) kept from the upstream."""
        return replace(self, headers=tuple(item for item in self.headers if item[0].lower() != name))


def read_inbound(raw: Headers) -> Inbound:
    """Keep what is end to end, in the client's order and spelling, and note what the proxy itself needs."""
    kept: list[tuple[bytes, bytes]] = []
    named: set[bytes] = set()
    pin = None
    expects_continue = encoded = private = verifying = coded = False
    for item in raw:
        name = item[0].lower()
        if name == b"connection":
            named |= _tokens(item[1])
        elif name in _HOP_BY_HOP:
            coded = coded or (name == b"transfer-encoding" and item[1].strip().lower() != b"chunked")
        elif name in _WRITTEN_BY_TRANSPORT:
            pass
        elif name.startswith(OWN_PREFIX):
            if name == PIN_HEADER:
                pin = item[1].decode("utf-8", "replace").strip()
            private = private or (name == CAPTURE_HEADER and item[1].strip().lower() == b"no")
            verifying = verifying or name == VERIFY_HEADER
        elif name == b"expect" and item[1].lower() == b"100-continue":
            expects_continue = True
        else:
            encoded = encoded or name == b"content-encoding"
            kept.append(item)
    return Inbound(_without(kept, named), pin, expects_continue, encoded, private, verifying, coded)


def end_to_end(trailers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Trailers of a request that go on: none that speak of one connection, of framing, or to us."""
    return tuple(
        item
        for item in trailers
        if (name := item[0].lower()) not in _HOP_BY_HOP
        and name not in _WRITTEN_BY_TRANSPORT
        and not name.startswith(OWN_PREFIX)
    )


def headers_for(lane: Lane, headers: Headers, request_id: str, priors: bytes = b"") -> Headers:
    """The client's headers with the lane's own in place of those of the same name.

    A lane whose headers are of our own family runs in our engine, which wants the request's id too, and may use
    what is known of its workload.
    """
    if not lane.headers:
        return headers
    own = tuple((name.encode("ascii"), value.encode("utf-8")) for name, value in lane.headers)
    names = {name.lower() for name, _ in own}
    if request_id and any(name.startswith(OWN_PREFIX) for name in names):
        own += ((REQUEST_ID, request_id.encode("ascii")),)
        own += ((_PRIORS, priors),) if priors else ()
    return tuple(item for item in headers if item[0].lower() not in names) + own


def response_headers(raw: Headers) -> Headers:
    """An upstream's headers that go on to the client."""
    kept: list[tuple[bytes, bytes]] = []
    named: set[bytes] = set()
    for item in raw:
        name = item[0].lower()
        if name == b"connection":
            named |= _tokens(item[1])
        elif name not in _HOP_BY_HOP:
            kept.append(item)
    return _without(kept, named)


@lru_cache(maxsize=1024)  # lanes, workloads and most reasons come again and again
def header_value(text: str, limit: int = 300) -> bytes:
    """Any text as a header value: one line of ASCII, at most `limit` bytes."""
    line = text[:limit]
    if not (line.isascii() and line.isprintable()):
        line = "".join(c if " " <= c <= "~" else " " if c.isspace() else "?" for c in line)
    return line.strip().encode("ascii")


def _tokens(value: bytes) -> set[bytes]:
    return {token.strip().lower() for token in value.split(b",")}


def _without(headers: list[tuple[bytes, bytes]], named: set[bytes]) -> Headers:
    unwanted = named - _NEVER_NAMED - {b"close", b"keep-alive", b"upgrade", b"te"}
    if not unwanted:
        return tuple(headers)
    return tuple(item for item in headers if item[0].lower() not in unwanted)
