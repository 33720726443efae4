"""The admin routes, without a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import pytest
from multidict import CIMultiDict

from specproxy.errors import LaneUnavailable, RequestError
from specproxy.proxy.admin import Admin, Reply
from specproxy.proxy.board import Board
from specproxy.proxy.guard import Guard
from specproxy.records import Decision, LaneStatus
from tests.proxy.samples import NGRAM, PLAIN, decision, lane_status, observation

LOCAL = {"Host": "127.0.0.1"}


class FakeView:
    """A view with two lanes; `explain` records what it was asked, or raises what it is told to."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.board = Board()
        self.asked: list[tuple[str, bytes]] = []
        self._failure = failure

    def lanes(self) -> Sequence[LaneStatus]:
        return lane_status(PLAIN), lane_status(NGRAM, in_flight=2)

    def status(self, *, everything: bool = False) -> dict[str, Any]:
        return {"version": "x", "all": everything}

    def live(self) -> dict[str, Any]:
        return self.status()

    def quarantine(self, lane: str, reason: str, fingerprint: str | None = None) -> LaneStatus:
        raise NotImplementedError

    def lift(self, lane: str, reason: str) -> LaneStatus:
        raise NotImplementedError

    def explain(self, path: str, headers: Mapping[str, str], body: bytes) -> Decision:
        self.asked.append((path, body))
        if self._failure is not None:
            raise self._failure
        return decision()


def ask(
    target: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] = LOCAL,
    body: bytes = b"",
    view: FakeView | None = None,
    token: str | None = None,
) -> Reply:
    admin = Admin(view or FakeView(), Guard(token))
    return admin.handle(method, target, CIMultiDict(headers), body)


def test_health_says_ok() -> None:
    """For probes: no token, no matter which Host."""
    reply = ask("/specproxy/health", headers={}, token="s3cret")
    assert (reply.status, reply.body) == (200, b'{"status":"ok"}')


@pytest.mark.parametrize(
    "name",
    [
        "",
        "metrics",
        "api/status",
        "api/events",
        "api/recent",
        "api/explain",
        "api/quarantine",
        "api/lift",
        "nothing",
    ],
)
def test_everything_else_is_guarded(name: str) -> None:
    """A foreign Host and a missing token are refused before anything is looked up."""
    assert ask(f"/specproxy/{name}", headers={"Host": "evil.example"}).status == 403
    reply = ask(f"/specproxy/{name}", token="s3cret")
    assert reply.status == 401
    assert ("WWW-Authenticate", 'Basic realm="specproxy"') in reply.headers


def test_status_is_the_views() -> None:
    """What the view tells comes out as JSON that is not cached; ?all=1 asks for earlier set-ups too."""
    reply = ask("/specproxy/api/status")
    assert orjson.loads(reply.body) == {"version": "x", "all": False}
    assert ("Cache-Control", "no-store") in reply.headers
    assert orjson.loads(ask("/specproxy/api/status?all=1").body)["all"] is True


async def test_events_are_a_stream() -> None:
    """Of what the view tells live; no proxy in between may hold it back."""
    reply = ask("/specproxy/api/events")
    assert (reply.status, reply.content_type) == (200, "text/event-stream")
    assert {("Cache-Control", "no-store"), ("X-Accel-Buffering", "no")} <= set(reply.headers)
    assert reply.stream is not None
    assert [await anext(reply.stream) for _ in range(2)][1] == b'data: {"version":"x","all":false}\n\n'
    await reply.stream.aclose()
    assert ask("/specproxy/api/events", method="HEAD").stream is None


def test_recent_takes_a_limit() -> None:
    """Newest first, as many as asked for."""
    view = FakeView()
    for n in range(3):
        view.board.observe(observation(request_id=str(n)))
    rows = orjson.loads(ask("/specproxy/api/recent?limit=2", view=view).body)["recent"]
    assert [row["id"] for row in rows] == ["2", "1"]
    assert ask("/specproxy/api/recent?limit=-1", view=view).status == 400


def test_explain_gives_the_decision() -> None:
    """The request's path comes in X-Path; candidates, rule and reason go out."""
    view = FakeView()
    headers = LOCAL | {"X-Path": "/api/chat"}
    reply = ask("/specproxy/api/explain", method="POST", headers=headers, body=b"{}", view=view)
    data = orjson.loads(reply.body)
    assert view.asked == [("/api/chat", b"{}")]
    assert (data["lane"], data["rule"], data["workload"], data["propensity"]) == (
        "ngram",
        "exploit",
        "code/greedy",
        0.9,
    )
    assert data["candidates"][0]["ratio_lo"] == 0.6


@pytest.mark.parametrize(
    ("failure", "status"),
    [(RequestError("not JSON", status=400), 400), (LaneUnavailable("none is ready"), 503)],
)
def test_explain_says_why_it_cannot(failure: Exception, status: int) -> None:
    """Our errors become JSON with their message."""
    reply = ask("/specproxy/api/explain", method="POST", view=FakeView(failure))
    assert reply.status == status
    assert orjson.loads(reply.body)["error"]["message"] == str(failure)


@pytest.mark.parametrize(
    ("method", "name", "status"),
    [
        ("POST", "api/status", 405),
        ("GET", "api/explain", 405),
        ("HEAD", "api/explain", 405),
        ("GET", "api/quarantine", 405),
        ("GET", "nothing", 404),
        ("GET", "api/../api/status", 404),
        ("DELETE", "", 405),
    ],
)
def test_wrong_method_or_name(method: str, name: str, status: int) -> None:
    """Unknown names are 404, wrong verbs 405."""
    assert ask(f"/specproxy/{name}", method=method).status == status


def test_head_has_no_body() -> None:
    """HEAD is GET without the body."""
    reply = ask("/specproxy/api/status", method="HEAD")
    assert (reply.status, reply.body) == (200, b"")


def test_page_loads_nothing_from_elsewhere() -> None:
    """The page is self-contained, and its policy forbids anything else."""
    reply = ask("/specproxy/")
    assert reply.content_type.startswith("text/html")
    assert b"http://" not in reply.body.replace(b"http://www.w3.org", b"")
    assert b"https://" not in reply.body
    assert any(
        name == "Content-Security-Policy" and "default-src 'none'" in value for name, value in reply.headers
    )
    assert ask("/specproxy").body == reply.body


def test_metrics_are_a_view_of_the_board() -> None:
    """Counters, histograms and gauges, with kinds (not temperatures) as workload."""
    view = FakeView()
    view.board.observe(observation(NGRAM, 0.01, draft_tokens=10, accepted_tokens=7))
    text = ask("/specproxy/metrics", view=view).body.decode()
    labels = 'lane="ngram",model="m.gguf",strategy="ngram",workload="code"'
    sample = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    by_set = {frozenset(k.replace("{", ",").rstrip("}").split(",")): float(v) for k, v in sample.items()}

    def value(name: str, extra: str = "") -> float:
        return by_set[frozenset([name, *labels.split(","), *([extra] if extra else [])])]

    assert value("specproxy_requests_total", 'outcome="complete"') == 1
    assert value("specproxy_spec_decode_num_draft_tokens_total") == 10
    assert value("specproxy_spec_decode_num_accepted_tokens_total") == 7
    assert value("specproxy_time_to_first_token_seconds_bucket", 'le="0.025"') == 0
    assert value("specproxy_time_to_first_token_seconds_bucket", 'le="0.05"') == 1
    assert value("specproxy_request_time_per_output_token_seconds_count") == 1
    assert value("specproxy_request_time_per_output_token_seconds_sum") == pytest.approx(0.01)
    assert by_set[frozenset(["specproxy_lane_up", 'lane="plain"', 'model="m.gguf"', 'strategy="plain"'])] == 1
    assert (
        by_set[
            frozenset(["specproxy_num_requests_running", 'lane="ngram"', 'model="m.gguf"', 'strategy="ngram"'])
        ]
        == 2
    )
