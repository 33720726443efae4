"""Lists of models of several servers become one, of which every entry is a server's own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specproxy.adapters.base import Backend
from specproxy.adapters.fake import FakeBackend, respond
from specproxy.records import Health
from tests.support.client import RawClient, RawReply
from tests.support.proxy import lane, running_proxy


def server(
    name: str, reply: Any, *, status: int = 200, models: tuple[str, ...] = (), target: str = ""
) -> FakeBackend:
    body = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
    given = lane(name, target=target or name, models=frozenset(models))
    return FakeBackend(name, [given], respond(body, status=status))


def listed(*names: str, **more: Any) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": name, "object": "model"} for name in names]} | more


async def ask(*backends: Backend, path: str = "/v1/models", method: str = "GET") -> RawReply:
    async with running_proxy(*backends) as proxy, await RawClient.connect(proxy.port) as client:
        return await client.ask(
            f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\n\r\n".encode()
        )


async def test_entries_of_all_servers_in_their_order() -> None:
    """The first one of a name counts, and what the first server says around its list stays."""
    one, two = server("a", listed("a", "both", extra=1)), server("b", listed("both", "b"))
    reply = await ask(one, two)
    data = json.loads(reply.content)
    assert [entry["id"] for entry in data["data"]] == ["a", "both", "b"]
    assert (data["extra"], data["object"]) == (1, "list")
    assert reply.values(b"content-type") == [b"application/json"]
    for asked in (one, two):
        assert (b"Authorization", b"Bearer k") in asked.exchanges[0].request.headers


async def test_ollamas_list_is_merged_by_name() -> None:
    """As is the one that llama-server puts beside OpenAI's."""
    tags = [{"models": [{"name": name, "size": 1}]} for name in ("a:latest", "b:latest")]
    reply = await ask(server("a", tags[0]), server("b", tags[1]), path="/api/tags?x=1")
    assert json.loads(reply.content) == {"models": [*tags[0]["models"], *tags[1]["models"]]}
    both = listed("a", models=[{"name": "a", "model": "a"}]), listed("b", models=[{"name": "b", "model": "b"}])
    data = json.loads((await ask(server("a", both[0]), server("b", both[1]))).content)
    assert [entry["id"] for entry in data["data"]] == ["a", "b"]
    assert [entry["model"] for entry in data["models"]] == ["a", "b"]


@pytest.mark.parametrize(
    "other",
    [
        server("b", listed("b"), status=500),
        server("b", b"<html>"),
        server("b", ["b"]),
        server("b", {"nothing": 1}),
        server("b", listed("a"), models=("a",)),
    ],
    ids=["error", "html", "array", "no list", "the same models"],
)
async def test_with_one_list_there_is_nothing_to_merge(other: FakeBackend) -> None:
    """The first server's answer comes as it is, byte for byte."""
    body = b'{ "data": [ {"id":"a", "size":1.50e3} ] }'
    one = FakeBackend("a", [lane("a", target="a", models=frozenset({"a"}))], respond(body))
    assert (await ask(one, other)).content == body


async def test_a_server_that_is_ill_is_not_waited_for() -> None:
    """Only ready ones are asked."""
    body = b'{"data":[]}'
    one, two = server("a", body), server("b", listed("b"))
    two.mark("b/plain", Health.UNHEALTHY)
    assert (await ask(one, two)).content == body
    assert two.exchanges == []


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/models"), ("GET", "/v1/models/a"), ("GET", "/api/ps")]
)
async def test_other_questions_are_passed_on(method: str, path: str) -> None:
    """They are about one model, or one server."""
    one, two = server("a", listed("a")), server("b", listed("b"))
    await ask(one, two, method=method, path=path)
    assert two.exchanges == []
