"""The fake Ollama says what Ollama says: the same checks run on a real one if SPECPROXY_TEST_OLLAMA names its
binary (with its llama-server in the usual place beside it)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from specproxy.adapters.ask import post_json
from specproxy.adapters.base import ProbeResult
from specproxy.adapters.gguf_facts import read_facts
from specproxy.adapters.http import Endpoint, HttpTransport
from specproxy.adapters.managed import ManagedOptions, plan_managed
from specproxy.adapters.ollama_serve import ManagedOllama, plan_ollama
from specproxy.adapters.probe import Prober
from specproxy.adapters.twin import Twin
from specproxy.adapters.twin_ollama import compare_prompts, overrides, refusal
from specproxy.records import Health, Lane
from tests.adapters.test_go_template import MADE, TALK
from tests.support.calibrated import CalibratedPair
from tests.support.fakes import Fake, fake_ollama, ollama_model
from tests.support.ports import free_port, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]

REAL = os.environ.get("SPECPROXY_TEST_OLLAMA")
CONTEXT = 1024
COMMANDS = {
    "bare": "",
    "told": 'SYSTEM """You are\nADAPTER to none\n"""\n',
    "tuned": 'PARAMETER top_k 20\nPARAMETER stop "x y"\nPARAMETER stop <|z|>\nPARAMETER draft_num_predict 3\n',
}
SHOWN = {
    "bare": "",
    "told": 'SYSTEM "You are\nADAPTER to none\n"\n',
    "tuned": "PARAMETER draft_num_predict 3\nPARAMETER stop x y\nPARAMETER stop <|z|>\nPARAMETER top_k 20\n",
}
"""What ``/api/show`` makes of them, as the fake says it."""


@pytest.fixture(scope="module")
def real(pair: CalibratedPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Ollama with the three models; its URL."""
    assert REAL is not None
    home, url = tmp_path_factory.mktemp("ollama"), f"127.0.0.1:{free_port()}"
    env = os.environ | {
        "HOME": str(home), "OLLAMA_HOST": url, "OLLAMA_MODELS": str(home / "models"),
        "OLLAMA_CONTEXT_LENGTH": str(CONTEXT),
    }  # fmt: skip
    with subprocess.Popen(
        [REAL, "serve"], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as child:
        try:
            wait_for(f"http://{url}/api/version")
            for name, commands in COMMANDS.items():
                (home / "Modelfile").write_text(f"FROM {pair.target}\n{commands}")
                command = [REAL, "create", name, "-f", str(home / "Modelfile")]
                subprocess.run(command, env=env, check=True, capture_output=True, timeout=60)
            yield f"http://{url}"
        finally:
            child.terminate()


def fake(pair: CalibratedPair) -> Fake:
    """The fake with the same models; the first one that is used is loaded, and serves for the others."""
    models = [ollama_model(f"{name}:latest", capabilities=["completion"]) for name in COMMANDS]
    server = fake_ollama(*models)

    def show(body: dict[str, str]) -> object:
        name = body["model"].removesuffix(":latest")
        return {
            "modelfile": f"# comment\n\nFROM {pair.target}\nTEMPLATE {{{{ .Prompt }}}}\n{SHOWN[name]}",
            "model_info": {
                "general.architecture": "glm4moe",
                "general.parameter_count": 2_232_194,
                "glm4moe.expert_count": 2,
                "glm4moe.expert_used_count": 1,
                "glm4moe.nextn_predict_layers": 1,
            },
            "capabilities": ["completion"],
        }

    def chat(body: dict[str, object]) -> object:
        name = str(body["model"]).removesuffix(":latest")
        if not server.routes["GET /api/ps"]["models"]:
            server.routes["GET /api/ps"] = {"models": [{"name": f"{name}:latest", "context_length": CONTEXT}]}
        messages = body["messages"]
        assert isinstance(messages, list)
        told = "You are\nADAPTER to none\n" if name == "told" and messages[0]["role"] != "system" else ""
        prompt = told + "".join(message["content"] for message in messages)
        return {"message": {"role": "assistant", "content": ""}, "_debug_info": {"rendered_template": prompt}}

    server.routes |= {"POST /api/show": show, "POST /api/chat": chat}
    return server


@pytest.fixture(
    params=["fake", pytest.param("real", marks=pytest.mark.skipif(REAL is None, reason="no Ollama"))]
)
async def url(request: pytest.FixtureRequest, pair: CalibratedPair) -> AsyncIterator[str]:
    if request.param == "real":
        yield request.getfixturevalue("real")
        return
    async with fake(pair) as server:
        yield server.url


async def chat(url: str, model: str) -> object:
    """The prompt that is made of a greeting."""
    transport = HttpTransport(Endpoint.parse(url))
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": model, "messages": messages, "stream": False, "_debug_render_only": True}
    try:
        _, reply = await post_json(transport.open, "/api/chat", body, timeout_s=30)
    finally:
        await transport.aclose()
    assert isinstance(reply, dict)
    assert reply["message"]["content"] == ""
    return reply["_debug_info"]["rendered_template"]


async def models(url: str) -> ProbeResult:
    found = await Prober(answer_s=10, whole_s=20)(url)
    assert (found.reachable, found.kind) == (True, "ollama")
    return found


async def test_models_are_read(url: str, pair: CalibratedPair) -> None:
    """Files, layers, parameters and drafts of each; nothing is read out of a system message."""
    served = {model.name: model for model in (await models(url)).served}
    assert sorted(served) == ["bare:latest", "told:latest", "tuned:latest"]
    bare = served["bare:latest"]
    assert (bare.weights, bare.experts, bare.experts_used, bare.mtp_layers) == (2_232_194, 2, 1, 1)
    assert (bare.adapted, bare.drafting, bare.unrouted, bare.parameters) == (False, False, "", ())
    assert bare.capabilities == {"completion"}
    kept, given = read_facts(Path(bare.path)), read_facts(pair.target)  # Ollama writes the file again
    assert (kept.parameters, kept.weight_bytes, kept.mtp_layers) == (given.parameters, given.weight_bytes, 1)
    assert len({model.digest for model in served.values()}) == 3
    same = {"digest": "", "loaded": False, "ctx": None}
    assert replace(served["told:latest"], name="bare:latest", **same) == replace(bare, **same)
    tuned = served["tuned:latest"]
    assert tuned.drafting
    assert set(tuned.parameters) == {
        ("top_k", "20"), ("stop", "x y"), ("stop", "<|z|>"), ("draft_num_predict", "3"),
    }  # fmt: skip
    assert refusal(tuned, "0.33.0") == ""
    assert dict(overrides(tuned))["stop"] == ("x y", "<|z|>")


async def test_prompts_are_shown_without_an_answer(url: str) -> None:
    """With the model's own system message; the model is loaded for that."""
    assert await chat(url, "bare") == "hello"
    assert await chat(url, "told") == "You are\nADAPTER to none\nhello"
    loaded = [model for model in (await models(url)).served if model.loaded]
    assert [(model.name, model.ctx) for model in loaded] == [
        ("bare:latest", CONTEXT)
    ]  # one process for one file


async def test_lanes_make_the_same_prompts_or_are_refused(url: str, pair: CalibratedPair) -> None:
    """By a real llama-server on the same file."""
    backend = plan_managed(ManagedOptions(pair.target, threads=1, ctx=512, strategies=("plain",))).backend()
    await backend.start()
    try:
        served = {model.name: model for model in (await models(url)).served}
        twins = {
            name: await compare_prompts(url, served[f"{name}:latest"], backend.address("plain"))
            for name in COMMANDS
        }
    finally:
        await backend.aclose()
    assert twins["bare"] == Twin(overrides=overrides(served["bare:latest"]))
    assert twins["tuned"].reason == ""
    assert "other prompts" in twins["told"].reason


@pytest.mark.skipif(REAL is None, reason="no Ollama; tests/adapters/test_ollama_serve.py has a stub")
async def test_further_ollamas_say_the_same_and_draft(real: str, pair: CalibratedPair, tmp_path: Path) -> None:
    """On Ollama's own routes and OpenAI's, as their environment tells llama-server; the log tells drafts."""
    assert REAL is not None
    served = {model.name: model for model in (await models(real)).served}
    bare = replace(served["bare:latest"], ctx=CONTEXT)
    options = ManagedOptions(Path(bare.path), exclude=("plain",), threads=1, log_dir=tmp_path)
    async with ClientSession(real) as session, session.get("/api/version") as reply:
        version = (await reply.json())["version"]  # what is built from source calls itself 0.0.0
    backend = plan_ollama(options, Path(REAL), bare, version, None).backend()
    wanted = pair.text("json", 24, 3)
    await backend.start()
    try:
        await backend.settled()
        ready = {s.lane.id: s.lane for s in backend.lanes() if s.health is Health.READY}
        assert set(ready) == {"ngram-simple", "mtp"}, backend.lanes()
        messages = [{"role": "user", "content": pair.marker("json", 3)}]
        native = {"model": "bare", "messages": messages, "stream": False}
        native["options"] = {"temperature": 0, "num_predict": 24}
        other = {"model": "bare", "messages": messages, "temperature": 0, "max_tokens": 24}
        for lane in ready.values():
            reply = await ask_lane(backend, lane, "/api/chat", native)
            assert reply["message"]["content"] == wanted, lane.id
            reply = await ask_lane(backend, lane, "/v1/chat/completions", other)
            assert reply["choices"][0]["message"]["content"] == wanted, lane.id
            assert ("draft acceptance" in backend.output(lane.id)) is (lane.id == "mtp")
    finally:
        await backend.aclose()


async def ask_lane(backend: ManagedOllama, lane: Lane, path: str, body: object) -> Any:
    """One request on a lane."""
    _, reply = await post_json(
        lambda request, sink: backend.open(request, lane, sink), path, body, timeout_s=60
    )
    return reply


@pytest.mark.skipif(REAL is None, reason="no Ollama, and the fake makes no models")
async def test_templates_make_what_ollama_makes_of_them(real: str) -> None:
    """All that tests/adapters/test_go_template.py expects."""
    transport = HttpTransport(Endpoint.parse(real))
    try:
        for source, text in MADE:
            new = {"model": "templated", "from": "bare", "template": source, "stream": False}
            await post_json(transport.open, "/api/create", new, timeout_s=30)
            body = {"model": "templated", "messages": TALK, "stream": False, "_debug_render_only": True}
            status, reply = await post_json(transport.open, "/api/chat", body, timeout_s=30)
            made = reply["_debug_info"]["rendered_template"] if status == 200 else None
            assert made == text or (text is None and "%!" in str(made)), source
        await post_json(transport.open, "/api/delete", {"model": "templated"}, timeout_s=30)
    finally:
        await transport.aclose()


@pytest.mark.skipif(REAL is None, reason="no Ollama, and the fake makes no models")
async def test_a_copy_that_uses_mtp_layers_is_made_as_advised(real: str) -> None:
    """The request that the advice gives is one that Ollama accepts, and the copy drafts."""
    transport = HttpTransport(Endpoint.parse(real))
    body = {"model": "bare-mtp", "from": "bare", "parameters": {"draft_num_predict": 3}, "stream": False}
    try:
        status, reply = await post_json(transport.open, "/api/create", body, timeout_s=30)
        assert (status, reply) == (200, {"status": "success"})
        made = {model.name: model for model in (await models(real)).served}["bare-mtp:latest"]
        await post_json(transport.open, "/api/delete", {"model": "bare-mtp"}, timeout_s=30)
    finally:
        await transport.aclose()
    assert made.drafting
