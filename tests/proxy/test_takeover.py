"""Running a model in Ollama's place: what is asked of Ollama, and what it is compared with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specproxy.config import Settings
from specproxy.errors import ConfigError
from specproxy.records import Dialect
from tests.support.calibrated import CalibratedPair, write_pair
from tests.support.fakes import Fake
from tests.support.ports import free_port

pytest.importorskip("jinja2")
from specproxy.proxy import takeover
from specproxy.proxy.embedded import AS_OLLAMA, _names
from specproxy.proxy.takeover import take_over

KIND = "application/vnd.ollama.image."


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> CalibratedPair:
    return write_pair(tmp_path_factory.mktemp("pair"), seed=7)


@pytest.fixture
def store(pair: CalibratedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ollama's folder with a model ``m`` that has a TEMPLATE and a SYSTEM; no Ollama at the usual place."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / "sha256-m").symlink_to(pair.target)
    (blobs / "sha256-t").write_text("{{ .System }}|{{ .Prompt }}")
    (blobs / "sha256-s").write_text("Be Bob.")
    layers = {"model": "m", "template": "t", "system": "s"}
    listed = [{"mediaType": KIND + kind, "digest": f"sha256:{name}"} for kind, name in layers.items()]
    manifest = tmp_path / "manifests" / "registry.ollama.ai" / "library" / "m" / "latest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": listed}))
    monkeypatch.setattr(takeover, "store_folders", lambda: (tmp_path,))
    monkeypatch.setattr(takeover, "USUAL_URL", f"http://127.0.0.1:{free_port()}")
    return tmp_path


def ollama(render: Any) -> Fake:
    """An Ollama that shows prompts, as `render` makes them of what a client sends."""

    def chat(body: Any) -> Any:
        return {"_debug_info": {"rendered_template": render(body["messages"])}}

    return Fake({"POST /api/show": {}, "POST /api/chat": chat, "POST /api/generate": {"done": True}})


def as_the_template_does(messages: list[dict[str, str]]) -> str:
    """``{{ .System }}|{{ .Prompt }}`` with the model's own system message."""
    out, system, prompt, said = "", "", "", ""
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": "Be Bob."}, *messages]
    for message in messages:
        if message["role"] == "system":
            system = message["content"]
        elif message["role"] == "user":
            if said:
                out, system, prompt, said = f"{out}{system}|{prompt}{said}", "", "", ""
            prompt = message["content"]
        else:
            said = message["content"]
    return f"{out}{system}|{prompt}{said}"


async def test_ollama_is_asked_what_it_makes_and_to_let_go(store: Path) -> None:
    """The prompts of a few chats, and then the model is put out of memory; nothing is generated."""
    async with ollama(as_the_template_does) as server:
        setup = await take_over(Settings(model="m", upstream=(server.url,)))
        assert (setup.template, setup.system, setup.model.name) == (
            "{{ .System }}|{{ .Prompt }}",
            "Be Bob.",
            "sha256-m",
        )
        assert server.asked[0] == "POST /api/show"
        assert server.asked[-1] == "POST /api/generate"
        assert server.bodies[-1] == {"model": "m", "keep_alive": 0}
        assert all(body["_debug_render_only"] for body in server.bodies[1:-1])


async def test_other_prompts_than_ollamas_are_a_refusal(store: Path) -> None:
    """With the reason; the model is not run."""
    async with ollama(lambda messages: "something else") as server:
        with pytest.raises(ConfigError, match="the prompts that Ollama makes are others"):
            await take_over(Settings(model="m", upstream=(server.url,)))


async def test_without_an_ollama_the_files_have_to_do(store: Path) -> None:
    """Nobody there, or nobody who has the model or shows prompts."""
    setup = await take_over(Settings(model="m"))
    assert setup.template == "{{ .System }}|{{ .Prompt }}"
    async with Fake({}) as server:
        assert await take_over(Settings(model="m", upstream=(server.url,))) == setup
        assert server.asked == ["POST /api/show"]
    async with Fake({"POST /api/show": {}, "POST /api/chat": {}, "POST /api/generate": {}}) as server:
        assert await take_over(Settings(model="m", upstream=(server.url,))) == setup
        assert server.bodies[-1] == {"model": "m", "keep_alive": 0}


def test_names_as_clients_write_them() -> None:
    """With and without the tag that is the default."""
    assert _names(("m",)) == _names(("m:latest",)) == {"m", "m:latest"}
    assert _names(("m:8b",)) == {"m:8b"}
    assert _names(("localhost:5000/a/m",)) == {"localhost:5000/a/m", "localhost:5000/a/m:latest"}


def test_plain_completions_stay_on_ollama() -> None:
    """It writes them into the model's template, which the engine does not."""
    assert set(Dialect) - AS_OLLAMA == {Dialect.OPENAI_COMPLETIONS}
