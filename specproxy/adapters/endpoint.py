"""Where an upstream listens, and how a request head looks on its wire."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from urllib.parse import urlsplit

from specproxy.adapters.base import Headers, UpstreamRequest
from specproxy.errors import ConfigError

__all__ = ["Endpoint"]

_EXPECTS_BODY = frozenset({"POST", "PUT", "PATCH"})
_ORIGIN_HEADERS = frozenset({b"origin", b"referer"})
_DEFAULT_PORTS = {"http": 80, "https": 443, "unix": 0}


@dataclass(frozen=True)
class Endpoint:
    """An upstream's address. `prefix` stands before every request target, without a closing slash.

    `strip_origin` drops Origin and Referer, for Ollama on loopback, which answers 403 to pages that it does not
    list. Whoever sets it has to check the origin itself, as `proxy.guard` does. `headers` go with every
    request, in place of those of the same name.
    """

    scheme: str  # http, https or unix
    host: str = "localhost"
    port: int = 0
    socket_path: str = ""
    prefix: str = ""
    connect_timeout_s: float = 10.0
    strip_origin: bool = False
    verify_tls: bool = True
    headers: Headers = field(default=(), repr=False)  # secrets

    @classmethod
    def parse(
        cls,
        url: str,
        *,
        connect_timeout_s: float = 10.0,
        strip_origin: bool = False,
        verify_tls: bool = True,
        headers: Headers = (),
    ) -> Endpoint:
        """Read ``http://host:port/prefix``, ``https://…`` or ``unix:///path/to/socket``.

        Raises:
            ConfigError: not such a URL.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is not a URL: {error}") from error
        if parts.scheme == "unix" and parts.path:
            scheme, host, socket_path, prefix = "unix", "localhost", parts.path, ""
        elif parts.scheme in ("http", "https") and parts.hostname:
            scheme, host, socket_path, prefix = parts.scheme, parts.hostname, "", parts.path.rstrip("/")
        else:
            raise ConfigError(f"{url!r} is not an upstream URL", hint="for example http://127.0.0.1:8080")
        port = port or _DEFAULT_PORTS[scheme]
        return cls(
            scheme, host, port, socket_path, prefix, connect_timeout_s, strip_origin, verify_tls, headers
        )

    @cached_property
    def url(self) -> str:
        """The endpoint as text, for messages."""
        if self.scheme == "unix":
            return f"unix://{self.socket_path}"
        return f"{self.scheme}://{self.authority}{self.prefix}"

    @cached_property
    def authority(self) -> str:
        """Value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @cached_property
    def _dropped(self) -> frozenset[bytes]:
        """Headers of a request that do not go out."""
        own = frozenset(name.lower() for name, _ in self.headers)
        return own | _ORIGIN_HEADERS if self.strip_origin else own

    @cached_property
    def _host_line(self) -> bytes:
        authority = self.authority.encode("ascii" if self.host.isascii() else "idna")
        return b" HTTP/1.1\r\nHost: " + authority + b"\r\n"

    def head_of(self, request: UpstreamRequest) -> bytes:
        """Request line and headers as they go on the wire, with the empty line."""
        target = (self.prefix + request.target).encode("utf-8", "surrogateescape")
        lines = [request.method.encode("ascii"), b" ", target, self._host_line]
        dropped = self._dropped
        for name, value in request.headers:
            if not (dropped and name.lower() in dropped):
                lines += (name, b": ", value, b"\r\n")
        for name, value in self.headers:
            lines += (name, b": ", value, b"\r\n")
        length = request.length if request.body is None else len(request.body)
        if length is None:
            lines.append(b"Transfer-Encoding: chunked\r\n")
        elif length or request.length is not None or request.method in _EXPECTS_BODY:
            lines.append(b"Content-Length: %d\r\n" % length)
        lines.append(b"\r\n")
        return b"".join(lines)
