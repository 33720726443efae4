"""A model of Ollama's in the engine: its template, system message, history and parameters are honoured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specproxy.adapters.ollama_setup import ModelSetup
from tests.adapters.embedded.conftest import Serve
from tests.support.fake_engine import FakeEngine

SETUP = ModelSetup(
    Path("/m.gguf"),
    "fake",
    "{{ range .Messages }}<{{ .Role }}>{{ .Content }}{{ end }}<assistant>",
    "Be Bob.",
    (("user", "hi"), ("assistant", "ho")),
    (("temperature", 0.0), ("num_predict", 7), ("stop", ["X"]), ("top_k", 5), ("repeat_penalty", 1.2)),
)
PROMPT = "<system>Be Bob.<user>hi<assistant>ho<user>Hi<assistant>"
HI = [{"role": "user", "content": "Hi"}]
MESSAGE = {"model": "fake", "max_tokens": 9, "messages": HI}


async def asked(serve: Serve, path: str, body: dict[str, Any]) -> tuple[FakeEngine, int, Any]:
    """An engine with this set-up, after one request."""
    engine = FakeEngine()
    session, _ = await serve(engine, setup=SETUP)
    async with session.post(path, json={"stream": False, **body}) as reply:
        return engine, reply.status, await reply.json()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"model": "fake", "messages": HI}),
        ("/api/generate", {"model": "fake", "prompt": "Hi"}),
        ("/v1/chat/completions", {"model": "fake", "messages": HI}),
        ("/v1/responses", {"model": "fake", "input": "Hi"}),
        ("/v1/messages", MESSAGE),
    ],
)
async def test_the_prompt_is_ollamas_on_every_route(serve: Serve, path: str, body: dict[str, Any]) -> None:
    engine, status, reply = await asked(serve, path, body)
    assert status == 200, reply
    assert engine.detokenize(list(engine.requests[0].prompt)).decode().endswith(PROMPT)


async def test_a_system_message_of_the_client_takes_the_place_of_the_models(serve: Serve) -> None:
    messages = [{"role": "system", "content": "Mine."}, *HI]
    engine, _, _ = await asked(serve, "/api/chat", {"model": "fake", "messages": messages})
    prompt = engine.detokenize(list(engine.requests[0].prompt)).decode()
    assert prompt.endswith("<user>hi<assistant>ho<system>Mine.<user>Hi<assistant>")


async def test_a_raw_prompt_stays_as_it_is(serve: Serve) -> None:
    engine, _, _ = await asked(serve, "/api/generate", {"model": "fake", "prompt": "Hi", "raw": True})
    assert "Bob" not in engine.detokenize(list(engine.requests[0].prompt)).decode()


async def test_parameters_are_defaults_on_ollamas_routes(serve: Serve) -> None:
    """What a request says counts before them."""
    engine, _, _ = await asked(
        serve, "/api/chat", {"model": "fake", "messages": HI, "options": {"top_k": 9, "stop": ["Y"]}}
    )
    [request] = engine.requests
    assert (request.sampling.temperature, request.sampling.repeat_penalty, request.max_tokens) == (0.0, 1.2, 7)
    assert (request.sampling.top_k, request.sampling.stop) == (9, ("Y",))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_temperature_is_one_on_the_other_routes(serve: Serve, path: str) -> None:
    """As in Ollama, whatever the parameters say; the others count."""
    body = {"/v1/responses": {"model": "fake", "input": "Hi"}}.get(path, MESSAGE)
    engine, _, _ = await asked(serve, path, body)
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (1.0, 1.0, 5, ("X",))


async def test_the_longest_answer_is_a_default_too(serve: Serve) -> None:
    engine, _, _ = await asked(serve, "/v1/chat/completions", {"model": "fake", "messages": HI})
    assert engine.requests[0].max_tokens == 7
    engine, _, _ = await asked(serve, "/v1/chat/completions", MESSAGE)
    assert engine.requests[0].max_tokens == 9


async def test_tools_are_refused_where_the_template_is_for_text_alone(serve: Serve) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    _, status, reply = await asked(serve, "/api/chat", {"model": "fake", "messages": HI, "tools": tools})
    assert (status, "used for text alone" in reply["error"]) == (400, True)


async def test_a_template_that_cannot_do_with_messages_refuses_them(serve: Serve) -> None:
    engine = FakeEngine()
    broken = ModelSetup(Path("/m.gguf"), "fake", "{{ range .Messages }}{{ .Nobody }}{{ end }}")
    session, _ = await serve(engine, setup=broken)
    async with session.post("/api/chat", json={"model": "fake", "messages": HI}) as reply:
        assert (reply.status, "no field Nobody" in (await reply.json())["error"]) == (400, True)
