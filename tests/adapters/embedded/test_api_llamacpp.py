"""llama.cpp's own routes on a scripted engine."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from tests.adapters.embedded.conftest import Serve
from tests.support.fake_engine import BOS, FakeEngine


async def post(session: Any, path: str, body: object) -> Any:
    async with session.post(path, json=body) as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()


async def test_completion_tells_how_it_ended(serve: Serve) -> None:
    engine = FakeEngine(["one\ntwo"])
    session, _ = await serve(engine)
    ask = {"prompt": "ab", "n_predict": 7, "n_probs": 1, "return_tokens": True, "cache_prompt": True}
    body = await post(session, "/completion", ask)
    assert (body["content"], body["stop"], body["stop_type"]) == ("one\ntwo", True, "eos")
    assert (body["tokens_predicted"], body["tokens_evaluated"], body["has_new_line"]) == (7, 3, True)
    assert body["tokens"] == list(b"one\ntwo")
    assert body["completion_probabilities"][0]["top_logprobs"][0]["token"] == "A"
    assert body["generation_settings"]["n_predict"] == 7
    assert body["timings"]["draft_n"] == 8
    engine.finish, engine.stop_text = "stop", "END"
    body = await post(session, "/completion", ask)
    assert (body["stop_type"], body["stopping_word"]) == ("word", "END")
    engine.finish = "length"
    assert (await post(session, "/completion", ask))["stop_type"] == "limit"


async def test_completion_streams_without_done(serve: Serve) -> None:
    session, _ = await serve(FakeEngine())
    async with session.post("/completion", json={"prompt": "ab", "stream": True}) as reply:
        events = [orjson.loads(part[6:]) for part in (await reply.read()).split(b"\n\n") if part]
    assert [e["content"] for e in events] == ["Hello", " world", ""]
    assert [e["stop"] for e in events] == [False, False, True]
    assert events[0]["tokens"] == list(b"Hello")
    assert "timings" in events[-1]


async def test_several_replies_are_an_array(serve: Serve) -> None:
    session, _ = await serve(FakeEngine())
    body = await post(session, "/completion", {"prompt": ["a", "b"]})
    assert [entry["index"] for entry in body] == [0, 1]
    body = await post(session, "/completion", {"prompt": ["a", "b"], "n_cmpl": 2})
    assert [entry["index"] for entry in body] == [0, 1, 2, 3]


async def test_grammar_and_schema_reach_the_engine(serve: Serve) -> None:
    engine = FakeEngine()
    session, _ = await serve(engine)
    await post(session, "/completion", {"prompt": "a", "grammar": 'root ::= "x"'})
    await post(session, "/completion", {"prompt": "a", "json_schema": {"type": "integer"}})
    assert engine.requests[0].sampling.grammar == 'root ::= "x"'
    assert "integer" in (engine.requests[1].sampling.grammar or "")
    both = {"prompt": "a", "grammar": 'root ::= "x"', "json_schema": {}}
    async with session.post("/completion", json=both) as reply:
        assert reply.status == 400


async def test_tokens_there_and_back(serve: Serve) -> None:
    session, _ = await serve(FakeEngine())
    assert (await post(session, "/tokenize", {"content": "ab"}))["tokens"] == [97, 98]
    assert (await post(session, "/tokenize", {"content": "a", "add_special": True}))["tokens"] == [BOS, 97]
    pieces = (await post(session, "/tokenize", {"content": "aé", "with_pieces": True}))["tokens"]
    assert pieces == [{"id": 97, "piece": "a"}, {"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]}]
    assert (await post(session, "/detokenize", {"tokens": [97, 98]}))["content"] == "ab"
    async with session.post("/detokenize", json={"tokens": [-1]}) as reply:
        assert reply.status == 400


async def test_template_is_applied_as_for_a_chat(serve: Serve) -> None:
    session, _ = await serve(FakeEngine())
    body = await post(session, "/apply-template", {"messages": [{"role": "user", "content": "Hi"}]})
    assert body["prompt"] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


async def test_state_is_shown(serve: Serve) -> None:
    engine = FakeEngine()
    engine.gate = asyncio.Event()
    session, _ = await serve(engine, slots=2)
    props = await (await session.get("/props")).json()
    assert (props["total_slots"], props["bos_token"], props["strategies"]) == (
        2,
        "<s>",
        ["plain", "ngram", "auto"],
    )
    assert props["strategies_refused"] == {"mtp": "the model file has no MTP layers"}
    asked = [asyncio.create_task(post(session, "/completion", {"prompt": "ab"}))]
    await engine.taken.wait()
    slots = await (await session.get("/slots")).json()
    assert [slot["is_processing"] for slot in slots] == [True, False]
    for _ in range(2):
        engine.taken.clear()
        asked.append(asyncio.create_task(post(session, "/completion", {"prompt": "ab"})))
        await engine.taken.wait()
    slots = await (await session.get("/slots")).json()
    assert [slot["is_processing"] for slot in slots] == [True, True], "one waits"
    engine.gate.set()
    await asyncio.gather(*asked)
    slots = await (await session.get("/slots")).json()
    assert [slot["is_processing"] for slot in slots] == [False, False]
    metrics = await (await session.get("/metrics")).text()
    assert "llamacpp:tokens_predicted_total 33\n" in metrics
    assert "llamacpp:spec_decode_num_accepted_tokens_total 18\n" in metrics


async def test_health_is_bad_while_loading(serve: Serve) -> None:
    session, _ = await serve(FakeEngine(), start_engine=False)
    for path in ("/health", "/props", "/slots", "/metrics", "/v1/models", "/api/tags"):
        async with session.get(path) as reply:
            assert reply.status == 503, path
    async with session.post("/tokenize", json={"content": "a"}) as reply:
        assert reply.status == 503


@pytest.mark.parametrize("path", ["/nothing", "/v1/nothing", "/slots/1"])
async def test_unknown_routes_get_an_openai_error(serve: Serve, path: str) -> None:
    session, _ = await serve(FakeEngine())
    async with session.get(path) as reply:
        assert reply.status == 404
        assert (await reply.json())["error"]["type"] == "not_found_error"
