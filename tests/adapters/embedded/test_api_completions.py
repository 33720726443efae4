"""OpenAI completions, embeddings and models, and /v1/responses, on a scripted engine."""

from __future__ import annotations

import openai
import orjson
import pytest

from tests.adapters.embedded.conftest import Serve
from tests.support.fake_engine import BOS, FakeEngine

CALL = ['<tool_call>{"name": "f", ', '"arguments": {"a": 1}}</tool_call>']


async def test_completion_with_logprobs_in_both_forms(serve: Serve) -> None:
    session, _ = await serve(FakeEngine(["ab"]))
    async with session.post("/v1/completions", json={"prompt": "x", "logprobs": 1}) as reply:
        body = await reply.json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert choice["logprobs"]["text_offset"] == [0, 1]
    assert choice["logprobs"]["top_logprobs"][0] == {"A": -65.5}
    assert choice["logprobs"]["content"][0]["token"] == "a"
    assert body["timings"]["draft_n"] == 8


async def test_stream_carries_timings_or_usage_at_the_end(serve: Serve) -> None:
    session, _ = await serve(FakeEngine())
    for options, key in (({}, "timings"), ({"stream_options": {"include_usage": True}}, "usage")):
        async with session.post("/v1/completions", json={"prompt": "x", "stream": True, **options}) as reply:
            data = [line[6:] for line in (await reply.read()).split(b"\n\n")]
        assert data[-2] == b"[DONE]"
        chunks = [orjson.loads(item) for item in data[:-2]]
        assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == "Hello world"
        assert key in chunks[-1]


async def test_a_reply_of_auto_says_how_it_drafted(serve: Serve) -> None:
    """Beside llama-server's timings; a fixed strategy has nothing to explain."""
    session, _ = await serve(FakeEngine())
    for strategy, said in (("auto", True), ("ngram", False)):
        headers = {"X-Specproxy-Engine-Strategy": strategy}
        async with session.post("/v1/completions", json={"prompt": "x"}, headers=headers) as reply:
            timings = (await reply.json())["timings"]
        assert (timings.get("draft_steps") == {"mtp:3": 2, "plain": 1}) is said
        assert (timings.get("draft_stopped") == "mtp is wrong") is said


async def test_several_prompts_of_any_kind(serve: Serve) -> None:
    engine = FakeEngine(["1"], ["2"], ["3"])
    session, _ = await serve(engine)
    prompts = ["ab", [65, 66], [67, "d"]]
    for body in ({"prompt": p} for p in prompts):
        async with session.post("/v1/completions", json=body) as reply:
            assert reply.status == 200
    assert [r.prompt for r in engine.requests] == [(BOS, 97, 98), (65, 66), (67, 100)]
    async with session.post("/v1/completions", json={"prompt": ["x", "y"], "n": 2}) as reply:
        choices = (await reply.json())["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2, 3]
    assert len({r.request_id for r in engine.requests[3:]}) == 4


@pytest.mark.parametrize(
    ("change", "named"),
    [({"suffix": "z"}, "suffix"), ({"echo": True}, "echo"), ({"best_of": 3}, "best_of"),
     ({"prompt": {}}, "prompt"), ({"prompt": [999]}, "prompt"), ({"prompt": [True]}, "prompt"),
     ({"logprobs": -1}, "logprobs")],
)  # fmt: skip
async def test_what_cannot_be_served_is_refused(serve: Serve, change: dict[str, object], named: str) -> None:
    session, _ = await serve(FakeEngine())
    async with session.post("/v1/completions", json={"prompt": "x", **change}) as reply:
        assert reply.status == 400
        assert named in (await reply.json())["error"]["message"]


async def test_embeddings_have_length_one_in_both_encodings(serve: Serve) -> None:
    _, url = await serve(FakeEngine())
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        made = await client.embeddings.create(model="fake", input=["a", "bc"], encoding_format="float")
        assert len(made.data) == 2
        assert made.usage.prompt_tokens == 5
        made = await client.embeddings.create(model="fake", input="a")  # decodes base64 by itself
        assert made.data[0].embedding == pytest.approx([0.6, 0.8, 0, 0])
        assert [m.id for m in (await client.models.list()).data] == ["fake"]


async def test_response_whole(serve: Serve) -> None:
    engine = FakeEngine(["<think>hm</think>", "Yes"], chat_template="{{ messages[0].content }}</think>")
    _, url = await serve(engine)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        made = await client.responses.create(
            model="fake", input="Hi", instructions="Be brief.", max_output_tokens=9
        )
    assert made.output_text == "Yes"
    assert [item.type for item in made.output] == ["reasoning", "message"]
    assert made.usage is not None
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    assert engine.requests[0].max_tokens == 9
    assert bytes(engine.requests[0].prompt[1:10]) == b"Be brief."


async def test_response_streamed(serve: Serve) -> None:
    session, url = await serve(FakeEngine())
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        stream = await client.responses.create(
            model="fake", input=[{"role": "user", "content": "Hi"}], stream=True
        )
        events = [event async for event in stream]
    assert [e.type for e in events] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.delta", "response.output_text.done",
        "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert events[-1].response.output_text == "Hello world"
    async with session.post("/v1/responses", json={"input": "Hi", "stream": True}) as reply:
        last = orjson.loads((await reply.read()).split(b"data: ")[-1])
    assert last["timings"]["draft_n_accepted"] == 6


async def test_response_with_a_function_call_and_its_result(serve: Serve) -> None:
    engine = FakeEngine(CALL)
    _, url = await serve(engine)
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        made = await client.responses.create(model="fake", input="Hi", tools=tools)  # type: ignore[arg-type]  # a plain dict
        call = made.output[0]
        assert (call.type, call.name, call.arguments) == ("function_call", "f", '{"a": 1}')
        turns = [
            {"role": "user", "content": "Hi"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c", "output": "42"},
        ]
        async with client.responses.stream(model="fake", input=turns, tools=tools) as stream:  # type: ignore[arg-type]  # as above
            kinds = [event.type async for event in stream]
    assert "response.function_call_arguments.done" in kinds
    assert b"<tool_response>\n42\n</tool_response>" in bytes(t for t in engine.requests[-1].prompt if t < 256)


@pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
async def test_responses_have_no_memory(serve: Serve, field: str) -> None:
    session, _ = await serve(FakeEngine())
    async with session.post("/v1/responses", json={"input": "Hi", field: "x"}) as reply:
        assert reply.status == 400
        assert field in (await reply.json())["error"]["message"]
