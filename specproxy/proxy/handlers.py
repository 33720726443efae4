"""What happens to a request: it is ours to answer, or goes to an upstream; what goes wrong is answered here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Protocol

from specproxy.adapters.base import ResponseHead
from specproxy.adapters.tasks import Tasks
from specproxy.errors import LaneUnavailable, RequestError, SpecproxyError
from specproxy.proxy.bodies import read_up_to
from specproxy.proxy.client import RelayResponse
from specproxy.proxy.cors import preflight, sharing
from specproxy.proxy.dialects import dialect_of, render_error
from specproxy.proxy.forward import Call, Forwarder, Limits, status_for
from specproxy.proxy.headers import Inbound, read_inbound
from specproxy.proxy.inbound import ClientRequest, HeaderView
from specproxy.proxy.queueing import FairQueue
from specproxy.proxy.router import Router
from specproxy.proxy.text_replay import TextReplayer
from specproxy.records import Dialect, Lane

__all__ = ["ADMIN_PREFIX", "AdminReply", "AdminRoutes", "Handlers", "origin_form"]

log = logging.getLogger(__name__)

ADMIN_PREFIX = "/specproxy"
_MAX_ADMIN_BODY = 16 * 1024 * 1024
_NOTICE_S = 5.0  # between two lines in the log about one limit
_LOOKS = frozenset({"GET", "HEAD", "OPTIONS"})  # by which clients ask what there is, and start nothing


class AdminReply(Protocol):
    """A whole reply to a request of our own."""

    @property
    def status(self) -> int: ...

    @property
    def body(self) -> bytes: ...

    @property
    def content_type(self) -> str: ...

    @property
    def headers(self) -> tuple[tuple[str, str], ...]: ...

    @property
    def stream(self) -> AsyncGenerator[bytes, None] | None:
        """Pieces of a body that comes bit by bit, and has no end; None where `body` is all of it."""
        ...


class AdminRoutes(Protocol):
    """What answers under ``/specproxy/``."""

    def refuse(self, method: str, target: str, headers: Mapping[str, str]) -> AdminReply | None:
        """The answer to a request whose body need not be read; None where it has to be."""
        ...

    def handle(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> AdminReply:
        """Answer one request; never raises for bad input, never blocks."""
        ...


class Handlers:
    """Answers every request that arrives.

    `guard` raises RequestError for a request that may not be served, and returns whether Authorization is ours.
    `reader` gives the Origin of a page that may read the answer, None where there is none. `replayer` hears
    finished requests.
    """

    def __init__(
        self,
        router: Router,
        *,
        admin: AdminRoutes | None = None,
        guard: Callable[[Mapping[str, str]], bool] | None = None,
        reader: Callable[[Mapping[str, str]], str | None] | None = None,
        limits: Limits | None = None,
        replayer: TextReplayer | None = None,
    ) -> None:
        self._tasks = Tasks()
        self._router = router
        self._forwarder = Forwarder(router, self._tasks, limits or Limits(), replayer)
        self._admin = admin
        self._guard = guard
        self._reader = reader
        self._queue = FairQueue(self._forwarder.limits.requests, self._forwarder.limits.queue)
        self._noticed: dict[
            str, tuple[float, int]
        ] = {}  # by limit: when the log was told, and times since then
        self._arrived: Callable[[], None] = lambda: None
        self._active = 0
        self._idle: asyncio.Event = asyncio.Event()
        self._idle.set()
        self._closing = False

    @property
    def active(self) -> int:
        """Requests being forwarded now."""
        return self._active

    @property
    def forwarding(self) -> int:
        """Requests to upstreams, of any sort, that run or wait."""
        return self._queue.running + self._queue.waiting

    def on_arrival(self, listener: Callable[[], None]) -> None:
        """Call `listener` as soon as a request has come that is more than a look at something."""
        self._arrived = listener

    def set_limits(self, limits: Limits) -> None:
        """Other limits for requests that come from now on."""
        self._forwarder.limits = limits
        self._queue.resize(limits.requests, limits.queue)

    def capture(self, keep: Callable[[str, bytes], None]) -> None:
        """Tell `keep` path and body of every routed request, but those that their clients want kept private."""
        self._forwarder.capture = keep

    def advise(self, priors: Callable[[Lane, str, str], bytes]) -> None:
        """Ask `priors` (of lane, workload and request id) for what the engine should know of a request."""
        self._forwarder.priors = priors

    async def drain(self, grace_s: float) -> bool:
        """Refuse new requests and give those in flight `grace_s` seconds; returns whether all ended."""
        self._closing = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def aclose(self) -> None:
        """End what still runs in the background."""
        await self._tasks.aclose()

    async def handle(self, request: ClientRequest, response: RelayResponse) -> None:
        """Answer one request. The server cancels it when the client leaves."""
        call = Call(request, response, *_read_head(request))
        self._enter()
        try:
            await self._serve(call)
        except SpecproxyError as error:
            self._refuse(call, error)
        except Exception:
            log.exception("a request could not be handled")
            self._refuse(call, SpecproxyError("specproxy failed to handle this request; its log says why"))
        finally:
            self._leave()

    def _enter(self) -> None:
        self._active += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._active -= 1
        if not self._active:
            self._idle.set()

    async def _serve(self, call: Call) -> None:
        request = call.request
        if request.fault is not None:
            raise request.fault
        if call.inbound.coded:  # chunks are undone here, and nobody behind us would know of the rest
            raise RequestError(
                "no transfer coding but chunked is known here", status=501, code="not_implemented"
            )
        path = call.target.partition("?")[0]
        if self._admin is not None and (path == ADMIN_PREFIX or path.startswith(ADMIN_PREFIX + "/")):
            await self._answer(self._admin, call)
            return
        headers = HeaderView(request.headers)
        if self._reader is not None and (origin := self._reader(headers)) is not None:
            call.response.reader = sharing(origin)
            if (answer := preflight(request.method, headers)) is not None:
                call.response.send(204, b"No Content", answer, b"")
                return
        if self._guard is not None and self._guard(headers):
            call = replace(call, inbound=call.inbound.without(b"authorization"))
        if request.method == "CONNECT":
            raise RequestError("specproxy is not a forward proxy", status=405, code="method_not_allowed")
        if request.method == "GET" and headers.get("Upgrade", "").lower() == "websocket":
            raise RequestError(
                "WebSocket connections are not relayed",
                status=501,
                code="not_implemented",
                hint="connect to the server behind specproxy itself",
            )
        if self._closing:
            call.response.keep_alive = False
            raise LaneUnavailable("specproxy is shutting down")
        if request.method not in _LOOKS:
            self._arrived()
        if self._queue.is_free:
            self._queue.start()
        else:
            await self._wait(call, headers)
        try:
            await self._forwarder.forward(call)
        finally:
            self._queue.leave()

    async def _wait(self, call: Call, headers: HeaderView) -> None:
        """Wait for a place among the requests in flight; those that go to no model do not wait."""
        if call.dialect is None:
            raise self._queue.full()
        client = (call.request.peer, headers.get("Authorization"), headers.get("User-Agent"))
        try:
            await self._queue.wait(client)
        except LaneUnavailable as error:
            self._router.turn_away(error)
            raise
        except asyncio.CancelledError:
            self._router.turn_away(None)
            raise

    def _refuse(self, call: Call, error: SpecproxyError) -> None:
        """Answer with an error in the client's dialect, or cut a response short that has begun."""
        if error.limit:
            self._notice(error)
        response = call.response
        if response.started:
            response.cut()
            return
        if not call.request.body.complete:
            response.keep_alive = False  # what is left of the body would be taken for the next request
        path = call.target.partition("?")[0]
        status, headers, body = render_error(call.dialect, path, error, status_for(error))
        response.send(status, HTTPStatus(status).phrase.encode("ascii"), headers, body)

    def _notice(self, error: SpecproxyError) -> None:
        """Say in the log which limit was reached, now and then where that happens again and again."""
        now = asyncio.get_running_loop().time()
        at, times = self._noticed.get(error.limit, (now - _NOTICE_S, 0))
        if now - at < _NOTICE_S:
            self._noticed[error.limit] = at, times + 1
            return
        self._noticed[error.limit] = now, 0
        again = f"; {times} more since the last line" if times else ""
        log.warning("a limit was reached: %s (%s)%s", error.message, error.hint or error.limit, again)

    async def _answer(self, admin: AdminRoutes, call: Call) -> None:
        request, view = call.request, HeaderView(call.request.headers)
        reply = admin.refuse(request.method, call.target, view)
        if reply is not None:
            call.response.keep_alive = call.response.keep_alive and request.body.complete
        else:
            if call.inbound.expects_continue and not request.body.complete:
                call.response.invite()
            body, whole = await read_up_to(request.body, _MAX_ADMIN_BODY)
            if not whole:
                raise RequestError(
                    f"the request body is longer than {_MAX_ADMIN_BODY} bytes",
                    status=413,
                    code="too_large",
                    hint="this limit of specproxy's own routes is fixed",
                    limit="specproxy's own routes",
                )
            reply = admin.handle(request.method, call.target, view, body)
        given = (("Content-Type", reply.content_type), *reply.headers)
        headers = tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in given)
        reason = HTTPStatus(reply.status).phrase.encode("ascii")
        if reply.stream is None:
            call.response.send(reply.status, reason, headers, reply.body)
        else:
            call.response.start(ResponseHead(reply.status, reason, headers))
            await self._stream(call.response, reply.stream)

    async def _stream(self, response: RelayResponse, pieces: AsyncGenerator[bytes, None]) -> None:
        """Send pieces as fast as the client reads, until it leaves or we stop: nobody waits for its end."""
        self._leave()
        try:
            async for piece in pieces:
                response.body((piece,))
                await response.client.drain()
        finally:
            self._enter()
            await pieces.aclose()


def _read_head(request: ClientRequest) -> tuple[str, Inbound, Dialect | None]:
    """Target in origin form, headers sorted out, and dialect of a request; found out once for one and the same
    head."""
    read: tuple[str, Inbound, Dialect | None] | None = request.notes.read
    if read is None:
        target = origin_form(request.target)
        dialect = dialect_of(request.method, target.partition("?")[0])
        read = request.notes.read = target, read_inbound(request.headers), dialect
    return read


def origin_form(target: str) -> str:
    """A raw request target in origin form: ``http://host/path?q`` becomes ``/path?q``; ``*`` stays."""
    if target.startswith("/") or "://" not in target:
        return target
    rest = target.partition("://")[2]
    start = min((i for i in (rest.find("/"), rest.find("?")) if i >= 0), default=len(rest))
    path = rest[start:]
    return path if path.startswith("/") else "/" + path
