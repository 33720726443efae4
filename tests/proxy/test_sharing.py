"""Proxies that learn together through a real Redis."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from specproxy.proxy.board import Board
from specproxy.proxy.quarantine import Quarantine
from specproxy.proxy.recorder import HeldPolicy
from specproxy.proxy.sharing import SharedRecorder
from specproxy.records import Observation
from specproxy.store import StoreWriter
from specproxy.store.redis import START, RedisStore
from specproxy.strategies.drafters.ngram_simple import NgramSimpleDrafter
from specproxy.strategies.learner import Learner
from specproxy.strategies.replay import ReplayResult, replay
from tests.proxy.samples import NGRAM, PLAIN, observation
from tests.support.redis import RunningRedis, running_redis

pytestmark = pytest.mark.redis


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningRedis]:
    with running_redis(str(tmp_path)) as server:
        yield server


class Proxy:
    """What learns in one proxy."""

    def __init__(self, server: RunningRedis) -> None:
        self.policy, self.board = Learner(), Board()
        self.lessons = 0
        self.store = RedisStore(server.url)
        self.writer = StoreWriter(self.store)
        self.recorder = SharedRecorder(
            self.writer, self.policy, self.board, take_changes=self.policy.take_events
        )
        self.router_sees = HeldPolicy(self.policy, self.recorder)

    async def see(self, *seen: Observation) -> None:
        """Requests end, and some are replayed; waits until the store has been told."""
        for one in seen:
            self.end(one)
        await self.writer.run(lambda store: None)

    def end(self, seen: Observation) -> None:
        """A request ends, and is replayed if it is among those that are."""
        self.router_sees.learn_one(seen)
        self.recorder(seen, None)
        lesson = replayed(seen)
        if lesson is not None:
            self.router_sees.learn_replay(NGRAM, seen, lesson, "tokens")

    @property
    def speeds(self) -> str:
        """All that is believed about speeds, and what drift has been watched on, as text."""
        state = self.policy.dump()
        models = {
            name: (model["speed"], model["lengths"], model["fits"]) for name, model in state["targets"].items()
        }
        return json.dumps([models, state["drift"]])

    @property
    def counted(self) -> int:
        return sum(cell.n for cell in self.board.cells.values())


def traffic(n: int, seed: int = 5) -> list[Observation]:
    """Requests of two kinds on two lanes, with noise and a change of speed on the way."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(n):
        lane = (PLAIN, NGRAM)[int(rng.integers(2))]
        speed = 0.02 if lane is PLAIN else (0.012 if i < n // 2 else 0.03)
        per_token = speed * float(np.exp(0.1 * rng.standard_normal()))
        found.append(observation(lane, per_token, request_id=f"r{seed}.{i}", at=1000.0 + i))
    return found


def replayed(seen: Observation) -> ReplayResult | None:
    """What the n-gram lane's drafter would have done on every third request: another thing on each."""
    number = int(seen.at) - 1000
    if number % 3:
        return None
    text = [token % (5 + number % 7) for token in range(seen.output_tokens)]
    return replay(range(900, 920), text, NgramSimpleDrafter(3, 8), 8)


def alone(server: RunningRedis) -> Proxy:
    """A proxy that saw all of it by itself, in the order that the store tells, and did all replays itself."""
    judge = Proxy(server)
    for entry in judge.store.after(START, 100_000):
        lesson = replayed(entry.seen)
        if entry.lesson:
            assert lesson is not None
            judge.policy.learn_replay(NGRAM, entry.seen, lesson, "tokens")
            judge.lessons += 1
        else:
            judge.policy.learn_one(entry.seen)
            judge.board.observe(entry.seen)
    return judge


def of(board: Board) -> dict[str, Any]:
    return board.dump()


async def test_two_with_half_the_traffic_learn_as_one_with_all(server: RunningRedis) -> None:
    """The same beliefs to the last bit, whoever served what, and the same totals."""
    one, two = Proxy(server), Proxy(server)
    await one.recorder.restore()
    await two.recorder.restore()
    for i, seen in enumerate(traffic(400)):
        await (one, two)[i % 2].see(seen) if i % 40 == 0 else (one, two)[i % 2].end(seen)
    for proxy in (one, two, one):
        await proxy.recorder.look()
    whole = alone(server)
    assert whole.counted == one.counted == two.counted == 400
    assert whole.lessons == 134
    assert one.speeds == two.speeds == whole.speeds
    assert of(one.board) == of(two.board) == of(whole.board)
    for proxy in (one, two, whole):
        await proxy.writer.aclose()


async def test_a_change_of_speed_is_told_once(server: RunningRedis) -> None:
    """By the proxy whose request gave it away, though both have noticed it."""
    one, two = Proxy(server), Proxy(server)
    await one.recorder.restore()
    await two.recorder.restore()
    for i, seen in enumerate(traffic(400)):
        (one, two)[i % 2].end(seen)
    for proxy in (one, two, one):
        await proxy.writer.run(lambda store: None)
        await proxy.recorder.look()
    for proxy in (one, two):
        await proxy.writer.run(lambda store: None)
    noticed = [[e.message for e in proxy.recorder.events if e.kind == "drift"] for proxy in (one, two)]
    told = [e.message for e in await one.writer.run(lambda store: store.events(100)) if e.kind == "drift"]
    assert noticed[0] == noticed[1]
    assert sorted(told) == sorted(noticed[0])
    assert len(told) >= 2
    for proxy in (one, two):
        await proxy.writer.aclose()


async def test_ours_are_learned_when_they_come_back(server: RunningRedis) -> None:
    """Not twice, and not before their turn; the reason of the decision is kept."""
    proxy = Proxy(server)
    await proxy.recorder.restore()
    await proxy.see(*traffic(3))
    assert proxy.counted == 0
    await proxy.recorder.look()
    await proxy.recorder.look()
    assert proxy.counted == 3
    assert len(proxy.board.recent()) == 3
    await proxy.writer.aclose()


async def test_learning_goes_on_alone_and_is_merged_later(server: RunningRedis) -> None:
    """Without the Redis a proxy learns from its own; afterwards all know all, and nothing counts twice."""
    one, two = Proxy(server), Proxy(server)
    await one.recorder.restore()
    await two.recorder.restore()
    seen = traffic(120)
    await one.see(*seen[:20])
    await two.see(*seen[20:40])
    await one.recorder.look()
    await two.recorder.look()
    server.stop()
    with capture_logs() as logs:
        await one.see(*seen[40:70])
        await one.recorder.look()
        await one.see(*seen[70:80])
        await two.see(*seen[80:120])
        await two.recorder.look()
    assert [line["event"] for line in logs].count("learning alone until the shared store is back") == 2
    assert (one.counted, two.counted) == (80, 80)
    assert one.recorder.away
    assert one.speeds != two.speeds
    server.start()
    for proxy in (one, two, one):
        await proxy.recorder.look()
    whole = alone(server)
    assert not one.recorder.away
    assert whole.counted == one.counted == two.counted == 120
    assert whole.lessons == 40
    assert one.speeds == two.speeds == whole.speeds
    assert len({row["id"] for row in one.board.recent()}) == len(one.board.recent()) == 120
    for proxy in (one, two, whole):
        await proxy.writer.aclose()


async def test_a_proxy_that_starts_later_knows_what_the_others_know(server: RunningRedis) -> None:
    """By the saved states and what came behind them."""
    one = Proxy(server)
    await one.recorder.restore()
    seen = traffic(60)
    await one.see(*seen[:40])
    await one.recorder.look()
    one.recorder.save()
    await one.see(*seen[40:])
    await one.recorder.look()
    two = Proxy(server)
    await two.recorder.restore()
    assert (two.counted, two.speeds) == (60, one.speeds)
    await two.see(replace(seen[0], request_id="new"))
    await two.recorder.look()
    await one.recorder.look()
    assert one.speeds == two.speeds
    for proxy in (one, two):
        await proxy.writer.aclose()


async def test_a_proxy_may_start_while_the_redis_is_away(server: RunningRedis) -> None:
    """It begins with nothing, learns alone, and joins when it can."""
    one = Proxy(server)
    await one.recorder.restore()
    seen = traffic(30)
    await one.see(*seen[:10])
    server.stop()
    two = Proxy(server)
    await two.recorder.restore()
    await two.see(*seen[10:30])
    await two.recorder.look()
    assert (two.recorder.away, two.counted) == (True, 20)
    two.recorder.save()
    server.start()
    await two.recorder.look()
    await two.recorder.look()
    assert two.counted == 30
    assert two.speeds == alone(server).speeds
    for proxy in (one, two):
        await proxy.writer.aclose()


async def test_quarantine_holds_on_all_proxies(server: RunningRedis) -> None:
    """Put on one and lifted on the other, also where the Redis was away in between."""
    one, two = Proxy(server), Proxy(server)
    wards = [Quarantine(lambda: 5.0), Quarantine(lambda: 6.0)]
    for proxy, ward in zip((one, two), wards, strict=True):
        proxy.recorder.share(ward)
        await proxy.recorder.restore()
    wards[0].put(NGRAM, "forks where it should not")
    await one.recorder.look()
    server.stop()
    await two.recorder.look()
    wards[1].put(PLAIN, "put while alone")
    server.start()
    await two.recorder.look()
    await one.recorder.look()
    assert wards[0].dump() == wards[1].dump()
    found = wards[1].of(NGRAM), wards[0].of(PLAIN)
    assert [s.reason if s else None for s in found] == ["forks where it should not", "put while alone"]
    wards[1].lift(NGRAM)
    await two.recorder.look()
    await one.recorder.look()
    assert wards[0].of(NGRAM) is None
    for proxy in (one, two):
        await proxy.writer.aclose()
