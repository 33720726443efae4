"""What becomes of observations, and how statistics come back after a restart or a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from specproxy.proxy.board import Board
from specproxy.proxy.recorder import Recorder
from specproxy.records import Decision, Observation, Situation
from specproxy.store import SqliteStore, StoreWriter
from specproxy.strategies.drift import DriftEvent
from specproxy.strategies.recovery import Settled
from tests.proxy.samples import NGRAM, PLAIN, decision, observation


class CountingPolicy:
    """Remembers which requests it was taught."""

    name = "counting"

    def __init__(self) -> None:
        self.ids: list[str] = []

    def choose(self, situation: Situation, rng: np.random.Generator) -> Decision:
        raise NotImplementedError

    def learn_one(self, observation: Observation) -> None:
        self.ids.append(observation.request_id)

    def dump(self) -> dict[str, Any]:
        return {"ids": list(self.ids)}

    def load(self, state: dict[str, Any]) -> None:
        if "ids" not in state:
            raise ValueError("not mine")
        self.ids = list(state["ids"])


class Proxy:
    """Policy, board and recorder on one state file, as one run of the proxy has them."""

    def __init__(self, path: Path) -> None:
        self.policy, self.board = CountingPolicy(), Board()
        self.writer = StoreWriter(SqliteStore(path))
        self.recorder = Recorder(self.writer, self.policy, self.board, wall=lambda: 5.0)

    async def see(self, *ids: str) -> None:
        """Requests end: the policy is taught, then listeners are told. Waits until they are committed."""
        for name in ids:
            seen = observation(NGRAM, 0.01, request_id=name)
            self.policy.learn_one(seen)
            self.recorder(seen, decision())
        await self.writer.run(lambda store: None)

    @property
    def counted(self) -> int:
        return sum(cell.n for cell in self.board.cells.values())


async def restarted(path: Path, old: Proxy) -> Proxy:
    await old.writer.aclose()
    new = Proxy(path)
    await new.recorder.restore()
    return new


async def test_an_orderly_end_loses_nothing(tmp_path: Path) -> None:
    """Saved state comes back, and nothing is counted twice."""
    path = tmp_path / "state.db"
    first = Proxy(path)
    await first.see("a", "b")
    first.recorder.save()
    second = await restarted(path, first)
    assert (second.policy.ids, second.counted) == (["a", "b"], 2)
    await second.see("c")
    third = await restarted(path, second)
    assert (third.policy.ids, third.counted) == (["a", "b", "c"], 3)
    await third.writer.aclose()


async def test_a_kill_loses_only_what_was_not_committed(tmp_path: Path) -> None:
    """Observations committed after the last save are taken in again, exactly once, by policy and board."""
    path = tmp_path / "state.db"
    first = Proxy(path)
    await first.see("a")
    first.recorder.save()
    await first.see("b", "c")  # no save after these
    second = await restarted(path, first)
    assert (second.policy.ids, second.counted) == (["a", "b", "c"], 3)
    assert [row["id"] for row in second.board.recent()] == ["c", "b", "a"]
    await second.writer.aclose()


async def test_a_kill_before_the_first_save(tmp_path: Path) -> None:
    """Without any saved state everything committed is taken in."""
    path = tmp_path / "state.db"
    first = Proxy(path)
    await first.see("a", "b")
    second = await restarted(path, first)
    assert (second.policy.ids, second.counted) == (["a", "b"], 2)
    await second.writer.aclose()


async def test_what_the_router_keeps_from_the_policy_stays_so(tmp_path: Path) -> None:
    """A request for a model that no lane names is counted, and not taught after a restart either."""
    path = tmp_path / "state.db"
    first = Proxy(path)
    first.recorder(observation(PLAIN, request_id="x", rule="unknown_model"), None)
    second = await restarted(path, first)
    assert (second.policy.ids, second.counted) == ([], 1)
    await second.writer.aclose()


async def test_unusable_state_is_named_and_left_behind(tmp_path: Path) -> None:
    """A policy state of another format costs the policy its past, not the board, and says so."""
    path = tmp_path / "state.db"
    first = Proxy(path)
    await first.see("a")
    first.recorder.save()
    first.writer.save_policy("counting", {"last": "a", "state": {"other": 1}}, 5.0)
    with capture_logs() as logs:
        second = await restarted(path, first)
    assert second.counted == 1
    assert [(line["event"], line["of"]) for line in logs] == [("earlier statistics cannot be used", "counting")]
    await second.writer.aclose()


async def test_saving_without_news_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle proxy leaves the disk alone."""
    proxy = Proxy(tmp_path / "state.db")
    await proxy.see("a")
    proxy.recorder.save()
    saved: list[str] = []
    monkeypatch.setattr(proxy.writer, "save_policy", lambda name, state, at: saved.append(name))
    proxy.recorder.save()
    assert saved == []
    await proxy.see("b")
    proxy.recorder.save()
    assert saved == ["board", "counting"]
    await proxy.writer.aclose()


async def test_every_request_is_one_log_line(tmp_path: Path) -> None:
    """The line carries the decision's reason."""
    proxy = Proxy(tmp_path / "state.db")
    with capture_logs() as logs:
        await proxy.see("a")
    assert [(line["event"], line["id"], line["reason"]) for line in logs] == [
        ("request", "a", "ngram is expected to be fastest")
    ]
    await proxy.writer.aclose()


async def test_events_are_kept(tmp_path: Path) -> None:
    """What happened to lanes is in the store's event log."""
    proxy = Proxy(tmp_path / "state.db")
    proxy.recorder.event("lane_ready", "loaded", "ngram")
    events = await proxy.writer.run(lambda store: store.events(5))
    assert [(e.at, e.kind, e.message, e.subject) for e in events] == [(5.0, "lane_ready", "loaded", "ngram")]
    again = await restarted(tmp_path / "state.db", proxy)
    assert list(again.recorder.events) == events
    await again.writer.aclose()


async def test_what_the_policy_notices_is_logged_and_kept(tmp_path: Path) -> None:
    """A drift alarm becomes a warning and an event, once."""
    drift = DriftEvent(5.0, 4.0, "fp/ngram", "ngram", "code", "acceptance", 0.74, 0.31, 6, 200, False)
    noticed = [[drift], []]
    writer = StoreWriter(SqliteStore(tmp_path / "state.db"))
    recorder = Recorder(
        writer, CountingPolicy(), Board(), take_changes=lambda: noticed.pop(0), wall=lambda: 5.0
    )
    with capture_logs() as logs:
        recorder(observation(), None)
        recorder(observation(), None)
    assert [line["noticed"] for line in logs if line["event"] == "drift"] == [drift.sentence]
    assert [(e.kind, e.message, e.subject) for e in recorder.events] == [("drift", drift.sentence, "fp/ngram")]
    await writer.aclose()


async def test_that_the_choice_has_settled_is_an_event_of_its_own(tmp_path: Path) -> None:
    """No warning; kept even where the request in between was another proxy's, for the choice was made here."""
    settled = Settled(9.0, "fp/ngram", "ngram", "the choice of lanes settled")
    noticed = [[settled]]
    writer = StoreWriter(SqliteStore(tmp_path / "state.db"))
    recorder = Recorder(
        writer, CountingPolicy(), Board(), take_changes=lambda: noticed.pop(0), wall=lambda: 9.0
    )
    with capture_logs() as logs:
        recorder._count(observation(), None, ours=False)
    assert [(line["log_level"], line["noticed"]) for line in logs] == [("info", settled.sentence)]
    kept = await writer.run(lambda store: store.events(5))
    told = [(e.at, e.kind, e.message, e.subject) for e in kept]
    assert told == [(9.0, "settled", settled.sentence, "fp/ngram")]
    await writer.aclose()


async def test_what_no_observation_brings_back_is_news(tmp_path: Path) -> None:
    """What a profile taught is saved without any request; a first request after that is not lost by a kill."""
    path = tmp_path / "state.db"
    first = Proxy(path)
    await first.recorder.restore()
    first.policy.ids.append("profile")
    first.recorder.save()
    first.recorder.learned()
    first.recorder.save()
    await first.see("a")
    second = await restarted(path, first)
    assert second.policy.ids == ["profile", "a"]
    assert second.counted == 1
    await second.writer.aclose()
