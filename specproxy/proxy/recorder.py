"""Where observations go: the log, the board, the store; and how statistics come back after a restart.

The policy's and the board's state are saved every few seconds with the id of the last request that they have
seen. Observations are committed within a fraction of a second. At start the states are loaded, and what was
committed after them is taken in again, so that a killed process loses no more than its last moment.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import structlog

from specproxy.errors import StoreError
from specproxy.logs import request_fields
from specproxy.proxy.board import Board
from specproxy.proxy.replayer import TakesReplays
from specproxy.records import Decision, Lane, Observation, Situation
from specproxy.store import Entry, Event, Store, StoreWriter
from specproxy.strategies.base import Policy
from specproxy.strategies.changes import Change
from specproxy.strategies.drift import DriftEvent
from specproxy.strategies.recovery import Settled
from specproxy.strategies.replay import ReplayResult

__all__ = ["HeldPolicy", "Recorder"]

CATCH_UP = 5_000  # observations that are looked at after a state's last one
EVENTS_SHOWN = 50
UNTAUGHT_RULES = ("unknown_model", "unread")  # what the router keeps from the policy

_Saved = tuple[dict[str, Any] | None, dict[str, Any] | None, list[Entry], list[Event]]

log = structlog.get_logger("specproxy")


class HeldPolicy:
    """A policy as the router sees it where observations are learned elsewhere: it only chooses.

    What replays teach is passed on to `pupil`, who sees to it that all learn it.
    """

    def __init__(self, policy: Policy, pupil: TakesReplays) -> None:
        self.name = policy.name
        self.pupil = pupil
        self._policy = policy

    def choose(self, situation: Situation, rng: np.random.Generator) -> Decision:
        """Choose as the policy does."""
        return self._policy.choose(situation, rng)

    def learn_one(self, observation: Observation) -> None:
        """Leave it to the one who gives the order."""

    def learn_replay(
        self, lane: Lane, observation: Observation, result: ReplayResult, source: str = "ids"
    ) -> None:
        """Leave this to the one who gives the order too."""
        self.pupil.learn_replay(lane, observation, result, source)

    def dump(self) -> dict[str, Any]:
        """The policy's state."""
        return self._policy.dump()

    def load(self, state: dict[str, Any]) -> None:
        """Restore the policy's state."""
        self._policy.load(state)


class Recorder:
    """Takes every observation in (as a listener of the router), and saves and restores state.

    `take_changes` gives what the policy has noticed since it was last asked, such as drift.
    """

    def __init__(
        self,
        writer: StoreWriter,
        policy: Policy,
        board: Board,
        *,
        take_changes: Callable[[], Sequence[DriftEvent | Change | Settled]] = tuple,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.events: deque[Event] = deque(maxlen=EVENTS_SHOWN)
        self._take_changes = take_changes
        self._writer = writer
        self._policy = policy
        self._board = board
        self._wall = wall
        self._last = ""
        self._saved: str | None = ""

    def __call__(self, seen: Observation, decision: Decision | None) -> None:
        """Log, count and keep one observation; the router has taught it to the policy."""
        self._writer.append(seen)
        log.info("request", **request_fields(seen, decision))
        self._count(seen, decision)

    def _count(self, seen: Observation, decision: Decision | None, *, ours: bool = True) -> None:
        """Note an observation that the policy has learned; `ours`: what it gives away is not told by others."""
        self._board.observe(seen, decision)
        self._last = seen.request_id
        for change in self._take_changes():
            if isinstance(change, Settled):  # of choices that were made here, whosever request came in between
                log.info("settled", lane=change.label, noticed=change.sentence)
                self.event("settled", change.sentence, change.arm)
                continue
            log.warning("drift", lane=change.label, noticed=change.sentence)
            event = Event(self._wall(), "drift", change.sentence, change.arm)
            self.events.append(event)
            if ours:
                self._writer.add_event(event)

    def event(self, kind: str, message: str, subject: str = "") -> None:
        """Keep something that happened, for the event log."""
        event = Event(self._wall(), kind, message, subject)
        self.events.append(event)
        self._writer.add_event(event)

    def learned(self) -> None:
        """The policy has learned something that no observation will bring back: it is news to save."""
        self._saved = None

    def save(self) -> None:
        """Queue the states for writing if there is news; never blocks on a disk."""
        if self._last == self._saved:
            return
        now = self._wall()
        for name, state in (("board", self._board.dump()), (self._policy.name, self._policy.dump())):
            self._writer.save_policy(name, {"last": self._last, "state": state}, now)
        self._saved = self._last

    async def restore(self) -> None:
        """Load both states and catch up. State that cannot be used is named in the log and left behind."""
        try:
            self._begin(await self._writer.run(self._read))
        except StoreError as error:
            log.warning("earlier statistics cannot be read", error=str(error))

    def _begin(self, saved: _Saved) -> None:
        """Begin with what was saved."""
        board, policy, recent, events = saved
        self.events.extend(events)
        known = [entry.id for entry in recent]
        counted = _after(known, self._load("board", board, self._board.load))
        self._board.recall([entry.seen for entry in recent[:counted] if not entry.lesson])
        for entry in recent[counted:]:
            if not entry.lesson:
                self._board.observe(entry.seen)
        for entry in recent[_after(known, self._load(self._policy.name, policy, self._policy.load)) :]:
            self._learn(entry)
        self._saved = self._last = known[-1] if known else ""

    def _learn(self, entry: Entry) -> None:
        if entry.seen.rule not in UNTAUGHT_RULES:
            self._policy.learn_one(entry.seen)

    def _read(self, store: Store) -> _Saved:
        board, policy = store.load_policy("board"), store.load_policy(self._policy.name)
        return board, policy, self._latest(store)[::-1], store.events(EVENTS_SHOWN)[::-1]

    def _latest(self, store: Store) -> list[Entry]:
        """The log's last entries, newest first."""
        return [Entry(seen.request_id, seen) for seen in store.recent(CATCH_UP)]

    def _load(
        self, name: str, saved: dict[str, Any] | None, load: Callable[[dict[str, Any]], None]
    ) -> str | None:
        """Load one state; returns the id of the last request that it has seen, None without one."""
        if saved is None:
            return None
        try:
            load(saved["state"])
            return str(saved["last"])
        except (ValueError, KeyError, TypeError) as error:
            log.warning("earlier statistics cannot be used", of=name, error=str(error))
            return None


def _after(ids: list[str], last: str | None) -> int:
    """Where catching up begins: behind `last`; at the start without a state, or with one that has seen no
    request; nowhere if `last` is long gone."""
    if not last:
        return 0
    return ids.index(last) + 1 if last in ids else len(ids)
