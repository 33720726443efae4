"""specproxy's own routes, all under /specproxy/: the page, what it and scripts are told, metrics, quarantine.

The handlers know nothing of the HTTP server: a request comes in as method, target, headers and body, and a
`Reply` goes out. Quarantine is all that can be changed here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

import orjson

from specproxy.errors import RequestError, SpecproxyError
from specproxy.proxy import metrics
from specproxy.proxy.board import RECENT, Board
from specproxy.proxy.guard import Guard
from specproxy.proxy.live import Live
from specproxy.records import Decision, LaneStatus
from specproxy.strategies.explain import explained

__all__ = ["PREFIX", "Admin", "Reply", "View", "page"]

PREFIX = "/specproxy/"
EXPLAIN_PATH_HEADER = "x-path"
MOST_TEXT = 300  # characters of a lane's name or a reason
DEFAULT_EXPLAIN_PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Reply:
    """What to send: a body, or a stream of pieces of one. Content-Length is the server's part."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()
    stream: AsyncGenerator[bytes, None] | None = None


class View(Protocol):
    """What the admin routes look at; the service implements it."""

    board: Board

    def lanes(self) -> Sequence[LaneStatus]:
        """Every lane as it is now."""
        ...

    def status(self, *, everything: bool = False) -> dict[str, Any]:
        """What `specproxy status` shows, as JSON-serialisable data; `everything` adds earlier set-ups."""
        ...

    def live(self) -> dict[str, Any]:
        """What an open page shows, as named sections of JSON-serialisable data."""
        ...

    def quarantine(self, lane: str, reason: str, fingerprint: str | None = None) -> LaneStatus:
        """Take a lane (by id) out of service, if its fingerprint is still the one that is meant.

        Raises:
            RequestError: there is no such lane, it has changed, or nothing else could answer plainly.
        """
        ...

    def lift(self, lane: str, reason: str) -> LaneStatus:
        """Put a lane (by id) back into service.

        Raises:
            RequestError: there is no such lane, or it is not in quarantine.
        """
        ...

    def explain(self, path: str, headers: Mapping[str, str], body: bytes) -> Decision:
        """Where a request would go, without running it or learning from it.

        Raises:
            RequestError: it is no request that would be routed.
            LaneUnavailable: no lane could take it.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Call:
    query: dict[str, list[str]]
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)


def _name(target: str) -> str:
    return urlsplit(target).path.removeprefix(PREFIX.rstrip("/")).lstrip("/")


class Admin:
    """Answers requests under `PREFIX`. At most `watchers` streams of events are open at a time."""

    def __init__(self, view: View, guard: Guard, *, watchers: int = 32) -> None:
        self._view = view
        self._guard = guard
        self._live = Live(lambda: view.live(), most=watchers)
        self._routes: dict[str, tuple[str, Callable[[_Call], Reply]]] = {
            "": ("GET", self._page),
            "health": ("GET", self._health),
            "metrics": ("GET", self._metrics),
            "api/status": ("GET", self._status),
            "api/events": ("GET", self._events),
            "api/recent": ("GET", self._recent),
            "api/explain": ("POST", self._explain),
            "api/quarantine": ("POST", self._quarantine),
            "api/lift": ("POST", self._lift),
        }

    def refuse(self, method: str, target: str, headers: Mapping[str, str]) -> Reply | None:
        """Why a request may not be answered, as far as its head tells; its body need not be read then."""
        name = _name(target)
        try:
            if name != "health":  # tells nothing, and container probes have no token
                self._guard.check(headers)
            if name not in self._routes:
                raise RequestError("no such page", status=404, code="not_found", hint=f"see {PREFIX}")
            verb, _ = self._routes[name]
            if method not in (verb, "HEAD" if verb == "GET" else verb):
                raise RequestError(f"use {verb} here", status=405, code="method_not_allowed")
        except RequestError as error:
            return _refusal(error.status, error.code, str(error))
        return None

    def handle(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """Answer one request; `headers` must look names up without regard to case. Bad input never raises."""
        if (refused := self.refuse(method, target, headers)) is not None:
            return refused
        _, handler = self._routes[_name(target)]
        try:
            reply = handler(_Call(parse_qs(urlsplit(target).query), headers, body))
        except RequestError as error:
            return _refusal(error.status, error.code, str(error))
        except SpecproxyError as error:
            return _refusal(503, "unavailable", str(error))
        return Reply(reply.status, b"", reply.content_type, reply.headers) if method == "HEAD" else reply

    def _page(self, _call: _Call) -> Reply:
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        policy += "; img-src data:"  # the empty icon, without which browsers ask for /favicon.ico
        headers = (
            ("Content-Security-Policy", f"{policy}; frame-ancestors 'none'"),
            ("Cache-Control", "no-cache"),
        )
        return Reply(200, page(), "text/html; charset=utf-8", headers)

    def _health(self, _call: _Call) -> Reply:
        return _json({"status": "ok"})

    def _metrics(self, _call: _Call) -> Reply:
        return Reply(200, metrics.render(self._view.board, self._view.lanes()), metrics.CONTENT_TYPE)

    def _status(self, call: _Call) -> Reply:
        return _json(self._view.status(everything=call.query.get("all", ["0"])[-1] not in ("0", "")))

    def _events(self, _call: _Call) -> Reply:
        headers = (("Cache-Control", "no-store"), ("X-Accel-Buffering", "no"))  # nginx would hold events back
        return Reply(200, b"", "text/event-stream", headers, self._live.open())

    def _recent(self, call: _Call) -> Reply:
        given = call.query.get("limit", [str(RECENT)])[-1]
        if not given.isdecimal():
            raise RequestError("limit should be a whole number")
        return _json({"recent": self._view.board.recent(int(given))})

    def _explain(self, call: _Call) -> Reply:
        path = call.headers.get(EXPLAIN_PATH_HEADER) or DEFAULT_EXPLAIN_PATH
        return _json(explained(self._view.explain(path, call.headers, call.body)))

    def _quarantine(self, call: _Call) -> Reply:
        given = _given(call.body, "lane", "reason")
        status = self._view.quarantine(given["lane"], given["reason"], given.get("fingerprint"))
        return _json({"lane": status.lane.id, "health": str(status.health), "note": status.note})

    def _lift(self, call: _Call) -> Reply:
        given = _given(call.body, "lane")
        status = self._view.lift(given["lane"], given.get("reason", "by hand"))
        return _json({"lane": status.lane.id, "health": str(status.health), "note": status.note})


def _given(body: bytes, *needed: str) -> dict[str, str]:
    """A JSON object of texts, one line each.

    Raises:
        RequestError: it is something else, or lacks what is needed.
    """
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError("this is no JSON object") from error
    if not isinstance(data, dict) or not all(isinstance(value, str) for value in data.values()):
        raise RequestError("this is no JSON object of texts")
    if missing := [name for name in needed if not data.get(name)]:
        raise RequestError(f"{missing[0]} is missing")
    return {name: " ".join(value.split())[:MOST_TEXT] for name, value in data.items()}


def page() -> bytes:
    """The page in one piece, styles and scripts in it."""
    folder = resources.files("specproxy.proxy").joinpath("page")
    html, style, *scripts = (
        folder.joinpath(name).read_text(encoding="utf-8")
        for name in ("index.html", "style.css", "charts.js", "page.js")
    )
    html = html.replace("<style></style>", f"<style>\n{style}</style>")
    return html.replace("<script></script>", f"<script>\n{''.join(scripts)}</script>").encode()


def _json(data: object, status: int = 200, headers: tuple[tuple[str, str], ...] = ()) -> Reply:
    headers = (("Cache-Control", "no-store"), *headers)
    return Reply(status, orjson.dumps(data, option=orjson.OPT_NON_STR_KEYS), headers=headers)


def _refusal(status: int, code: str, message: str) -> Reply:
    headers = (("WWW-Authenticate", 'Basic realm="specproxy"'),) if status == 401 else ()
    return _json({"error": {"message": message, "type": code}}, status, headers)
