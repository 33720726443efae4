"""Who may talk to us: a token where one is configured, else only what no foreign web page can bring about."""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import socket
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from specproxy.errors import RequestError

__all__ = ["TOKEN_HEADER", "Guard"]

TOKEN_HEADER = "x-specproxy-token"  # noqa: S105 (the name of a header)


_MOST_KNOWN = 256  # names that are looked at once


class Guard:
    """Checks request headers, of relayed requests and of our own routes.

    With a token, it must come as ``X-Specproxy-Token``, as a bearer token, or as the password of basic
    authentication (which is how a browser sends it); comparison takes the same time for every wrong token.
    A browser adds that password to requests of foreign pages too, so their Origin must be one that may call.

    Without one we listen on loopback only, and the danger is a web page in the user's own browser. Its requests
    carry its site in Origin; where its name was made to resolve to 127.0.0.1 (DNS rebinding), they carry that
    name in Host. Both must be names that no stranger can own, or be in `origins` (``https://chat.example``;
    ``*`` is all). Ollama does the same check, but never sees these headers from us.
    """

    def __init__(self, token: str | None = None, *, origins: Iterable[str] = ()) -> None:
        self._names = {"localhost", socket.gethostname().lower()}
        self._known: dict[str, bool] = {}
        self.set(token, origins)

    def set(self, token: str | None, origins: Iterable[str]) -> None:
        """Ask for another token, or allow other origins, from now on."""
        self._token = token.encode() if token else None
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)

    def check(self, headers: Mapping[str, str]) -> bool:
        """Let the request pass, or raise. `headers` must look names up without regard to case.

        Returns whether Authorization carries our token: then it is for us, and no upstream may see it.

        Raises:
            RequestError: 401 for a missing or wrong token, 403 for a foreign Host or Origin.
        """
        if self._token is not None:
            authorization = [hmac.compare_digest(given, self._token) for given in _authorization(headers)]
            own = headers.get(TOKEN_HEADER, "").encode("utf-8", "surrogateescape")
            by_itself = hmac.compare_digest(own, self._token)
            if not any((*authorization, by_itself)):
                raise RequestError(
                    "a valid token is needed",
                    status=401,
                    code="authentication_error",
                    hint="send it as Authorization: Bearer … or X-Specproxy-Token",
                )
            if not by_itself and _is_basic(headers):
                self._check_page(headers)
            return any(authorization)
        if not self._is_ours(_without_port(headers.get("Host", ""))):
            raise _forbidden(
                "this Host may not be used here", "use 127.0.0.1 or localhost, or start with a token"
            )
        self._check_page(headers)
        return False

    def _check_page(self, headers: Mapping[str, str]) -> None:
        """Raise where a page calls that may not: neither our own, nor one that is allowed."""
        origin = headers.get("Origin")
        if origin is None or self._may_call(origin.lower()):
            return
        host = headers.get("Host", "").lower()
        own = self._token is not None and host and origin.lower() in (f"http://{host}", f"https://{host}")
        if not own:
            raise _forbidden("pages of this Origin may not call here", "allow it with the setting origins")

    def reader(self, headers: Mapping[str, str]) -> str | None:
        """The Origin of the page that calls, if it may read the answer."""
        origin = headers.get("Origin")
        return origin if origin is not None and self._may_call(origin.lower()) else None

    def _may_call(self, origin: str) -> bool:
        if origin in self._origins or "*" in self._origins:
            return True
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False  # such as an address whose bracket is not closed
        if parts.scheme in ("http", "https"):
            return self._is_ours(parts.netloc and _without_port(parts.netloc))
        return bool(parts.scheme)  # an app's or extension's own scheme; "null" has none

    def _is_ours(self, host: str) -> bool:
        """Whether no stranger can own this name; clients say the same one again and again."""
        known = self._known.get(host)
        if known is None:
            known = self._find_out(host)
            if len(self._known) < _MOST_KNOWN:
                self._known[host] = known
        return known

    def _find_out(self, host: str) -> bool:
        name = host.lower().rstrip(".")
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name in self._names or name.endswith((".localhost", ".internal"))
        return True  # an address cannot be rebound: the browser really went there


def _forbidden(message: str, hint: str) -> RequestError:
    return RequestError(message, status=403, code="permission_error", hint=hint)


def _is_basic(headers: Mapping[str, str]) -> bool:
    return headers.get("Authorization", "")[:6].lower() == "basic "


def _authorization(headers: Mapping[str, str]) -> list[bytes]:
    """The token that Authorization offers, if it does."""
    scheme, _, value = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return [value.strip().encode("utf-8", "surrogateescape")]
    if scheme.lower() == "basic":
        try:
            return [base64.b64decode(value, validate=True).partition(b":")[2]]
        except (binascii.Error, ValueError):
            return []
    return []


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.rpartition(":")[0] if host.count(":") == 1 else host
