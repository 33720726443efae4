"""What clients may do at the edge, and the errors for those that do more."""

from __future__ import annotations

from dataclasses import dataclass

from specproxy.errors import RequestError

__all__ = ["ServerLimits"]


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """How many connections there may be, and what one may do. Times in seconds."""

    connections: int = 4096
    head_bytes: int = 128 * 1024
    headers: int = 256
    patience_s: float = 60.0  # from the first byte of a head to its last, and between bytes of a body
    idle_s: float = 600.0  # between requests
    linger_s: float = 5.0  # reading on after an answer to a request that had not come whole

    def head_too_long(self) -> RequestError:
        """The error for a head above the limits."""
        return RequestError(
            f"the request head is longer than {self.head_bytes} bytes, or has more than {self.headers} headers",
            status=431,
            code="header_too_large",
            hint="limits.head and limits.headers in the configuration raise the limit",
            limit="limits.head and limits.headers",
        )

    def too_slow(self) -> RequestError:
        """The error for a head that takes too long, or a body that does not go on."""
        return RequestError(
            f"the request has not come within {self.patience_s:g} seconds",
            status=408,
            code="request_timeout",
            hint="limits.patience in the configuration raises the limit",
            limit="limits.patience",
        )

    def too_many_connections(self) -> RequestError:
        """The error for a request on a connection too many."""
        return RequestError(
            f"there are {self.connections} connections already",
            status=503,
            code="too_many_connections",
            hint="limits.connections in the configuration raises the limit",
            limit="limits.connections",
        )
