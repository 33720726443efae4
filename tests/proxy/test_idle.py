"""Lanes that displace each other, through the whole proxy: decision, load, observation, dwell, idle time."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest

from specproxy.adapters.fake import FakeBackend, FakeExchange, respond
from specproxy.proxy.idle import LEAST_IDLE_S, RETRY_S, IdleLoader
from specproxy.proxy.router import Router
from specproxy.records import Control, Dialect, Health, Lane, LaneStatus, Outcome, RequestFacts, Turn
from specproxy.strategies.learner import Learner
from specproxy.strategies.speed import arm_key
from tests.support.client import RawClient, post
from tests.support.proxy import ScriptedPolicy, lane, running_proxy

LOAD_S, TOKENS, PER_TOKEN_S = 6.0, 150, 0.02
PLAIN = lane("ollama", "plain", control=Control.RELOAD, load_s=LOAD_S, fingerprint="fp-plain")
MTP = lane("ollama", "mtp:3", control=Control.RELOAD, load_s=LOAD_S, fingerprint="fp-mtp")


class Ollama:
    """A server with one model in memory: MTP takes half of plain's time, and a load is told in the reply."""

    def __init__(self) -> None:
        self.backend = FakeBackend("ollama", [PLAIN, MTP], self._answer)
        self.ran: list[str] = []
        self.resident = PLAIN.id

    async def _answer(self, exchange: FakeExchange) -> None:
        load_s = 0.0 if exchange.lane.id == self.resident else LOAD_S
        self.resident = exchange.lane.id
        self.ran.append(self.resident)
        ratio = 0.5 if self.resident == MTP.id else 1.0
        reply = {
            "model": "m", "done": True, "message": {"role": "assistant", "content": "{}"},
            "prompt_eval_count": 40, "prompt_eval_duration": 100_000_000, "eval_count": TOKENS,
            "eval_duration": round(ratio * PER_TOKEN_S * TOKENS * 1e9),
            "load_duration": round(load_s * 1e9) + 1000,
        }  # fmt: skip
        await respond(orjson.dumps(reply))(exchange)


def question(i: int) -> bytes:
    return orjson.dumps(
        {
            "model": "m",
            "stream": False,
            "format": "json",
            "messages": [{"role": "user", "content": f"record {i}"}],
        }
    )


async def test_a_reload_from_decision_to_dwell() -> None:
    """The lane is loaded once it pays, by a request that says so and teaches nothing about speed; then it
    stays, although the next choice would be free again."""
    ollama, learner = Ollama(), Learner()
    async with running_proxy(ollama.backend, policy=learner) as proxy:  # type: ignore[arg-type]  # a real policy
        async with await RawClient.connect(proxy.port) as client:
            for i in range(40):
                reply = await client.ask(post("/api/chat", question(i)))
                assert reply.status == 200
        seen = proxy.seen
    loads = [s for s in seen if s.load_s]
    assert [(s.lane, s.rule, s.load_s) for s in loads] == [(MTP.id, "reload", pytest.approx(LOAD_S, abs=0.01))]
    at = seen.index(loads[0])
    assert {s.lane for s in seen[:at]} == {PLAIN.id}
    assert {s.lane for s in seen[at:]} == {MTP.id}, "it was loaded for good, and within the dwell"
    mtp = learner.model("m").speed.arm(arm_key("fp-mtp", "mtp"), "mtp")
    assert mtp.evidence == pytest.approx(len(seen) - at - 1, rel=0.2), "the load itself has taught nothing"
    assert [s.resident for s in proxy.router.lanes()] == [False, True]


class Waiter(ScriptedPolicy):
    """Wants one lane loaded in idle time, and writes down what it is told and asked."""

    def __init__(self, wanted: Lane | None) -> None:
        super().__init__()
        self.due = wanted
        self.told: list[tuple[str, float]] = []
        self.asked: list[tuple[str, ...]] = []

    def idle_switch(self, lanes: list[LaneStatus], at: float) -> Lane | None:
        self.asked.append(tuple(s.lane.id for s in lanes))
        return self.due

    def loaded(self, lane: Lane, at: float) -> None:
        self.told.append((lane.id, at))
        self.due = None


class Night:
    """A router whose last request ended at 100 s, and somebody who uses the time after it."""

    def __init__(self, wanted: Lane | None = MTP, backend: FakeBackend | None = None) -> None:
        self.backend = backend or FakeBackend("ollama", [PLAIN, MTP])
        self.policy = Waiter(wanted)
        self.router = Router([self.backend], self.policy, rng=np.random.default_rng(1))
        self.now = 100.0
        self.loaded: list[str] = []
        self.loader = IdleLoader(
            self.router, self.policy, on_load=lambda lane: self.loaded.append(lane.id),
            wall=self.clock, clock=self.clock,
        )  # fmt: skip
        self.router.load.leave(self.router.load.enter(99.0), 100.0)

    def clock(self) -> float:
        return self.now

    async def look(self, now: float) -> list[Any]:
        self.now = now
        await self.loader.look()
        return list(self.backend.loads)


async def test_an_idle_machine_loads_what_is_due() -> None:
    """Once it has been idle for as long as the load takes; the policy hears of it, and it is done once."""
    night = Night()
    assert await night.look(100.0 + LEAST_IDLE_S - 0.1) == []
    assert night.policy.asked == []
    assert await night.look(100.0 + LOAD_S - 0.1) == []
    assert await night.look(100.0 + LOAD_S) == [MTP.id]
    assert night.policy.told == [(MTP.id, 106.0)]
    assert night.loaded == [MTP.id]
    assert await night.look(200.0) == [MTP.id]
    assert [s.resident for s in night.backend.lanes()] == [False, True]


async def test_a_request_in_flight_is_no_idle_time() -> None:
    """However long it takes."""
    night = Night()
    facts = RequestFacts(Dialect.OPENAI_CHAT, "m", turns=(Turn("user", "hello"),))
    night.router.route(facts, pin=None, now=101.0)
    assert await night.look(500.0) == []
    assert night.policy.asked == []


async def test_a_failed_load_is_not_repeated_at_once() -> None:
    """It is logged, the policy is not told that it was done, and the next try comes minutes later."""
    night = Night()
    night.backend.reachable = False
    assert await night.look(110.0) == [MTP.id]
    assert night.policy.told == []
    assert await night.look(110.0 + RETRY_S - 1.0) == [MTP.id]
    night.backend.reachable = True
    assert await night.look(110.0 + RETRY_S) == [MTP.id, MTP.id]
    assert night.policy.told == [(MTP.id, 110.0 + RETRY_S)]


async def test_only_ready_lanes_under_reload_control_are_asked_about() -> None:
    """Lanes that all run anyway need no loads; one that is not ready cannot be loaded."""
    night = Night(backend=FakeBackend("ollama", [lane("ollama", "plain"), lane("ollama", "mtp:3")]))
    assert await night.look(300.0) == []
    assert night.policy.asked == []
    night = Night(wanted=None)
    night.backend.mark(MTP.id, Health.UNHEALTHY)
    await night.look(300.0)
    assert night.policy.asked == [(PLAIN.id,)]


async def test_a_displaced_lane_has_lost_its_cache() -> None:
    """The beginnings that it had are not counted on after another lane took its place."""
    night = Night()
    facts = RequestFacts(Dialect.OPENAI_CHAT, "m", turns=(Turn("user", "x" * 4000),))
    ticket = night.router.route(facts, pin=None, now=110.0)
    night.router.finish(ticket, Outcome.COMPLETE, now=111.0)
    night.router.route(facts, pin=None, now=112.0)
    assert night.policy.situations[-1].prefix_hits[PLAIN.id] > 500
    await night.backend.load(MTP)
    night.router.route(facts, pin=None, now=113.0)
    assert night.policy.situations[-1].prefix_hits == {}
    await night.backend.load(PLAIN)
    night.router.route(facts, pin=None, now=114.0)
    assert night.policy.situations[-1].prefix_hits == {}
