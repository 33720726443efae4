"""mlx_lm.server: what is in its memory, whom it lets wait, and how it says what is wrong."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from specproxy.adapters.mlx_lm import MlxBackend
from specproxy.proxy.deployments import Deployments
from specproxy.records import Control, Health, Outcome, TimingSource
from specproxy.strategies.cost import LaneFacts
from tests.support.client import RawClient, post
from tests.support.deployments import CHAT, ask, deployment, proxied
from tests.support.fake_mlx import FakeMlx
from tests.support.proxy import Proxy, running_proxy
from tests.support.upstream import Conn, Upstream

SMALL = "org/small"
DRAFT = b"X-Specproxy-Strategy: draft"


def only(proxy: Proxy) -> MlxBackend:
    [backend] = proxy.router.backends
    assert isinstance(backend, MlxBackend)
    return backend


def resident(proxy: Proxy) -> list[bool]:
    return [status.resident for status in only(proxy).lanes()]


async def test_it_loads_for_each_change_of_draft() -> None:
    """One pair of models is in memory: the one that was asked for last; looking at it changes nothing."""
    async with FakeMlx("m", SMALL) as server:
        one = deployment(server, kind="mlx", drafts=[SMALL], draft_tokens=4, load_s=7)
        async with proxied(one) as proxy:
            lanes = [s.lane for s in only(proxy).lanes()]
            assert {(lane.control, lane.load_s) for lane in lanes} == {(Control.RELOAD, 7.0)}
            assert resident(proxy) == [True, False]
            await ask(proxy, DRAFT)
            assert resident(proxy) == [False, True]
            assert server.key == ("m", None, SMALL)
            await only(proxy).check()
            client = await RawClient.connect(proxy.port)
            await client.ask(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            client.close()
            assert resident(proxy) == [False, True]
            await ask(proxy)
            assert resident(proxy) == [True, False]
        assert server.chats[0] == CHAT | {"draft_model": SMALL, "num_draft_tokens": 4}
        assert server.chats[1] == CHAT
        assert [seen.load_s > 0 for seen in proxy.seen] == [True, True]


@pytest.mark.parametrize(
    ("fields", "after"),
    [
        ({"draft_model": SMALL}, [False, True]),
        ({"draft_model": "org/mine"}, [False, False]),
        ({"adapters": "mine"}, [False, False]),
        ({"model": "org/mine"}, [False, False]),
        ({"num_draft_tokens": 9}, [True, False]),
        ({"adapters": None}, [True, False]),
    ],
)
async def test_what_a_client_names_itself_is_what_is_in_memory(
    fields: dict[str, Any], after: list[bool]
) -> None:
    """Its fields are left alone, and the next request on a lane is known to load."""
    server = FakeMlx("m", SMALL, "org/mine")
    async with server, proxied(deployment(server, kind="mlx", drafts=[SMALL])) as proxy:
        await ask(proxy)
        assert (await ask(proxy, **fields)).status == 200
        assert resident(proxy) == after
        assert server.chats[-1] == CHAT | fields
        loads = server.loads
        await ask(proxy)
        assert (server.loads > loads) is (not after[0])
        assert (proxy.seen[-1].load_s > 0) is (not after[0])


@pytest.mark.parametrize("body", [b"{", b"[]"])
async def test_what_is_no_request_loads_nothing(body: bytes) -> None:
    """The server refuses it before it looks for models."""
    async with FakeMlx("m") as server, proxied(deployment(server, kind="mlx")) as proxy:
        client = await RawClient.connect(proxy.port)
        await client.ask(post("/v1/chat/completions", body))
        client.close()
        assert resident(proxy) == [True]
        assert server.key == ("m", None, None)


async def test_it_is_well_without_a_list_of_models_and_empty_after_a_failed_load() -> None:
    """Its list is of files in a cache; before it loads a pair it lets go of the old one."""
    server = FakeMlx("m", listed=False)
    async with server, proxied(deployment(server, kind="mlx", drafts=["org/none"])) as proxy:
        assert [status.health for status in only(proxy).lanes()] == [Health.READY] * 2
        reply = await ask(proxy, DRAFT)
        assert (reply.status, resident(proxy)) == (404, [False, False])
        assert json.loads(reply.content)["error"].startswith("404 Client Error")
        assert server.key is None
        await ask(proxy)
        assert resident(proxy) == [True, False]
        assert [seen.outcome for seen in proxy.seen] == [Outcome.ERROR, Outcome.COMPLETE]


async def test_what_it_refuses_is_passed_on() -> None:
    """A wrong field is a 400, and the models stay."""
    async with FakeMlx("m") as server, proxied(deployment(server, kind="mlx")) as proxy:
        reply = await ask(proxy, max_tokens="many")
        assert (reply.status, reply.content) == (400, b'{"error": "max_tokens must be of type int"}')
        assert (proxy.seen[-1].outcome, resident(proxy)) == (Outcome.ERROR, [True])


async def test_its_stream_passes_as_it_is_and_is_read() -> None:
    """Comments that keep the connection alive are no content."""
    async with FakeMlx("m") as server, proxied(deployment(server, kind="mlx")) as proxy:
        reply = await ask(proxy, stream=True, stream_options={"include_usage": True})
        assert reply.content.startswith(b": keepalive 0/9\n\n: keepalive 9/9\n\ndata: {")
        assert reply.content.endswith(b"data: [DONE]\n\n")
        [seen] = proxy.seen
        assert (seen.outcome, seen.source) == (Outcome.COMPLETE, TimingSource.USAGE)
        assert (seen.prompt_tokens, seen.output_tokens, seen.draft_tokens) == (9, 3, 0)


async def test_requests_with_a_draft_wait_for_each_other() -> None:
    """And the learner is told so; those without are decoded together."""
    async with FakeMlx("m", SMALL) as server:
        named = Deployments([deployment(server, kind="mlx", drafts=[SMALL])])
        await named.start()
        _, drafting = [status.lane for status in named.backends[0].lanes()]
        assert named.facts() == {drafting.id: LaneFacts(slots=1)}
        async with running_proxy(*named.backends) as proxy:
            for headers, waiting, together in (((DRAFT,), 2, 0), ((), 0, 3)):
                server.open.clear()
                server.chats.clear()
                asked = [asyncio.create_task(ask(proxy, *headers)) for _ in range(3)]
                while len(server.chats) < 3 or server.waiting > waiting:  # noqa: ASYNC110 - told by no event
                    await asyncio.sleep(0)
                assert (server.waiting, server.most) == (waiting, together)
                server.open.set()
                await asyncio.gather(*asked)
        await named.aclose()


@pytest.mark.parametrize("answer", [b"503 Service Unavailable", b"404 Not Found"])
async def test_one_that_cannot_generate_is_not_well(answer: bytes) -> None:
    """It says so at /health; without an answer there its list of models decides."""

    async def serve(conn: Conn) -> None:
        seen = await conn.request()
        body = b'{"data": [{"id": "m"}]}'
        if seen.request_line.split(b" ")[1] == b"/health":
            await conn.send(b'HTTP/1.0 %b\r\n\r\n{"status": "unavailable"}' % answer)
        else:
            await conn.send(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        conn.close()

    async with Upstream(serve) as server, proxied(deployment(server, kind="mlx")) as proxy:
        [status] = proxy.router.lanes()
        assert (status.health is Health.READY) == answer.startswith(b"404")
