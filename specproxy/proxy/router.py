"""Chooses a lane for each request, and turns what came of it into exactly one Observation.

No I/O and no clock of its own: instants are arguments, on one monotonic clock (`now`), except `at`, which comes
from the `wall` clock that is passed in. Prompt text is looked at in `route` and not kept.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from specproxy.adapters.base import Backend, TellsDrafts
from specproxy.errors import BackendError, LaneUnavailable, SpecproxyError
from specproxy.proxy.decide import decide
from specproxy.proxy.event_rates import EventRates
from specproxy.proxy.load import Busy, Load
from specproxy.proxy.prefixes import PrefixMemory
from specproxy.proxy.quarantine import Quarantine
from specproxy.proxy.repeats import RepeatMemory
from specproxy.proxy.tap import ReplyFacts
from specproxy.proxy.ticket import Ticket, Unsettled, observation, plain_beside, refusal, safest
from specproxy.records import (
    Control,
    Decision,
    Health,
    Lane,
    LaneStatus,
    Observation,
    Outcome,
    OutputForm,
    RequestFacts,
    Situation,
    Strategy,
    TempBucket,
    Workload,
)
from specproxy.strategies.balance import without_equals
from specproxy.strategies.base import Policy
from specproxy.strategies.classify import classify

__all__ = ["UNREAD", "LaneErrorListener", "Listener", "Router"]

log = logging.getLogger(__name__)

Listener = Callable[[Observation, Decision | None], None]
LaneErrorListener = Callable[[Lane, BackendError], None]

UNREAD = "unread"  # kind and rule of requests that were passed on without being read
_PREFILLED = (Outcome.COMPLETE, Outcome.CLIENT_GONE)  # the lane's cache probably holds the prompt now


class Router:
    """Lanes of all backends, the policy that chooses among them, and the listeners that hear what came of it.

    `primary` names the backend to which everything goes that is not routed (the first one by default),
    `aliases` maps further names to models: who asks for one gets the other. `alone` is what the policy says of
    the only lane, where that can be told without asking it.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        policy: Policy,
        *,
        rng: np.random.Generator,
        primary: str | None = None,
        wall: Callable[[], float] = time.time,
        repeats: RepeatMemory | None = None,
        quarantine: Quarantine | None = None,
        aliases: Mapping[str, str] | None = None,
        alone: Callable[[Workload, LaneStatus], Decision] | None = None,
    ) -> None:
        self.policy = policy
        self.load = Load()
        self.set_backends(backends)
        self._rng = rng
        self._primary = primary
        self._wall = wall
        self._aliases = dict(aliases or {})
        self._alone = alone
        self._repeats = repeats or RepeatMemory()
        self._quarantine = quarantine or Quarantine()
        self._prefixes = PrefixMemory()
        self._in_flight: dict[str, int] = {}
        self._event_rates = EventRates()
        self._turns: dict[str, int] = {}  # when each lane was last chosen, by a running number
        self._turn = itertools.count(1)
        self._listeners: list[Listener] = []
        self._error_listeners: list[LaneErrorListener] = []
        self._ids = itertools.count(1)
        self._run = f"{self._rng.integers(1 << 32):08x}"

    # --- what surrounds it ---

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The backends, the first one first."""
        return tuple(self._backends)

    def set_backends(self, backends: Sequence[Backend], hosts: Mapping[str, str] | None = None) -> None:
        """Replace the backends; requests in flight stay where they are.

        `hosts` names the hosts of those that run on other machines, by backend.
        """
        self.load.hosts = hosts or {}
        self._backends = list(backends)
        self._by_name = {backend.name: backend for backend in reversed(backends)}
        self._telling = {b.name: b for b in backends if isinstance(b, TellsDrafts)}

    def on_observation(self, listener: Listener) -> None:
        """Call `listener` with every Observation and its Decision (None where none was reached)."""
        self._listeners.append(listener)

    def on_lane_error(self, listener: LaneErrorListener) -> None:
        """Call `listener` whenever a lane could not be reached or broke a response off."""
        self._error_listeners.append(listener)

    def lanes(self) -> tuple[LaneStatus, ...]:
        """Every lane as it is now, quarantine included, with the requests that we have in flight on it."""
        lanes = self._all_lanes()
        return lanes if self._quarantine.is_empty else tuple([self._quarantine.seen(s) for s in lanes])

    def default(self) -> tuple[Backend, Lane]:
        """Where a request goes that is not routed: a plain lane of the primary backend if it has one.

        Raises:
            LaneUnavailable: there is no backend.
        """
        backend = next((b for b in self._backends if b.name == self._primary), None)
        if backend is None:
            if not self._backends:
                raise LaneUnavailable("no upstream is configured")
            backend = self._backends[0]
        status = safest([self._quarantine.seen(status) for status in backend.lanes()])
        if status is not None:
            return backend, status.lane
        return backend, Lane("default", backend.name, "", Strategy(), Control.OBSERVE, fingerprint="")

    def tokens_per_event(self, lane: Lane) -> float:
        """Tokens that one content event of this lane's streams has stood for lately."""
        return self._event_rates.of(lane.id)

    # --- one request ---

    def candidates(self, facts: RequestFacts, *, held_too: bool = False) -> tuple[LaneStatus, ...]:
        """Lanes of the model's target that can answer: those that name it, else those that take any name.

        With `held_too` as if none were in quarantine.
        """
        lanes = self._all_lanes() if held_too else self.lanes()
        model = self.meant(facts.model)
        statuses = [s for s in lanes if s.lane.can_answer(facts)]
        named = [s for s in statuses if model in s.lane.models]
        fitting = named or [s for s in statuses if not s.lane.models or model is None]
        if not fitting:
            return ()
        if facts.is_bound:
            fitting = [s for s in fitting if s.lane.bound] or fitting
        target = fitting[0].lane.target
        return tuple(s for s in fitting if s.lane.target == target)

    def route(
        self,
        facts: RequestFacts,
        *,
        pin: str | None,
        now: float,
        among: tuple[LaneStatus, ...] | None = None,
        hurry: bool = False,
    ) -> Ticket:
        """Decide where a request runs. Every ticket must come back through `finish`.

        `among` are its candidates, where they have been found already. In a `hurry`, where nothing is to be
        chosen, what only learning needs is left to `settle`.

        Raises:
            RequestError: 400, the pinned strategy does not exist here, or is in quarantine.
            LaneUnavailable: no lane can take it now.
        """
        workload = classify(facts)
        request_id = f"{self._run}{next(self._ids):08x}"
        statuses = self.candidates(facts) if among is None else among
        if hurry and pin is None and self._alone is not None and _is_one_ready(statuses):
            ticket = self._ticket(facts, self._alone(workload, statuses[0]), statuses, request_id, now)
            ticket.unsettled = Unsettled(facts, statuses, self.load.around(statuses))
            return ticket
        target = statuses[0].lane.target if statuses else self.meant(facts.model) or ""
        repeat = self._repeats.add(self._repeats.digest(target, facts.turns))
        blocks = self._prefixes.blocks(facts.turns)
        try:
            if statuses:
                busy = self.load.around(statuses, coming=1)
                situation = self._situation(facts, workload, statuses, pin, repeat, request_id, blocks, busy)
                decision = decide(self.policy, situation, statuses, self._rng)
            else:
                decision = self._unnamed(workload)
        except SpecproxyError as error:
            seen = refusal(
                request_id, workload, at=self._wall(), target=target, streamed=facts.stream, error=error
            )
            self._refused(seen)
            raise
        ticket = self._ticket(facts, decision, statuses, request_id, now)
        ticket.repeat, ticket.blocks = repeat, blocks
        return ticket

    def settle(self, ticket: Ticket) -> None:
        """Take note of a request that was routed in a hurry; does nothing the second time."""
        left, ticket.unsettled = ticket.unsettled, None
        if left is None:
            return
        facts, lanes = left.facts, left.lanes
        ticket.repeat = self._repeats.add(self._repeats.digest(lanes[0].lane.target, facts.turns))
        ticket.blocks = self._prefixes.blocks(facts.turns)
        situation = self._situation(
            facts, ticket.workload, lanes, None, ticket.repeat, ticket.id, ticket.blocks, left.busy
        )
        ticket.decision = decide(self.policy, situation, lanes, self._rng)

    def _ticket(
        self,
        facts: RequestFacts,
        decision: Decision,
        statuses: tuple[LaneStatus, ...],
        request_id: str,
        now: float,
    ) -> Ticket:
        lane = decision.lane
        self._in_flight[lane.id] = self._in_flight.get(lane.id, 0) + 1
        self._turns[lane.id] = next(self._turn)
        return Ticket(
            id=request_id,
            workload=decision.workload,
            backend=self._backend_of(lane),
            decision=decision,
            streamed=facts.stream,
            prompt_tokens=facts.prompt_tokens_estimate,
            started=now,
            stay=self.load.enter(now, lane),
            model=facts.model or "",
            formed=facts.output is not OutputForm.FREE,
            loads=any(s.lane.id == lane.id and not s.resident for s in statuses),
            known=bool(statuses),
            plain=plain_beside(lane, statuses) if len(statuses) > 1 else None,
        )

    def unread(self, *, now: float) -> Ticket:
        """A ticket for a request to a model whose body could not be read; it must come back through `finish`.

        Raises:
            LaneUnavailable: there is no backend.
        """
        workload = Workload(UNREAD, TempBucket.WARM)
        request_id = f"{self._run}{next(self._ids):08x}"
        try:
            backend, lane = self.default()
        except LaneUnavailable as error:
            self._refused(refusal(request_id, workload, at=self._wall(), error=error))
            raise
        reason = "its body is not JSON, is encoded, or is above limits.inspect"
        self._in_flight[lane.id] = self._in_flight.get(lane.id, 0) + 1
        return Ticket(
            id=request_id,
            workload=workload,
            backend=backend,
            decision=Decision(lane, workload, UNREAD, reason),
            streamed=False,
            prompt_tokens=0,
            started=now,
            stay=self.load.enter(now, lane),
            known=False,
        )

    def turn_away(self, error: SpecproxyError | None) -> None:
        """Make the Observation of a request to a model that ends before anything is looked at.

        It is refused with an error, or (None) its client left while it waited.
        """
        request_id = f"{self._run}{next(self._ids):08x}"
        self._refused(refusal(request_id, Workload(UNREAD, TempBucket.WARM), at=self._wall(), error=error))

    def sole(self, facts: RequestFacts, among: Sequence[LaneStatus]) -> tuple[Backend, Lane] | None:
        """The one candidate of a request, where there is nothing to choose and nothing to change in it.

        Then the request can be on its way before `route` is asked, which will say the same.
        """
        if not _is_one_ready(among):
            return None
        lane = among[0].lane
        plain_sailing = not (
            lane.headers or lane.overrides or lane.upstream_model or facts.model in self._aliases
        )
        return (self._backend_of(lane), lane) if plain_sailing else None

    def preview(self, facts: RequestFacts, *, pin: str | None = None) -> Decision:
        """What `route` would decide, without counting or remembering anything.

        Raises:
            RequestError: 400, the pinned strategy does not exist here, or is in quarantine.
            LaneUnavailable: no lane can take it now.
        """
        workload = classify(facts)
        statuses = self.candidates(facts)
        if not statuses:
            return self._unnamed(workload)
        repeat = self._repeats.knows(self._repeats.digest(statuses[0].lane.target, facts.turns))
        blocks = self._prefixes.blocks(facts.turns)
        busy = self.load.around(statuses, coming=1)
        situation = self._situation(facts, workload, statuses, pin, repeat, "", blocks, busy)
        decision = decide(self.policy, situation, statuses, self._rng)
        return dataclasses.replace(decision, repeat=repeat)

    def fall_back(self, ticket: Ticket, error: str, *, now: float) -> bool:
        """Move a ticket to plain after its lane failed; returns False where there is no other plain lane."""
        status, ticket.plain = ticket.plain, None
        if status is None:
            return False
        self._leave_lane(ticket.lane)
        self._in_flight[status.lane.id] = self._in_flight.get(status.lane.id, 0) + 1
        ticket.loads = not status.resident
        reason = f"{ticket.lane.id} failed ({error}), so plain answers"
        ticket.decision = dataclasses.replace(
            ticket.decision, lane=status.lane, rule="fallback", reason=reason, propensity=1.0
        )
        ticket.backend = self._backend_of(status.lane)
        ticket.stay = self.load.move(ticket.stay, now, status.lane)
        return True

    def lane_failed(self, lane: Lane, error: BackendError) -> None:
        """Tell the listeners that a lane could not be reached or broke off."""
        for listener in self._error_listeners:
            _call(listener, lane, error)

    def finish(
        self,
        ticket: Ticket,
        outcome: Outcome,
        *,
        now: float,
        status: int = 0,
        reply: ReplyFacts | None = None,
        events: int = 0,
    ) -> Observation:
        """Conclude a request: learn from it and tell the listeners. Once for each ticket.

        `reply` is what the tap read, `events` the content events that it saw.
        """
        assert not ticket.finished, "a ticket is finished once"
        ticket.finished = True
        self.settle(ticket)
        self._leave_lane(ticket.lane)
        reply = reply or ReplyFacts()
        drafts = reply.draft_tokens, reply.accepted_tokens
        if not drafts[0] and (telling := self._telling.get(ticket.backend.name)) is not None:
            drafts = telling.take_drafts(ticket.lane.id)
        seen = observation(
            ticket,
            outcome,
            reply,
            at=self._wall(),
            now=now,
            status=status,
            drafts=drafts,
            concurrency=self.load.leave(ticket.stay, now),
        )
        self._event_rates.learn(seen, events)
        if outcome in _PREFILLED:
            self._prefixes.note(ticket.lane, ticket.blocks)
        if ticket.known:
            _call(self.policy.learn_one, seen)
        for listener in self._listeners:
            _call(listener, seen, ticket.decision)
        return seen

    # --- parts ---

    def _all_lanes(self) -> tuple[LaneStatus, ...]:
        """Every lane, as if none were in quarantine."""
        return tuple([self._counted(status) for backend in self._backends for status in backend.lanes()])

    @property
    def has_aliases(self) -> bool:
        """Whether models have further names."""
        return bool(self._aliases)

    def meant(self, model: str | None) -> str | None:
        """The model behind a name that a client asks for."""
        return self._aliases.get(model, model) if model is not None else None

    def _situation(
        self,
        facts: RequestFacts,
        workload: Workload,
        statuses: tuple[LaneStatus, ...],
        pin: str | None,
        repeat: bool,
        request_id: str,
        blocks: tuple[int, ...],
        busy: Busy,
    ) -> Situation:
        hits = self._prefixes.hits(blocks, statuses)
        ready = tuple(s for s in statuses if s.health is Health.READY) or statuses
        return Situation(
            workload=workload,
            lanes=ready if pin is not None else without_equals(ready, hits, self._turns),
            at=self._wall(),
            prompt_tokens=facts.prompt_tokens_estimate,
            max_tokens=facts.max_tokens,
            in_flight=busy.here,
            elsewhere=busy.elsewhere,
            pin=pin,
            prefix_hits=hits,
            repeat=repeat,
            request_id=request_id,
        )

    def _unnamed(self, workload: Workload) -> Decision:
        """For a model that no lane names: the default lane, whose own answer is the truth."""
        _, lane = self.default()
        return Decision(lane, workload, "unknown_model", "no lane names this model")

    def _backend_of(self, lane: Lane) -> Backend:
        return self._by_name[lane.backend]

    def _counted(self, status: LaneStatus) -> LaneStatus:
        ours = self._in_flight.get(status.lane.id, 0)
        return dataclasses.replace(status, in_flight=ours) if ours != status.in_flight else status

    def _leave_lane(self, lane: Lane) -> None:
        left = self._in_flight.pop(lane.id, 1) - 1
        if left > 0:
            self._in_flight[lane.id] = left

    def _refused(self, seen: Observation) -> None:
        """Tell the listeners of a request that no lane took."""
        for listener in self._listeners:
            _call(listener, seen, None)


def _is_one_ready(statuses: Sequence[LaneStatus]) -> bool:
    return len(statuses) == 1 and statuses[0].health is Health.READY


def _call(function: Callable[..., object], *args: object) -> None:
    """Call a listener; its failure is logged and costs the client nothing."""
    try:
        function(*args)
    except Exception:
        log.exception("a listener failed")
