"""What every store does, and what the SQLite one does with files it finds."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from specproxy.errors import StoreError
from specproxy.records import Observation, Outcome, TempBucket, TimingSource, Workload
from specproxy.store import Event, MemoryStore, SqliteStore, Store, open_store
from specproxy.store.base import from_json, to_json
from specproxy.store.redis import RedisStore
from tests.support.redis import running_redis

CODE = Workload("code", TempBucket.COOL, frozenset({"thinking"}), signals=("fence",))
SEEN = Observation(
    request_id="a",
    at=10.0,
    workload=CODE,
    lane="mtp",
    strategy="mtp",
    fingerprint="f1",
    target="t",
    outcome=Outcome.COMPLETE,
    source=TimingSource.SERVER,
    ttft_s=0.2,
    total_s=1.2,
    prompt_tokens=50,
    output_tokens=101,
    prefill_s=0.1,
    decode_s=1.0,
    draft_tokens=80,
    accepted_tokens=60,
)


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with ExitStack() as stack:
        made: Store
        if request.param == "redis":
            server = stack.enter_context(running_redis(str(tmp_path)))
            made = RedisStore(server.url, keep=600)
        else:
            made = (
                MemoryStore(keep=600) if request.param == "memory" else SqliteStore(tmp_path / "s.db", keep=600)
            )
        yield made
        made.close()


@pytest.mark.parametrize("text", ["0", "[]", "{}", '"text"', "nothing"])
def test_what_is_no_observation_is_refused(text: str) -> None:
    """By errors that every store makes its own."""
    with pytest.raises((ValueError, KeyError, TypeError)):
        from_json(text)


@pytest.mark.parametrize(
    "changes",
    [{"lane": 7}, {"output_tokens": "x"}, {"output_tokens": 1.5}, {"status": True}, {"decode_s": -1},
     {"kind": []}, {"decode_s": math.nan}, {"total_s": math.inf}, {"streamed": 1}, {"lane": None},
     {"flags": [1]}, {"at": None}, {"lane": "\ud800"}, {"kind": "\ud800"}],
    ids=str,
)  # fmt: skip
def test_an_observation_with_damage_is_refused(changes: dict[str, object]) -> None:
    """What is of another kind would be an error wherever it is learned from."""
    with pytest.raises((ValueError, TypeError)):
        from_json(json.dumps(json.loads(to_json(SEEN)) | changes))


def test_an_observation_comes_back_as_it_went_in(store: Store) -> None:
    """Every field survives, enums and flags included; signals are not kept."""
    store.append([SEEN])
    (found,) = store.recent(5)
    assert found == SEEN
    assert found.workload.flags == {"thinking"}
    assert isinstance(found.outcome, Outcome)


def test_recent_is_newest_first_and_limited(store: Store) -> None:
    """`recent` gives the last ones, in reverse order of arrival."""
    store.append([replace(SEEN, request_id=str(i)) for i in range(5)])
    assert [o.request_id for o in store.recent(3)] == ["4", "3", "2"]


def test_observations_are_bounded(store: Store) -> None:
    """The oldest go once the bound is passed, give or take one pruning interval."""
    for start in range(0, 2000, 100):
        store.append([replace(SEEN, request_id=str(i)) for i in range(start, start + 100)])
    kept = store.recent(10_000)
    assert 600 <= len(kept) <= 600 + 256
    assert kept[0].request_id == "1999"


def test_summary_adds_up_by_workload_and_lane(store: Store) -> None:
    """Sums count complete requests; failures are counted apart; ratios follow from the sums."""
    gone = replace(SEEN, outcome=Outcome.CLIENT_GONE, at=99.0)
    other = replace(SEEN, lane="plain", strategy="plain", draft_tokens=0, accepted_tokens=0, decode_s=None)
    store.append([SEEN, replace(SEEN, decode_s=3.0), gone, other])
    mtp, plain = store.summary()
    assert (mtp.workload, mtp.lane, mtp.n, mtp.failed, mtp.output_tokens) == ("code/cool", "mtp", 2, 1, 202)
    assert mtp.acceptance == pytest.approx(0.75)
    assert mtp.tokens_per_s == pytest.approx(200 / 4.0)
    assert mtp.mean_ttft_s == pytest.approx(0.2)
    assert mtp.last_at == 99.0
    assert plain.acceptance is None
    assert plain.tokens_per_s is None


def test_summary_of_nothing_is_empty(store: Store) -> None:
    """A new store has no rows."""
    assert store.summary() == []


def test_policy_state_is_replaced_by_name(store: Store) -> None:
    """The last state saved under a name comes back; other names are apart."""
    assert store.load_policy("learner") is None
    store.save_policy("learner", {"v": [1.5, None]}, at=1.0)
    store.save_policy("learner", {"v": [2.5, "x"]}, at=2.0)
    assert store.load_policy("learner") == {"v": [2.5, "x"]}
    assert store.load_policy("other") is None


def test_events_are_newest_first_and_bounded(store: Store) -> None:
    """Events come back in reverse order, and the oldest beyond the bound are gone."""
    for i in range(1100):
        store.add_event(Event(float(i), "drift", f"message {i}", "lane"))
    events = store.events(5000)
    assert 1000 <= len(events) <= 1100  # a stream is trimmed by whole nodes
    assert events[0] == Event(1099.0, "drift", "message 1099", "lane")


def test_close_may_be_repeated(store: Store) -> None:
    """Closing twice is harmless."""
    store.close()
    store.close()


# --- SQLite only ---------------------------------------------------------------------------------


def test_state_survives_a_restart(tmp_path: Path) -> None:
    """What was written is there when the file is opened again."""
    first = SqliteStore(tmp_path / "deep" / "state.db")
    first.append([SEEN])
    first.save_policy("p", {"x": 1}, 1.0)
    first.close()
    second = SqliteStore(tmp_path / "deep" / "state.db")
    assert second.recent(1) == [SEEN]
    assert second.load_policy("p") == {"x": 1}
    second.close()


def test_files_are_private(tmp_path: Path) -> None:
    """Database and side files are for the owner alone, also where the file was laxer before."""
    path = tmp_path / "state.db"
    path.touch(mode=0o644)
    path.chmod(0o644)
    store = SqliteStore(path)
    store.append([SEEN])
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}
    store.close()
    assert set(modes) >= {"state.db", "state.db-wal"}
    assert set(modes.values()) == {0o600}


def test_two_processes_may_share_a_file(tmp_path: Path) -> None:
    """A second connection reads while the first is open, and sees what was committed."""
    first, second = SqliteStore(tmp_path / "s.db"), SqliteStore(tmp_path / "s.db")
    first.append([SEEN])
    second.append([replace(SEEN, request_id="b")])
    assert [o.request_id for o in first.recent(5)] == ["b", "a"]
    first.close()
    second.close()


@pytest.mark.parametrize(
    "content", [b"not a database at all, but long enough to have a header" * 20, b"\0" * 4096]
)
def test_a_damaged_file_is_moved_aside(tmp_path: Path, content: bytes) -> None:
    """A file that is no database is kept under another name; a new one is begun, and the note says so."""
    path = tmp_path / "state.db"
    path.write_bytes(content)
    store, note = open_store(path)
    assert isinstance(store, SqliteStore)
    assert "moved to" in note
    assert (tmp_path / "state.db.damaged-1").read_bytes() == content
    store.append([SEEN])
    store.close()


def test_a_database_of_something_else_is_moved_aside(tmp_path: Path) -> None:
    """A foreign SQLite file that claims our schema version counts as damaged."""
    path = tmp_path / "state.db"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 1")
    db.close()
    store, note = open_store(path)
    assert isinstance(store, SqliteStore)
    assert "moved to" in note
    store.close()


def test_a_truncated_database_does_not_crash(tmp_path: Path) -> None:
    """Half a database is either readable or moved aside; the store works in any case."""
    path = tmp_path / "state.db"
    first = SqliteStore(path)
    first.append([replace(SEEN, request_id=str(i)) for i in range(500)])
    first.close()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    store, _ = open_store(path)
    store.save_policy("p", {"x": 1}, 1.0)
    assert store.load_policy("p") == {"x": 1}
    store.close()


def test_a_newer_file_is_left_alone(tmp_path: Path) -> None:
    """A file of a newer version is not touched; statistics stay in memory, and the note says what to do."""
    path = tmp_path / "state.db"
    SqliteStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="newer version"):
        SqliteStore(path)
    store, note = open_store(path)
    assert isinstance(store, MemoryStore)
    assert "upgrade specproxy" in note
    assert "memory only" in note
    assert path.read_bytes() == before


def test_a_directory_in_the_way_means_memory(tmp_path: Path) -> None:
    """Where no file can be made, statistics stay in memory."""
    (tmp_path / "state.db").mkdir()
    store, note = open_store(tmp_path / "state.db")
    assert isinstance(store, MemoryStore)
    assert "memory only" in note


CHILD = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from specproxy.store import SqliteStore
from tests.store.test_store import SEEN
store = SqliteStore(Path(sys.argv[1]))
n = 0
while True:
    store.append([replace(SEEN, request_id=str(n))])
    store.save_policy("p", {"n": n}, 0.0)
    print(n, flush=True)
    n += 1
"""


def test_kill_9_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    """A child is killed in mid-write; every write that it reported is in the file."""
    path = tmp_path / "state.db"
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), root], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if int(line) >= 40:
                os.kill(child.pid, 9)
                break
        reported = max([40, *(int(rest) for rest in child.stdout.read().split("\n")[:-1])])
    store = SqliteStore(path)
    kept = [int(o.request_id) for o in store.recent(100_000)]
    assert kept[0] >= reported
    assert kept[::-1] == list(range(kept[0] + 1))
    policy = store.load_policy("p")
    store.close()
    assert policy is not None
    assert policy["n"] >= reported
