"""The Store protocol, and the store that keeps everything in memory.

A store holds three things: the learner's state by name, a bounded log of observations (numbers only, never
text), and a bounded log of events. It is synchronous; `StoreWriter` (`store.writer`) runs it on one thread
beside the event loop.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, NamedTuple, Protocol, get_type_hints, runtime_checkable

import orjson

from specproxy.records import Observation, Outcome, TempBucket, TimingSource, Workload

__all__ = ["Entry", "Event", "MemoryStore", "Row", "Store", "from_json", "summarise", "to_json"]

MOST = 1e15  # a number of an observation that is larger is damage


class Entry(NamedTuple):
    """An observation in a log, or what a replay of it has taught.

    `id` is its place in the log, `proxy` where it comes from (empty: this one). `lesson` is empty for an
    observation, else a text of the proxies' own that the store does not read.
    """

    id: str
    seen: Observation
    proxy: str = ""
    lesson: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened and is worth telling. `kind` is one word (drift, started, recovered)."""

    at: float
    kind: str
    message: str
    subject: str = ""  # lane, fingerprint or workload that it is about


@dataclass(frozen=True, slots=True)
class Row:
    """What the observations of one workload on one lane add up to; times in seconds.

    `n` counts complete requests, `failed` the others. Ratios (`acceptance`, `tokens_per_s`) are None where
    nothing was reported.
    """

    workload: str
    lane: str
    strategy: str
    fingerprint: str
    n: int
    failed: int
    output_tokens: int
    decode_tokens: int
    decode_s: float
    draft_tokens: int
    accepted_tokens: int
    prompt_tokens: int
    prefill_s: float
    total_s: float
    ttft_s: float
    last_at: float

    @property
    def acceptance(self) -> float | None:
        """Accepted / drafted tokens."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    @property
    def tokens_per_s(self) -> float | None:
        """Decoded tokens per second of decoding."""
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else None

    @property
    def mean_ttft_s(self) -> float | None:
        """Mean time to the first token."""
        return self.ttft_s / self.n if self.n else None


@runtime_checkable
class Store(Protocol):
    """Where statistics live between runs. Methods block for at most one disk or network operation.

    Raises:
        StoreError: the backing storage failed; the caller may go on without it.
    """

    def load_policy(self, name: str) -> dict[str, Any] | None:
        """State that `save_policy` kept under that name, or None."""
        ...

    def save_policy(self, name: str, state: dict[str, Any], at: float) -> None:
        """Keep a policy's state (JSON-serialisable) under a name, in place of what was there."""
        ...

    def append(self, observations: Sequence[Observation]) -> None:
        """Add observations in order; the oldest beyond the store's bound are dropped."""
        ...

    def recent(self, n: int) -> list[Observation]:
        """The last `n` observations, newest first."""
        ...

    def summary(self) -> list[Row]:
        """All observations kept, added up by workload and lane, in that order."""
        ...

    def add_event(self, event: Event) -> None:
        """Add an event; the oldest beyond the store's bound are dropped."""
        ...

    def events(self, n: int) -> list[Event]:
        """The last `n` events, newest first."""
        ...

    def close(self) -> None:
        """Make everything durable and let go of it; idempotent."""
        ...


class MemoryStore:
    """A store that forgets when the process ends. `keep` bounds the observations, `keep_events` the events."""

    def __init__(self, keep: int = 20_000, keep_events: int = 1_000) -> None:
        self._policies: dict[str, str] = {}
        self._observations: deque[Observation] = deque(maxlen=keep)
        self._events: deque[Event] = deque(maxlen=keep_events)

    def load_policy(self, name: str) -> dict[str, Any] | None:
        text = self._policies.get(name)
        state: dict[str, Any] | None = None if text is None else json.loads(text)
        return state

    def save_policy(self, name: str, state: dict[str, Any], at: float) -> None:
        del at
        self._policies[name] = json.dumps(state)

    def append(self, observations: Sequence[Observation]) -> None:
        self._observations.extend(observations)

    def recent(self, n: int) -> list[Observation]:
        return [o for _, o in zip(range(n), reversed(self._observations), strict=False)]

    def summary(self) -> list[Row]:
        return summarise(self._observations)

    def add_event(self, event: Event) -> None:
        self._events.append(event)

    def events(self, n: int) -> list[Event]:
        return [e for _, e in zip(range(n), reversed(self._events), strict=False)]

    def close(self) -> None:
        return None


def summarise(observations: Iterable[Observation]) -> list[Row]:
    """Add observations up by workload and lane."""
    sums: dict[tuple[str, str, str, str], list[float]] = {}
    for seen in observations:
        key = (seen.workload.key, seen.lane, seen.strategy, seen.fingerprint)
        total = sums.setdefault(key, [0.0] * 12)
        for i, value in enumerate(contribution(seen)):
            total[i] = max(total[i], value) if i == _LAST_AT else total[i] + value
    return [row_of(key, total) for key, total in sorted(sums.items())]


_LAST_AT = 11


def contribution(seen: Observation) -> tuple[float, ...]:
    """What one observation adds to its row, in the order of Row's numbers."""
    done = seen.outcome is Outcome.COMPLETE
    timed = done and seen.time_per_token is not None
    return (
        float(done),
        float(not done),
        seen.output_tokens if done else 0,
        seen.output_tokens - 1 if timed else 0,
        (seen.decode_s or 0.0) if timed else 0.0,
        seen.draft_tokens if done else 0,
        seen.accepted_tokens if done else 0,
        seen.prompt_tokens if done else 0,
        (seen.prefill_s or 0.0) if done else 0.0,
        seen.total_s if done else 0.0,
        (seen.ttft_s or 0.0) if done else 0.0,
        seen.at,
    )


def row_of(key: tuple[str, str, str, str], total: Sequence[float]) -> Row:
    """A Row from its key and sums."""
    n, failed, out, decoded, decode_s, drafted, accepted, prompt, prefill_s, total_s, ttft_s, last = total
    return Row(
        *key, int(n), int(failed), int(out), int(decoded), decode_s, int(drafted), int(accepted), int(prompt),
        prefill_s, total_s, ttft_s, last,
    )  # fmt: skip


def to_json(seen: Observation) -> str:
    """One observation as a JSON object; its workload becomes kind, temperature and flags."""
    data = {f.name: getattr(seen, f.name) for f in fields(seen) if f.name != "workload"}
    data["kind"] = seen.workload.kind
    data["temperature"] = seen.workload.temperature
    data["flags"] = sorted(seen.workload.flags)
    return json.dumps(data, separators=(",", ":"))


def from_json(text: str) -> Observation:
    """What `to_json` wrote; fields that this version doesn't know are left out.

    Raises:
        ValueError, KeyError, TypeError: the text is not an observation.
    """
    data = orjson.loads(text)  # refuses halves of characters too, which could be shown nowhere
    if not isinstance(data, dict):
        raise TypeError(f"not a JSON object: {text[:40]}")
    kind, flags = data.pop("kind"), frozenset(data.pop("flags"))
    if not all(isinstance(text, str) for text in (kind, *flags)):
        raise TypeError("the workload of an observation has a name that is none")
    workload = Workload(kind, TempBucket(data.pop("temperature")), flags)
    known = {f.name for f in fields(Observation)}
    data = {k: v for k, v in data.items() if k in known}
    data["outcome"] = Outcome(data["outcome"])
    data["source"] = TimingSource(data["source"])
    for name, value in data.items():
        if not _fits(value, _TYPES[name]):
            raise TypeError(f"{name} of an observation is {value!r}")
    return Observation(workload=workload, **data)


_TYPES = get_type_hints(Observation)


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a value is what an observation holds in such a field; numbers are finite and not negative."""
    if isinstance(wanted, UnionType):
        return any(_fits(value, each) for each in wanted.__args__)
    if wanted in (int, float):
        numbers = (int, float) if wanted is float else (int,)
        return isinstance(value, numbers) and not isinstance(value, bool) and 0 <= value <= MOST
    return isinstance(value, wanted)
