"""OpenAI chat completions over HTTP, on a scripted engine."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import orjson
import pytest
from aiohttp import ClientSession

from specproxy.adapters.embedded.side_channel import decode_report, encode_priors
from specproxy.errors import BackendError
from specproxy.records import EnginePriors
from tests.adapters.embedded.conftest import Serve
from tests.support.fake_engine import BOS, FakeEngine

ASK: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


async def events(session: ClientSession, body: dict[str, Any]) -> list[Any]:
    """The data of all events of a streamed reply."""
    async with session.post("/v1/chat/completions", json={**body, "stream": True}) as reply:
        assert reply.status == 200, await reply.text()
        assert reply.content_type == "text/event-stream"
        data = [line[6:] for line in (await reply.read()).split(b"\n\n") if line.startswith(b"data: ")]
    assert data[-1] == b"[DONE]"
    return [orjson.loads(item) for item in data[:-1]]


async def test_whole_reply_has_text_usage_and_timings(serve: Serve) -> None:
    session, _ = await serve(FakeEngine())
    async with session.post("/v1/chat/completions", json=ASK) as reply:
        body = await reply.json()
    choice = body["choices"][0]
    assert choice == {
        "finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": "Hello world"},
    }  # fmt: skip
    prompt = len("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n") + 1  # and BOS
    assert body["usage"] == {
        "completion_tokens": 11, "prompt_tokens": prompt, "total_tokens": prompt + 11,
        "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip
    assert body["timings"]["draft_n"] == 8
    assert body["timings"]["draft_n_accepted"] == 6
    assert body["timings"]["predicted_per_second"] == pytest.approx(10 / 0.020)


async def test_stream_has_role_text_reason_and_timings_in_order(serve: Serve) -> None:
    session, _ = await serve(FakeEngine())
    chunks = await events(session, ASK)
    assert [c["choices"][0]["delta"] for c in chunks] == [
        {"role": "assistant", "content": None}, {"content": "Hello"}, {"content": " world"}, {},
    ]  # fmt: skip
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "stop"]
    assert chunks[-1]["timings"]["draft_n"] == 8
    assert len({c["id"] for c in chunks}) == 1


async def test_usage_chunk_carries_the_timings_when_asked_for(serve: Serve) -> None:
    session, _ = await serve(FakeEngine())
    chunks = await events(session, {**ASK, "stream_options": {"include_usage": True}})
    assert "timings" not in chunks[-2]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 11
    assert chunks[-1]["timings"]["draft_n_accepted"] == 6


async def test_several_choices_have_their_own_seeds_and_one_prompt_count(serve: Serve) -> None:
    engine = FakeEngine(["one"], ["two"])
    session, _ = await serve(engine)
    async with session.post("/v1/chat/completions", json={**ASK, "n": 2, "seed": 7}) as reply:
        body = await reply.json()
    assert sorted(c["message"]["content"] for c in body["choices"]) == ["one", "two"]
    assert [c["index"] for c in body["choices"]] == [0, 1]
    assert sorted(r.sampling.seed for r in engine.requests) == [7, 8]
    assert body["usage"]["completion_tokens"] == 6
    assert body["usage"]["prompt_tokens"] == len(engine.requests[0].prompt)


async def test_logprobs_follow_the_tokens_of_the_text(serve: Serve) -> None:
    session, _ = await serve(FakeEngine(["ab"]))
    ask = {**ASK, "logprobs": True, "top_logprobs": 2}
    async with session.post("/v1/chat/completions", json=ask) as reply:
        content = (await reply.json())["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "b"]
    assert content[0]["bytes"] == [97]
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["A", "B"]
    streamed = await events(session, ask)
    assert [e for c in streamed for e in c["choices"][0].get("logprobs", {}).get("content", [])] == content


async def test_sampling_fields_reach_the_engine(serve: Serve) -> None:
    engine = FakeEngine()
    session, _ = await serve(engine)
    ask = {
        **ASK, "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "seed": 3, "stop": "END",
        "max_tokens": 9,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"65": -100, "66": 1.5},
        "repeat_penalty": 1.2, "dry_multiplier": 0.8, "user": "me", "metadata": {"a": "b"}, "store": True,
    }  # fmt: skip
    async with session.post("/v1/chat/completions", json=ask) as reply:
        assert reply.status == 200
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 7, 0.1)
    assert (sampling.seed, sampling.stop, engine.requests[0].max_tokens) == (3, ("END",), 9)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling.logit_bias == {65: -100.0, 66: 1.5}
    assert (sampling.repeat_penalty, sampling.dry_multiplier) == (1.2, 0.8)
    assert engine.requests[0].prompt[0] == BOS
    assert engine.requests[0].prompt[1] != BOS


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mirostat": 2}, "mirostat"),
        ({"xtc_probability": 0.5}, "xtc_probability"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
        ({"stop": [1]}, "stop"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"logit_bias": {"9": 1e39}}, "logit_bias"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"top_k": 2**32 + 1}, "top_k"),
        ({"repeat_last_n": 2**31}, "repeat_last_n"),
        ({"dry_penalty_last_n": 2**31}, "dry_penalty_last_n"),
        ({"dry_sequence_breakers": ["a"] * 65}, "dry_sequence_breakers"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"if": {}}}}},
            "response_format",
        ),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(
    serve: Serve, change: dict[str, Any], named: str
) -> None:
    engine = FakeEngine()
    session, _ = await serve(engine)
    async with session.post("/v1/chat/completions", json={**ASK, **change}) as reply:
        error = (await reply.json())["error"]
        assert reply.status == 400
    assert error["type"] == "invalid_request_error"
    assert named in error["message"]
    assert engine.requests == []


async def test_temperatures_too_low_to_divide_by_are_greedy(serve: Serve) -> None:
    engine = FakeEngine()
    session, _ = await serve(engine)
    async with session.post("/v1/chat/completions", json={**ASK, "temperature": 1e-39, "seed": -5}) as reply:
        assert reply.status == 200
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.seed) == (0, 2**32 - 5)


@pytest.mark.parametrize("body", [b"{", b"[]", b'"x"', b"\xff"])
async def test_malformed_bodies_get_an_openai_error(serve: Serve, body: bytes) -> None:
    session, _ = await serve(FakeEngine())
    async with session.post("/v1/chat/completions", data=body) as reply:
        assert reply.status == 400
        assert (await reply.json())["error"]["type"] == "invalid_request_error"


async def test_prompt_that_does_not_fit_is_answered_as_llama_server_does(serve: Serve) -> None:
    session, _ = await serve(FakeEngine(context=8))
    for stream in (False, True):
        async with session.post("/v1/chat/completions", json={**ASK, "stream": stream}) as reply:
            error = (await reply.json())["error"]
            assert reply.status == 400
        assert error["type"] == "exceed_context_size_error"
        assert error["n_ctx"] == 8
        assert error["n_prompt_tokens"] > 8


async def test_error_in_mid_stream_is_an_event(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    session, _ = await serve(FakeEngine(["Hello", BackendError("decode failed")]))
    async with session.post("/v1/chat/completions", json={**ASK, "stream": True}) as reply:
        data = await reply.read()
    assert b'"content":"Hello"' in data
    assert orjson.loads(data.split(b"data: ")[-1])["error"]["message"] == "decode failed"


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_cancels_the_generation(serve: Serve, stream: bool) -> None:
    engine = FakeEngine()
    engine.gate = asyncio.Event()
    session, _ = await serve(engine)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2), session.post("/v1/chat/completions", json={**ASK, "stream": stream}):
            pass
    async with asyncio.timeout(5):
        await engine.given_up.wait()
    assert engine.closed == 1


async def test_strategy_priors_and_report_travel_by_the_side_channel(serve: Serve) -> None:
    engine = FakeEngine()
    session, _ = await serve(engine)
    priors = EnginePriors("r1", "code/greedy", {"ngram": ((3.0, 4.0),)})
    headers = {
        "X-Specproxy-Engine-Strategy": "ngram:5",
        "X-Specproxy-Priors": encode_priors(priors).decode(),
        "X-Specproxy-Request-Id": "r1",
    }
    async with session.post("/v1/chat/completions", json=ASK, headers=headers) as reply:
        await reply.read()
    request = engine.requests[0]
    assert (request.strategy.name, request.strategy.n_max, request.priors) == ("ngram", 5, priors)
    async with session.get("/specproxy-engine/reports/r1") as reply:
        report = decode_report(await reply.read())
    assert (report.request_id, report.strategy, report.prompt_ids) == ("r1", "ngram", request.prompt)
    async with session.get("/specproxy-engine/reports/r1") as reply:
        assert reply.status == 404


async def test_strategy_is_auto_unless_asked_for(serve: Serve) -> None:
    engine = FakeEngine()
    session, _ = await serve(engine)
    async with session.post("/v1/chat/completions", json=ASK) as reply:
        await reply.read()
    assert engine.requests[0].strategy.name == "auto"


@pytest.mark.parametrize(
    ("strategy", "why"), [("mtp", "no MTP layers"), ("ngram:x", "X-Specproxy"), ("eagle3", "eagle3")]
)
async def test_strategy_that_cannot_run_is_refused_with_the_reason(
    serve: Serve, strategy: str, why: str
) -> None:
    session, _ = await serve(FakeEngine())
    async with session.post(
        "/v1/chat/completions", json=ASK, headers={"X-Specproxy-Engine-Strategy": strategy}
    ) as r:
        assert r.status == 400
        assert why in (await r.json())["error"]["message"]


async def test_loading_is_answered_as_llama_server_does(serve: Serve) -> None:
    session, _ = await serve(FakeEngine(), start_engine=False)
    async with session.post("/v1/chat/completions", json=ASK) as reply:
        assert reply.status == 503
        assert (await reply.json())["error"]["message"] == "Loading model"


async def test_official_client_reads_whole_and_streamed_replies(serve: Serve) -> None:
    _, url = await serve(FakeEngine())
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        whole = await client.chat.completions.create(model="fake", messages=ASK["messages"])
        assert whole.choices[0].message.content == "Hello world"
        stream = await client.chat.completions.create(model="fake", messages=ASK["messages"], stream=True)
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "Hello world"
        with pytest.raises(openai.BadRequestError, match="mirostat"):
            await client.chat.completions.create(
                model="x", messages=ASK["messages"], extra_body={"mirostat": 1}
            )
