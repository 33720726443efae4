"""Measures lanes on prompts of our own while nothing else goes on: first requests are routed by evidence then.

What to run is decided in `strategies.profiling`. Here it is run: one request at a time, on lanes on this
machine that are ready and in memory, while no request is forwarded and none has been for a while. Whenever one
comes, the run is broken off at once, its connection closed, and it teaches nothing.

A run takes the way of a request that is pinned to a lane, but for what is kept for people: no listener of the
router hears of it, so that it is in no statistics, metrics or log of requests.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from time import perf_counter
from typing import Any, Protocol

import orjson
import structlog

from specproxy.adapters.ask import JSON_HEADERS
from specproxy.adapters.base import Backend, Exchange, Headers, ResponseHead, TellsDrafts, UpstreamRequest
from specproxy.errors import BackendError
from specproxy.proxy.dialects import read_facts
from specproxy.proxy.headers import headers_for
from specproxy.proxy.load import Stay
from specproxy.proxy.profile_prompts import DRAWN, draw
from specproxy.proxy.router import Router
from specproxy.proxy.splice import splice
from specproxy.proxy.tap import Tap
from specproxy.proxy.text_replay import Heard, TextReplayer
from specproxy.proxy.ticket import Ticket, observation
from specproxy.records import (
    PROFILE,
    Decision,
    Dialect,
    Health,
    Lane,
    Observation,
    Outcome,
    OutputForm,
    RequestFacts,
    TempBucket,
    Workload,
)
from specproxy.strategies import profiling
from specproxy.strategies.speed import arm_of
from specproxy.strategies.target import TargetModel

__all__ = ["AFTER_REQUEST_S", "AFTER_START_S", "KnowsTargets", "Profiler", "State"]

LOOK_S = 1.0  # between looks
AFTER_START_S = 10.0  # without a request, from the moment on when no lane is starting any more
AFTER_REQUEST_S = 120.0  # who has asked may go on, and wants to find the conversation in a slot's cache
MOST_RUN_S = 30.0  # a run that takes longer is given up, and not made again
PATH = "/v1/chat/completions"

log = structlog.get_logger("specproxy")


class State(StrEnum):
    """How far profiling is."""

    OFF = "off"
    WAITING = "waiting"  # for the machine to be idle, or for lanes to come up
    RUNNING = "running"
    DONE = "done"  # nothing is left to measure, or no time for it


class KnowsTargets(Protocol):
    """The part of a policy that profiles teach."""

    def model(self, target: str) -> TargetModel:
        """Learned state of a target."""
        ...


class Profiler:
    """Looks now and then whether the machine is idle and something is left to measure.

    Args:
        router: knows lanes and what is in flight.
        policy: is taught.
        at_hand: whether a lane runs on this machine, and may be used without asking.
        replayer: teaches n-gram lanes by the texts of runs.
        on_news: is called when statistics have changed.
        on_done: is called with a target and what a profile of it has found, in a sentence.
        rng: draws prompts.
        wall: seconds since the epoch.
        clock: the clock of the router's instants.
        pause: waits for so many seconds.
    """

    def __init__(
        self,
        router: Router,
        policy: KnowsTargets,
        *,
        at_hand: Callable[[Lane], bool],
        replayer: TextReplayer | None = None,
        on_news: Callable[[], None] = lambda: None,
        on_done: Callable[[str, str], None] = lambda *_: None,
        rng: random.Random | None = None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = perf_counter,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.budget_s = 0.0  # for all runs on a set-up; 0 switches profiling off
        self.forwarding: Callable[[], int] = lambda: 0  # requests of any sort that are being forwarded
        self._router = router
        self._policy = policy
        self._at_hand = at_hand
        self._replayer = replayer
        self._on_news = on_news
        self._on_done = on_done
        self._rng = rng or random.SystemRandom()
        self._wall = wall
        self._clock = clock
        self._pause = pause
        self._numbers = itertools.count(1)
        self._since: float | None = None  # when lanes had come up and nothing was asked for
        self._patience_s = AFTER_START_S
        self._run: _Run | None = None
        self._state = State.WAITING
        self._measured: set[str] = set()  # targets that have something new to tell

    # --- around it ---

    def arrived(self) -> None:
        """A request has come: whatever runs is broken off."""
        self._since, self._patience_s = self._clock(), AFTER_REQUEST_S
        if self._run is not None:
            self._run.break_off()

    def json(self) -> dict[str, Any]:
        """How far it is, as JSON-serialisable data."""
        state = self._state if self.budget_s > 0.0 else State.OFF
        arms: dict[str, set[str]] = {}
        for target, lanes in self._targets().items():
            arms[target] = {arm_of(lane) for lane in lanes}
        profiles = {target: self._policy.model(target).profile for target in arms}
        return {
            "state": str(state),
            "budget_s": self.budget_s,
            "targets": [
                {
                    "target": target,
                    "lanes": len(arms[target]),
                    "seconds": profile.spent(arms[target]),
                    "runs": sum(sum(profile.runs.get(arm, {}).values()) for arm in arms[target]),
                }
                for target, profile in profiles.items()
            ],
        }

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await self._pause(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Measure what is left to measure for as long as the machine is idle."""
        if self.budget_s <= 0.0:
            return
        while self._is_idle():
            found = self._next()
            if found is None:
                self._conclude()
                return
            target, planned = found
            if self._state is not State.RUNNING:
                left_s = self._left_s(self._policy.model(target), planned.lanes)
                log.info("measuring lanes while idle", target=target, most_s=round(left_s), off="--profile 0")
            self._state = State.RUNNING
            if not await self._round(target, planned):
                break
        if self._state is State.RUNNING:
            self._state = State.WAITING

    # --- deciding ---

    def _is_idle(self) -> bool:
        now, router = self._clock(), self._router
        statuses = router.lanes()
        coming = not statuses or any(s.health is Health.STARTING for s in statuses)
        if self._since is None or coming or router.load.in_flight or self.forwarding():
            self._since = now
        return min(now - self._since, router.load.idle_s(now)) >= self._patience_s

    def _targets(self) -> dict[str, tuple[Lane, ...]]:
        """The lanes to measure of each target that has a choice."""
        groups: dict[str, list[Lane]] = {}
        for status in self._router.lanes():
            if status.health is Health.READY and status.resident and self._at_hand(status.lane):
                groups.setdefault(status.lane.target, []).append(status.lane)
        found = {target: profiling.subjects(lanes) for target, lanes in groups.items() if target}
        return {target: lanes for target, lanes in found.items() if lanes}

    def _left_s(self, model: TargetModel, lanes: Sequence[Lane]) -> float:
        return self.budget_s - model.profile.spent(arm_of(lane) for lane in lanes)

    def _next(self) -> tuple[str, profiling.Round] | None:
        for target, lanes in self._targets().items():
            model = self._policy.model(target)
            if self._left_s(model, lanes) > 0.0:
                planned = profiling.next_round(model, lanes, DRAWN)
                if planned is not None:
                    return target, planned
        return None

    def _conclude(self) -> None:
        """Nothing is left to do: say what was found, once."""
        self._state = State.DONE
        for target, lanes in self._targets().items():
            if target in self._measured:
                self._measured.discard(target)
                if sentence := profiling.summary(self._policy.model(target), lanes):
                    self._on_done(target, sentence)

    # --- running ---

    async def _round(self, target: str, planned: profiling.Round) -> bool:
        """Run one prompt on all lanes of a round; returns whether it came to its end."""
        fields = draw(planned.kind, self._rng) | {
            "model": target,
            "max_tokens": planned.tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body = orjson.dumps(fields)
        facts = read_facts(Dialect.OPENAI_CHAT, body)
        assert facts is not None, "our own requests can be read"
        model, lanes = self._policy.model(target), self._targets().get(target, ())
        waiting = deque(planned.lanes)
        while waiting:
            lane = waiting.popleft()
            left_s = self._left_s(model, lanes)
            if left_s <= 0.0 or lane not in self._targets().get(target, ()):
                return left_s <= 0.0
            if not lane.can_answer(facts):
                model.profile.refuse(arm_of(lane), planned.kind)
            elif not await self._measure(model, lane, planned.kind, facts, body, min(left_s, MOST_RUN_S)):
                return False
            if lane.strategy.is_plain and (arm_of(lane), planned.kind) in model.profile.refused:
                return True  # there is nothing to hold others against
        return True

    async def _measure(
        self, model: TargetModel, lane: Lane, kind: str, facts: RequestFacts, body: bytes, most_s: float
    ) -> bool:
        """Run one prompt on one lane and learn from it; returns whether to go on."""
        backend = next((b for b in self._router.backends if b.name == lane.backend), None)
        if backend is None or not self._is_idle():
            return False
        begun = self._clock()
        ticket = _ticket(lane, backend, kind, facts, f"profile{next(self._numbers)}", begun)
        hold = self._replayer.hold(ticket, body) if self._replayer is not None else 0
        tap = Tap(
            Dialect.OPENAI_CHAT, tokens_per_event=self._router.tokens_per_event(lane), started=begun, hold=hold
        )
        self._run = run = _Run(tap, self._clock)
        try:
            run.begin(backend, _request(lane, body), lane)
            await run.wait(most_s)
        finally:
            self._run = None
            run.break_off()
            now = self._clock()
            model.profile.spend(arm_of(lane), now - begun)
            self._on_news()
        if run.broken_off and not run.timed_out:
            return False
        seen = self._conclude_run(ticket, run, tap, backend, now)
        if seen.outcome is not Outcome.COMPLETE:
            model.profile.refuse(arm_of(lane), kind)  # it would not go better next time
            log.debug("a lane was not measured", lane=lane.id, kind=kind, outcome=str(seen.outcome))
            if run.error is not None:
                self._router.lane_failed(lane, run.error)
            return run.error is None
        profiling.learn(model, seen)
        self._measured.add(lane.target)
        if self._replayer is not None and tap.held:
            self._replayer.offer(Heard(seen, Dialect.OPENAI_CHAT, body, tap.held))
        return True

    def _conclude_run(self, ticket: Ticket, run: _Run, tap: Tap, backend: Backend, now: float) -> Observation:
        """The one observation of a run, as of any request."""
        reply = tap.finish(now)
        outcome = Outcome.COMPLETE if reply.complete and run.ended else Outcome.TRUNCATED
        if reply.error or run.status >= 400:
            outcome = Outcome.ERROR
        drafts = reply.draft_tokens, reply.accepted_tokens
        if not drafts[0] and isinstance(backend, TellsDrafts):
            drafts = backend.take_drafts(ticket.lane.id)
        return observation(
            ticket, outcome, reply, at=self._wall(), now=now, status=run.status, drafts=drafts, concurrency=1.0
        )


class _Run:
    """One exchange that is listened to until its end (a `Sink`)."""

    def __init__(self, tap: Tap, clock: Callable[[], float]) -> None:
        self.status = 0
        self.ended = False  # the response has come to its end
        self.error: BackendError | None = None
        self.broken_off = False
        self.timed_out = False
        self._tap = tap
        self._clock = clock
        self._exchange: Exchange | None = None
        self._over = asyncio.Event()

    def begin(self, backend: Backend, request: UpstreamRequest, lane: Lane) -> None:
        """Send the request."""
        self._exchange = backend.open(request, lane, self)

    async def wait(self, seconds: float) -> None:
        """Wait for the end, at most so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._over.wait()
        except TimeoutError:
            self.timed_out = True

    def break_off(self) -> None:
        """Close the connection, if the response has not come to its end."""
        if not self._over.is_set():
            self.broken_off = True
            self._over.set()
            if self._exchange is not None:
                self._exchange.abort()

    # --- Sink ---

    def head(self, head: ResponseHead) -> None:
        self.status = head.status
        self._tap.head(head.status, head.headers, self._clock())

    def data(self, parts: Sequence[bytes]) -> None:
        self._tap.feed(parts, self._clock())

    def end(self, trailers: Headers) -> None:  # noqa: ARG002 (nobody is shown them)
        self.ended = True
        self._over.set()

    def fail(self, error: BackendError) -> None:
        self.error = error
        self._over.set()


def _request(lane: Lane, body: bytes) -> UpstreamRequest:
    """The request as it goes to a lane, with what that changes in it."""
    name = lane.upstream_model or min(lane.models, default=lane.target)
    body = splice(body, model=name, fields=lane.overrides)
    return UpstreamRequest("POST", PATH, headers_for(lane, JSON_HEADERS, ""), body, len(body), replayable=True)


def _ticket(
    lane: Lane, backend: Backend, kind: str, facts: RequestFacts, request_id: str, begun: float
) -> Ticket:
    workload = Workload(kind, TempBucket.WARM, frozenset({PROFILE}))
    return Ticket(
        id=request_id,
        workload=workload,
        backend=backend,
        decision=Decision(lane, workload, PROFILE, "lanes are measured while nothing else goes on"),
        streamed=True,
        prompt_tokens=facts.prompt_tokens_estimate,
        started=begun,
        stay=Stay(begun, 0.0),
        formed=facts.output is not OutputForm.FREE,
    )
