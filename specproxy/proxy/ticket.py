"""A request on its way, and the one Observation that it becomes. Pure: instants and all else are arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specproxy.adapters.base import Backend
from specproxy.errors import RequestError, SpecproxyError
from specproxy.proxy.load import Busy, Stay
from specproxy.proxy.tap import ReplyFacts
from specproxy.records import (
    Decision,
    Health,
    Lane,
    LaneStatus,
    Observation,
    Outcome,
    RequestFacts,
    Workload,
)

__all__ = ["Ticket", "Unsettled", "observation", "plain_beside", "refusal", "safest"]

_MAY_TRY = (Health.READY, Health.UNHEALTHY, Health.STARTING)


@dataclass(frozen=True, slots=True)
class Unsettled:
    """What a request is remembered by, left for later since nothing had to be chosen.

    `busy` is what was in flight in the moment in which it came, itself included.
    """

    facts: RequestFacts
    lanes: tuple[LaneStatus, ...]
    busy: Busy


@dataclass(slots=True)
class Ticket:
    """A request on its way: what was decided, and what the Observation will need.

    Holds no prompt text once it is settled. `lane`, `backend` and `decision` change when it falls back to
    plain. `known` is false for a model that no lane names: such a request goes to the default lane, and nothing
    is learned from it.
    """

    id: str
    workload: Workload
    backend: Backend
    decision: Decision
    streamed: bool
    prompt_tokens: int
    started: float
    stay: Stay
    repeat: bool = False
    blocks: tuple[int, ...] = ()  # hashes of the prompt's beginnings
    model: str = ""  # the name that the client asked for
    formed: bool = False  # a form of the answer was asked for
    loads: bool = False  # the lane was not in memory when it was chosen
    known: bool = True
    plain: LaneStatus | None = None  # where a retry may go
    finished: bool = False
    unsettled: Unsettled | None = None  # there until `Router.settle`

    @property
    def lane(self) -> Lane:
        """Where it runs."""
        return self.decision.lane


def observation(
    ticket: Ticket,
    outcome: Outcome,
    reply: ReplyFacts,
    *,
    at: float,
    now: float,
    status: int,
    drafts: tuple[int, int],
    concurrency: float,
) -> Observation:
    """What a request that ends `now` has shown; `drafts` are tokens drafted and accepted."""
    lane = ticket.lane
    twice = ticket.formed and reply.thought  # then figures are of the second time alone
    its_own = "steering" in ticket.workload.flags  # it may not have been decoded as the lane does
    return Observation(
        request_id=ticket.id,
        at=at,
        workload=ticket.workload,
        lane=lane.id,
        strategy=lane.strategy.name,
        fingerprint=lane.fingerprint,
        target=lane.target,
        outcome=outcome,
        rule=ticket.decision.rule,
        status=status,
        streamed=ticket.streamed,
        source=reply.source,
        ttft_s=None if reply.ttft_at is None else max(0.0, reply.ttft_at - ticket.started),
        total_s=now - ticket.started,
        prompt_tokens=reply.prompt_tokens or ticket.prompt_tokens,
        cached_tokens=reply.cached_tokens,
        output_tokens=reply.output_tokens,
        prefill_s=reply.prefill_s,
        decode_s=reply.decode_s,
        draft_tokens=drafts[0],
        accepted_tokens=drafts[1],
        load_s=reply.load_s or _load_s(ticket, reply),
        concurrency=concurrency,
        repeat=ticket.repeat,
        propensity=ticket.decision.propensity,
        weight=0.0 if twice or its_own else reply.weight,
    )


def refusal(
    request_id: str,
    workload: Workload,
    *,
    at: float,
    target: str = "",
    streamed: bool = False,
    error: SpecproxyError | None,
) -> Observation:
    """The one Observation of a request that no lane took; without an error its client has left."""
    asked_wrong = isinstance(error, RequestError)
    outcome = Outcome.ERROR if asked_wrong else Outcome.UNREACHABLE
    return Observation(
        request_id=request_id,
        at=at,
        workload=workload,
        lane="",
        strategy="",
        fingerprint="",
        target=target,
        outcome=Outcome.CLIENT_GONE if error is None else outcome,
        rule="pin" if asked_wrong else "unavailable",
        status=error.status if isinstance(error, RequestError) else 0 if error is None else 503,
        streamed=streamed,
        weight=0.0,
    )


def _load_s(ticket: Ticket, reply: ReplyFacts) -> float:
    """Seconds that a load took within a request, where the server does not tell: what came before the first
    token and was not the prompt's doing, or what a load of the lane usually takes."""
    if not ticket.loads:
        return 0.0
    if reply.ttft_at is None:
        return ticket.lane.load_s
    return max(1e-3, reply.ttft_at - ticket.started - (reply.prefill_s or 0.0))


def safest(statuses: Sequence[LaneStatus]) -> LaneStatus | None:
    """The lane to try without statistics: ready before unready, then plain before others, then the first."""
    usable = [s for s in statuses if s.health in _MAY_TRY]
    return min(usable, key=lambda s: (_MAY_TRY.index(s.health), not s.lane.strategy.is_plain), default=None)


def plain_beside(lane: Lane, statuses: Sequence[LaneStatus]) -> LaneStatus | None:
    """Another lane of the same target that is plain and ready; for a request that is on plain already only one
    that is its equal."""
    if lane.strategy.is_plain:
        ready = (s for s in statuses if s.health is Health.READY and s.lane.fingerprint == lane.fingerprint)
        return next((s for s in ready if s.lane.id != lane.id and s.lane.strategy.is_plain), None)
    return next((s for s in statuses if s.lane.strategy.is_plain and s.health is Health.READY), None)
