"""What the shared store adds: one order for all, batches that go in once, and a Redis that goes away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from specproxy.errors import ConfigError, StoreError
from specproxy.store import Event, redis
from specproxy.store.redis import EXPIRY_S, START, RedisStore
from tests.store.test_store import SEEN
from tests.support.redis import RunningRedis, running_redis

pytestmark = pytest.mark.redis


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningRedis]:
    with running_redis(str(tmp_path)) as server:
        yield server


def ids(store: RedisStore, position: str = START) -> list[str]:
    return [entry.seen.request_id for entry in store.after(position)]


def see(store: RedisStore, *names: str) -> None:
    store.append([replace(SEEN, request_id=name) for name in names])


def test_all_see_one_order(server: RunningRedis) -> None:
    """Entries of two proxies come in the order of arrival, with where they come from."""
    one, two = RedisStore(server.url), RedisStore(server.url)
    see(one, "a", "b")
    see(two, "c")
    see(one, "d")
    entries = two.after(START)
    assert [entry.seen.request_id for entry in entries] == ["a", "b", "c", "d"]
    assert [entry.proxy for entry in entries] == [one.proxy, one.proxy, two.proxy, one.proxy]
    assert ids(one, entries[1].id) == ["c", "d"]
    assert [entry.seen.request_id for entry in one.after(START, 2)] == ["a", "b"]


def test_position_is_that_of_the_latest_entry(server: RunningRedis) -> None:
    """So that nothing is missed and nothing is taken twice behind a restore."""
    store = RedisStore(server.url)
    assert store.latest(10) == []
    assert store.position == START
    see(store, "a", "b")
    assert [entry.seen.request_id for entry in store.latest(1)] == ["b"]
    see(store, "c")
    assert ids(store, store.position) == ["c"]


def test_lessons_stand_in_the_one_order_and_are_no_observations(server: RunningRedis) -> None:
    """What a replay teaches comes behind its observation, and counts as none."""
    one, two = RedisStore(server.url), RedisStore(server.url)
    see(one, "a")
    one.append_lesson(replace(SEEN, request_id="a"), "what a teaches")
    see(two, "b", "c")
    found = [(entry.seen.request_id, entry.lesson, entry.proxy) for entry in two.after(START)]
    assert found == [
        ("a", "", one.proxy),
        ("a", "what a teaches", one.proxy),
        *[(x, "", two.proxy) for x in "bc"],
    ]
    assert [(entry.seen.request_id, entry.lesson) for entry in one.latest(3)] == [
        ("c", ""),
        ("b", ""),
        ("a", "what a teaches"),
    ]
    assert [seen.request_id for seen in one.recent(3)] == ["c", "b", "a"]
    assert sum(row.n for row in one.summary()) == 3


def test_lessons_wait_while_the_redis_is_away(server: RunningRedis) -> None:
    """They keep their place behind their observation."""
    store = RedisStore(server.url)
    server.stop()
    with pytest.raises(StoreError):
        see(store, "a")
    with pytest.raises(StoreError):
        store.append_lesson(replace(SEEN, request_id="a"), "lesson")
    server.start()
    see(store, "b")
    assert [(entry.seen.request_id, entry.lesson) for entry in store.after(START)] == [
        ("a", ""),
        ("a", "lesson"),
        ("b", ""),
    ]


def test_a_batch_goes_in_once_where_the_answer_was_lost(
    server: RunningRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent again, and the Redis knows it."""
    store = RedisStore(server.url)
    really = store._db.eval

    def lost(*args: object) -> object:
        really(*args)
        raise redis.redis.exceptions.TimeoutError("lost")

    monkeypatch.setattr(store._db, "eval", lost)
    with pytest.raises(StoreError, match="TimeoutError"):
        see(store, "a", "b")
    monkeypatch.setattr(store._db, "eval", really)
    see(store, "c")
    assert ids(store) == ["a", "b", "c"]


def test_observations_wait_while_the_redis_is_away(server: RunningRedis) -> None:
    """They go in with the next call that reaches it, in order, once."""
    store = RedisStore(server.url)
    see(store, "a")
    server.stop()
    for name in ("b", "c"):
        with pytest.raises(StoreError, match="shared store"):
            see(store, name)
    server.start()
    assert ids(store) == ["a", "b", "c"]


def test_what_waits_goes_in_however_many_batches_it_takes(
    server: RunningRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, in order, once."""
    monkeypatch.setattr(redis, "_BATCH", 3)
    store = RedisStore(server.url)
    server.stop()
    with pytest.raises(StoreError):
        see(store, *"abcdefg")
    server.start()
    see(store, "h")
    assert ids(store) == list("abcdefgh")


def test_what_waits_is_bounded(server: RunningRedis) -> None:
    """The oldest are dropped, apart from the batch that may have got through."""
    store = RedisStore(server.url, keep=5)
    server.stop()
    for i in range(9):
        with pytest.raises(StoreError):
            see(store, str(i))
    server.start()
    assert ids(store) == ["0", "4", "5", "6", "7", "8"]


def test_an_older_state_never_replaces_a_newer(server: RunningRedis) -> None:
    """Proxies save when they like."""
    one, two = RedisStore(server.url), RedisStore(server.url)
    one.save_policy("p", {"v": 2}, at=200.5)
    two.save_policy("p", {"v": 1}, at=100.25)
    assert two.load_policy("p") == {"v": 2}
    two.save_policy("p", {"v": 3}, at=200.75)
    assert one.load_policy("p") == {"v": 3}


def test_every_key_expires(server: RunningRedis) -> None:
    """Whatever was written, and not before its time."""
    store = RedisStore(server.url)
    see(store, "a")
    store.save_policy("p", {}, 1.0)
    store.add_event(Event(1.0, "drift", "m"))
    store.sync("quarantine", {"f": "reason"})
    keys = store._db.keys("*")
    assert sorted(key.removeprefix("specproxy:2:") for key in keys) == [
        "batches",
        "events",
        "observations",
        "policy:p",
        "quarantine",
    ]
    assert all(EXPIRY_S - 60 < store._db.ttl(key) <= EXPIRY_S for key in keys)


def test_a_table_is_shared_entry_by_entry(server: RunningRedis) -> None:
    """Two proxies add and remove at the same time, and both changes hold."""
    one, two = RedisStore(server.url), RedisStore(server.url)
    assert one.sync("quarantine", {"a": "1"}) == {"a": "1"}
    assert two.sync("quarantine", {"b": "2"}) == {"a": "1", "b": "2"}
    assert one.sync("quarantine", {}) == {"b": "2"}
    assert two.sync("quarantine", {"a": "1", "b": "3"}) == {"b": "3"}


def test_what_it_cannot_read_is_an_error_of_the_store(server: RunningRedis) -> None:
    """Foreign data under our keys."""
    store = RedisStore(server.url)
    store._db.hset("specproxy:2:policy:p", "state", "{")
    with pytest.raises(StoreError, match="cannot read"):
        store.load_policy("p")


def test_entries_that_it_cannot_read_keep_nobody_from_learning(server: RunningRedis) -> None:
    """Those of a proxy of another version are left out, wherever they stand."""
    store = RedisStore(server.url)
    for entry in ({"o": "{", "p": "x"}, {"x": "y"}, {"o": "{}", "p": "x"}):
        store._db.xadd("specproxy:2:observations", entry)
    see(store, "a")
    store._db.xadd("specproxy:2:observations", {"o": json.dumps({"kind": "code"}), "p": "x"})
    see(store, "b")
    store._db.xadd("specproxy:2:observations", {"o": "1", "p": "x"})
    assert ids(store) == ["a", "b"]
    assert [entry.seen.request_id for entry in store.after(START, 1)] == ["a"]
    assert [seen.request_id for seen in store.recent(2)] == ["b", "a"]
    store._db.xadd("specproxy:2:events", {"e": '{"at": 1, "kind": "k", "message": "m", "newer": 1}', "p": "x"})
    store.add_event(Event(1.0, "drift", "m"))
    assert store.events(5) == [Event(1.0, "drift", "m")]


def test_a_password_is_not_told() -> None:
    """Errors name what happened, not the URL."""
    store = RedisStore("redis://user:canary-pass@127.0.0.1:1/0")
    with pytest.raises(StoreError) as raised:
        store.recent(1)
    assert "canary" not in str(raised.value)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra's name is in the hint."""
    monkeypatch.setattr(redis, "redis", None)
    with pytest.raises(ConfigError, match=r"specproxy\[redis\]"):
        RedisStore("redis://127.0.0.1/0")
