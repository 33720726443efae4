"""Routed requests end to end: the lane that was chosen, the retry on plain, and how each request ends."""

from __future__ import annotations

import asyncio
import socket

import numpy as np
import orjson
import pytest

from specproxy.adapters.fake import FakeBackend, FakeExchange, respond
from specproxy.adapters.http import Endpoint, HttpBackend
from specproxy.errors import LaneUnavailable, UpstreamConnectError
from specproxy.records import Control, Decision, Health, Outcome, Situation, TimingSource
from tests.support.client import RawClient, post
from tests.support.loops import both_loops
from tests.support.proxy import ScriptedPolicy, lane, running_proxy
from tests.support.relay import CHAT, EVENTS, GET, Recorder, settled
from tests.support.upstream import Conn, Upstream, chunk, chunked

ROUTES = {
    "/v1/chat/completions": b'"code":',
    "/api/chat": b'{"error":"',
    "/v1/messages": b'{"type":"error","error":{"type":',
}
PLAIN_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nplain"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def close_at_once(conn: Conn) -> None:
    await conn.request()
    conn.close()


async def reset_at_once(conn: Conn) -> None:
    await conn.request()
    conn.reset()


# --- retry on plain ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "failing",
    [
        close_at_once,
        reset_at_once,
        Recorder(b"HTTP/1.1 503 Loading\r\nContent-Length: 4\r\n\r\nwait"),
        Recorder(b"220 mail.example ESMTP\r\n\r\n"),
        None,
    ],
    ids=["closes", "resets", "503", "no HTTP", "refuses"],
)
@both_loops
async def test_a_failed_lane_is_retried_on_plain(failing: object) -> None:
    """While the client has seen nothing, plain answers in its place, and says why."""
    recorder = Recorder(PLAIN_OK)
    policy = ScriptedPolicy("mtp")
    async with Upstream(recorder) as plain, Upstream(failing or close_at_once) as other:  # type: ignore[arg-type]  # a script
        url = other.url if failing else f"http://127.0.0.1:{free_port()}"
        backends = [_one("a", plain.url, "plain"), _one("b", url, "mtp")]
        async with (
            running_proxy(*backends, policy=policy) as proxy,
            await RawClient.connect(proxy.port) as client,
        ):
            reply = await client.ask(post("/v1/chat/completions", CHAT))
            assert (reply.status, reply.body) == (200, b"plain")
            assert reply.values(b"X-Specproxy-Lane") == [b"a/plain"]
            assert reply.values(b"X-Specproxy-Reason")[0].startswith(b"fallback: b/mtp failed")
            await settled(lambda: len(proxy.seen) == 1)
            assert (proxy.seen[0].lane, proxy.seen[0].rule) == ("a/plain", "fallback")
            assert [seen.body for seen in recorder.seen] == [CHAT]


@both_loops
async def test_a_second_failure_is_passed_on() -> None:
    """Plain's own server error reaches the client as it is."""
    error = b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\nwell"
    policy = ScriptedPolicy("mtp")
    async with Upstream(Recorder(error)) as plain, Upstream(close_at_once) as other:
        backends = [_one("a", plain.url, "plain"), _one("b", other.url, "mtp")]
        async with (
            running_proxy(*backends, policy=policy) as proxy,
            await RawClient.connect(proxy.port) as client,
        ):
            reply = await client.ask(post("/v1/chat/completions", CHAT))
            assert (reply.status_line, reply.body) == (b"HTTP/1.1 500 Oops", b"well")
            await settled(lambda: len(proxy.seen) == 1)
            assert proxy.seen[0].outcome is Outcome.ERROR


@pytest.mark.parametrize("status", [400, 404, 429])
@both_loops
async def test_a_clients_error_is_not_retried(status: int) -> None:
    """Statuses below 500 are the answer."""
    recorder = Recorder(PLAIN_OK)
    answer = b"HTTP/1.1 %d No\r\nContent-Length: 2\r\n\r\nno" % status
    policy = ScriptedPolicy("mtp")
    async with Upstream(recorder) as plain, Upstream(Recorder(answer)) as other:
        backends = [_one("a", plain.url, "plain"), _one("b", other.url, "mtp")]
        async with (
            running_proxy(*backends, policy=policy) as proxy,
            await RawClient.connect(proxy.port) as client,
        ):
            assert (await client.ask(post("/v1/chat/completions", CHAT))).status == status
            assert recorder.seen == []


@both_loops
async def test_nothing_is_retried_after_the_first_byte() -> None:
    """A stream that breaks off is broken for the client; plain is not asked."""

    async def breaks(conn: Conn) -> None:
        await conn.request()
        await conn.send(EVENTS + chunk(b"data: 1\n\n"))
        conn.close()

    recorder = Recorder(PLAIN_OK)
    policy = ScriptedPolicy("mtp")
    async with Upstream(recorder) as plain, Upstream(breaks) as other:
        backends = [_one("a", plain.url, "plain"), _one("b", other.url, "mtp")]
        async with (
            running_proxy(*backends, policy=policy) as proxy,
            await RawClient.connect(proxy.port) as client,
        ):
            await client.send(post("/v1/chat/completions", CHAT))
            assert (await client.rest()).endswith(b"\r\n\r\n" + chunk(b"data: 1\n\n"))
            assert recorder.seen == []
            assert [seen.outcome for seen in proxy.seen] == [Outcome.TRUNCATED]


@both_loops
async def test_a_server_error_on_plain_is_passed_on_at_once() -> None:
    """There is nothing better than plain to ask."""
    recorder = Recorder(b"HTTP/1.1 503 Loading\r\nRetry-After: 1\r\nContent-Length: 4\r\n\r\nwait")
    async with Upstream(recorder) as plain, Upstream(Recorder()) as other:
        backends = [_one("a", plain.url, "plain"), _one("b", other.url, "mtp")]
        async with running_proxy(*backends) as proxy, await RawClient.connect(proxy.port) as client:
            reply = await client.ask(post("/v1/chat/completions", CHAT))
            assert (reply.status, reply.values(b"retry-after")) == (503, [b"1"])
            assert len(recorder.seen) == 1


@both_loops
async def test_the_client_leaves_during_the_retry() -> None:
    """It is still one observation, and both upstreams are let go."""
    closed = asyncio.Event()
    reached = asyncio.Event()

    async def waits(conn: Conn) -> None:
        await conn.request()
        reached.set()
        await conn.gone()
        closed.set()

    policy = ScriptedPolicy("mtp")
    async with Upstream(waits) as plain, Upstream(close_at_once) as other:
        backends = [_one("a", plain.url, "plain"), _one("b", other.url, "mtp")]
        async with running_proxy(*backends, policy=policy) as proxy:
            client = await RawClient.connect(proxy.port)
            await client.send(post("/v1/chat/completions", CHAT))
            await reached.wait()
            client.reset()
            await closed.wait()
            assert [seen.outcome for seen in proxy.seen] == [Outcome.CLIENT_GONE]
            assert len(policy.learned) == 1


# --- no upstream ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "shape"), ROUTES.items())
@both_loops
async def test_an_absent_upstream(path: str, shape: bytes) -> None:
    """503 in the client's dialect, saying what was tried; the connection stays usable."""
    async with (
        running_proxy(f"http://127.0.0.1:{free_port()}") as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        for _ in range(2):
            reply = await client.ask(post(path, CHAT))
            assert reply.status == 503
            assert shape in reply.body
            assert b"cannot connect to http://127.0.0.1:" in reply.body
            assert reply.values(b"retry-after")
        assert {seen.outcome for seen in proxy.seen} == {Outcome.UNREACHABLE}
        assert {seen.status for seen in proxy.seen} == {503}
        assert len(proxy.lane_errors) == 2
        assert isinstance(proxy.lane_errors[0][1], UpstreamConnectError)


@pytest.mark.parametrize(("path", "shape"), ROUTES.items())
@both_loops
async def test_an_upstream_that_does_not_answer(path: str, shape: bytes) -> None:
    """502 in the client's dialect."""
    async with (
        Upstream(close_at_once) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        reply = await client.ask(post(path, CHAT))
        assert reply.status == 502
        assert shape in reply.body
        assert [seen.outcome for seen in proxy.seen] == [Outcome.UNREACHABLE]


@both_loops
async def test_other_routes_get_errors_too() -> None:
    """What is not routed is answered in the shape that its path suggests, and not observed."""
    async with (
        running_proxy(f"http://127.0.0.1:{free_port()}") as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        assert (await client.ask(b"GET /api/tags HTTP/1.1\r\nHost: x\r\n\r\n")).body.startswith(b'{"error":"')
        assert (await client.ask(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")).body.startswith(b'{"error":{')
        head = await client.ask(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n", head_only=True)
        assert head.status == 503
        assert proxy.seen == []


async def test_a_lane_that_comes_back_is_used() -> None:
    """Nothing has to be restarted when the upstream appears."""
    port = free_port()
    async with (
        running_proxy(f"http://127.0.0.1:{port}") as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        assert (await client.ask(GET)).status == 503
        async with Upstream(Recorder(), port=port):
            assert (await client.ask(GET)).status == 200


# --- what goes upstream --------------------------------------------------------------------------


async def _opened(*lanes_: object, request: bytes, wanted: str = "plain") -> FakeExchange:
    """The exchange that a request leads to on a scripted backend."""
    fake = FakeBackend("f", lanes_)  # type: ignore[arg-type]  # lanes
    async with (
        running_proxy(fake, policy=ScriptedPolicy(wanted)) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.ask(request)
        (exchange,) = fake.exchanges
        return exchange


async def test_overrides_and_upstream_model_are_spliced() -> None:
    """The lane's fields come first, its model name replaces the client's, all else keeps its bytes."""
    special = lane("f", upstream_model="m-plain", overrides=(("draft_model", "d"), ("n", 3), ("stream", False)))
    body = b'{ "model":"m","messages":[ ] ,"stream":true, "temperature":0.70 }'
    exchange = await _opened(special, request=post("/v1/chat/completions", body))
    assert exchange.request.body == (
        b'{"draft_model":"d","n":3, "model":"m-plain","messages":[ ] ,"stream":true, "temperature":0.70 }'
    )
    assert exchange.request.length == len(exchange.request.body)


async def test_lane_headers_replace_the_clients() -> None:
    """A lane may bring an authorisation of its own; other headers stay."""
    special = lane("f", headers=(("Authorization", "Bearer lane"),))
    request = post("/v1/chat/completions", CHAT, b"authorization: Bearer client", b"X-A: 1")
    exchange = await _opened(special, request=request)
    assert exchange.request.headers == ((b"X-A", b"1"), (b"Authorization", b"Bearer lane"))


async def test_the_engine_is_told_the_request_id() -> None:
    """Lanes whose headers are ours run in our engine, whose reports are keyed by the id."""
    special = lane("f", headers=(("X-Specproxy-Engine-Strategy", "mtp"),), control=Control.REQUEST)
    exchange = await _opened(
        special, request=post("/v1/chat/completions", CHAT, b"X-Specproxy-Request-Id: fake")
    )
    assert [name for name, _ in exchange.request.headers] == [
        b"X-Specproxy-Engine-Strategy",
        b"X-Specproxy-Request-Id",
    ]
    assert exchange.request.headers[1][1] != b"fake"


async def test_the_engine_is_told_what_is_known_of_the_workload() -> None:
    """By lane, workload and the id that its report will have; other servers are told nothing."""
    ours = lane("f", headers=(("X-Specproxy-Engine-Strategy", "auto"),), control=Control.REQUEST)
    for special, wanted in ((ours, [b"chat/warm f/plain"]), (lane("f"), [])):
        fake = FakeBackend("f", [special])
        async with running_proxy(fake) as proxy, await RawClient.connect(proxy.port) as client:
            proxy.handlers.advise(lambda lane, workload, _: f"{workload} {lane.id}".encode())
            await client.ask(post("/v1/chat/completions", CHAT))
            headers = fake.exchanges[0].request.headers
            assert [value for name, value in headers if name == b"X-Specproxy-Priors"] == wanted


async def test_a_pin_in_the_header_is_followed() -> None:
    """The pinned lane runs it, and the header stays here."""
    request = post("/v1/chat/completions", CHAT, b"X-Specproxy-Strategy: mtp")
    exchange = await _opened(lane("f"), lane("f", "mtp"), request=request)
    assert exchange.lane.id == "f/mtp"
    assert exchange.request.headers == ()


@pytest.mark.parametrize(("path", "shape"), ROUTES.items())
async def test_an_unknown_pin_is_refused(path: str, shape: bytes) -> None:
    """400 in the client's dialect with the strategies that exist; nothing goes upstream."""
    fake = FakeBackend("f", [lane("f"), lane("f", "ngram")])
    async with running_proxy(fake) as proxy, await RawClient.connect(proxy.port) as client:
        reply = await client.ask(post(path, CHAT, b"X-Specproxy-Strategy: eagle3"))
        assert reply.status == 400
        assert shape in reply.body
        assert b"plain, ngram" in reply.body
        assert fake.exchanges == []
        assert len(proxy.seen) == 1


@pytest.mark.parametrize("body", [b"{", b"[]", b"", b'"text"', b"null", b"\xff"])
async def test_malformed_json_is_the_servers_to_refuse(body: bytes) -> None:
    """It goes to the default lane as it is, is counted as unread, and teaches nothing."""
    fake = FakeBackend("f", [lane("f", "mtp"), lane("f")], respond(b"bad", status=400))
    async with running_proxy(fake) as proxy, await RawClient.connect(proxy.port) as client:
        assert (await client.ask(post("/v1/chat/completions", body))).status == 400
        assert (fake.exchanges[0].request.body, fake.exchanges[0].lane.id) == (body, "f/plain")
        await settled(lambda: bool(proxy.seen))
        assert [(s.rule, s.outcome, s.status) for s in proxy.seen] == [("unread", Outcome.ERROR, 400)]
        assert proxy.policy.learned == []
        assert proxy.router.load.in_flight == 0


async def test_deeply_nested_json_does_no_harm() -> None:
    """A parser's limit is no reason to fail."""
    fake = FakeBackend("f", [lane("f")])
    body = b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    async with running_proxy(fake) as proxy, await RawClient.connect(proxy.port) as client:
        assert (await client.ask(post("/v1/chat/completions", body))).status == 200
        assert fake.exchanges[0].request.body == body


# --- how a request ends --------------------------------------------------------------------------


async def _observed(answer: bytes, path: str = "/v1/chat/completions") -> tuple[Outcome, TimingSource, int]:
    """Outcome, source and output tokens of one request with this answer."""
    async with (
        Upstream(Recorder(answer)) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        await client.ask(post(path, CHAT))
        await settled(lambda: len(proxy.seen) == 1)
        assert proxy.policy.learned == proxy.seen
        return proxy.seen[0].outcome, proxy.seen[0].source, proxy.seen[0].output_tokens


def _json(value: object, status: int = 200) -> bytes:
    body = orjson.dumps(value)
    return b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )


DELTA = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
STOP = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
FAULT = b'data: {"error":{"message":"x"}}\n\n'
TIMINGS = {"predicted_n": 9, "predicted_ms": 90.0, "prompt_n": 3, "prompt_ms": 5.0}


@pytest.mark.parametrize(
    ("answer", "outcome", "source", "tokens"),
    [
        (_json({"choices": [{}], "timings": TIMINGS}), Outcome.COMPLETE, TimingSource.SERVER, 9),
        (_json({"choices": [{}], "usage": {"completion_tokens": 4}}), Outcome.COMPLETE, TimingSource.USAGE, 4),
        (EVENTS + chunked(DELTA, DELTA, STOP, b"data: [DONE]\n\n"), Outcome.COMPLETE, TimingSource.ESTIMATE, 2),
        (EVENTS + chunked(DELTA), Outcome.TRUNCATED, TimingSource.ESTIMATE, 1),
        (
            EVENTS + chunked(DELTA, b'data: {"error":{"message":"x"}}\n\n'),
            Outcome.ERROR,
            TimingSource.ESTIMATE,
            1,
        ),
        (_json({"error": "model not found"}, 404), Outcome.ERROR, TimingSource.NONE, 0),
        (_json({"error": "no"}, 500), Outcome.ERROR, TimingSource.NONE, 0),
    ],
    ids=["timings", "usage", "events", "no end", "error event", "404", "500"],
)
async def test_outcomes(answer: bytes, outcome: Outcome, source: TimingSource, tokens: int) -> None:
    """Each request has one outcome, and the best figures that its reply has."""
    assert await _observed(answer) == (outcome, source, tokens)


async def test_the_tap_loses_nothing_to_the_order_of_things() -> None:
    """Events that come in one read with the end are all read before the request is concluded."""
    answer = EVENTS + chunked(*[DELTA] * 500, STOP)
    assert await _observed(answer) == (Outcome.COMPLETE, TimingSource.ESTIMATE, 500)


async def test_unready_lanes_answer_if_they_can() -> None:
    """A server that came back before its health was seen is used at once."""
    async with Upstream(Recorder()) as upstream:
        backend = _one("a", upstream.url, "plain")
        backend.mark("a/plain", Health.UNHEALTHY)
        async with running_proxy(backend) as proxy, await RawClient.connect(proxy.port) as client:
            assert (await client.ask(post("/v1/chat/completions", CHAT))).status == 200


def _one(name: str, url: str, strategy: str) -> HttpBackend:
    return HttpBackend(name, Endpoint.parse(url), [lane(name, strategy)])


# --- where there is nothing to choose ------------------------------------------------------------


@pytest.mark.parametrize(("strategies", "sent_before"), [(["plain"], 1), (["plain", "ngram"], 0)])
async def test_a_request_with_one_place_to_go_is_sent_before_it_is_judged(
    strategies: list[str], sent_before: int
) -> None:
    """The server starts on it meanwhile; a choice comes first where there is one. Both are explained."""
    fake = FakeBackend("f", [lane("f", name) for name in strategies], respond(b"{}"))
    seen: list[int] = []

    class Policy(ScriptedPolicy):
        def choose(self, situation: Situation, rng: np.random.Generator) -> Decision:
            seen.append(len(fake.exchanges))
            return super().choose(situation, rng)

    async with running_proxy(fake, policy=Policy()) as proxy, await RawClient.connect(proxy.port) as client:
        reply = await client.ask(post("/v1/chat/completions", CHAT))
        assert reply.values(b"X-Specproxy-Reason") == [b"scripted: plain is wanted"]
        assert (seen, len(fake.exchanges)) == ([sent_before], 1)
        await settled(lambda: len(proxy.seen) == 1)
        assert reply.values(b"X-Specproxy-Request-Id") == [proxy.seen[0].request_id.encode()]


async def test_a_request_that_was_sent_too_early_is_withdrawn() -> None:
    """The policy has the last word, also where there seemed to be nothing to choose."""
    fake = FakeBackend("f", [lane("f")], respond(b"{}"))
    policy = ScriptedPolicy(error=LaneUnavailable("not now"))
    async with running_proxy(fake, policy=policy) as proxy, await RawClient.connect(proxy.port) as client:
        assert (await client.ask(post("/v1/chat/completions", CHAT))).status == 503
        assert [exchange.aborted for exchange in fake.exchanges] == [True]
        assert [observation.outcome for observation in proxy.seen] == [Outcome.UNREACHABLE]
