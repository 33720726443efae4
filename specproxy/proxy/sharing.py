"""Learning together: proxies that share a store learn from every observation, in the one order that it gives.

An observation of ours goes into the store and is learned when it comes back in its place among those of the
others, a fraction of a second later. So does what replays of finished requests teach. So every proxy takes in
the same things in the same order, and their statistics of speeds are the same, as if one proxy had seen all the
traffic.

While the store is away, ours are learned at once, and wait. When it is back, we return to what was known when
it went, and take in what all proxies have seen since: nothing counts twice, and nothing is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import structlog

from specproxy.errors import StoreError
from specproxy.logs import request_fields
from specproxy.proxy.lessons import Lesson
from specproxy.proxy.quarantine import Quarantine
from specproxy.proxy.recorder import CATCH_UP, UNTAUGHT_RULES, Recorder
from specproxy.proxy.replayer import TakesReplays
from specproxy.records import Decision, Lane, Observation
from specproxy.store import Entry, Store, StoreWriter
from specproxy.store.redis import RedisStore
from specproxy.strategies.base import Policy
from specproxy.strategies.replay import ReplayResult

__all__ = ["SharedPolicy", "SharedRecorder"]

POLL_S = 0.25
_PAGE = 1000
_MOST_OURS = 50_000  # as many as the store keeps

T = TypeVar("T")

log = structlog.get_logger("specproxy")


class SharedPolicy(Policy, TakesReplays, Protocol):
    """A policy that replays teach too."""


class _Ours(NamedTuple):
    """What this proxy has sent into the store."""

    seen: Observation
    decision: Decision | None = None
    lesson: Lesson | None = None


class SharedRecorder(Recorder):
    """A recorder whose store is shared with other proxies. `follow` has to run beside it."""

    _policy: SharedPolicy

    def __init__(self, writer: StoreWriter, policy: SharedPolicy, *args: Any, **given: Any) -> None:
        super().__init__(writer, policy, *args, **given)
        self._ours: dict[tuple[str, str], _Ours] = {}  # on their way, by request and taught lane ("": none)
        self._position: str | None = None  # of the last entry that was taken in; None before the first look
        self._quarantine: Quarantine | None = None
        self._before: tuple[dict[str, Any], dict[str, Any]] | None = None  # states when the store went away

    def share(self, quarantine: Quarantine) -> None:
        """Share these sentences too, from the next look on."""
        self._quarantine = quarantine

    @property
    def away(self) -> bool:
        """Whether the store cannot be reached, as far as is known."""
        return self._before is not None

    def __call__(self, seen: Observation, decision: Decision | None) -> None:
        """Log an observation and send it to all; while nobody can be reached, take it in at once."""
        log.info("request", **request_fields(seen, decision))
        self._writer.append(seen)
        self._note(_Ours(seen, decision))

    def learn_replay(
        self, lane: Lane, observation: Observation, result: ReplayResult, source: str = "ids"
    ) -> None:
        """Send what a replay teaches to all, behind the observation; taken in at once while nobody is there."""
        lesson = Lesson(lane, result, source)
        text = lesson.to_text()
        self._writer.later(lambda store: _redis(store).append_lesson(observation, text))
        self._note(_Ours(observation, None, lesson))

    def save(self) -> None:
        """Queue the states for writing if there is news; not while they are ahead of the store."""
        if not self.away and self._position is not None:
            super().save()

    async def restore(self) -> None:
        """Load the states that all proxies share, and catch up; done by `follow` if the store is away now."""
        try:
            await self._read_store(lambda store: store.recent(1))
        except StoreError as error:
            self._leave(error)
            return
        await self._catch_up()

    async def follow(self) -> None:
        """Take in what comes out of the store, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            await self.look()

    async def look(self) -> None:
        """Take in what the store has got since the last look."""
        try:
            if self._position is None:
                await self._read_store(lambda store: store.flush())
                await self._come_back()
                await self._catch_up()
            while len(await self._take_page()) == _PAGE:
                pass
            if self._quarantine is not None:
                await self._sync(self._quarantine)
        except StoreError as error:
            self._leave(error)

    # --- inside ----------------------------------------------------------------------------------

    def _note(self, ours: _Ours) -> None:
        self._ours[_key(ours.seen, ours.lesson)] = ours
        if len(self._ours) > _MOST_OURS:
            del self._ours[next(iter(self._ours))]
        if self.away:
            self._take(ours, told=True)

    async def _read_store(self, read: Callable[[RedisStore], T]) -> T:
        return await self._writer.run(lambda store: read(_redis(store)))

    def _latest(self, store: Store) -> list[Entry]:
        return _redis(store).latest(CATCH_UP)

    async def _catch_up(self) -> None:
        """Begin with the states in the store, and all that it holds behind them."""
        saved, position = await self._read_store(lambda store: (self._read(store), store.position))
        self._begin(saved)
        self._position = position
        for entry in saved[2]:
            self._ours.pop(_key(entry.seen, _lesson(entry)), None)

    async def _sync(self, quarantine: Quarantine) -> None:
        """Tell the others what was changed here, and take over what they have changed."""
        ours = quarantine.entries()
        shared = await self._read_store(lambda store: store.sync("quarantine", ours))
        if shared != ours == quarantine.entries():  # else something was changed meanwhile: next time
            quarantine.replace(shared)

    async def _take_page(self) -> Sequence[Entry]:
        position = self._position
        assert position is not None
        entries = await self._read_store(lambda store: store.after(position, _PAGE))
        await self._come_back()
        for entry in entries:
            lesson = _lesson(entry)
            ours = self._ours.pop(_key(entry.seen, lesson), None)
            if not entry.lesson or lesson is not None:
                self._take(ours or _Ours(entry.seen, None, lesson), told=ours is not None)
            self._position = self._last = entry.id
        return entries

    def _take(self, one: _Ours, *, told: bool) -> None:
        """Learn from something; `told`: it is ours, so what it gives away is for us to tell."""
        self._teach(one.seen, one.lesson)
        if one.lesson is None:
            self._count(one.seen, one.decision, ours=told)

    def _learn(self, entry: Entry) -> None:
        lesson = _lesson(entry)
        if not entry.lesson or lesson is not None:
            self._teach(entry.seen, lesson)

    def _teach(self, seen: Observation, lesson: Lesson | None) -> None:
        if lesson is not None:
            self._policy.learn_replay(lesson.lane, seen, lesson.result, lesson.source)
        elif seen.rule not in UNTAUGHT_RULES:
            self._policy.learn_one(seen)

    def _leave(self, error: StoreError) -> None:
        """Go on alone: remember where we were, and take in what of ours is still on its way."""
        if self.away:
            return
        log.warning("learning alone until the shared store is back", error=error.message)
        self._before = self._board.dump(), self._policy.dump()
        for ours in self._ours.values():
            self._take(ours, told=True)

    async def _come_back(self) -> None:
        """The store is there again: return to where it was left."""
        if self._before is None:
            return
        log.info("learning together again", observations=len(self._ours))
        board, policy = self._before
        self._before = None
        self._board.withdraw({seen.request_id for seen, _, lesson in self._ours.values() if lesson is None})
        self._board.load(board)
        self._policy.load(policy)


def _redis(store: Store) -> RedisStore:
    assert isinstance(store, RedisStore)
    return store


def _key(seen: Observation, lesson: Lesson | None) -> tuple[str, str]:
    return seen.request_id, lesson.lane.id if lesson is not None else ""


def _lesson(entry: Entry) -> Lesson | None:
    """The lesson of an entry; None for an observation, and for what a proxy of another version has taught."""
    try:
        return Lesson.from_text(entry.lesson) if entry.lesson else None
    except ValueError:
        return None
