"""Ollama's API over HTTP, on a scripted engine."""

from __future__ import annotations

import asyncio
from typing import Any

import ollama
import orjson
import pytest

from specproxy.errors import BackendError
from tests.adapters.embedded.conftest import Serve
from tests.support.fake_engine import FakeEngine

ASK: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
THINKS = "{{ messages[-1].content }}</think>"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = ['<tool_call>{"name": "f", ', '"arguments": {"a": 1}}</tool_call>']


async def test_chat_streams_lines_and_ends_with_true_counts(serve: Serve) -> None:
    session, _ = await serve(FakeEngine())
    async with session.post("/api/chat", json=ASK) as reply:
        assert reply.content_type == "application/x-ndjson"
        lines = [orjson.loads(line) for line in (await reply.read()).splitlines()]
    assert [line["message"]["content"] for line in lines] == ["Hello", " world", ""]
    assert [line["done"] for line in lines] == [False, False, True]
    last = lines[-1]
    assert (last["eval_count"], last["eval_duration"], last["prompt_eval_duration"]) == (
        11,
        20_000_000,
        10_000_000,
    )
    assert (last["load_duration"], last["done_reason"]) == (5_000_000, "stop")
    assert last["total_duration"] >= 35_000_000


async def test_the_total_duration_includes_waiting(serve: Serve) -> None:
    engine = FakeEngine()
    engine.gate = asyncio.Event()
    session, _ = await serve(engine)
    asked = asyncio.create_task(session.post("/api/chat", json=ASK))
    await engine.taken.wait()
    await asyncio.sleep(0.06)  # longer than all that the engine says it took
    engine.gate.set()
    lines = (await (await asked).read()).splitlines()
    assert orjson.loads(lines[-1])["total_duration"] >= 60_000_000


async def test_whole_chat_reply(serve: Serve) -> None:
    engine = FakeEngine()
    session, _ = await serve(engine)
    async with session.post("/api/chat", json={**ASK, "stream": False}) as reply:
        body = await reply.json()
    assert body["message"] == {"role": "assistant", "content": "Hello world"}
    assert body["prompt_eval_count"] == len(engine.requests[0].prompt)


async def test_options_and_ollamas_defaults_reach_the_engine(serve: Serve) -> None:
    engine = FakeEngine()
    session, _ = await serve(engine)
    options = {"temperature": 0, "num_predict": 5, "seed": 3, "stop": ["X"], "num_ctx": 9999, "num_gpu": 1}
    async with session.post("/api/chat", json={**ASK, "options": options, "stream": False}) as reply:
        assert reply.status == 200
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.seed, sampling.stop) == (0, 3, ("X",))
    assert (sampling.top_p, sampling.min_p, sampling.repeat_penalty) == (0.9, 0.0, 1.0)
    assert engine.requests[0].max_tokens == 5


async def test_generate_gives_a_context_to_go_on_from(serve: Serve) -> None:
    engine = FakeEngine(["Yes"])
    session, _ = await serve(engine)
    ask = {"model": "fake", "prompt": "Hi", "stream": False}
    async with session.post("/api/generate", json={**ask, "system": "Be brief."}) as reply:
        body = await reply.json()
    assert body["response"] == "Yes"
    assert body["context"] == [*engine.requests[0].prompt, *b"Yes"]
    async with session.post("/api/generate", json={**ask, "context": body["context"]}) as reply:
        assert reply.status == 200
    assert list(engine.requests[1].prompt[: len(body["context"])]) == body["context"]


async def test_raw_prompts_stay_as_they_are(serve: Serve) -> None:
    engine = FakeEngine()
    session, _ = await serve(engine)
    async with session.post(
        "/api/generate", json={"model": "fake", "prompt": "ab", "raw": True, "stream": False}
    ):
        pass
    assert engine.requests[0].prompt[1:] == (97, 98)


async def test_thinking_comes_apart(serve: Serve) -> None:
    session, _ = await serve(FakeEngine(["<think>hm", "</think>Yes"], chat_template=THINKS))
    async with session.post("/api/chat", json={**ASK, "stream": False, "think": True}) as reply:
        message = (await reply.json())["message"]
    assert message == {"role": "assistant", "content": "Yes", "thinking": "hm"}


async def test_thinking_of_a_model_that_cannot_is_refused(serve: Serve) -> None:
    session, _ = await serve(FakeEngine())
    async with session.post("/api/chat", json={**ASK, "think": True}) as reply:
        assert reply.status == 400
        assert "does not support thinking" in (await reply.json())["error"]


@pytest.mark.parametrize("stream", [True, False])
async def test_tool_calls_come_whole(serve: Serve, stream: bool) -> None:
    session, _ = await serve(FakeEngine(CALL))
    async with session.post("/api/chat", json={**ASK, "tools": TOOLS, "stream": stream}) as reply:
        lines = [orjson.loads(line) for line in (await reply.read()).splitlines()]
    calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == [{"index": 0, "name": "f", "arguments": {"a": 1}}]


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"a": {"type": "integer"}}}])
async def test_formats_become_grammars(serve: Serve, form: object) -> None:
    engine = FakeEngine()
    session, _ = await serve(engine)
    async with session.post("/api/chat", json={**ASK, "format": form, "stream": False}) as reply:
        assert reply.status == 200
    assert "root ::=" in (engine.requests[0].sampling.grammar or "")


@pytest.mark.parametrize(
    ("path", "body", "status", "named"),
    [
        ("/api/chat", {**ASK, "model": "other"}, 404, "model 'other' not found"),
        ("/api/chat", {"messages": []}, 400, "model"),
        ("/api/chat", {**ASK, "options": {"mirostat": 1}}, 400, "options.mirostat"),
        ("/api/chat", {**ASK, "options": {"temperature": "x"}}, 400, "options.temperature"),
        ("/api/chat", {**ASK, "format": "yaml"}, 400, "format"),
        ("/api/generate", {"model": "fake", "prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("/api/generate", {"model": "fake", "prompt": "x", "images": ["aa"]}, 400, "images"),
        ("/api/generate", {"model": "fake", "prompt": "x", "context": [99999]}, 400, "context"),
        ("/api/show", {"model": "other"}, 404, "not found"),
        ("/api/pull", {"model": "other"}, 404, "Not Found"),
    ],
)
async def test_errors_are_ollamas(
    serve: Serve, path: str, body: dict[str, Any], status: int, named: str
) -> None:
    session, _ = await serve(FakeEngine())
    async with session.post(path, json=body) as reply:
        assert reply.status == status
        error = await reply.json()
    assert list(error) == ["error"]
    assert named in error["error"]


async def test_error_in_mid_stream_is_a_line(serve: Serve) -> None:
    session, _ = await serve(FakeEngine(["Hello", BackendError("decode failed")]))
    async with session.post("/api/chat", json=ASK) as reply:
        lines = (await reply.read()).splitlines()
    assert orjson.loads(lines[-1]) == {"error": "decode failed"}


async def test_empty_requests_load_and_unload(serve: Serve) -> None:
    engine = FakeEngine()
    session, _ = await serve(engine)
    async with session.post("/api/generate", json={"model": "fake"}) as reply:
        assert (await reply.json())["done_reason"] == "load"
    for keep_alive in (0, "0s", "0"):
        async with session.post("/api/chat", json={"model": "fake", "keep_alive": keep_alive}) as reply:
            assert (await reply.json())["done_reason"] == "unload"
    assert engine.unloads == 3
    async with session.post("/api/chat", json={**ASK, "keep_alive": "5m", "stream": False}):
        pass
    assert engine.unloads == 3


async def test_model_routes_tell_about_the_model(serve: Serve) -> None:
    session, _ = await serve(FakeEngine(chat_template=THINKS), names=["fake:1b", "alias"])
    async with session.get("/api/tags") as reply:
        listed = (await reply.json())["models"]
    assert [entry["name"] for entry in listed] == ["fake:1b", "alias"]
    assert listed[0]["details"]["parameter_size"] == "1.00M"
    assert len(listed[0]["digest"]) == 64
    async with session.post("/api/show", json={"model": "alias:latest"}) as reply:
        shown = await reply.json()
    assert shown["capabilities"] == ["completion", "embedding", "thinking"]
    assert shown["model_info"]["llama.context_length"] == 2048
    async with session.get("/api/ps") as reply:
        assert (await reply.json())["models"][0]["context_length"] == 4096
    async with session.head("/") as reply:
        assert reply.status == 200
    async with session.get("/") as reply:
        assert await reply.text() == "Ollama is running"


async def test_embeddings(serve: Serve) -> None:
    session, _ = await serve(FakeEngine())
    async with session.post("/api/embed", json={"model": "fake", "input": ["a", "b"]}) as reply:
        body = await reply.json()
    assert body["embeddings"] == [[0.6, 0.8, 0, 0]] * 2
    assert body["prompt_eval_count"] == 4
    async with session.post("/api/embeddings", json={"model": "fake", "prompt": "a"}) as reply:
        assert (await reply.json())["embedding"] == [3, 4, 0, 0]


async def test_nothing_to_embed_gives_no_vector(serve: Serve) -> None:
    engine = FakeEngine()
    session, _ = await serve(engine)
    async with session.post("/api/embed", json={"model": "fake", "input": ""}) as reply:
        assert (await reply.json())["embeddings"] == []
    async with session.post("/api/embeddings", json={"model": "fake", "prompt": ""}) as reply:
        assert (await reply.json())["embedding"] == []
    assert not engine.requests


async def test_official_client(serve: Serve) -> None:
    _, url = await serve(FakeEngine(["Hello", " world"], CALL))
    client = ollama.AsyncClient(url)
    stream = await client.chat("fake", ASK["messages"], stream=True)
    assert "".join([part.message.content or "" async for part in stream]) == "Hello world"
    reply = await client.chat("fake", ASK["messages"], tools=TOOLS)
    assert reply.message.tool_calls is not None
    assert reply.message.tool_calls[0].function.arguments == {"a": 1}
    assert (await client.list()).models[0].model == "fake"
    assert (await client.show("fake")).capabilities
    with pytest.raises(ollama.ResponseError, match="not found"):
        await client.chat("other", ASK["messages"])
    await client._client.aclose()
