"""The engine's replies beside those of a real llama-server that runs the same model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientSession, UnixConnector

from specproxy.adapters.embedded.backend import EmbeddedBackend, EmbeddedOptions
from specproxy.adapters.managed import ManagedOptions, plan_managed
from tests.support.calibrated import CalibratedPair

pytestmark = [
    pytest.mark.engine,
    pytest.mark.embedded,
    pytest.mark.timeout(120),
    pytest.mark.asyncio(loop_scope="module"),
]
TOKENS = 8
Servers = tuple[ClientSession, ClientSession]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(pair: CalibratedPair) -> AsyncIterator[Servers]:
    """Sessions with the engine and with llama-server, neither of them drafting."""
    managed = plan_managed(
        ManagedOptions(pair.target, None, threads=1, ctx=1024, strategies=("plain",))
    ).backend()
    engine = EmbeddedBackend(EmbeddedOptions(pair.target, threads=1, ctx=1024))
    await asyncio.gather(managed.start(), engine.start())
    await managed.settled()
    assert engine._directory is not None
    ours = ClientSession("http://engine", connector=UnixConnector(str(engine._directory / "engine.sock")))
    async with ours, ClientSession(managed.address("plain")) as theirs:
        yield ours, theirs
    await managed.aclose()
    await engine.aclose()


def body(path: str, prompt: str) -> dict[str, Any]:
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": prompt}], "max_tokens": TOKENS},
        "/v1/completions": {"prompt": prompt, "max_tokens": TOKENS},
        "/completion": {"prompt": prompt, "n_predict": TOKENS},
        "/v1/responses": {"input": prompt, "max_output_tokens": TOKENS},
        "/v1/messages": {"messages": [{"role": "user", "content": prompt}], "max_tokens": TOKENS},
    }
    return asked[path] | {"model": "m", "temperature": 0}


async def events(session: ClientSession, path: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The JSON of each event of a stream; its ``event:`` name has to be the `type` inside."""
    found: list[dict[str, Any]] = []
    headers = {"X-Specproxy-Engine-Strategy": "plain"}
    async with session.post(path, json=asked | {"stream": True}, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        for block in (await reply.text()).split("\n\n"):
            fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
            if fields.get("data", "[DONE]") != "[DONE]":
                data = json.loads(fields["data"])
                assert fields.get("event", data.get("type")) == data.get("type")
                found.append(data)
    return found


def missing(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Members that llama-server's object has, and ours has not, by their path."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        gone = [f"{path}.{key}" for key in theirs.keys() - ours.keys()]
        return gone + [
            m for key in theirs.keys() & ours.keys() for m in missing(ours[key], theirs[key], f"{path}.{key}")
        ]
    if isinstance(theirs, list) and isinstance(ours, list) and theirs and ours:
        return missing(ours[0], theirs[0], f"{path}[0]")
    return []


def kinds(found: Sequence[dict[str, Any]]) -> list[str]:
    """Types of events in order, runs of the same one taken together."""
    order: list[str] = []
    for event in found:
        if not order or order[-1] != event["type"]:
            order.append(event["type"])
    return order


async def test_events_of_a_response_come_in_the_same_order(servers: Servers, pair: CalibratedPair) -> None:
    """One delta a token, between the same beginnings and ends; but a reply cut short is called incomplete."""
    asked = body("/v1/responses", "words " + pair.marker("json"))
    ours, theirs = [await events(session, "/v1/responses", asked) for session in servers]
    assert kinds(theirs)[-1] == "response.completed"
    assert kinds(ours) == [*kinds(theirs)[:-1], "response.incomplete"]
    text = [[e["delta"] for e in found if e["type"].endswith("delta")] for found in (ours, theirs)]
    assert text[0] == text[1]
    assert len(text[0]) == TOKENS
    assert [m for a, b in zip(ours, theirs, strict=True) for m in missing(a, b)] == []


async def test_events_of_a_message_come_in_the_same_order(servers: Servers, pair: CalibratedPair) -> None:
    """Anthropic's stream, the names of its events included."""
    asked = body("/v1/messages", "words " + pair.marker("json"))
    ours, theirs = [await events(session, "/v1/messages", asked) for session in servers]
    assert kinds(ours) == kinds(theirs)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_chunks_hold_what_llama_servers_hold(servers: Servers, pair: CalibratedPair, path: str) -> None:
    """The same text in as many chunks; no member of the first, middle and last one is missing."""
    asked = body(path, "words " + pair.marker("code", 2))
    ours, theirs = [await events(session, path, asked) for session in servers]
    assert len(ours) == len(theirs)

    def text(found: list[dict[str, Any]]) -> str:
        choices = [choice for event in found for choice in event["choices"]]
        return "".join(c.get("text") or (c.get("delta") or {}).get("content") or "" for c in choices)

    assert text(ours) == text(theirs) != ""
    for at in (0, len(ours) // 2, -1):
        assert missing(ours[at], theirs[at]) == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_whole_replies_hold_what_llama_servers_hold(
    servers: Servers, pair: CalibratedPair, path: str
) -> None:
    """Every member that a client of llama-server may read is there."""
    asked = body(path, "words " + pair.marker("prose", 3))
    replies = []
    for session in servers:
        async with session.post(path, json=asked) as reply:
            assert reply.status == 200, await reply.text()
            replies.append(await reply.json())
    assert missing(*replies) == []
