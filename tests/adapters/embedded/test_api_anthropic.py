"""Anthropic's messages on a scripted engine."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from specproxy.errors import BackendError
from tests.adapters.embedded.conftest import Serve
from tests.support.fake_engine import FakeEngine

ASK: dict[str, Any] = {"model": "fake", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}
THINKS = "{{ messages[-1].content }}</think>"
TOOLS = [{"name": "f", "input_schema": {"type": "object"}}]
CALL = ["Well. ", '<tool_call>{"name": "f", ', '"arguments": {"a": 1}}</tool_call>']


def client(url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)


async def test_whole_message(serve: Serve) -> None:
    engine = FakeEngine()
    _, url = await serve(engine)
    async with client(url) as api:
        made = await api.messages.create(
            **ASK,
            system="Be brief.",
            stop_sequences=["END"],
            metadata={"user_id": "u"},
            extra_body={"temperature": 0.5},
        )
    assert made.content[0].text == "Hello world"
    assert made.stop_reason == "end_turn"
    assert made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0) == len(engine.requests[0].prompt)
    assert made.usage.output_tokens == 11
    assert engine.requests[0].sampling.stop == ("END",)
    assert engine.requests[0].max_tokens == 50
    assert engine.requests[0].sampling.temperature == 0.5


async def test_streamed_message_with_thinking_and_a_tool(serve: Serve) -> None:
    _, url = await serve(
        FakeEngine(["<think>hm</think>", *CALL], chat_template=THINKS + "<tool_call>{{ tools }}")
    )
    async with client(url) as api, api.messages.stream(**ASK, tools=TOOLS) as stream:
        names = [event.type async for event in stream if event.type.startswith(("message_", "content_block_"))]
        final = await stream.get_final_message()
    assert names[0] == "message_start"
    assert names[-1] == "message_stop"
    assert names.count("content_block_start") == names.count("content_block_stop") == 3
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].input == {"a": 1}
    assert (final.stop_reason, final.usage.output_tokens > 0) == ("tool_use", True)


async def test_whole_message_with_a_tool_result_in_its_history(serve: Serve) -> None:
    engine = FakeEngine(CALL)
    _, url = await serve(engine)
    history = [
        *ASK["messages"],
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "42"},
                                     {"type": "text", "text": "And?"}]},
    ]  # fmt: skip
    async with client(url) as api:
        made = await api.messages.create(model="fake", max_tokens=9, messages=history, tools=TOOLS)  # type: ignore[arg-type]  # plain dicts
    assert [block.type for block in made.content] == ["text", "tool_use"]
    prompt = bytes(t for t in engine.requests[0].prompt if t < 256).decode()
    assert prompt.index("<tool_response>\n42") < prompt.index("And?")


@pytest.mark.parametrize(
    ("finish", "stop_text", "reason"),
    [("length", "", "max_tokens"), ("stop", "END", "stop_sequence"), ("stop", "", "end_turn")],
)
async def test_stop_reasons(serve: Serve, finish: str, stop_text: str, reason: str) -> None:
    engine = FakeEngine()
    engine.finish, engine.stop_text = finish, stop_text
    session, _ = await serve(engine)
    async with session.post("/v1/messages", json=ASK) as reply:
        body = await reply.json()
    assert body["stop_reason"] == reason
    assert body["stop_sequence"] == (stop_text or None)


async def test_tokens_are_counted_without_generating(serve: Serve) -> None:
    engine = FakeEngine()
    session, url = await serve(engine)
    async with client(url) as api:
        counted = await api.messages.count_tokens(model="fake", messages=ASK["messages"])
    assert engine.requests == []
    async with session.post("/v1/messages", json=ASK) as reply:
        await reply.read()
    assert counted.input_tokens == len(engine.requests[0].prompt)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"if": {}}}}},
            "output_config.format.schema",
        ),
    ],
)
async def test_errors_are_anthropics(serve: Serve, change: dict[str, Any], named: str) -> None:
    session, _ = await serve(FakeEngine())
    async with session.post("/v1/messages", json={**ASK, **change}) as reply:
        body = await reply.json()
        assert reply.status == 400
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert named in body["error"]["message"]


async def test_a_schema_for_the_output_becomes_a_grammar(serve: Serve) -> None:
    engine = FakeEngine()
    session, _ = await serve(engine)
    config = {"format": {"type": "json_schema", "schema": {"type": "integer"}}}
    async with session.post("/v1/messages", json={**ASK, "output_config": config}) as reply:
        assert reply.status == 200
    assert engine.requests[0].sampling.grammar


async def test_error_in_mid_stream_is_an_error_event(serve: Serve) -> None:
    _, url = await serve(FakeEngine(["Hello", BackendError("decode failed")]))
    async with client(url) as api:
        stream = await api.messages.create(**ASK, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="decode failed"):
            async for _ in stream:
                pass
