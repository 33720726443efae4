"""Further names for models: asked for by one name, answered under it, run on the other."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from specproxy.adapters.fake import FakeBackend, respond
from specproxy.config import Settings
from tests.support.client import RawClient, RawReply, post
from tests.support.proxy import lane, running_proxy

NDJSON = ((b"Content-Type", b"application/x-ndjson"),)


def ollama() -> FakeBackend:
    lanes = [lane("o", target=name, models=frozenset({name})) for name in ("qwen3:8b", "llama3")]
    lines = [b'{"model":"qwen3:8b","message":{"content":"x"}}\n', b'{"model":"qwen3:8b","done":true}\n']
    return FakeBackend("o", lanes[:1], respond(headers=NDJSON, parts=lines))


async def ask(fake: FakeBackend, model: str, path: str = "/api/chat") -> tuple[RawReply, Any]:
    body = json.dumps({"model": model, "messages": []}).encode()
    async with running_proxy(fake) as proxy:
        proxy.router._aliases = {"gpt-4o": "qwen3:8b"}
        async with await RawClient.connect(proxy.port) as client:
            return await client.ask(post(path, body)), proxy


async def test_an_alias_is_answered_under_its_name() -> None:
    """The request names the model that is there, every line of the reply the one that was asked for."""
    fake = ollama()
    reply, proxy = await ask(fake, "gpt-4o")
    assert json.loads(fake.exchanges[0].request.body)["model"] == "qwen3:8b"
    assert [json.loads(line)["model"] for line in reply.content.splitlines()] == ["gpt-4o"] * 2
    assert proxy.seen[0].target == "qwen3:8b"


@pytest.mark.parametrize("model", ["qwen3:8b", "unknown"])
async def test_other_names_stay(model: str) -> None:
    """Byte for byte, there and back."""
    fake = ollama()
    reply, _ = await ask(fake, model)
    assert json.loads(fake.exchanges[0].request.body)["model"] == model
    assert b"qwen3:8b" in reply.content


def test_aliases_are_pairs() -> None:
    """In a list or one text with commas; anything else is refused with the form that is meant."""
    assert Settings.model_validate({"aliases": "a=b, c = d:8b"}).model_aliases == {"a": "b", "c": "d:8b"}
    for odd in ("a", "=b", "a="):
        with pytest.raises(ValidationError, match="NAME=MODEL"):
            Settings.model_validate({"aliases": [odd]})
