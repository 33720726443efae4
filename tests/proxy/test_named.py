"""Questions about a model: under any of its names, to the server that has it, and nothing else is touched."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specproxy.adapters.base import UpstreamRequest
from specproxy.adapters.fake import FakeBackend, FakeExchange, respond
from specproxy.proxy.named import read_question
from specproxy.records import Health
from tests.support.client import RawClient, RawReply, post
from tests.support.proxy import Proxy, lane, running_proxy

REAL = "qwen3:8b"


def server(name: str, *models: str, **fields: Any) -> FakeBackend:
    """A server that says which model it was asked about, on every route."""

    async def answer(exchange: FakeExchange) -> None:
        asked = exchange.request
        if asked.method == "GET":
            body = b'{ "object":"model", "id": "%b" }' % models[0].encode()
        else:
            body = b'{ "model":"%b", "embeddings":[[0.50]] }' % models[0].encode()
        await respond(body)(exchange)

    return FakeBackend(name, [lane(name, target=models[0], models=frozenset(models), **fields)], answer)


async def ask(
    raw: bytes, *servers: FakeBackend, aliases: dict[str, str] | None = None
) -> tuple[RawReply, Proxy]:
    async with running_proxy(*servers) as proxy:
        proxy.router._aliases = aliases or {}
        async with await RawClient.connect(proxy.port) as client:
            return await client.ask(raw), proxy


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def got(server: FakeBackend) -> UpstreamRequest:
    [exchange] = server.exchanges
    return exchange.request


@pytest.mark.parametrize(
    "path",
    [
        "/api/show", "/api/embed", "/api/embeddings", "/v1/embeddings", "/embedding", "/v1/rerank", "/tokenize",
        "/apply-template", "/v1/messages/count_tokens", "/v1/embeddings?x=1",
    ],
)  # fmt: skip
@pytest.mark.parametrize("field", ["model", "name"])
async def test_an_alias_in_a_body(path: str, field: str) -> None:
    """It becomes the model's name on the way there, and comes back in the reply; no other byte changes."""
    asked = server("o", REAL)
    body = b'{ "%b" : "gpt-4o", "input":["a"], "n":1.50 }' % field.encode()
    reply, proxy = await ask(post(path, body), asked, aliases={"gpt-4o": REAL})
    assert got(asked).body == body.replace(b"gpt-4o", REAL.encode())
    assert reply.content == b'{ "model":"gpt-4o", "embeddings":[[0.50]] }'
    assert proxy.seen == [], "it is no generation"


@pytest.mark.parametrize(
    ("path", "upstream"),
    [
        ("/v1/models/team%2Fgpt", "/v1/models/qwen3:8b"),
        ("/v1/models/team/gpt?x=1", "/v1/models/qwen3:8b?x=1"),
    ],
)
async def test_an_alias_in_a_path(path: str, upstream: str) -> None:
    """Slashes may be written either way."""
    asked = server("o", REAL)
    reply, _ = await ask(get(path), asked, aliases={"team/gpt": REAL})
    assert got(asked).target == upstream
    assert reply.content == b'{ "object":"model", "id": "team/gpt" }'


@pytest.mark.parametrize("path", ["/v1/models/Qwen%2FQwen3", "/v1/models/other", "/api/tags", "/v1/models"])
async def test_other_paths_stay_as_they_were_written(path: str) -> None:
    """With aliases too; lists of models hold none."""
    asked = server("o", REAL)
    reply, _ = await ask(get(path), asked, aliases={"gpt-4o": REAL})
    assert got(asked).target == path
    assert b"gpt-4o" not in reply.content


@pytest.mark.parametrize("path", ["/api/delete", "/api/copy", "/api/pull", "/api/push", "/api/create"])
async def test_what_changes_models_is_about_the_very_name(path: str) -> None:
    """Who deletes an alias does not mean the model behind it."""
    asked = server("o", REAL)
    body = b'{"model":"gpt-4o"}'
    raw = post(path, body) if path != "/api/delete" else post(path, body).replace(b"POST", b"DELETE", 1)
    await ask(raw, asked, aliases={"gpt-4o": REAL})
    assert got(asked).body == body


async def test_a_model_that_another_server_has_is_asked_about_there() -> None:
    """Under that server's own name; what none has, and what the first one has too, goes to the first one."""
    for model, at, named in (
        ("far", 1, "org/far"), ("near", 0, "near"), ("both", 0, "both"), ("unknown", 0, "unknown"),
    ):  # fmt: skip
        servers = server("a", "near", "both"), server("b", "far", "both", upstream_model="org/far")
        await ask(post("/v1/embeddings", json.dumps({"model": model}).encode()), *servers)
        assert [len(one.exchanges) for one in servers] == [1 - at, at]
        assert json.loads(got(servers[at]).body or b"")["model"] == named


async def test_a_server_that_is_ill_is_not_asked() -> None:
    """The first one answers, if only that it has no such model."""
    servers = server("a", "near"), server("b", "far")
    servers[1].mark("b/plain", Health.UNHEALTHY)
    await ask(get("/v1/models/far"), *servers)
    assert [len(one.exchanges) for one in servers] == [1, 0]


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b'{"model":1}', b'{"model":""}', b"\xff"])
async def test_a_body_that_names_nothing_passes(body: bytes) -> None:
    """Byte for byte, to the first server."""
    asked = server("o", REAL)
    await ask(post("/api/show", body), asked, aliases={"gpt-4o": REAL})
    assert got(asked).body == body
    assert read_question("POST", "/api/show", body) is None


async def test_without_aliases_and_names_nothing_is_read() -> None:
    """A body in chunks is passed on in chunks."""
    asked = server("o", REAL)
    raw = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    await ask(raw, asked)
    assert got(asked).body is None
