"""Lanes beside Ollama: a fake one, whose blob is a calibrated model; the lanes are real llama-servers."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.calibrated import CalibratedPair
from tests.support.command import clean_env, get, started
from tests.support.fakes import Fake, fake_ollama, ollama_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(60)]

READY = {"m:latest": "ready", "ngram": "ready", "mtp": "ready"}


def ollama(pair: CalibratedPair, modelfile: str = "", loaded: bool = True) -> Fake:
    show = {"modelfile": f"FROM {pair.target}\n{modelfile}", "model_info": {}, "capabilities": ["completion"]}
    model = ollama_model("m:latest", capabilities=["completion"])
    return fake_ollama(model, loaded={"m:latest": 1024} if loaded else {}, show=show)


async def until(url: str, condition: Any) -> dict[str, Any]:
    """The status once a condition on it holds; the test's own time-out ends a wait in vain."""
    while True:
        data: dict[str, Any] = await asyncio.to_thread(get, f"{url}/specproxy/api/status")
        if condition(data):
            return data
        await asyncio.sleep(0.05)


def health(data: dict[str, Any]) -> dict[str, str]:
    return {lane["id"]: lane["health"] for lane in data["lanes"]}


def post(url: str, path: str, body: dict[str, Any], pin: str = "") -> tuple[str, dict[str, Any]]:
    """The lane that answered, and its answer."""
    request = urllib.request.Request(f"{url}{path}", data=json.dumps({"stream": False, **body}).encode())
    if pin:
        request.add_header("X-Specproxy-Strategy", pin)
    with urllib.request.urlopen(request, timeout=30) as reply:
        return reply.headers["X-Specproxy-Lane"], json.load(reply)


async def test_openai_chats_run_beside_ollama_and_the_rest_on_it(pair: CalibratedPair, tmp_path: Path) -> None:
    """Same name, the model's own stop, and Ollama's routes untouched."""
    marker, words = pair.marker("prose", 3), pair.text("prose", 20, 3)
    stop = words.split(" ")[6]
    async with ollama(pair, f"PARAMETER stop {stop}\n") as server:
        with started(clean_env(tmp_path), "--upstream", server.url, "--manage", "--threads", "1") as (_, url):
            data = await until(url, lambda data: health(data) == READY)
            assert data["rung"]["number"] == 2
            chat = {
                "model": "m",
                "messages": [{"role": "user", "content": marker}],
                "temperature": 0,
                "max_tokens": 20,
            }
            lane, reply = await asyncio.to_thread(post, url, "/v1/chat/completions", chat, "mtp")
            assert (lane, reply["model"]) == ("mtp", "m")
            assert reply["choices"][0]["message"]["content"] == words[: words.index(stop)]
            assert reply["choices"][0]["finish_reason"] == "stop"
            lane, reply = await asyncio.to_thread(post, url, "/api/chat", chat)
            assert (lane, reply["message"]["content"]) == ("m:latest", "from ollama")


async def test_a_model_that_is_not_loaded_gets_no_lanes_yet(pair: CalibratedPair, tmp_path: Path) -> None:
    """They come with the first use, and stay when Ollama puts the model out of memory."""
    async with ollama(pair, loaded=False) as server:
        with started(clean_env(tmp_path), "--upstream", server.url, "--manage", "--threads", "1") as (_, url):
            data = await until(url, lambda data: data["rung"] is not None)
            assert (data["rung"]["number"], health(data)) == (4, {"m:latest": "ready"})
            assert "no model loaded" in data["rung"]["why"]
            idle, server.routes["GET /api/ps"] = (
                server.routes["GET /api/ps"],
                {"models": [{"name": "m:latest"}]},
            )
            await until(url, lambda data: health(data) == READY)
            server.routes["GET /api/ps"] = idle
            looks = server.asked.count("GET /api/ps")
            while server.asked.count("GET /api/ps") < looks + 2:  # noqa: ASYNC110 - another process looks
                await asyncio.sleep(0.05)
            assert health(await until(url, lambda data: True)) == READY


async def test_a_model_with_another_prompt_is_left_alone(pair: CalibratedPair, tmp_path: Path) -> None:
    """The reason is shown; no lane is offered, not even for a moment."""
    async with ollama(pair) as server:
        server.routes["POST /api/chat"] = {"_debug_info": {"rendered_template": "something else"}}
        with started(clean_env(tmp_path), "--upstream", server.url, "--manage", "--threads", "1") as (
            child,
            url,
        ):
            data = await until(url, lambda data: data["rung"] and "other prompts" in data["rung"]["why"])
            assert health(data) == {"m:latest": "ready"}
            child.terminate()
            out, _ = await asyncio.to_thread(child.communicate, timeout=20)
            assert '"lane": "ngram"' not in out
