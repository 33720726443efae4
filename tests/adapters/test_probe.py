"""What a probe makes of the servers that people run. All of them are fakes; a real llama-server is in
tests/engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from specproxy.adapters.base import ProbeResult, ServedModel
from specproxy.adapters.probe import Prober
from tests.support.fake_mlx_vlm import FakeMlxVlm
from tests.support.fakes import (
    LOADING,
    Fake,
    fake_llama_server,
    fake_llama_swap,
    fake_ollama,
    llama_props,
    ollama_model,
)
from tests.support.ports import free_port
from tests.support.upstream import Conn, Upstream

SHOW = {
    "modelfile": """# FROM x

FROM /blobs/sha256-1
DRAFT /blobs/sha256-2
FROM /blobs/sha256-3
TEMPLATE "a
ADAPTER /in/a/template
"
SYSTEM \"\"\"say "b"
DRAFT /in/a/system/message
\"\"\"
PARAMETER stop <|im_end|>
PARAMETER stop " x"
PARAMETER top_k 20
MESSAGE user "c
ADAPTER /in/a/message"
""",
    "model_info": {
        "general.architecture": "qwen35moe",
        "general.parameter_count": 8_000_000_000,
        "qwen35moe.expert_count": 128,
        "qwen35moe.expert_used_count": 8,
        "qwen35moe.nextn_predict_layers": 1,
    },
    "capabilities": ["completion", "tools"],
}  # fmt: skip


async def look(server: Fake) -> ProbeResult:
    async with server:
        return await Prober()(server.url)


async def test_llama_server_says_what_it_runs() -> None:
    """File, context, slots, modalities and the live drafter."""
    found = await look(fake_llama_server(speculative=True))
    assert (found.reachable, found.kind, found.version) == (True, "llama-server", "b11549-abc")
    assert found.models == ("m",)
    assert found.served == (
        ServedModel(
            "m",
            path="/models/m.gguf",
            ctx=2048,
            slots=2,
            drafting=True,
            weights=7,
            capabilities=frozenset({"vision"}),
        ),
    )


async def test_a_process_is_asked_for_its_slots_once() -> None:
    """Asking wakes a server that sleeps; another process is asked again, a sleeping one is not."""
    probe = Prober()
    async with fake_llama_server(speculative=True) as server:
        await probe(server.url)
        found = await probe(server.url)
        assert server.asked.count("GET /slots") == 1
        assert found.served[0].drafting is True
        server.routes["GET /props"] = llama_props(media_marker="<__media_2__>", is_sleeping=True)
        assert (await probe(server.url)).served[0].drafting is None
        assert server.asked.count("GET /slots") == 1
        server.routes["GET /props"] = llama_props(media_marker="<__media_2__>")
        server.routes["GET /slots"] = [{"speculative": False}]
        assert (await probe(server.url)).served[0].drafting is False


def broken(_body: object) -> None:
    """A route that breaks the connection off."""
    raise ConnectionError


async def test_slots_that_were_not_told_are_asked_for_again() -> None:
    """A server that breaks off there, as it does while it ends, is not taken for one that does not draft."""
    probe = Prober()
    async with fake_llama_server(speculative=True) as server:
        told, server.routes["GET /slots"] = server.routes["GET /slots"], broken
        found = await probe(server.url)
        assert (found.reachable, found.silent) == (False, True)
        server.routes["GET /slots"] = told
        assert (await probe(server.url)).served[0].drafting is True


async def test_a_server_that_goes_while_it_is_looked_at_is_away() -> None:
    """Refused at its slots means that it has gone, not that it is busy."""
    async with fake_llama_server(speculative=True) as server:

        def gone(body: object) -> None:
            server._server.close()  # type: ignore[union-attr]  # it listens
            broken(body)

        server.routes["GET /slots"] = gone
        found = await Prober()(server.url)
        assert (found.reachable, found.silent) == (False, False)


async def test_a_llama_server_that_loads_is_one() -> None:
    """Every route answers 503 meanwhile."""
    loading = {f"GET {path}": (503, LOADING) for path in ("/v1/models", "/props", "/api/version")}
    found = await look(Fake(loading))
    assert (found.reachable, found.kind, found.loading, found.served) == (True, "llama-server", True, ())


async def test_a_llama_server_behind_a_key_is_known_by_its_models() -> None:
    """Its list of models is public, its properties are not."""
    server = fake_llama_server()
    server.routes["GET /props"] = (401, {"error": {"message": "Invalid API Key"}})
    found = await look(server)
    assert (found.kind, found.models, found.served[0].path) == ("llama-server", ("m",), "")
    server.routes["GET /v1/models"] = server.routes["GET /props"]
    found = await look(server)  # with --api-prefix the list is not public either
    assert (found.kind, found.models) == ("llama-server", ())


async def test_ollama_tells_models_apart() -> None:
    """Loaded ones come first; what is not ours to route is said; files and layers come from /api/show."""
    server = fake_ollama(
        ollama_model("a:latest"),
        ollama_model("embed", capabilities=["embedding"]),
        ollama_model("big:cloud", remote_host="https://ollama.com"),
        ollama_model("mlx", details={"format": "safetensors"}),
        ollama_model("b:8b"),
        loaded={"b:8b": 4096},
        show=SHOW,
    )
    found = await look(server)
    assert (found.kind, found.version) == ("ollama", "0.33.0")
    assert found.models == ("b:8b", "a:latest", "embed", "big:cloud", "mlx")
    by_name = {model.name: model for model in found.served}
    assert {name: model.unrouted for name, model in by_name.items()} == {
        "b:8b": "",
        "a:latest": "",
        "embed": "it generates no text",
        "big:cloud": "it runs in the cloud",
        "mlx": "it runs on MLX, which chooses its draft length itself",
    }
    assert by_name["b:8b"] == ServedModel(
        "b:8b",
        path="/blobs/sha256-1",
        draft="/blobs/sha256-2",
        digest="digest-of-b:8b",
        ctx=4096,
        drafting=True,
        weights=8_000_000_000,
        experts=128,
        experts_used=8,
        mtp_layers=1,
        capabilities=frozenset({"completion", "tools"}),
        parameters=(("stop", "<|im_end|>"), ("stop", " x"), ("top_k", "20")),
    )
    assert not by_name["a:latest"].loaded
    assert server.asked.count("POST /api/show") == 2  # only what can be routed


async def test_a_model_with_an_adapter_is_known() -> None:
    """A LoRA makes another model of the same file."""
    found = await look(fake_ollama(ollama_model("a"), show={"modelfile": "FROM /m\nADAPTER /lora\n"}))
    assert found.served[0].adapted


@pytest.mark.parametrize(
    ("modelfile", "drafting"),
    [
        ("FROM /m\n", False),
        ("FROM /m\nPARAMETER draft_num_predict 3\n", True),
        ("FROM /m\nDRAFT /d\n", True),
        ("FROM /m\nDRAFT /d\nPARAMETER draft_num_predict 0\n", False),
    ],
)
async def test_when_ollama_drafts(modelfile: str, drafting: bool) -> None:
    """With a DRAFT file unless told not to, with MTP layers only if told to."""
    found = await look(fake_ollama(ollama_model("a"), show=SHOW | {"modelfile": modelfile}))
    assert found.served[0].drafting is drafting


async def test_an_ollama_model_is_asked_about_once() -> None:
    """Until its digest changes; whether it is loaded is looked at each time."""
    probe = Prober()
    async with fake_ollama(ollama_model("a"), loaded={"a": 4096}, show=SHOW) as server:
        await probe(server.url)
        server.routes["GET /api/ps"] = {"models": []}
        found = await probe(server.url)
        assert (found.served[0].loaded, found.served[0].path) == (False, "/blobs/sha256-1")
        assert server.asked.count("POST /api/show") == 1
        server.routes["GET /api/tags"] = {"models": [ollama_model("a", digest="other")]}
        await probe(server.url)
        assert server.asked.count("POST /api/show") == 2


def owned_by(owner: str) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": "m", "owned_by": owner}]}


LISTED = owned_by("somebody")
STUDIO = {"data": [{"id": "m", "type": "llm", "compatibility_type": "gguf", "state": "loaded"}]}


@pytest.mark.parametrize(
    ("routes", "kind", "version"),
    [
        ({"GET /v1/models": LISTED}, "openai", ""),
        ({"GET /v1/models": LISTED, "GET /api/v0/models": STUDIO}, "lmstudio", ""),
        ({"GET /v1/models": owned_by("vllm"), "GET /version": {"version": "0.20"}}, "vllm", "0.20"),
        ({"GET /v1/models": owned_by("sglang")}, "sglang", ""),
        ({"GET /v1/models": LISTED, "GET /api/version": {"version": "1"}}, "openai", ""),
        ({}, "unknown", ""),
        ({"GET /v1/models": "none", "GET /props": ["odd"], "GET /api/version": {"version": 7}}, "unknown", ""),
    ],
)
async def test_other_servers(routes: dict[str, Any], kind: str, version: str) -> None:
    """By what they answer; odd answers are no reason to fail."""
    found = await look(Fake(routes))
    assert (found.reachable, found.kind, found.version) == (True, kind, version)
    assert found.models == (("m",) if kind != "unknown" else ())


async def test_mlx_vlm_is_known_by_what_it_says_of_its_health() -> None:
    """It names nobody as the owner of its models."""
    async with FakeMlxVlm("d") as server:
        found = await Prober()(server.url)
    assert (found.kind, found.served) == ("mlx-vlm", (ServedModel("m"),))


async def test_llama_swap_is_no_ollama() -> None:
    """Although it tells a version at the same address; no model is loaded to look at it."""
    server = fake_llama_swap("a", "b", loaded="b")
    found = await look(server)
    assert (found.reachable, found.kind, found.version) == (True, "llama-swap", "250")
    assert found.served == (ServedModel("a", loaded=False), ServedModel("b"))
    assert set(server.asked) == {"GET /v1/models", "GET /props", "GET /api/version"}


async def test_nobody_is_unreachable() -> None:
    """A refused connection is not silence."""
    assert await Prober()(f"http://127.0.0.1:{free_port()}") == ProbeResult(False)


async def test_a_server_that_does_not_answer_holds_nobody_up() -> None:
    """It is silent, within the bound for all questions together."""
    async with Upstream(Conn.gone) as server:
        async with asyncio.timeout(5):
            assert await Prober(answer_s=0.05)(server.url) == ProbeResult(False, silent=True)
            assert await Prober(whole_s=0.05)(server.url) == ProbeResult(False, silent=True)


async def test_half_an_answer_is_none() -> None:
    """An Ollama that names no models for once has not lost them."""
    server = fake_ollama(ollama_model("a"))
    server.routes["GET /api/tags"] = (500, {"error": "busy"})
    assert await look(server) == ProbeResult(False, silent=True)
