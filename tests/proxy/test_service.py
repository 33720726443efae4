"""The composition root: a whole proxy in front of real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from specproxy.adapters.base import ProbeResult, ServedModel
from specproxy.config import Settings
from specproxy.errors import ConfigError
from specproxy.proxy import service as module
from specproxy.proxy import sidecar
from specproxy.proxy.fleet import Fleet
from specproxy.proxy.service import STATE_FILE, Service
from specproxy.records import Health, LaneStatus
from specproxy.strategies.cost import LaneFacts
from specproxy.strategies.drift import DriftEvent
from tests.proxy import samples
from tests.support.client import RawClient, RawReply
from tests.support.ports import free_port
from tests.support.relay import settled
from tests.support.server import openai_like
from tests.support.upstream import Conn, Upstream

CANARY = "xylophone-canary-7421"


def settings(tmp_path: Path, upstream: str | None, **changes: Any) -> Settings:
    given = {"port": 0, "state_dir": tmp_path / "state", "grace": 0.0}
    return Settings.model_validate(given | ({"upstream": upstream} if upstream else {}) | changes)


@asynccontextmanager
async def running(given: Settings) -> AsyncIterator[Service]:
    service = Service(given)
    try:
        await service.start()
        yield service
    finally:
        await service.aclose()


async def ask(service: Service, method: str, path: str, body: object = None, **headers: str) -> RawReply:
    port = int(service.url.rpartition(":")[2])
    payload = b"" if body is None else json.dumps(body).encode()
    lines = {"Host": "127.0.0.1", "Content-Length": str(len(payload))} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    async with await RawClient.connect(port) as client:
        return await client.ask(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + payload)


async def chat(service: Service, text: str = "hello", **headers: str) -> RawReply:
    body = {"model": "test-model", "messages": [{"role": "user", "content": text}]}
    return await ask(service, "POST", "/v1/chat/completions", body, **headers)


async def status_of(service: Service) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((await ask(service, "GET", "/specproxy/api/status")).content)
    return data


async def until(condition: Any) -> None:
    """Wait until a condition holds; the test's own time-out ends a wait in vain."""
    while not condition():  # noqa: ASYNC110 (the other side is a real socket, not an event of ours)
        await asyncio.sleep(0.01)


async def test_sidecar_relays_counts_and_tells(tmp_path: Path) -> None:
    """A request goes through, its numbers are in status and recent, and explain gives a reason."""
    async with openai_like() as upstream, running(settings(tmp_path, upstream.url)) as service:
        reply = await chat(service)
        assert reply.status == 200
        data = await status_of(service)
        assert data["listen"] == service.url
        assert [u["reachable"] for u in data["upstreams"]] == [True]
        assert [(lane["health"], lane["strategy"]) for lane in data["lanes"]] == [("ready", "plain")]
        [row] = data["kinds"]
        assert (row["n"], row["share"], row["tok_s"]) == (1, 1.0, pytest.approx(3 / 0.03))
        [workload] = data["workloads"]
        assert workload["believed"]["ratio"] == 1.0
        assert data["policy"] == {"name": "learner", "allowance_requests": 1.0, "allowance_share": 0.02}
        [account] = data["gate"]
        assert (account["workload"], account["lost_s"]) == (workload["workload"], 0.0)
        assert account["allowed_s"] == pytest.approx((1.0 + 0.02 * 2) * account["plain_s"])
        assert list(data["learning_curve"].values()) == [[[1, 0.0]]]
        assert list(data["recoveries"].values()) == [[]]
        assert data["requests"] == {"total": 1, "outcomes": {"complete": 1}, "in_flight": 0}
        recent = json.loads((await ask(service, "GET", "/specproxy/api/recent")).content)["recent"]
        assert [(r["outcome"], r["output_tokens"]) for r in recent] == [("complete", 4)]
        body = {"messages": [{"role": "user", "content": "x"}]}
        explained = json.loads((await ask(service, "POST", "/specproxy/api/explain", body)).content)
        assert explained["strategy"] == "plain"
        assert explained["reason"]
        assert (await status_of(service))["requests"]["total"] == 1


async def test_lanes_are_measured_where_that_is_wanted(tmp_path: Path) -> None:
    """By default, and switched off while running; what a profile finds is an event, and saved."""
    async with openai_like() as upstream, running(settings(tmp_path, upstream.url)) as service:
        assert (await status_of(service))["profile"] == {"state": "waiting", "budget_s": 120.0, "targets": []}
        service.take(settings(tmp_path, upstream.url, profile=False))
        assert (await status_of(service))["profile"]["state"] == "off"
        with capture_logs() as logs:
            service._learned()
            service._profiled("m", "profiled 2 lanes")
        assert [line["found"] for line in logs] == ["profiled 2 lanes"]
        events = (await status_of(service))["events"]
        assert [(e["message"], e["subject"]) for e in events if e["kind"] == "profiled"] == [
            ("profiled 2 lanes", "m")
        ]


async def test_servers_that_are_named_are_left_alone(tmp_path: Path) -> None:
    """A deployment may be paid for by the token, wherever it is: it is not measured unasked."""
    plain = {"kind": "openai", "urls": ["http://127.0.0.1:9"], "target": "m"}
    given = settings(tmp_path, None, deployments=[plain, plain | {"strategy": "mtp"}])
    fleet = Fleet(given)
    lanes = [status.lane for backend in fleet.backends for status in backend.lanes()]
    assert [lane.strategy.name for lane in lanes] == ["plain", "mtp"]
    assert not any(fleet.at_hand(lane) for lane in lanes)
    await fleet.aclose()


@pytest.mark.parametrize(("url", "near"), [("http://127.0.0.1:9", True), ("http://10.0.0.7:9", False)])
async def test_a_server_elsewhere_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, near: bool
) -> None:
    """Whose it is, and who pays for it, is not ours to know; the host counts as it does for load."""
    found = ProbeResult(True, "ollama", "0.33", ("m",), served=(ServedModel("m", loaded=True),))

    async def probe(_: str) -> ProbeResult:
        return found

    monkeypatch.setattr("specproxy.proxy.fleet.Prober", lambda: probe)
    fleet = Fleet(settings(tmp_path, url, probe_fields=False))
    await fleet.start()
    [lane] = [status.lane for backend in fleet.backends for status in backend.lanes()]
    assert fleet.at_hand(lane) is near
    assert not fleet.hosts() if near else set(fleet.hosts().values()) == {"10.0.0.7"}
    await fleet.aclose()


async def test_no_prompt_text_anywhere(tmp_path: Path) -> None:
    """A canary in the prompt shows up in no log line, state file, status, metric or explanation."""
    async with openai_like() as upstream:
        with capture_logs() as logs:
            async with running(settings(tmp_path, upstream.url)) as service:
                assert (await chat(service, CANARY)).status == 200
                body = {"messages": [{"role": "user", "content": CANARY}]}
                pages = [await ask(service, "POST", "/specproxy/api/explain", body)]
                for page in ("api/status?all=1", "api/recent", "metrics", ""):
                    pages.append(await ask(service, "GET", f"/specproxy/{page}"))
        assert all(page.status == 200 for page in pages)
        assert CANARY not in repr(logs)
        assert CANARY.encode() not in b"".join(page.content for page in pages)
        files = [p for p in (tmp_path / "state").rglob("*") if p.is_file()]
        assert STATE_FILE in {p.name for p in files}
        for file in files:
            assert CANARY.encode() not in file.read_bytes()
        assert any(line["event"] == "request" for line in logs)


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/chat/completions", lambda data: data["error"]["message"]),
        ("/api/chat", lambda data: data["error"]),
        ("/v1/messages", lambda data: data["error"]["message"] if data["type"] == "error" else None),
    ],
)
async def test_an_absent_upstream_is_an_error_in_the_clients_dialect(
    tmp_path: Path, path: str, shape: Any
) -> None:
    """503 that names the address, in the client's own error format, and counted as unreachable."""
    port = free_port()
    with capture_logs() as logs:
        async with running(settings(tmp_path, f"http://127.0.0.1:{port}")) as service:
            body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
            reply = await ask(service, "POST", path, body)
            data = await status_of(service)
    assert reply.status == 503
    assert f"127.0.0.1:{port}" in shape(json.loads(reply.content))
    assert data["requests"]["outcomes"] == {"unreachable": 1}
    assert [u["reachable"] for u in data["upstreams"]] == [False]
    assert any(f"http://127.0.0.1:{port}" in str(line.get("probed")) for line in logs)


async def test_an_upstream_that_comes_up_later_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The background look finds it, without a restart."""
    monkeypatch.setattr(sidecar, "RETRY_S", 0.02)
    port = free_port()
    async with running(settings(tmp_path, f"http://127.0.0.1:{port}")) as service:
        assert service.lanes()[0].health == "unhealthy"
        async with openai_like(port):
            await until(lambda: service.lanes()[0].health == "ready")
            assert (await chat(service)).status == 200


async def test_the_usual_ports_are_probed_without_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first server found in the usual places serves; before that the error says where was looked."""
    monkeypatch.setattr(sidecar, "RETRY_S", 0.02)
    ports = free_port(), free_port()
    monkeypatch.setattr(sidecar, "USUAL_URLS", tuple(f"http://127.0.0.1:{port}" for port in ports))
    async with running(settings(tmp_path, None)) as service:
        reply = await chat(service)
        assert reply.status == 503
        assert all(str(port) in reply.content.decode() for port in ports)
        assert (await status_of(service))["survey"] == {f"http://127.0.0.1:{port}": "" for port in ports}
        async with openai_like(ports[1]):
            await until(lambda: bool(service.lanes()))
            assert (await chat(service)).status == 200
            assert [u["url"] for u in (await status_of(service))["upstreams"]] == [
                f"http://127.0.0.1:{ports[1]}"
            ]


async def test_statistics_survive_a_restart(tmp_path: Path) -> None:
    """The second run shows what the first has counted."""
    async with openai_like() as upstream:
        given = settings(tmp_path, upstream.url)
        async with running(given) as service:
            await chat(service)
        async with running(given) as service:
            assert (await status_of(service))["requests"]["total"] == 1
            await chat(service)
            assert (await status_of(service))["kinds"][0]["n"] == 2


async def test_a_taken_port_ends_it(tmp_path: Path) -> None:
    """A clear error before any backend has started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        service = Service(settings(tmp_path, "http://127.0.0.1:9", port=taken.getsockname()[1]))
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:"):
            await service.start()
        assert [u.found.reachable for u in service._fleet.upstreams] == [False]
        await service.aclose()


async def test_requests_in_flight_are_drained(tmp_path: Path) -> None:
    """At shutdown a running request is answered in full, and a new one is not taken."""
    arrived, go = asyncio.Event(), asyncio.Event()

    async def script(conn: Conn) -> None:
        seen = await conn.request()
        if seen.request_line.startswith(b"POST"):
            arrived.set()
            await go.wait()
        await conn.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    async with Upstream(script) as upstream:
        service = Service(settings(tmp_path, upstream.url, grace=10.0))
        await service.start()
        async with asyncio.TaskGroup() as group:
            request = group.create_task(chat(service))
            await arrived.wait()
            closing = group.create_task(service.aclose())
            await asyncio.sleep(0)
            assert not request.done()
            go.set()
        assert request.result().content == b"{}"
        assert closing.done()


async def test_a_second_signal_cuts_draining_short(tmp_path: Path) -> None:
    """With the force event set, closing does not wait for the grace period."""
    arrived = asyncio.Event()

    async def script(conn: Conn) -> None:
        seen = await conn.request()
        if seen.request_line.startswith(b"POST"):
            arrived.set()
            await conn.gone()
        await conn.send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    async with Upstream(script) as upstream:
        service = Service(settings(tmp_path, upstream.url, grace=3600.0))
        await service.start()
        request = asyncio.ensure_future(chat(service))
        await arrived.wait()
        force = asyncio.Event()
        force.set()
        await service.aclose(force)
        with pytest.raises(asyncio.IncompleteReadError):
            await request


async def test_a_token_guards_everything_but_health(tmp_path: Path) -> None:
    """Relayed and own routes want it; the upstream never sees our header."""
    async with openai_like() as upstream, running(settings(tmp_path, upstream.url, token="s3cret")) as service:
        assert (await chat(service)).status == 401
        assert (await ask(service, "GET", "/specproxy/api/status")).status == 401
        assert (await ask(service, "GET", "/specproxy/health")).status == 200
        assert (await chat(service, X_Specproxy_Token="s3cret")).status == 200
        assert (await ask(service, "GET", "/specproxy/api/status", Authorization="Bearer s3cret")).status == 200


async def test_a_foreign_page_is_refused(tmp_path: Path) -> None:
    """Host and Origin of another site get 403 on relayed routes too, in the client's dialect."""
    async with openai_like() as upstream, running(settings(tmp_path, upstream.url)) as service:
        reply = await chat(service, Origin="https://evil.example")
        assert reply.status == 403
        assert "Origin" in json.loads(reply.content)["error"]["message"]


async def test_the_router_knows_which_servers_are_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the start on, so that their requests are not counted as load of this machine."""
    monkeypatch.setattr("specproxy.proxy.fleet.host_of", lambda url, _own: url and "gpu")
    async with running(settings(tmp_path, f"http://127.0.0.1:{free_port()}")) as service:
        assert set(service.router.load.hosts.values()) == {"gpu"}
        assert {status.lane.backend for status in service.lanes()} == set(service.router.load.hosts)


async def test_status_tells_how_long_a_change_was_felt(tmp_path: Path) -> None:
    """Of each change: since when, on what lane, and how long it took until the choice had settled again."""
    fell = DriftEvent(5.0, 4.0, "fp/ngram", "ngram", "code", "acceptance", 0.74, 0.31, 6, 200, False)
    async with running(settings(tmp_path, f"http://127.0.0.1:{free_port()}")) as service:
        service.policy.model("m").recoveries.begin(fell)
        service.policy.model("m").recoveries.note("code", 0.5, 8.0)
        assert (await status_of(service))["recoveries"] == {
            "m": [
                {
                    "at": 5.0,
                    "lane": "ngram",
                    "change": fell.sentence,
                    "requests": 1,
                    "seconds": 3.0,
                    "settled": False,
                }
            ]
        }


async def test_short_memory_is_told_to_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within half a minute, and again once it is over."""
    monkeypatch.setattr(module, "MEMORY_EVERY_S", 0.001)
    stalls = [0.0]
    monkeypatch.setattr(module, "memory_stalls", lambda: stalls[0])
    heavy = replace(samples.NGRAM, memory_bytes=1 << 30)
    async with running(settings(tmp_path, f"http://127.0.0.1:{free_port()}")) as service:
        told: list[bool] = []
        monkeypatch.setattr(service.policy, "set_facts", lambda lane, facts: told.append(facts.memory_pressure))
        monkeypatch.setattr(service.router, "lanes", lambda: (LaneStatus(heavy, Health.READY),))
        monkeypatch.setattr(service._fleet, "facts", lambda: {heavy.id: LaneFacts(slots=1)})
        for n, share in enumerate((0.0, 0.5, 0.0), 1):
            stalls[0] = share
            await settled(lambda n=n: len(told) == n)
        assert told == [False, True, False]
