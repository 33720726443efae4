"""The default store: one SQLite file in WAL mode, readable by its owner alone.

A commit reaches the operating system at once (``synchronous=NORMAL`` in WAL mode), so that a killed process
loses nothing that was committed; only a power cut can lose the last moments, and never corrupts the file.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from specproxy.errors import StoreError
from specproxy.records import Observation
from specproxy.store.base import Event, MemoryStore, Row, Store, contribution, from_json, row_of, to_json

__all__ = ["SCHEMA_VERSION", "SqliteStore", "open_store"]

_SUMS = (
    "done", "failed", "output_tokens", "decode_tokens", "decode_s", "draft_tokens", "accepted_tokens",
    "prompt_tokens", "prefill_s", "total_s", "ttft_s", "at",
)  # fmt: skip
_KEYS = ("workload", "lane", "strategy", "fingerprint")

_MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE policy (name TEXT PRIMARY KEY, at REAL NOT NULL, state TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE observation (
        id INTEGER PRIMARY KEY,
        workload TEXT NOT NULL, lane TEXT NOT NULL, strategy TEXT NOT NULL, fingerprint TEXT NOT NULL,
        done REAL, failed REAL, output_tokens REAL, decode_tokens REAL, decode_s REAL, draft_tokens REAL,
        accepted_tokens REAL, prompt_tokens REAL, prefill_s REAL, total_s REAL, ttft_s REAL, at REAL,
        data TEXT NOT NULL
    );
    CREATE TABLE event (id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT, message TEXT, subject TEXT);
    """,
)
SCHEMA_VERSION = len(_MIGRATIONS)

_INSERT = (
    f"INSERT INTO observation ({', '.join(_KEYS + _SUMS)}, data) "  # noqa: S608 - names are constants of this module
    f"VALUES ({', '.join('?' * (len(_KEYS) + len(_SUMS) + 1))})"
)
_SUMMARY = (
    f"SELECT {', '.join(_KEYS)}, {', '.join(f'SUM({s})' for s in _SUMS[:-1])}, MAX({_SUMS[-1]}) "  # noqa: S608 - as above
    f"FROM observation GROUP BY {', '.join(_KEYS)} ORDER BY {', '.join(_KEYS)}"
)
_PRUNE_EVERY = 256


class SqliteStore:
    """Store in the SQLite file at `path`, which is created if need be. To be used by one thread at a time.

    `keep` bounds the observations, `keep_events` the events; a few hundred more may be there between prunings.

    Raises:
        StoreError: the file can't be opened, is not a database, or was written by a newer version.
    """

    def __init__(self, path: Path, keep: int = 50_000, keep_events: int = 1_000) -> None:
        self.path = path
        self._keep, self._keep_events = keep, keep_events
        self._until_prune = _PRUNE_EVERY
        with _converted(path):
            _create_private(path)
            self._db = sqlite3.connect(path, timeout=2.0, isolation_level=None, check_same_thread=False)
            try:
                self._migrate()
            except BaseException:
                self._db.close()
                raise

    def load_policy(self, name: str) -> dict[str, Any] | None:
        with _converted(self.path):
            row = self._db.execute("SELECT state FROM policy WHERE name = ?", (name,)).fetchone()
            state: dict[str, Any] | None = None if row is None else json.loads(row[0])
            return state

    def save_policy(self, name: str, state: dict[str, Any], at: float) -> None:
        text = json.dumps(state, separators=(",", ":"))
        with _converted(self.path):
            self._db.execute("INSERT OR REPLACE INTO policy VALUES (?, ?, ?)", (name, at, text))

    def append(self, observations: Sequence[Observation]) -> None:
        rows = [
            (o.workload.key, o.lane, o.strategy, o.fingerprint, *contribution(o), to_json(o))
            for o in observations
        ]
        with _converted(self.path), self._transaction():
            self._db.executemany(_INSERT, rows)
            self._until_prune -= len(rows)
            if self._until_prune <= 0:
                self._until_prune = _PRUNE_EVERY
                self._db.execute(
                    "DELETE FROM observation WHERE id <= (SELECT MAX(id) FROM observation) - ?", (self._keep,)
                )

    def recent(self, n: int) -> list[Observation]:
        with _converted(self.path):
            rows = self._db.execute("SELECT data FROM observation ORDER BY id DESC LIMIT ?", (n,)).fetchall()
            return [from_json(text) for (text,) in rows]

    def summary(self) -> list[Row]:
        with _converted(self.path):
            return [row_of(tuple(row[:4]), row[4:]) for row in self._db.execute(_SUMMARY).fetchall()]

    def add_event(self, event: Event) -> None:
        with _converted(self.path), self._transaction():
            self._db.execute(
                "INSERT INTO event (at, kind, message, subject) VALUES (?, ?, ?, ?)",
                (event.at, event.kind, event.message, event.subject),
            )
            self._db.execute(
                "DELETE FROM event WHERE id <= (SELECT MAX(id) FROM event) - ?", (self._keep_events,)
            )

    def events(self, n: int) -> list[Event]:
        with _converted(self.path):
            rows = self._db.execute(
                "SELECT at, kind, message, subject FROM event ORDER BY id DESC LIMIT ?", (n,)
            ).fetchall()
            return [Event(*row) for row in rows]

    def close(self) -> None:
        self._db.close()

    def _migrate(self) -> None:
        """Bring the file to this version's schema, one transaction a step."""
        found = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        if found > SCHEMA_VERSION:
            raise StoreError(
                f"{self.path} was written by a newer version (schema {found}, this one reads {SCHEMA_VERSION})",
                hint="upgrade specproxy, or move the file away to start afresh",
            )
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        for version in range(found, SCHEMA_VERSION):
            with self._transaction():
                for statement in filter(None, map(str.strip, _MIGRATIONS[version].split(";"))):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {version + 1}")
        self._db.execute("SELECT COUNT(*) FROM policy").fetchone()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def open_store(path: Path) -> tuple[Store, str]:
    """The store at `path`, and what there is to say about it ("" if nothing).

    Never fails: a damaged file is moved aside and a new one begun; where that doesn't help (a newer version's
    file, no permission, a full disk), a store in memory takes its place.
    """
    try:
        try:
            return SqliteStore(path), ""
        except _Damaged as error:
            aside = _move_aside(path)
            return SqliteStore(path), f"{error.message}; it was moved to {aside}, and a new one begun"
    except StoreError as error:
        return MemoryStore(), f"{error}; statistics are kept in memory only"


class _Damaged(StoreError):
    """The file is not a database that we wrote."""


@contextmanager
def _converted(path: Path) -> Iterator[None]:
    """Turn foreign exceptions into StoreError, naming the file."""
    try:
        yield
    except sqlite3.OperationalError as error:
        damaged = "no such table" in str(error) or "already exists" in str(error) or "malformed" in str(error)
        raise (_Damaged if damaged else StoreError)(f"state file {path}: {error}") from error
    except (sqlite3.Error, ValueError, KeyError, TypeError) as error:
        raise _Damaged(f"state file {path} is damaged: {error}") from error
    except OSError as error:
        raise StoreError(f"state file {path}: {error.strerror or error}") from error


def _create_private(path: Path) -> None:
    """Make the file (mode 0600) and its directory (0700) before SQLite does; its side files follow its mode."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    if path.stat().st_mode & 0o077:
        path.chmod(0o600)


def _move_aside(path: Path) -> Path:
    """Rename a damaged file to a free name beside it, and drop its side files.

    Raises:
        StoreError: it can't be renamed.
    """
    with _converted(path):
        aside = next(a for n in count(1) if not (a := path.with_name(f"{path.name}.damaged-{n}")).exists())
        path.rename(aside)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        return aside
