"""Who may talk to us: a token where one is configured, else a Host that no foreign web page can bring about."""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import socket
from collections.abc import Mapping

from specproxy.errors import RequestError

__all__ = ["TOKEN_HEADER", "Guard"]

TOKEN_HEADER = "x-specproxy-token"  # noqa: S105 (the name of a header)


class Guard:
    """Checks request headers.

    With a token, it must come as ``X-Specproxy-Token``, as a bearer token, or as the password of basic
    authentication (which is how a browser sends it); comparison takes the same time for every wrong token.
    Without one we listen on loopback only, and the danger is DNS rebinding: a page of a foreign site whose name
    suddenly resolves to 127.0.0.1. Its requests carry that name in Host, so only names that no stranger can own
    are accepted.
    """

    def __init__(self, token: str | None = None, *, names: frozenset[str] = frozenset()) -> None:
        self._token = token.encode() if token else None
        self._names = names | {"localhost", socket.gethostname().lower()}

    def check(self, headers: Mapping[str, str]) -> None:
        """Let the request pass, or raise. `headers` must look names up without regard to case.

        Raises:
            RequestError: 401 for a missing or wrong token, 403 for a foreign Host.
        """
        if self._token is not None:
            if not any(hmac.compare_digest(given, self._token) for given in _given(headers)):
                raise RequestError(
                    "a valid token is needed",
                    status=401,
                    code="authentication_error",
                    hint="send it as Authorization: Bearer … or X-Specproxy-Token",
                )
        elif not self._is_ours(headers.get("Host", "")):
            raise RequestError(
                "this Host may not be used here",
                status=403,
                code="permission_error",
                hint="use 127.0.0.1 or localhost, or start specproxy with a token",
            )

    def _is_ours(self, host: str) -> bool:
        name = _without_port(host).lower().rstrip(".")
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name in self._names or name.endswith((".localhost", ".internal"))
        return True  # an address cannot be rebound: the browser really went there


def _given(headers: Mapping[str, str]) -> list[bytes]:
    """Every token that a request offers."""
    found = []
    if own := headers.get(TOKEN_HEADER):
        found.append(own.encode("utf-8", "surrogateescape"))
    scheme, _, value = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        found.append(value.strip().encode("utf-8", "surrogateescape"))
    elif scheme.lower() == "basic":
        try:
            found.append(base64.b64decode(value, validate=True).partition(b":")[2])
        except binascii.Error:
            return found
    return found


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.rpartition(":")[0] if host.count(":") == 1 else host
