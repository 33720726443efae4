"""Attacks on a whole service: foreign pages, rebound names, guessed tokens, upgrades and redirects."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from specproxy.proxy.admin import Admin
from specproxy.proxy.guard import Guard
from specproxy.proxy.service import Service
from tests.proxy.test_service import ask, chat, running, settings
from tests.support.client import RawClient, RawReply
from tests.support.proxy import running_proxy
from tests.support.relay import CHAT, Recorder
from tests.support.server import openai_like
from tests.support.upstream import Upstream

TOKEN = "t0ken-of-the-test"
EVIL = "http://evil.example"


class NoView:
    """Admin looks at it only once a request has been let in."""


ROUTES = {f"/specproxy/{name}": verb for name, (verb, _) in Admin(NoView(), Guard())._routes.items()}  # type: ignore[arg-type]  # see NoView
READING = [path for path, verb in ROUTES.items() if verb == "GET" and not path.endswith("/health")]
CHANGING = [path for path, verb in ROUTES.items() if verb != "GET"]
RELAYED = ["/v1/models", "/v1/chat/completions", "/api/delete", "/anything"]


def test_all_routes_are_attacked() -> None:
    """The lists below come from the routes themselves."""
    assert {"/specproxy/", "/specproxy/api/events", "/specproxy/metrics"} <= set(READING)
    assert {"/specproxy/api/quarantine", "/specproxy/api/lift"} <= set(CHANGING)


async def attack(service: Service, path: str, **headers: str) -> RawReply:
    """What a page can send without being asked first: GET, or POST of text that happens to be JSON."""
    if path in READING:
        return await ask(service, "GET", path, **headers)
    lane = service.lanes()[0].lane.id
    body = {"lane": lane, "reason": "r", "messages": [{"role": "user", "content": "x"}]}
    return await ask(service, "POST", path, body, Content_Type="text/plain", **headers)


async def test_a_rebound_name_opens_nothing(tmp_path: Path) -> None:
    """Neither the page, the API, the stream of events nor the model answer to a name that a stranger owns."""
    async with openai_like() as upstream, running(settings(tmp_path, upstream.url)) as service:
        for path in (*READING, *CHANGING, *RELAYED):
            port = service.url.rpartition(":")[2]
            reply = await attack(service, path, Host=f"evil.example:{port}", Origin=f"{EVIL}:{port}")
            assert reply.status == 403, path
            assert set(json.loads(reply.content)) <= {"error", "type"}, path
            assert (await attack(service, path, Host=f"evil.example:{port}")).status == 403, path
        assert service.status()["requests"]["total"] == 0
        assert (await ask(service, "GET", "/specproxy/health", Host="evil.example")).status == 200


@pytest.mark.parametrize("origin", [EVIL, "https://127.0.0.1.evil.example", "null"])
@pytest.mark.parametrize("token", [None, TOKEN])
async def test_a_foreign_page_changes_nothing(token: str | None, origin: str, tmp_path: Path) -> None:
    """Its plain POST is refused on every route, with the password too that a browser adds by itself."""
    async with openai_like() as upstream, running(settings(tmp_path, upstream.url, token=token)) as service:
        password = base64.b64encode(f"any:{TOKEN}".encode()).decode()
        added = {"Authorization": f"Basic {password}"} if token else {}
        before = service.lanes()
        for path in (*CHANGING, *RELAYED):
            reply = await attack(service, path, Origin=origin, **added)
            assert reply.status == 403, path
            assert not reply.values(b"access-control-allow-origin"), path
        assert service.lanes() == before
        assert service.status()["requests"]["total"] == 0
        own = service.url if token else "http://localhost:1"
        assert (await attack(service, "/specproxy/api/explain", Origin=own, **added)).status == 200


@pytest.mark.parametrize(
    "sent",
    [
        {},
        {"X_Specproxy_Token": TOKEN + "x"},
        {"X_Specproxy_Token": TOKEN[:-1]},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic " + base64.b64encode(f"{TOKEN}:wrong".encode()).decode()},
        {"Cookie": f"token={TOKEN}"},
    ],
)
async def test_without_the_token_nothing_is_told(sent: dict[str, str], tmp_path: Path) -> None:
    """401 on every route of ours and on what is relayed, from this machine too; health alone answers."""
    async with openai_like() as upstream, running(settings(tmp_path, upstream.url, token=TOKEN)) as service:
        for path in (*READING, *CHANGING, *RELAYED, f"/specproxy/?token={TOKEN}", "/specproxy/none"):
            reply = await attack(service, path, **sent)
            assert reply.status == 401, path
            assert set(json.loads(reply.content)) <= {"error", "type"}, path
            assert reply.values(b"www-authenticate") or not path.startswith("/specproxy"), path
            assert (await ask(service, "GET", path, Origin=EVIL, **sent)).status == 401, path
        assert service.status()["requests"]["total"] == 0
        assert (await ask(service, "GET", "/specproxy/health")).content == b'{"status":"ok"}'
        assert (await chat(service, X_Specproxy_Token=TOKEN)).status == 200


@pytest.mark.parametrize("path", ["/specproxy/api/explain", "/specproxy/none", "/v1/chat/completions"])
async def test_without_the_token_no_body_is_read(path: str, tmp_path: Path) -> None:
    """A stranger is refused by the head of a request, and fills no memory."""
    async with (
        openai_like() as upstream,
        running(settings(tmp_path, upstream.url, token=TOKEN)) as service,
        await RawClient.connect(int(service.url.rpartition(":")[2])) as client,
    ):
        await client.send(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n" % path.encode())
        assert (await client.rest()).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("path", ["/specproxy/", "/specproxy/api/status", "/specproxy/api/events"])
async def test_a_websocket_gets_past_no_check(path: str, tmp_path: Path) -> None:
    """There is none here: the upgrade is declined, and what answers is the route under its usual rules."""
    offer = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ=="}
    async with openai_like() as upstream, running(settings(tmp_path, upstream.url)) as service:
        port = int(service.url.rpartition(":")[2])
        assert (await ask(service, "GET", path, Origin=EVIL, **offer)).status == 403
        head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in offer.items())
        async with await RawClient.connect(port) as client:
            await client.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n".encode())
            reply = await client.head()
            assert (reply.status, reply.values(b"upgrade")) == (200, [])
    async with openai_like() as upstream, running(settings(tmp_path, upstream.url, token=TOKEN)) as service:
        assert (await ask(service, "GET", path, **offer)).status == 401


@pytest.mark.parametrize("status", [b"301 Moved Permanently", b"302 Found", b"307 Temporary Redirect"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/files"])
async def test_a_redirect_is_the_clients_business(status: bytes, path: str) -> None:
    """It goes to the client as it came, and nothing is fetched from where it points."""
    other = Recorder()
    async with Upstream(other) as elsewhere:
        answer = b"HTTP/1.1 %b\r\nLocation: %b/steal\r\nContent-Length: 5\r\n\r\nmoved"
        own = Recorder(answer % (status, elsewhere.url.encode()))
        async with (
            Upstream(own) as upstream,
            running_proxy(upstream.url) as proxy,
            await RawClient.connect(proxy.port) as client,
        ):
            sent = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(CHAT))
            reply = await client.ask(sent + CHAT)
            assert reply.status_line == b"HTTP/1.1 " + status
            assert (reply.values(b"location"), reply.body) == ([elsewhere.url.encode() + b"/steal"], b"moved")
            assert (elsewhere.connections, len(own.seen)) == (0, 1)
