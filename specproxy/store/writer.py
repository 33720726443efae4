"""Runs a store on one thread of its own, so that the event loop never waits for a disk."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from specproxy.errors import StoreError
from specproxy.records import Observation
from specproxy.store.base import Event, Store

__all__ = ["StoreWriter"]

T = TypeVar("T")


class StoreWriter:
    """Queue in front of a store. All methods are called from the event loop; none blocks it.

    Writes are collected and committed about every `interval` seconds, so that a killed process loses no more
    than that. When more than `bound` observations wait (a stuck disk), the oldest are dropped and counted in
    `dropped`. A failing store is reported to `on_error` (on the thread, once per run of failures), and writing
    goes on. What is queued after `aclose` is not written.
    """

    def __init__(
        self,
        store: Store,
        *,
        interval: float = 0.25,
        bound: int = 10_000,
        on_error: Callable[[StoreError], None] | None = None,
    ) -> None:
        self.dropped = 0
        self._store = store
        self._interval = interval
        self._on_error = on_error
        self._observations: deque[Observation] = deque(maxlen=bound)
        self._events: deque[Event] = deque(maxlen=1_000)
        self._policies: dict[str, tuple[dict[str, Any], float]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._hurry = threading.Event()
        self._closing = False
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="specproxy-store", daemon=True)
        self._thread.start()

    def append(self, observation: Observation) -> None:
        """Queue one observation."""
        with self._lock:
            if len(self._observations) == self._observations.maxlen:
                self.dropped += 1
            self._observations.append(observation)
        self._work.set()

    def add_event(self, event: Event) -> None:
        """Queue one event."""
        with self._lock:
            self._events.append(event)
        self._work.set()

    def save_policy(self, name: str, state: dict[str, Any], at: float) -> None:
        """Queue a policy's state, not to be changed afterwards; only the latest of a name is written."""
        with self._lock:
            self._policies[name] = (state, at)
        self._work.set()

    async def run(self, read: Callable[[Store], T]) -> T:
        """Call `read` with the store on its thread, after everything queued so far was written.

        Raises:
            StoreError: the store failed, or the writer is closed.
        """
        if self._closing:
            raise StoreError("the state store is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def call() -> None:
            try:
                result = read(self._store)
            except Exception as error:  # handed to whoever waits for it
                loop.call_soon_threadsafe(_settle, future, None, error)
            else:
                loop.call_soon_threadsafe(_settle, future, result, None)

        with self._lock:
            self._calls.append(call)
        self._hurry.set()
        self._work.set()
        return await future

    def later(self, write: Callable[[Store], None]) -> None:
        """Call `write` with the store on its thread, after everything queued so far was written.

        For what only some stores can keep. A store that fails is expected to tell so at its next call too.
        """

        def call() -> None:
            with contextlib.suppress(StoreError):
                write(self._store)

        with self._lock:
            self._calls.append(call)
        self._work.set()

    async def aclose(self) -> None:
        """Write what is queued, close the store and end the thread; idempotent."""
        self._closing = True
        self._hurry.set()
        self._work.set()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    # --- on the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._work.wait()
            if not self._closing:
                self._hurry.wait(self._interval)
            self._work.clear()
            self._hurry.clear()
            self._write()
            if self._closing and not self._work.is_set():
                break
        self._store.close()

    def _write(self) -> None:
        with self._lock:
            observations, policies, events = list(self._observations), self._policies, list(self._events)
            calls = list(self._calls)
            self._observations.clear()
            self._events.clear()
            self._calls.clear()
            self._policies = {}
        try:
            if observations:
                self._store.append(observations)
            for event in events:
                self._store.add_event(event)
            for name, (state, at) in policies.items():
                self._store.save_policy(name, state, at)
            self._failing = False
        except StoreError as error:
            if self._on_error is not None and not self._failing:
                self._on_error(error)
            self._failing = True
        for call in calls:
            call()


def _settle(future: asyncio.Future[T], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
