"""The store that several proxies share: a Redis.

Keys, all under ``specproxy:2:`` (2 is the layout's version):

=================== ======= ==================================================================================
``observations``    stream  one entry an observation: ``o`` its JSON, ``p`` the proxy it comes from; and one
                            for all that a replay of it has taught a lane: ``l`` the lesson's JSON besides;
                            about `keep` entries, the oldest go first
``events``          stream  ``e`` the event's JSON, ``p`` the proxy; about `keep_events` entries
``policy:<name>``   hash    ``state`` JSON, ``at`` seconds since the epoch; an older one never replaces a newer
``batches``         hash    by proxy, the number of its last batch of observations that was taken in
``quarantine``      hash    one field a sentence: lane id and fingerprint, and the sentence's JSON
=================== ======= ==================================================================================

Every key expires `EXPIRY_S` after its last write, so that a Redis that is no longer used cleans itself. Every
write is one script or one command, which Redis runs as a whole: a batch of observations goes in exactly once,
also where the answer to it was lost and it is sent again.
"""

from __future__ import annotations

import json
import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import chain, islice
from typing import Any

from specproxy.errors import ConfigError, StoreError
from specproxy.records import Observation
from specproxy.store.base import Entry, Event, Row, from_json, summarise, to_json

try:
    import redis
except ImportError:  # the extra is not installed; `RedisStore` says so
    redis = None

__all__ = ["EXPIRY_S", "START", "RedisStore"]

PREFIX = "specproxy:2:"
EXPIRY_S = 90 * 24 * 3600
START = "0-0"  # before every entry
_TIMEOUT_S = 2.0
_BATCH = 500
_PAGE = 1000

# KEYS: observations, batches. ARGV: proxy, batch number, most entries, expiry; observation and lesson in turn.
_APPEND = """
if tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or '0') >= tonumber(ARGV[2]) then return 0 end
for i = 5, #ARGV, 2 do
  local entry = {'o', ARGV[i], 'p', ARGV[1]}
  if ARGV[i + 1] ~= '' then entry[5], entry[6] = 'l', ARGV[i + 1] end
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[3], '*', unpack(entry))
end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('EXPIRE', KEYS[2], ARGV[4])
return (#ARGV - 4) / 2
"""

# KEYS: the policy. ARGV: state, at, expiry.
_SAVE = """
if tonumber(redis.call('HGET', KEYS[1], 'at') or '-1') > tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[1], 'state', ARGV[1], 'at', ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1
"""


class RedisStore:
    """Store in a Redis, shared by all proxies on it (a `Store`). To be used by one thread at a time.

    Nothing connects before it is used. While the Redis is away, up to `keep` observations wait here, and go in
    with the next call that reaches it.

    Raises:
        ConfigError: the redis package is not installed, or the URL is none.
    """

    def __init__(self, url: str, keep: int = 50_000, keep_events: int = 1_000) -> None:
        if redis is None:
            raise ConfigError("a shared store needs the redis package", hint="pip install 'specproxy[redis]'")
        try:
            self._db: Any = redis.Redis.from_url(
                url,
                decode_responses=True,
                socket_timeout=_TIMEOUT_S,
                socket_connect_timeout=_TIMEOUT_S,
                retry=None,
            )
        except ValueError:  # whose text may hold a piece of the password
            raise ConfigError("store: not a URL that the redis package can use") from None
        self.proxy = secrets.token_hex(4)
        self.position = START  # of the newest entry that `latest` gave
        self._keep, self._keep_events = keep, keep_events
        self._waiting: deque[tuple[str, str]] = deque(maxlen=keep)  # observation and lesson
        self._batch: list[tuple[str, str]] = []  # is being sent, perhaps again
        self._batches = 0
        self._tables: dict[str, dict[str, str]] = {}  # as `sync` last saw them

    # --- what every store does ---

    def load_policy(self, name: str) -> dict[str, Any] | None:
        with _converted():
            text = self._db.hget(f"{PREFIX}policy:{name}", "state")
            state: dict[str, Any] | None = None if text is None else json.loads(text)
            return state

    def save_policy(self, name: str, state: dict[str, Any], at: float) -> None:
        text = json.dumps(state, separators=(",", ":"))
        with _converted():
            self._db.eval(_SAVE, 1, f"{PREFIX}policy:{name}", text, repr(at), EXPIRY_S)

    def append(self, observations: Sequence[Observation]) -> None:
        self._waiting.extend((to_json(seen), "") for seen in observations)
        self.flush()

    def recent(self, n: int) -> list[Observation]:
        with _converted():
            return [entry.seen for entry in islice((e for e in self._backwards(n) if not e.lesson), n)]

    def summary(self) -> list[Row]:
        with _converted():
            return summarise(entry.seen for entry in self._all() if not entry.lesson)

    def add_event(self, event: Event) -> None:
        key = f"{PREFIX}events"
        fields: dict[Any, Any] = {"e": json.dumps(asdict(event)), "p": self.proxy}
        with _converted(), self._db.pipeline(transaction=True) as both:
            both.xadd(key, fields, maxlen=self._keep_events, approximate=True)
            both.expire(key, EXPIRY_S)
            both.execute()

    def events(self, n: int) -> list[Event]:
        with _converted():
            entries = self._db.xrevrange(f"{PREFIX}events", count=n)
        found = []
        for _, fields in entries:
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                found.append(Event(**json.loads(fields["e"])))
        return found

    def close(self) -> None:
        self._db.close()

    # --- what a shared one does ---

    def append_lesson(self, seen: Observation, lesson: str) -> None:
        """Put what a replay of an observation has taught behind it, for all to learn in its place.

        Raises:
            StoreError: the Redis is away; it waits as observations do.
        """
        self._waiting.append((to_json(seen), lesson))
        self.flush()

    def latest(self, n: int) -> list[Entry]:
        """The last `n` entries, newest first; what comes behind them is what `after` gives for `position`."""
        with _converted():
            entries = list(islice(self._backwards(n), n))
        self.position = entries[0].id if entries else START
        return entries

    def flush(self) -> None:
        """Send the observations that wait, in batches that go in exactly once.

        Raises:
            StoreError: the Redis is away; they go on waiting.
        """
        while self._batch or self._waiting:
            if not self._batch:
                self._batch = list(islice(_drain(self._waiting), _BATCH))
                self._batches += 1
            keys = (f"{PREFIX}observations", f"{PREFIX}batches")
            head = (self.proxy, self._batches, self._keep, EXPIRY_S)
            with _converted():
                self._db.eval(_APPEND, 2, *keys, *head, *chain.from_iterable(self._batch))
            self._batch = []

    def after(self, position: str, n: int = _PAGE) -> list[Entry]:
        """Up to `n` entries of all proxies behind a position, in the one order that all of them see.

        Entries that this version cannot read are left out.
        """
        self.flush()
        with _converted():
            return self._page(position, n)

    def sync(self, name: str, ours: Mapping[str, str]) -> dict[str, str]:
        """Bring a table of texts up to date with that of the other proxies, and return what it is now.

        What was added, changed or removed in `ours` since the last call is written, entry by entry, so that
        two proxies may change it at the same time; where both change one entry, the later one holds.
        """
        key, before = f"{PREFIX}{name}", self._tables.get(name, {})
        changed = {field: text for field, text in ours.items() if before.get(field) != text}
        removed = before.keys() - ours.keys()
        with _converted(), self._db.pipeline(transaction=True) as all_of_it:
            if changed:
                all_of_it.hset(key, mapping=changed)
                all_of_it.expire(key, EXPIRY_S)
            if removed:
                all_of_it.hdel(key, *removed)
            all_of_it.hgetall(key)
            now: dict[str, str] = all_of_it.execute()[-1]
        self._tables[name] = now
        return dict(now)

    def _page(self, position: str, n: int) -> list[Entry]:
        while found := self._db.xrange(f"{PREFIX}observations", min=f"({position}", count=n):
            if entries := list(_readable(found)):
                return entries
            position = found[-1][0]
        return []

    def _backwards(self, n: int) -> Iterator[Entry]:
        """All entries, newest first, read `n` at a time."""
        end = "+"
        while found := self._db.xrevrange(f"{PREFIX}observations", max=end, count=n):
            yield from _readable(found)
            end = f"({found[-1][0]}"

    def _all(self) -> Iterator[Entry]:
        position = START
        while page := self._page(position, _PAGE):
            yield from page
            position = page[-1].id


def _readable(found: Sequence[tuple[str, Mapping[str, str]]]) -> Iterator[Entry]:
    """What a proxy of another version has written must not keep the others from learning."""
    for place, fields in found:
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            yield Entry(place, from_json(fields["o"]), fields["p"], fields.get("l", ""))


def _drain(queue: deque[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    while queue:
        yield queue.popleft()


@contextmanager
def _converted() -> Iterator[None]:
    """Turn foreign exceptions into StoreError; the URL, which may hold a password, is left out."""
    try:
        yield
    except redis.exceptions.RedisError as error:
        raise StoreError(f"the shared store: {type(error).__name__}: {error}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(f"the shared store holds what this version cannot read: {error}") from error
