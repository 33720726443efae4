"""Any HTTP/1.1 upstream as a Backend, and an iterator's view of a response for callers off the relay's path."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

from specproxy.adapters.base import Exchange, Headers, ProbeResult, ResponseHead, Sink, UpstreamRequest
from specproxy.adapters.endpoint import Endpoint
from specproxy.adapters.transport import HttpTransport
from specproxy.errors import BackendError, UpstreamClosed, UpstreamProtocolError
from specproxy.records import Health, Lane, LaneStatus

__all__ = ["Endpoint", "HttpBackend", "HttpTransport", "Opener", "Reply", "ResponseStream", "fetch"]

Opener = Callable[[UpstreamRequest, Sink], Exchange]

_HIGH_WATER = 256 * 1024  # bytes held for a reader before the upstream is paused


class HttpBackend:
    """A server that somebody else runs, with lanes that somebody else worked out (a `Backend`).

    Its lanes are READY and in memory until `mark` says otherwise. `on_load` is called with a lane that gets a
    request while it is not in memory.
    """

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        lanes: Iterable[Lane] = (),
        *,
        on_load: Callable[[Lane], None] = lambda _: None,
    ) -> None:
        self.name = name
        self._on_load = on_load
        self.transport = HttpTransport(endpoint)
        self._lanes = {lane.id: LaneStatus(lane, Health.READY, since=time.time()) for lane in lanes}

    async def start(self) -> None:
        """Nothing to bring up."""

    def lanes(self) -> tuple[LaneStatus, ...]:
        return tuple(self._lanes.values())

    def set_lanes(self, lanes: Iterable[Lane]) -> None:
        """Replace the lanes; one that stays keeps its health."""
        old, now = self._lanes, time.time()
        self._lanes = {
            lane.id: dataclasses.replace(old[lane.id], lane=lane)
            if lane.id in old
            else LaneStatus(lane, Health.READY, since=now)
            for lane in lanes
        }

    def mark(self, lane_id: str, health: Health, note: str = "", *, resident: bool | None = None) -> None:
        """Set the health of a lane that is known here, and whether its model is in memory (None: as it is)."""
        status = self._lanes[lane_id]
        resident = status.resident if resident is None else resident
        if (status.health, status.note, status.resident) != (health, note, resident):
            since = status.since if status.health == health else time.time()
            self._lanes[lane_id] = dataclasses.replace(
                status, health=health, since=since, note=note, resident=resident
            )

    async def probe(self) -> ProbeResult:
        """Whether anything answers HTTP there; what it is, `adapters.probe` finds out."""
        try:
            request = UpstreamRequest("GET", "/", (), replayable=True)
            reply = await fetch(self.transport.open, request, timeout_s=5.0)
        except BackendError:
            return ProbeResult(reachable=False)
        return ProbeResult(reachable=True, detail={"status": reply.head.status})

    def open(self, request: UpstreamRequest, lane: Lane, sink: Sink) -> Exchange:
        self.brought_in(lane)  # it will be, and is asked for as if it were
        return self.transport.open(request, sink)

    def brought_in(self, lane: Lane) -> None:
        """Take note that a lane is coming into memory, if it is not there."""
        status = self._lanes.get(lane.id)
        if status is not None and not status.resident:
            self.mark(lane.id, status.health, status.note, resident=True)  # it will be by then
            self._on_load(lane)

    async def aclose(self) -> None:
        await self.transport.aclose()


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole response."""

    head: ResponseHead
    body: bytes
    trailers: Headers = ()


class ResponseStream:
    """An exchange as an asynchronous iterator over body pieces, with back-pressure (a `Sink`).

    ::

        async with ResponseStream(transport.open, request) as response:
            head = await response.wait_head()
            async for piece in response:
                ...

    Leaving the block early closes the upstream connection.
    """

    def __init__(self, opener: Opener, request: UpstreamRequest) -> None:
        self.trailers: Headers = ()
        self._opener = opener
        self._request = request
        self._exchange: Exchange | None = None
        self._head: ResponseHead | None = None
        self._pieces: deque[bytes] = deque()
        self._held = 0
        self._ended = False
        self._error: BackendError | None = None
        self._news = asyncio.Event()

    async def __aenter__(self) -> ResponseStream:
        self._exchange = self._opener(self._request, self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._exchange is not None:
            self._exchange.abort()

    async def wait_head(self) -> ResponseHead:
        """The response head, once it is there.

        Raises:
            BackendError: the exchange broke before it came.
        """
        while self._head is None:
            await self._wait()
        return self._head

    def __aiter__(self) -> ResponseStream:
        return self

    async def __anext__(self) -> bytes:
        while not self._pieces:
            if self._ended:
                raise StopAsyncIteration
            await self._wait()
        piece = self._pieces.popleft()
        self._held -= len(piece)
        if self._held <= _HIGH_WATER // 2 and self._exchange is not None:
            self._exchange.resume()
        return piece

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._news.clear()
        await self._news.wait()

    # --- Sink ---

    def head(self, head: ResponseHead) -> None:
        self._head = head
        self._news.set()

    def data(self, parts: Sequence[bytes]) -> None:
        self._pieces.extend(parts)
        self._held += sum(map(len, parts))
        if self._held > _HIGH_WATER and self._exchange is not None:
            self._exchange.pause()
        self._news.set()

    def end(self, trailers: Headers) -> None:
        self.trailers = trailers
        self._ended = True
        self._news.set()

    def fail(self, error: BackendError) -> None:
        self._error = error
        self._news.set()


async def fetch(
    opener: Opener, request: UpstreamRequest, *, timeout_s: float | None = None, limit: int = 16 * 1024 * 1024
) -> Reply:
    """Send a request and read its whole reply.

    Raises:
        BackendError: the exchange broke, took longer than `timeout_s` seconds, or gave more than `limit` bytes.
    """
    try:
        async with asyncio.timeout(timeout_s), ResponseStream(opener, request) as response:
            head = await response.wait_head()
            pieces = bytearray()
            async for piece in response:
                pieces += piece
                if len(pieces) > limit:
                    raise UpstreamProtocolError(f"the reply to {request.target} is longer than {limit} bytes")
    except TimeoutError as error:
        raise UpstreamClosed(f"no whole reply to {request.target} within {timeout_s:g} s") from error
    return Reply(head, bytes(pieces), response.trailers)
