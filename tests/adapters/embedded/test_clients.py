"""Official clients against the application on the real engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import anthropic
import ollama
import openai
import pytest
from aiohttp import web

from specproxy.adapters.embedded.app import build_app, serve_site
from tests.support.calibrated import CalibratedPair

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(120)]
ASK: Any = [{"role": "user", "content": "Please: <|json:0|>"}]
TOOL = {
    "name": "look_up",
    "parameters": {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]},
}


@pytest.fixture
async def url(pair: CalibratedPair) -> AsyncIterator[str]:
    """Where the engine listens."""
    from specproxy.adapters.embedded.engine import LlamaEngine
    from specproxy.adapters.embedded.options import EngineOptions

    engine = LlamaEngine(EngineOptions(pair.target, pair.draft, name="tiny", context=1024, threads=1))
    runner = await serve_site(build_app(engine), lambda r: web.TCPSite(r, "127.0.0.1", 0))
    # the model's own template has no tools; ChatML, which stands in for a missing one, has
    engine.card = replace(engine.card, chat_template=None)
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_openai(url: str, pair: CalibratedPair) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        plain = await client.completions.create(
            model="tiny", prompt=pair.marker("json"), max_tokens=20, temperature=0
        )
        assert plain.choices[0].text == pair.text("json", 20)
        assert plain.usage is not None
        assert plain.usage.completion_tokens == 20
        chat: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 12, "temperature": 0}
        whole = await client.chat.completions.create(**chat, logprobs=True, top_logprobs=2)
        stream = await client.chat.completions.create(
            **chat, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 12
        assert whole.choices[0].logprobs is not None
        entries = whole.choices[0].logprobs.content
        assert entries is not None
        assert "".join(entry.token for entry in entries) == text
        assert all(entry.top_logprobs[0].logprob == pytest.approx(entry.logprob) for entry in entries)
        response = await client.responses.create(model="tiny", input=ASK, max_output_tokens=12, temperature=0)
        assert response.output_text == text


async def test_openai_choices_in_parallel_are_reproducible(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        made = [
            await client.chat.completions.create(
                model="tiny", messages=ASK, n=3, max_tokens=8, seed=5, temperature=1.5
            )
            for _ in range(2)
        ]
    first, second = ([choice.message.content for choice in one.choices] for one in made)
    assert first == second


async def test_openai_schemas_and_tools_bind(url: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tools: Any = [{"type": "function", "function": TOOL}]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        made = await client.chat.completions.create(
            model="tiny", messages=ASK, response_format=form, max_tokens=200
        )
        value = json.loads(made.choices[0].message.content or "")
        assert value["a"] in (1, 2)
        assert value["b"] in (True, False)
        called = await client.chat.completions.create(
            model="tiny",
            messages=ASK,
            tools=tools,
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=200,
        )
        assert called.choices[0].finish_reason == "tool_calls"
        call: Any = (called.choices[0].message.tool_calls or [])[0]
        assert call.function.name == "look_up"
        assert json.loads(call.function.arguments)["n"] <= 9


async def test_openai_errors(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="tiny", prompt=[300] * 2000)
        error: Any = caught.value.body
        assert error["type"] == "exceed_context_size_error"
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (2000, 1024)
        with pytest.raises(openai.BadRequestError, match="grammar"):
            await client.completions.create(model="tiny", prompt="x", extra_body={"grammar": "root ::= ("})


async def test_ollama(url: str) -> None:
    client = ollama.AsyncClient(url)
    fixed: Any = {"temperature": 0, "num_predict": 10}
    whole = await client.chat("tiny", ASK, options=fixed)
    parts = [part async for part in await client.chat("tiny", ASK, options=fixed, stream=True)]
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert whole.eval_count == parts[-1].eval_count == 10
    assert (whole.eval_duration or 0) > 0
    made = await client.generate(
        "tiny", "x", format={"type": "integer", "maximum": 5, "minimum": 1}, options=fixed
    )
    assert 1 <= int(made.response) <= 5
    assert len((await client.embed("tiny", "x")).embeddings[0]) == 128
    await client.generate("tiny", keep_alive=0)
    assert (await client.ps()).models == []
    assert (await client.chat("tiny", ASK, options=fixed)).message.content == whole.message.content
    await client._client.aclose()


async def test_anthropic(url: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        chat: Any = {"model": "tiny", "messages": ASK, "max_tokens": 10, "extra_body": {"temperature": 0}}
        whole = await client.messages.create(**chat)
        async with client.messages.stream(**chat) as stream:
            assert await stream.get_final_text() == whole.content[0].text
        tool: Any = {"name": "look_up", "input_schema": TOOL["parameters"]}
        called = await client.messages.create(
            model="tiny",
            messages=ASK,
            max_tokens=200,
            tools=[tool],
            tool_choice={"type": "tool", "name": "look_up"},
        )
        assert called.stop_reason == "tool_use"
        assert called.content[-1].input["n"] <= 9


async def test_requests_run_side_by_side(url: str, pair: CalibratedPair) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        async def text(start: int, strategy: str) -> str:
            made = await client.completions.create(
                model="tiny", prompt=pair.marker("json", start), max_tokens=30, temperature=0,
                extra_headers={"X-Specproxy-Engine-Strategy": strategy},
            )  # fmt: skip
            return made.choices[0].text

        strategies = ("plain", "ngram:5", "draft", "mtp")
        texts = await asyncio.gather(*(text(i, s) for i, s in enumerate(strategies)))
    assert texts == [pair.text("json", 30, start) for start in range(4)]
