"""The real proxy in this event loop, between two servers that misbehave and clients that do."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import psutil

from benchmarks.chaos.client import CLIENT_FAULTS, Seen, ask, judge
from benchmarks.chaos.faults import FAULTS, SHAPES, Ending, Shape
from benchmarks.chaos.upstream import ChaosUpstream
from specproxy.config import Settings
from specproxy.proxy.service import Service
from specproxy.records import Health

__all__ = ["MIXED", "Arena", "Tally", "arena", "patiently", "until"]

T = TypeVar("T")

LIMIT_S = 30.0  # a request that takes longer hangs
_TICK_S = 0.1
SETTLE_S = 15.0
_ONLY_WITH_CLIENTS = ("takes_its_time", "sends_a_flood", "never_goes_on", "never_answers")

MIXED = tuple(name for name in FAULTS if name not in _ONLY_WITH_CLIENTS)
"""Faults of an upstream that any request may meet."""


@dataclass
class Tally:
    """What was tried, and what went wrong."""

    kinds: set[str] = field(default_factory=set)
    requests: int = 0
    lost: int = 0
    hung: int = 0
    leaked_tasks: int = 0
    leaked_sockets: int = 0
    endings: Counter[str] = field(default_factory=Counter)

    def wrong(self, what: str, *, lost: int = 1) -> None:
        """Count and show something that went wrong."""
        self.lost += lost
        print(f"WRONG: {what}", file=sys.stderr, flush=True)


@dataclass
class Arena:
    """A proxy with a plain server and one that drafts; from `fewest` to `most` requests should be counted."""

    service: Service
    plain: ChaosUpstream
    drafts: ChaosUpstream
    tally: Tally
    rng: random.Random
    strategy: str = ""  # the drafting lane's
    fewest: int = 0
    most: int = 0
    _ids: int = 0

    @property
    def port(self) -> int:
        return int(self.service.url.rpartition(":")[2])

    def key(self) -> str:
        """A request id that was not used before."""
        self._ids += 1
        return f"r{self._ids}"

    async def upstream_fault(self, fault: str, shape: Shape, *, on_drafts: bool) -> None:
        """One request to a server that fails in this way; on the drafting one plain may step in."""
        name = self.drafts.name if on_drafts else self.plain.name
        pin = self.strategy if on_drafts else "plain"
        key = self.key()
        seen = await self.request(f"{fault}|{name}|{key}", shape, pin)
        if seen is None:
            return
        answer = FAULTS[fault](shape)
        fails_early = answer.may == {Ending.ERROR} or answer.head.startswith(b"HTTP/1.1 50")
        rescued = on_drafts and fails_early
        ending, wrong = judge(shape, fault, seen, rescued=rescued)
        if wrong and on_drafts and Ending.ERROR in answer.may and not fails_early:
            ending, wrong = judge(shape, fault, seen, rescued=True)
        self.tally.endings[str(ending)] += 1
        if wrong:
            self.tally.wrong(f"{fault} on {name} ({shape.name}): {wrong}")
        self._check_attempts(fault, key, ending)

    def _check_attempts(self, fault: str, key: str, ending: Ending | None) -> None:
        """Nothing is sent twice once a byte has been shown, and a failure is retried at most once on plain."""
        on_drafts, on_plain = self.drafts.seen.pop(key, 0), self.plain.seen.pop(key, 0)
        # An idle connection may turn out to be dead, so that a request is sent once more on a fresh one.
        allowed = 1 if ending is Ending.CUT else 2
        if on_drafts > 2 or on_plain > 2 or (ending is Ending.CUT and on_drafts + on_plain > allowed):
            self.tally.wrong(f"{fault}: sent {on_drafts} times to the drafting lane, {on_plain} to plain")

    async def request(self, tag: str, shape: Shape, pin: str) -> Seen | None:
        """Send one request; None if it hung."""
        self.tally.requests += 1
        self.fewest += 1
        self.most += 1
        self.tally.kinds.add("upstream_" + tag.partition("|")[0])
        try:
            return await patiently(ask(self.port, shape, tag, f"X-Specproxy-Strategy: {pin}"))
        except TimeoutError:
            self.tally.hung += 1
            print(f"HUNG: {tag}", file=sys.stderr, flush=True)
            return None

    async def client_fault(self, name: str, shape: Shape) -> None:
        """One client that fails in this way."""
        run, fewest, most = CLIENT_FAULTS[name]
        self.tally.requests += max(1, most)
        self.fewest += fewest
        self.most += most
        self.tally.kinds.add(name)
        try:
            wrong = await patiently(run(self.port, shape, self.key()))
        except TimeoutError:
            self.tally.hung += 1
            print(f"HUNG: {name}", file=sys.stderr, flush=True)
            return
        except Exception as error:
            wrong = repr(error)
        if wrong:
            self.tally.wrong(f"{name} ({shape.name}): {wrong}")

    # --- faults that concern everybody, one at a time ---

    async def refuses_connections(self) -> None:
        """The drafting server is away: plain answers. Both are: an error. They come back: all is well."""
        shape = self.any_shape()
        await self.drafts.close()
        await self._expect("refuses_connections", shape, self.strategy, Ending.COMPLETE)
        await self.plain.close()
        for pin in ("plain", self.strategy):
            await self._expect("refuses_connections", self.any_shape(), pin, Ending.ERROR)
        await self.drafts.open()
        await self.plain.open()
        await self.ready()
        await self._expect("refuses_connections", shape, "plain", Ending.COMPLETE)

    async def closes_idle_connections(self) -> None:
        """Kept connections are gone when the next request comes: nobody notices."""
        for _ in range(3):
            await self._expect("well", self.any_shape(), "plain", Ending.COMPLETE)
            await self.plain.close()
            await self.plain.open()
        await self._expect("closes_idle_connections", self.any_shape(), "plain", Ending.COMPLETE)
        await self.ready()

    async def clock_jumps(self) -> None:
        """The wall clock leaps by years, forwards and back, with requests under way."""
        really = time.time
        for years in (10, -20, 0.5):
            with mock.patch.object(time, "time", lambda by=years: really() + by * 3.15e7):
                jobs = [
                    self._expect("clock_jumps", self.any_shape(), "plain", Ending.COMPLETE) for _ in range(4)
                ]
                await asyncio.gather(*jobs)
        await self._expect("clock_jumps", self.any_shape(), "plain", Ending.COMPLETE)

    async def _expect(self, kind: str, shape: Shape, pin: str, ending: Ending) -> None:
        self.tally.kinds.add("upstream_" + kind if "clock" not in kind else kind)
        seen = await self.request(f"well|all|{self.key()}", shape, pin)
        if seen is None:
            return
        got, _ = judge(shape, "well", seen)
        self.tally.endings[str(got)] += 1
        if got is not ending:
            self.tally.wrong(f"{kind}: ended as {got}, not as {ending}: {seen.status} {seen.content[:200]!r}")

    def any_shape(self) -> Shape:
        return self.rng.choice(list(SHAPES.values()))

    def is_ready(self) -> bool:
        """Whether both lanes are known and ready."""
        lanes = self.service.lanes()
        return len(lanes) == 2 and all(lane.health is Health.READY for lane in lanes)

    async def ready(self) -> None:
        """Wait until both lanes are ready."""
        await until(self.is_ready)

    async def check_count(self) -> None:
        """Every request was counted exactly once, whatever became of it."""
        await until(lambda: self.service.router.load.in_flight == 0)
        counted = self.service.status()["requests"]["total"]
        off = max(self.fewest - counted, counted - self.most, 0)
        if off:
            self.tally.wrong(f"{counted} requests were counted, not {self.fewest} to {self.most}", lost=off)


async def patiently(work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives.

    Raises:
        TimeoutError: `LIMIT_S` seconds were not enough. Where a busy machine keeps this process waiting for a
            time, that time does not count: else it would be taken for hanging.
    """
    task = asyncio.create_task(work)
    spent, before = 0.0, time.monotonic()
    try:
        while not task.done():
            if spent > LIMIT_S:
                raise TimeoutError
            await asyncio.wait((task,), timeout=_TICK_S)
            now = time.monotonic()
            spent, before = spent + min(now - before, 2 * _TICK_S), now
        return task.result()
    finally:
        if task.cancel():
            await asyncio.wait((task,))


async def until(condition: Callable[[], bool], seconds: float = SETTLE_S) -> bool:
    """Wait for a condition; returns whether it came true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


@dataclass(frozen=True)
class _Held:
    """Tasks of this loop and open sockets of this process."""

    tasks: int
    sockets: int

    @classmethod
    def now(cls) -> _Held:
        return cls(len(asyncio.all_tasks()), len(psutil.Process().net_connections(kind="all")))

    async def check(self, tally: Tally, when: str) -> None:
        """Wait until no more is held than this, and count what still is."""
        await until(lambda: (now := _Held.now()).tasks <= self.tasks and now.sockets <= self.sockets)
        now = _Held.now()
        tasks, sockets = max(0, now.tasks - self.tasks), max(0, now.sockets - self.sockets)
        tally.leaked_tasks += tasks
        tally.leaked_sockets += sockets
        if tasks or sockets:
            names = sorted(task.get_name() for task in asyncio.all_tasks())
            print(f"LEAKED {when}: {tasks} tasks of {names}, {sockets} sockets", file=sys.stderr, flush=True)


@asynccontextmanager
async def arena(state: Path, tally: Tally, seed: int) -> AsyncIterator[Arena]:
    """A running proxy; what it has leaked when all is quiet, and when it has ended, is added to the tally."""
    outside = _Held.now()
    plain, drafts = ChaosUpstream("plain"), ChaosUpstream("drafts", drafts=True)
    await plain.open()
    await drafts.open()
    given = {"port": 0, "state_dir": state, "grace": 0.0, "probe_fields": False}
    service = Service(Settings.model_validate(given | {"upstream": (plain.server.url, drafts.server.url)}))
    here = Arena(service, plain, drafts, tally, random.Random(seed))
    try:
        await service.start()
        await here.ready()
        here.strategy = next(s.lane.strategy.name for s in service.lanes() if not s.lane.strategy.is_plain)
        await until(lambda: plain.server.open_now + drafts.server.open_now == 0)
        quiet = _Held.now()
        yield here
        await here.check_count()
        await quiet.check(tally, "when all was quiet")
    finally:
        await service.aclose()
        await plain.close()
        await drafts.close()
    await outside.check(tally, "at the end")
