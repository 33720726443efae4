"""Measuring lanes in idle time: when, on which lanes, for how long, and who hears of it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from structlog.testing import capture_logs

from specproxy.adapters.fake import FakeBackend, FakeExchange, respond
from specproxy.errors import UpstreamClosed
from specproxy.proxy.dialects import read_facts
from specproxy.proxy.profile_prompts import DRAWN, draw
from specproxy.proxy.profiler import AFTER_REQUEST_S, AFTER_START_S, Profiler
from specproxy.proxy.replayer import ReplayAccount
from specproxy.proxy.router import Router
from specproxy.proxy.text_replay import Heard, TextReplayer
from specproxy.proxy.ticket import Ticket
from specproxy.records import PROFILE, Control, Dialect, Health, Lane, Observation, Outcome
from specproxy.strategies.classify import KINDS, classify
from specproxy.strategies.learner import Learner
from specproxy.strategies.profiling import ORDER, RUNS
from specproxy.strategies.replay import ReplayResult
from tests.support.client import RawClient, post
from tests.support.proxy import lane, running_proxy

STREAM = ((b"Content-Type", b"text/event-stream"),)
PLAIN, NGRAM, DRAFT = lane("b", "plain"), lane("b", "ngram"), lane("b", "draft")


def reply(tokens: int = 32, ms: float = 10.0) -> list[bytes]:
    """A streamed answer with a llama-server's figures."""
    timings = {"prompt_n": 60, "prompt_ms": 50.0, "predicted_n": tokens, "predicted_ms": ms * tokens}
    last = {"choices": [{"delta": {}, "finish_reason": "stop"}], "timings": timings}
    first = {"choices": [{"delta": {"content": "one two"}}]}
    return [b"data: " + orjson.dumps(event) + b"\n\n" for event in (first, last)] + [b"data: [DONE]\n\n"]


class Evening:
    """A proxy that nobody uses, on fake lanes; time passes as told, and a second with every run."""

    def __init__(self, *lanes: Lane, budget_s: float = 1000.0, learner: Learner | None = None) -> None:
        self.now = 1000.0
        self.run_s = 1.0
        self.ms = {"draft": 5.0, "ngram": 11.0}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.stop: Callable[[], object] = lambda: None  # called within a run, as soon as it has begun
        self.hangs = False
        self.status = 200
        self.backend = FakeBackend("b", lanes or (PLAIN, NGRAM), self._answer)
        self.learner = learner or Learner()
        self.router = Router([self.backend], self.learner, rng=np.random.default_rng(1))
        self.heard: list[Observation] = []
        self.router.on_observation(lambda seen, _: self.heard.append(seen))
        self.failed: list[str] = []
        self.router.on_lane_error(lambda failed, _: self.failed.append(failed.id))
        self.news = 0
        self.done: list[tuple[str, str]] = []
        self.away: set[str] = set()
        self.profiler = Profiler(
            self.router,
            self.learner,
            at_hand=lambda one: one.id not in self.away,
            on_news=self._learned,
            on_done=lambda *told: self.done.append(told),
            rng=random.Random(3),
            wall=lambda: self.now,
            clock=lambda: self.now,
        )
        self.profiler.budget_s = budget_s

    def _learned(self) -> None:
        self.news += 1

    async def _answer(self, exchange: FakeExchange) -> None:
        self.asked.append((exchange.lane.id, json.loads(exchange.request.body or b"{}")))
        self.now += self.run_s
        self.stop()
        if self.hangs:
            await exchange.gone()
        if self.status != 200:
            await respond(b'{"error": {"message": "no"}}', status=self.status)(exchange)
            return
        parts = reply(ms=self.ms.get(exchange.lane.strategy.name, 10.0))
        await respond(parts=parts, headers=STREAM)(exchange)

    async def look(self, later: float = 0.0) -> int:
        """Look after so many seconds; returns how many runs that led to."""
        before = len(self.asked)
        self.now += later
        await self.profiler.look()
        return len(self.asked) - before

    async def idle(self) -> int:
        """The first look begins to count, the second one is late enough."""
        return await self.look() + await self.look(AFTER_START_S)

    @property
    def state(self) -> str:
        """How far it is."""
        return str(self.profiler.json()["state"])


async def test_an_idle_machine_measures_its_lanes() -> None:
    """After some seconds all kinds on all lanes, each prompt once on a lane; then it is told, once."""
    evening = Evening()
    assert await evening.look() == 0
    assert await evening.look(AFTER_START_S - 0.1) == 0
    assert evening.state == "waiting"
    with capture_logs() as logs:
        assert await evening.look(0.2) == 2 * RUNS * len(ORDER)
    assert [(each["event"], each["off"]) for each in logs] == [("measuring lanes while idle", "--profile 0")]
    asked = [(where, body["messages"][0]["content"]) for where, body in evening.asked]
    assert len(set(asked)) == len(asked)
    assert evening.state == "done"
    assert await evening.look(1000.0) == 0
    [(target, sentence)] = evening.done
    assert target == "m"
    assert sentence.startswith(f"profiled 2 lanes on {len(ORDER)} kinds in {len(asked)} s; ")
    assert evening.news == len(asked)


async def test_what_is_sent_is_a_short_stream_for_the_lane() -> None:
    """With its own fields and model name, so that it decodes as it does for clients."""
    special = replace(NGRAM, overrides=(("speculative.n_max", 4),), upstream_model="m-fast")
    evening = Evening(PLAIN, special)
    await evening.idle()
    bodies = dict(evening.asked)
    assert bodies[special.id]["speculative.n_max"] == 4
    assert bodies[special.id]["model"] == "m-fast"
    assert "speculative.n_max" not in bodies[PLAIN.id]
    assert all(32 <= body["max_tokens"] <= 96 and body["stream"] is True for _, body in evening.asked)
    assert {e.request.target for e in evening.backend.exchanges} == {"/v1/chat/completions"}


async def test_the_first_request_is_routed_by_it() -> None:
    """Nobody has asked for anything, and it is known which lane is fastest."""
    evening = Evening(PLAIN, NGRAM, DRAFT)
    await evening.idle()
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "Write a Python function."}]})
    facts = read_facts(Dialect.OPENAI_CHAT, body)
    assert facts is not None
    decision = evening.router.preview(facts)
    assert decision.lane.id == DRAFT.id
    draft = next(c for c in decision.candidates if c.lane == DRAFT.id)
    assert draft.ratio == pytest.approx(0.5, abs=0.1)
    assert draft.n == 0.0
    assert draft.profiled >= 1.0


async def test_no_statistics_of_users_hear_of_it() -> None:
    """No listener of the router, no ledger, no lengths, no traffic, and no prompt counts as seen before."""
    evening = Evening()
    await evening.idle()
    model = evening.learner.model("m")
    assert evening.heard == []
    assert model.ledgers == {}
    assert model.traffic.n == 0.0
    assert model.lengths.dump() == []
    assert model.curve.gains() == []
    assert evening.learner.drift.dump()["series"] == []
    assert evening.router.load.in_flight == 0
    facts = read_facts(Dialect.OPENAI_CHAT, orjson.dumps(evening.asked[0][1]))
    assert facts is not None
    assert evening.router.preview(facts).repeat is False


async def test_a_request_breaks_a_run_off() -> None:
    """Its connection is closed at once, it teaches nothing, and the pause that follows is longer."""
    evening = Evening()
    evening.hangs = True
    evening.stop = evening.profiler.arrived
    assert await evening.idle() == 1
    assert evening.backend.exchanges[0].aborted
    assert evening.state == "waiting"
    profile = evening.learner.model("m").profile
    assert profile.runs == {}
    assert sum(profile.seconds.values()) == evening.run_s
    evening.hangs, evening.stop = False, lambda: None
    assert await evening.look(AFTER_REQUEST_S - 0.1) == 0
    assert await evening.look(0.2) == 2 * RUNS * len(ORDER)


async def test_a_request_that_comes_while_a_reply_is_read_wins_too() -> None:
    """Half an answer teaches nothing."""
    evening = Evening()

    async def half(exchange: FakeExchange) -> None:
        evening.asked.append((exchange.lane.id, {}))
        await exchange.head(200, STREAM)
        await exchange.data(reply()[0])
        evening.profiler.arrived()
        await exchange.gone()

    evening.backend.script = half
    assert await evening.idle() == 1
    assert evening.backend.exchanges[0].aborted
    assert evening.learner.model("m").profile.runs == {}


async def test_nothing_runs_beside_requests() -> None:
    """Neither while one to a model is in flight, nor one of another sort, however long that takes."""
    evening = Evening()
    await evening.look()
    stay = evening.router.load.enter(evening.now)
    assert await evening.look(500.0) == 0
    evening.router.load.leave(stay, evening.now)
    evening.profiler.forwarding = lambda: 1
    assert await evening.look(500.0) == 0
    evening.profiler.forwarding = lambda: 0
    assert await evening.look(AFTER_START_S - 0.1) == 0
    assert await evening.look(0.2) > 0


async def test_the_bound_holds() -> None:
    """The last run is cut off where the time is over, restarts included; more time, and it goes on."""
    evening = Evening(budget_s=5.0)
    assert await evening.idle() == 5
    assert evening.state == "done"
    later = Evening(budget_s=5.0, learner=Learner())
    later.learner.load(json.loads(json.dumps(evening.learner.dump())))
    assert await later.idle() == 0
    later.profiler.budget_s = 7.0
    assert await later.look(1.0) == 2


async def test_a_restart_does_not_measure_again() -> None:
    """What was done is in the learner's state; a lane that has changed is measured, beside plain."""
    evening = Evening()
    await evening.idle()
    state = json.loads(json.dumps(evening.learner.dump()))
    learner = Learner()
    learner.load(state)
    assert await Evening(learner=learner).idle() == 0
    learner.load(state)
    changed = Evening(PLAIN, replace(NGRAM, fingerprint="fp-new"), learner=learner)
    assert await changed.idle() > 2 * len(ORDER)


async def test_a_run_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not made again; others are."""
    monkeypatch.setattr("specproxy.proxy.profiler.MOST_RUN_S", 0.3)
    evening = Evening()
    evening.hangs = True

    def once() -> None:
        evening.hangs = len(evening.asked) == 1

    evening.stop = once
    await evening.idle()
    profile = evening.learner.model("m").profile
    assert evening.backend.exchanges[0].aborted
    assert profile.refused == {("fp-b/plain", "code_edit")}
    assert set(profile.runs["fp-b/ngram"]) == set(ORDER) - {"code_edit"}
    assert evening.state == "done"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda e: setattr(e.profiler, "budget_s", 0.0), "switched off"),
        (lambda e: e.away.add(NGRAM.id), "on another machine"),
        (lambda e: e.backend.mark(NGRAM.id, Health.STARTING), "still coming up"),
        (lambda e: e.backend.mark(NGRAM.id, Health.QUARANTINED), "in quarantine"),
        (lambda e: e.backend.mark(PLAIN.id, Health.UNHEALTHY), "plain is ill"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_lanes_that_are_left_alone(change: Callable[[Evening], object], why: str) -> None:
    """Where one of two lanes cannot be measured, or may not, there is nothing to compare."""
    evening = Evening()
    change(evening)
    assert await evening.idle() == 0, why
    assert evening.state == {"switched off": "off", "still coming up": "waiting"}.get(why, "done")


async def test_no_load_is_caused() -> None:
    """A lane that would have to come into memory is left where it is."""
    lanes = [replace(one, control=Control.RELOAD, load_s=3.0) for one in (PLAIN, NGRAM)]
    evening = Evening(*lanes)
    assert await evening.idle() == 0
    assert [status.resident for status in evening.backend.lanes()] == [True, False]


async def test_a_lane_that_comes_up_is_waited_for() -> None:
    """Loading takes what measuring needs: the wait begins when all lanes are there."""
    evening = Evening()
    evening.backend.mark(NGRAM.id, Health.STARTING)
    assert await evening.look() == await evening.look(60.0) == 0
    evening.backend.mark(NGRAM.id, Health.READY)
    assert await evening.look(AFTER_START_S - 0.1) == 0
    assert await evening.look(0.2) > 0


async def test_what_a_server_refuses_is_not_asked_again() -> None:
    """One refusal for each kind and lane; nothing is learned from it, and no lane is ill for it."""
    evening = Evening()
    evening.status = 400
    assert await evening.idle() == len(ORDER)
    assert evening.failed == []
    assert evening.learner.model("m").speed.arms.get("fp-b/ngram") is None or not (
        evening.learner.model("m").speed.arms["fp-b/ngram"].evidence
    )
    assert evening.done == []


async def test_a_server_that_has_gone_is_reported() -> None:
    """As if a client had met it: lanes are looked after, and there is an end to it."""
    evening = Evening()

    async def gone(exchange: FakeExchange) -> None:
        evening.asked.append((exchange.lane.id, {}))
        raise UpstreamClosed("gone")

    evening.backend.script = gone
    assert await evening.idle() == 1
    assert evening.failed == [PLAIN.id]
    for _ in range(100):
        await evening.look(1.0)
    assert len(evening.asked) == len(ORDER)


async def test_lanes_without_tools_get_none() -> None:
    """What a lane may not get from clients it does not get from us."""
    evening = Evening(PLAIN, replace(NGRAM, tools=False))
    await evening.idle()
    assert not [body for where, body in evening.asked if where == NGRAM.id and "tools" in body]
    assert [body for where, body in evening.asked if where == PLAIN.id and "tools" in body]


async def test_a_lane_that_goes_away_ends_its_round() -> None:
    """The next look sees what is left."""
    evening = Evening()
    evening.stop = lambda: evening.backend.mark(NGRAM.id, Health.UNHEALTHY)
    assert await evening.idle() == 1
    assert await evening.look(1.0) == 0


async def test_it_looks_again_and_again() -> None:
    """Until it is cancelled; a run that is under way is broken off then."""
    evening = Evening()
    evening.hangs = True
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        evening.now += seconds
        await asyncio.sleep(0)

    evening.profiler._pause = pause
    task = asyncio.create_task(evening.profiler.run())
    while not evening.asked:  # noqa: ASYNC110 (time is the fake's)
        await asyncio.sleep(0)
    assert len(pauses) > AFTER_START_S
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert evening.backend.exchanges[0].aborted


async def test_a_client_goes_first() -> None:
    """A request that comes while a lane is measured has the run's connection closed before it is forwarded."""
    begun = asyncio.Event()

    async def answer(exchange: FakeExchange) -> None:
        if b"stream_options" in (exchange.request.body or b""):
            begun.set()
            await exchange.gone()
        order.append((exchange.request.method, backend.exchanges[0].aborted))
        await respond(parts=reply(), headers=STREAM)(exchange)

    order: list[tuple[str, bool]] = []
    backend = FakeBackend("b", [PLAIN, NGRAM], answer)
    async with running_proxy(backend) as proxy:
        profiler = Profiler(
            proxy.router, Learner(), at_hand=lambda _: True, rng=random.Random(1), clock=lambda: now
        )
        profiler.budget_s, profiler.forwarding = 60.0, lambda: proxy.handlers.forwarding
        proxy.handlers.on_arrival(profiler.arrived)
        now = 1000.0
        await profiler.look()
        now += AFTER_START_S
        looking = asyncio.create_task(profiler.look())
        await begun.wait()
        async with await RawClient.connect(proxy.port) as client:
            assert (await client.ask(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")).status == 200
            body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]})
            assert (await client.ask(post("/v1/chat/completions", body))).status == 200
        await looking
        assert order == [("GET", False), ("POST", True)]
        assert [seen.outcome for seen in proxy.seen] == [Outcome.COMPLETE]
        assert proxy.handlers.forwarding == 0


class Listener(TextReplayer):
    """A replayer that keeps what it is offered."""

    offered: list[Heard]

    def hold(self, ticket: Ticket, body: bytes) -> int:
        return 100_000 if ticket.lane.target == "m" and body else 0

    def offer(self, heard: Heard) -> None:
        self.offered.append(heard)


async def test_texts_of_runs_teach_ngram_lanes() -> None:
    """They are replayed like any other, but not counted among replays of requests."""
    evening = Evening()
    account = ReplayAccount()
    evening.profiler._replayer = listener = Listener(evening.router, evening.learner, account)
    offered = listener.offered = []
    await evening.idle()
    assert len(offered) == len(evening.asked)
    heard = offered[0]
    assert heard.seen.workload.flags == {PROFILE}
    assert b"one two" in b"".join(heard.reply)
    account.note(NGRAM, replace(heard.seen, lane=NGRAM.id), ReplayResult(32, 8, 8, 8, (24, 8), (), (), 0))
    assert account.json() == {"replayed": 0, "left_out": 0, "compared": 0, "error": None}


def test_prompts_are_drawn_anew() -> None:
    """Hundreds of a kind with hardly a repeat; of all kinds but one without a common shape, and as these."""
    rng = random.Random(5)
    assert DRAWN == set(ORDER) == set(KINDS) - {"infill"}
    for kind in sorted(DRAWN):
        drawn = [json.dumps(draw(kind, rng)) for _ in range(200)]
        assert len(set(drawn)) >= 0.98 * len(drawn), kind
        facts = [read_facts(Dialect.OPENAI_CHAT, text.encode()) for text in drawn]
        assert max(len(text) for text in drawn) < 1500
        seen = [classify(each).kind for each in facts if each is not None]
        assert seen.count(kind) >= 0.9 * len(drawn), (kind, set(seen))


def test_status_names_targets() -> None:
    """Time and runs of the lanes of now."""
    evening = Evening()
    assert evening.profiler.json() == {
        "state": "waiting",
        "budget_s": 1000.0,
        "targets": [{"target": "m", "lanes": 2, "seconds": 0.0, "runs": 0}],
    }
