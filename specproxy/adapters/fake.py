"""A scripted backend without sockets or processes: for tests of whatever uses a Backend, here and elsewhere.

It passes the same contract checks as the real ones.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Sequence

from specproxy.adapters.base import Exchange, Headers, ProbeResult, ResponseHead, Sink, UpstreamRequest
from specproxy.adapters.tasks import Tasks
from specproxy.errors import BackendError, UpstreamClosed
from specproxy.records import Control, Health, Lane, LaneStatus

__all__ = ["FakeBackend", "FakeExchange", "Script", "respond"]


class FakeExchange:
    """One exchange with the fake, seen from both sides.

    A script reads `request`, `lane` and `body()`, and answers with `head`, `data`, `end` or `fail`. What the
    caller did is recorded: `aborted`, `paused`.
    """

    def __init__(self, request: UpstreamRequest, lane: Lane, sink: Sink) -> None:
        self.request = request
        self.lane = lane
        self.aborted = False
        self.paused = False
        self.over = False  # the sink has heard its last
        self._sink = sink
        self._task: asyncio.Task[None] | None = None
        self._pieces = bytearray(request.body or b"")
        self._whole = asyncio.Event()
        self._running = asyncio.Event()
        self._running.set()
        if request.body is not None:
            self._whole.set()

    # --- the script's side ---

    async def body(self) -> bytes:
        """The whole request body, once it is there."""
        await self._whole.wait()
        return bytes(self._pieces)

    async def gone(self) -> None:
        """Wait until the caller has given up."""
        await asyncio.get_running_loop().create_future()

    async def head(self, status: int = 200, headers: Headers = (), reason: bytes = b"OK") -> None:
        """Send a response head."""
        await self._running.wait()
        if not self.over:
            self._sink.head(ResponseHead(status, reason, headers))

    async def data(self, *parts: bytes) -> None:
        """Send body bytes, as one read; waits while the caller has paused. One turn of the loop each."""
        await asyncio.sleep(0)
        await self._running.wait()
        if not self.over:
            self._sink.data(parts)

    async def end(self, trailers: Headers = ()) -> None:
        """Complete the response."""
        await self._running.wait()
        if not self.over:
            self.over = True
            self._sink.end(trailers)

    def fail(self, error: BackendError) -> None:
        """Break off."""
        if not self.over:
            self.over = True
            self._sink.fail(error)

    def start(self, task: asyncio.Task[None]) -> None:
        """Remember the task that runs the script, to cancel it."""
        self._task = task

    # --- Exchange ---

    async def write(self, data: bytes) -> None:
        if self.over:
            raise UpstreamClosed("the fake takes no more")
        self._pieces += data

    async def write_end(self, trailers: Headers = ()) -> None:  # noqa: ARG002 - scripts have not asked for them
        if self.over:
            raise UpstreamClosed("the fake takes no more")
        self._whole.set()

    def pause(self) -> None:
        self.paused = True
        self._running.clear()

    def resume(self) -> None:
        self.paused = False
        self._running.set()

    def abort(self) -> None:
        if not self.over:
            self.over = True
            self.aborted = True
            if self._task is not None:
                self._task.cancel()


Script = Callable[[FakeExchange], Awaitable[None]]


def respond(
    body: bytes = b"{}",
    *,
    status: int = 200,
    headers: Headers = ((b"Content-Type", b"application/json"),),
    parts: Sequence[bytes] | None = None,
) -> Script:
    """A script that answers with a body, or with `parts` as so many reads of a chunked one."""

    async def script(exchange: FakeExchange) -> None:
        if parts is None:
            await exchange.head(status, (*headers, (b"Content-Length", b"%d" % len(body))))
            if body and exchange.request.method != "HEAD":
                await exchange.data(body)
        else:
            await exchange.head(status, (*headers, (b"Transfer-Encoding", b"chunked")))
            for part in parts:
                await exchange.data(part)
        await exchange.end()

    return script


class FakeBackend:
    """A `Backend` whose every exchange runs a script. All exchanges are kept in `exchanges`.

    Of the lanes under reload control the first one is in memory, until a request or `load` (kept in `loads`)
    brings in another.

    A script that raises a BackendError breaks its exchange off with it; one that returns without an end breaks
    off with UpstreamClosed.
    """

    def __init__(self, name: str, lanes: Iterable[Lane], script: Script | None = None) -> None:
        self.name = name
        self.script = script or respond()
        self.exchanges: list[FakeExchange] = []
        self.reachable = True
        self.started = False
        self._tasks = Tasks()
        self.loads: list[str] = []
        self._lanes = {lane.id: LaneStatus(lane, Health.READY) for lane in lanes}
        first = next((lane for lane in self._movable()), None)
        if first is not None:
            self._bring_in(first)

    async def start(self) -> None:
        self.started = True

    def lanes(self) -> tuple[LaneStatus, ...]:
        return tuple(self._lanes.values())

    def mark(self, lane_id: str, health: Health, note: str = "") -> None:
        """Set the health of a lane."""
        self._lanes[lane_id] = dataclasses.replace(self._lanes[lane_id], health=health, note=note)

    async def probe(self) -> ProbeResult:
        return ProbeResult(reachable=self.reachable, kind="fake" if self.reachable else "unknown")

    async def load(self, lane: Lane) -> None:
        self.loads.append(lane.id)
        if not self.reachable:
            raise UpstreamClosed("the fake is away")
        self._bring_in(lane)

    def open(self, request: UpstreamRequest, lane: Lane, sink: Sink) -> Exchange:
        if lane.control is Control.RELOAD:
            self._bring_in(lane)
        exchange = FakeExchange(request, lane, sink)
        self.exchanges.append(exchange)
        exchange.start(self._tasks.spawn(self._run(exchange), name="fake exchange"))
        return exchange

    async def aclose(self) -> None:
        await self._tasks.aclose()
        for exchange in self.exchanges:
            exchange.fail(UpstreamClosed("the fake was closed"))

    def _movable(self) -> Iterable[Lane]:
        return [s.lane for s in self._lanes.values() if s.lane.control is Control.RELOAD]

    def _bring_in(self, lane: Lane) -> None:
        for other in self._movable():
            status = self._lanes[other.id]
            self._lanes[other.id] = dataclasses.replace(status, resident=other.id == lane.id)

    async def _run(self, exchange: FakeExchange) -> None:
        try:
            await self.script(exchange)
        except BackendError as error:
            exchange.fail(error)
        exchange.fail(UpstreamClosed("the script ended without an end"))
