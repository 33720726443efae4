"""A backend that stands in while no server has been found."""

from __future__ import annotations

from collections.abc import Iterable

from specproxy.adapters.base import Exchange, ProbeResult, Sink, UpstreamRequest
from specproxy.adapters.refused import RefusedExchange
from specproxy.errors import UpstreamConnectError
from specproxy.records import Lane, LaneStatus

__all__ = ["NobodyHome"]


class NobodyHome:
    """Answers for servers that were not found: every exchange fails, saying where was looked (a `Backend`)."""

    name = "nobody"

    def __init__(self, urls: Iterable[str]) -> None:
        places = ", ".join(urls)
        self._message = (
            f"no server answers at {places}: start Ollama or llama-server, or name one with --upstream"
        )

    async def start(self) -> None:
        """Nothing to bring up."""

    def lanes(self) -> tuple[LaneStatus, ...]:
        """None."""
        return ()

    async def probe(self) -> ProbeResult:
        """Unreachable."""
        return ProbeResult(False)

    def open(self, request: UpstreamRequest, lane: Lane, sink: Sink) -> Exchange:  # noqa: ARG002 (nothing is sent)
        """Fail, once the caller has the exchange in hand."""
        return RefusedExchange(sink, UpstreamConnectError(self._message))

    async def aclose(self) -> None:
        """Nothing to close."""
