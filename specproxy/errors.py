"""One error tree. Foreign exceptions are converted to these at the edge where they appear.

SpecproxyError
├── ConfigError            settings that cannot be used (CLI exit code 2)
│   ├── ModelFileError     a model file that is missing, not GGUF, truncated or unsupported
│   └── PairError          a draft that does not fit its target
├── RequestError           a request that cannot be served as asked (HTTP 4xx)
├── StoreError             the state store failed; the proxy goes on without it
└── BackendError           something upstream went wrong
    ├── UpstreamConnectError   no connection: nothing was sent, a retry is safe
    ├── UpstreamClosed         the connection ended before the response was complete
    ├── UpstreamProtocolError  bytes that are not HTTP/1.x
    ├── LaneUnavailable        no lane can take the request now
    └── LaneStartError         a lane did not come up
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "ConfigError",
    "LaneStartError",
    "LaneUnavailable",
    "ModelFileError",
    "PairError",
    "RequestError",
    "SpecproxyError",
    "StoreError",
    "UpstreamClosed",
    "UpstreamConnectError",
    "UpstreamProtocolError",
]


class SpecproxyError(Exception):
    """Base of every error that specproxy raises on purpose; `hint` says what to do next.

    `limit` names the setting that was reached, where that is what happened.
    """

    def __init__(self, message: str, *, hint: str = "", limit: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.limit = limit

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(SpecproxyError):
    """A setting that cannot be used."""


class ModelFileError(ConfigError):
    """A model file that is missing, not GGUF, truncated, or of an unsupported kind."""


class PairError(ConfigError):
    """A draft model that does not fit its target."""


class RequestError(SpecproxyError):
    """A request that cannot be served as asked; `status` is the HTTP status (4xx)."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request_error",
        hint: str = "",
        limit: str = "",
    ) -> None:
        super().__init__(message, hint=hint, limit=limit)
        self.status = status
        self.code = code


class StoreError(SpecproxyError):
    """The state store failed; whoever asked may go on without it."""


class BackendError(SpecproxyError):
    """Something upstream went wrong."""


class UpstreamConnectError(BackendError):
    """No connection could be made: nothing was sent, so a retry is safe."""


class UpstreamClosed(BackendError):
    """The upstream connection ended before the response was complete."""


class UpstreamProtocolError(BackendError):
    """The upstream sent bytes that are not HTTP/1.x."""


class LaneUnavailable(BackendError):
    """No lane can take the request now."""


class LaneStartError(BackendError):
    """A lane did not come up."""
