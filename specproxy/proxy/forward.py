"""Takes one request to an upstream and its response back.

A request is routed, with one retry on plain, if its path is a known inference route and its body is JSON of a
moderate size; where only one lane can take it, it is sent before it is judged. Everything else goes to the
default lane as it comes: body streamed, nothing looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

from specproxy.adapters.base import Backend, Headers, UpstreamRequest
from specproxy.adapters.tasks import Tasks
from specproxy.errors import (
    BackendError,
    RequestError,
    SpecproxyError,
    UpstreamClosed,
    UpstreamProtocolError,
)
from specproxy.proxy.bodies import pump, read_up_to, too_long
from specproxy.proxy.client import RelayResponse
from specproxy.proxy.dialects import read_facts
from specproxy.proxy.headers import REQUEST_ID, Inbound, header_value, headers_for
from specproxy.proxy.inbound import ClientRequest
from specproxy.proxy.later import Later
from specproxy.proxy.listing import LISTS, askable, merged_list
from specproxy.proxy.named import Question, asks_about_a_model, home, names_matter, read_question
from specproxy.proxy.relay import Attempt, HeldBack
from specproxy.proxy.rename import Renamer
from specproxy.proxy.router import Router
from specproxy.proxy.splice import splice
from specproxy.proxy.tap import Tap
from specproxy.proxy.text_replay import Heard, TextReplayer
from specproxy.proxy.ticket import Ticket
from specproxy.records import Dialect, Lane, Observation, Outcome, RequestFacts

__all__ = ["Call", "Forwarder", "Limits", "status_for"]

_REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"})  # idempotent by RFC 9110


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be asked for: a body above `inspect` bytes is not read to classify it, one above `body` bytes is
    refused with 413; above `requests` in flight, `queue` further ones wait, and others are refused with 503."""

    inspect: int = 8 * 1024 * 1024
    body: int = 1024 * 1024 * 1024
    requests: int = 1024
    queue: int = 1024


@dataclass(frozen=True, slots=True)
class Call:
    """A client's request, and the response that it gets. `target` is the raw request target in origin form."""

    request: ClientRequest
    response: RelayResponse
    target: str
    inbound: Inbound
    dialect: Dialect | None


class Forwarder:
    """Forwards calls. Raises what could not be answered; the caller renders it.

    `capture` is told path and body of every routed request that its client does not want kept private. `priors`
    gives, by lane, workload and request id, what the engine is told about a request's workload.
    """

    def __init__(
        self, router: Router, tasks: Tasks, limits: Limits, replayer: TextReplayer | None = None
    ) -> None:
        self.limits = limits
        self.capture: Callable[[str, bytes], None] | None = None
        self.priors: Callable[[Lane, str, str], bytes] | None = None
        self._router = router
        self._replayer = replayer
        self._tasks = tasks
        self._later = Later()

    async def forward(self, call: Call) -> None:
        """Forward a request and relay its response.

        Raises:
            BackendError: no upstream answered, or it broke off; `call.response.started` tells which.
            RequestError: the request cannot be served as asked.
        """
        if await self._listed(call):
            return
        inbound, body, length = call.inbound, call.request.body, call.request.length
        if length is not None and length > self.limits.body:
            raise too_long(self.limits.body)
        if inbound.expects_continue and not body.complete:
            call.response.invite()
        asks = asks_about_a_model(call.request.method, call.target) and names_matter(self._router)
        readable = (call.dialect is not None or asks) and not inbound.encoded
        in_chunks = length is None and (body.held > 0 or bool(body.trailers))
        arriving = not body.complete and (not readable or (length or 0) > self.limits.inspect)
        if arriving or (in_chunks and not readable):
            await self._pass_on(call, b"", False)
            return
        data, whole = await read_up_to(body, self.limits.inspect)
        now = perf_counter()
        facts = read_facts(call.dialect, data) if whole and readable and call.dialect is not None else None
        if facts is not None:
            await self._route(call, facts, data, now)
            return
        question = (
            read_question(call.request.method, call.target, data) if whole and asks and readable else None
        )
        if question is not None:
            await self._ask(call, question)
        else:
            await self._pass_on(call, data, whole)

    async def _listed(self, call: Call) -> bool:
        """Answer a question for all models where several servers have some."""
        if call.request.method != "GET" or (path := call.target.partition("?")[0]) not in LISTS:
            return False
        asked = askable(self._router.backends)
        if len(asked) < 2:
            return False
        body = await merged_list(asked, path, call.target, call.inbound.headers)
        if body is None:
            return False
        call.response.send(200, b"OK", ((b"Content-Type", b"application/json"),), body)
        return True

    # --- routed ---

    async def _route(self, call: Call, facts: RequestFacts, body: bytes, now: float) -> None:
        pin = call.inbound.pin
        among = self._router.candidates(facts, held_too=pin is not None and call.inbound.verifying)
        sole = self._router.sole(facts, among) if pin is None else None
        early = self._begin_early(call, body, *sole) if sole is not None else None
        try:
            ticket = self._router.route(facts, pin=pin, now=now, among=among, hurry=early is not None)
        except BaseException:
            if early is not None and early.exchange is not None:
                early.exchange.abort()
            raise
        del facts  # holds the prompt
        if ticket.unsettled is not None:
            self._later.add(partial(self._router.settle, ticket))
        if self.capture is not None and not call.inbound.private:
            self.capture(call.target.partition("?")[0], body)
        await self._observed(call, ticket, partial(self._try_lanes, call, ticket, body, early), body)

    async def _observed(
        self, call: Call, ticket: Ticket, run: Callable[[list[Attempt]], Awaitable[None]], body: bytes = b""
    ) -> None:
        """Run a request and make its one Observation, whatever becomes of it; `run` lists its attempts.

        `body` is the request's, where it was read.
        """
        tried: list[Attempt] = []
        outcome: Outcome | None = Outcome.CLIENT_GONE
        status = 0
        try:
            await run(tried)
            outcome = None
        except BackendError as error:
            outcome = Outcome.TRUNCATED if call.response.started else Outcome.UNREACHABLE
            status = status_for(error)
            self._router.lane_failed(ticket.lane, error)
            raise
        except asyncio.CancelledError:
            if tried and tried[-1].complete:
                outcome = None  # the client had it all, and left before we could go on
            elif call.response.client.connected:
                outcome = Outcome.TRUNCATED  # we are being shut down
            raise
        finally:
            attempt = tried[-1] if tried else None
            seen = self._conclude(call, ticket, attempt, outcome, status)
            tap = attempt.tap if attempt is not None else None
            if self._replayer is not None and tap is not None and tap.held and call.dialect is not None:
                self._replayer.offer(Heard(seen, call.dialect, body, tap.held))

    def _begin_early(self, call: Call, body: bytes, backend: Backend, lane: Lane) -> Attempt:
        """Send a request to the only lane before its kind is worked out: the server starts meanwhile."""
        attempt = Attempt(call.response, self._later)
        begun = perf_counter()
        attempt.exchange = backend.open(_unread(call, lane, body, True), lane, attempt)
        attempt.tap = self._tap(call, lane, started=begun)
        return attempt

    async def _try_lanes(
        self, call: Call, ticket: Ticket, body: bytes, early: Attempt | None, tried: list[Attempt]
    ) -> None:
        """Run on the chosen lane, and once more on plain if that fails before the client has seen a byte."""
        may_retry = ticket.plain is not None
        if early is not None:
            early.extra = _explain(ticket, perf_counter())
        tried.append(early or self._attempt(call, ticket, body, hold_errors=may_retry))
        try:
            await tried[-1].run()
        except (BackendError, HeldBack) as error:
            if call.response.started or not may_retry:
                raise
            failed = ticket.lane
            self._router.fall_back(ticket, str(error), now=perf_counter())
            if isinstance(error, BackendError):
                self._router.lane_failed(failed, error)
            tried.append(self._attempt(call, ticket, body, hold_errors=False))
            await tried[-1].run()

    def _attempt(self, call: Call, ticket: Ticket, body: bytes, *, hold_errors: bool) -> Attempt:
        lane, asked = ticket.lane, ticket.model
        meant = self._router.meant(asked)
        # a lane must not pass for a model that it does not name
        fields, name = (lane.overrides, lane.upstream_model) if ticket.known else ((), None)
        model = name or (meant if meant != asked else None)
        if fields or model:
            body = splice(body, model=model, fields=fields)
        upstream = UpstreamRequest(
            call.request.method,
            call.target,
            headers_for(lane, call.inbound.headers, ticket.id, self._advice(ticket)),
            body,
            len(body),
            replayable=True,
        )
        renamer = Renamer(model, asked) if model and asked and model != asked else None
        hold = self._replayer.hold(ticket, body) if self._replayer is not None else 0
        attempt = self._tapped(call, ticket, hold_errors=hold_errors, renamer=renamer, hold=hold)
        attempt.begin(partial(ticket.backend.open, upstream, lane))
        return attempt

    def _advice(self, ticket: Ticket) -> bytes:
        return self.priors(ticket.lane, ticket.workload.key, ticket.id) if self.priors is not None else b""

    def _tapped(
        self,
        call: Call,
        ticket: Ticket,
        *,
        hold_errors: bool = False,
        renamer: Renamer | None = None,
        hold: int = 0,
    ) -> Attempt:
        """An attempt whose reply is read and explained."""
        return Attempt(
            call.response,
            self._later,
            tap=self._tap(call, ticket.lane, hold),
            extra=_explain(ticket, perf_counter()),
            hold_errors=hold_errors,
            renamer=renamer,
        )

    def _tap(self, call: Call, lane: Lane, hold: int = 0, started: float | None = None) -> Tap:
        per_event = self._router.tokens_per_event(lane)
        return Tap(call.dialect, tokens_per_event=per_event, started=started or perf_counter(), hold=hold)

    def _conclude(
        self, call: Call, ticket: Ticket, attempt: Attempt | None, outcome: Outcome | None, status: int
    ) -> Observation:
        """Make the request's one Observation. `outcome` is None where the reply itself tells it."""
        now = perf_counter()
        status = call.response.status_sent or status
        tap = attempt.tap if attempt is not None else None
        if attempt is not None:
            attempt.read_on()
        reply = tap.finish(now) if tap is not None and call.response.started else None
        if outcome is None:
            if status >= 400 or (reply is not None and reply.error):
                outcome = Outcome.ERROR
            else:
                outcome = Outcome.COMPLETE if reply is not None and reply.complete else Outcome.TRUNCATED
        events = tap.content_events if tap is not None else 0
        return self._router.finish(ticket, outcome, now=now, status=status, reply=reply, events=events)

    # --- passed on unread ---

    async def _pass_on(self, call: Call, data: bytes, whole: bool) -> None:
        """Relay without looking; `data` was read already, and is all of the body if `whole`."""
        if call.dialect is not None:
            ticket = self._router.unread(now=perf_counter())
            await self._observed(call, ticket, partial(self._try_unread, call, ticket, data, whole))
            return
        backend, lane = self._router.default()
        attempt = Attempt(call.response, self._later)
        attempt.begin(partial(backend.open, _unread(call, lane, data, whole), lane))
        try:
            await self._carry(call, attempt, data, whole)
        except BackendError as error:
            self._router.lane_failed(lane, error)
            raise

    async def _ask(self, call: Call, question: Question) -> None:
        """Pass a question about a model on to where that model is, under its name there."""
        backend, lane, name = home(self._router, question.name)
        put = question.about(name) if name != question.name else question
        renamer = Renamer(name, question.name, question.key) if put is not question else None
        request = replace(_unread(call, lane, put.body, True), target=put.target, length=len(put.body))
        attempt = Attempt(call.response, self._later, renamer=renamer)
        attempt.begin(partial(backend.open, request, lane))
        try:
            await attempt.run()
        except BackendError as error:
            self._router.lane_failed(lane, error)
            raise

    async def _try_unread(
        self, call: Call, ticket: Ticket, data: bytes, whole: bool, tried: list[Attempt]
    ) -> None:
        """Pass on a request to a model that could not be read; its reply is looked at as any other."""
        tried.append(attempt := self._tapped(call, ticket))
        request = _unread(call, ticket.lane, data, whole)
        attempt.begin(partial(ticket.backend.open, request, ticket.lane))
        await self._carry(call, attempt, data, whole)

    async def _carry(self, call: Call, attempt: Attempt, data: bytes, whole: bool) -> None:
        """Relay the response, and meanwhile what is still to come of the body."""
        if whole:
            await attempt.run()
            return
        upload = self._tasks.spawn(self._upload(call, data, attempt), name="upload")
        try:
            await attempt.run()
        finally:
            upload.cancel()
            await asyncio.wait((upload,))

    async def _upload(self, call: Call, first: bytes, attempt: Attempt) -> None:
        assert attempt.exchange is not None
        try:
            await pump(first, call.request.body, attempt.exchange, limit=self.limits.body)
        except BackendError:
            return  # the response, or its failure, says what happened
        except RequestError as error:
            attempt.give_up(error)


def _unread(call: Call, lane: Lane, data: bytes, whole: bool) -> UpstreamRequest:
    """A request as it came, for a lane that changes nothing in it."""
    method = call.request.method
    return UpstreamRequest(
        method,
        call.target,
        headers_for(lane, call.inbound.headers, ""),
        data if whole else None,
        call.request.length,
        replayable=whole and (method in _REPEATABLE or call.dialect is not None),
    )


def status_for(error: SpecproxyError) -> int:
    """The HTTP status that an error of ours is answered with."""
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, UpstreamClosed | UpstreamProtocolError):
        return 502
    return 503 if isinstance(error, BackendError) else 500


def _explain(ticket: Ticket, now: float) -> Headers:
    """Response headers that say what was decided and what it cost."""
    lane = header_value(ticket.lane.id)
    spent_ms = (now - ticket.started) * 1e3
    return (
        (b"X-Specproxy-Lane", lane),
        (b"X-Specproxy-Strategy", header_value(ticket.lane.strategy.name)),
        (b"X-Specproxy-Workload", header_value(ticket.workload.key)),
        (b"X-Specproxy-Reason", header_value(f"{ticket.decision.rule}: {ticket.decision.reason}")),
        (REQUEST_ID, ticket.id.encode("ascii")),
        (b"Server-Timing", b'specproxy;dur=%.3f;desc="%b"' % (spent_ms, lane.replace(b'"', b"'"))),
    )
