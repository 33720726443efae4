"""What a model sets besides its weights: read from Ollama's folder, and honoured or refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specproxy.adapters.ollama_setup import PROBES, Message, ModelSetup, read_setup, settle
from specproxy.errors import ConfigError

KIND = "application/vnd.ollama.image."


def put(store: Path, config: dict[str, Any] | None = None, **layers: Any) -> Path:
    """A model ``m`` with these layers (texts, or data that is written as JSON); its file."""
    blobs = store / "blobs"
    blobs.mkdir(parents=True)
    listed = []

    def blob(content: Any) -> str:
        digest = f"sha256-{len(list(blobs.iterdir()))}"
        (blobs / digest).write_text(content if isinstance(content, str) else json.dumps(content))
        return digest.replace("-", ":")

    for kind, content in {"model": "GGUF", **layers}.items():
        listed.append({"mediaType": KIND + kind, "digest": blob(content)})
    manifest = store / "manifests" / "registry.ollama.ai" / "library" / "m" / "latest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": listed, "config": {"digest": blob(config or {})}}))
    return blobs / "sha256-0"


def test_everything_is_read(tmp_path: Path) -> None:
    model = put(
        tmp_path,
        {"renderer": "", "model_format": "gguf"},
        template="{{ .Prompt }}",
        system="Be Bob.",
        params={"temperature": 0, "stop": ["a", "b"], "num_ctx": 4096, "num_gpu": 3, "top_k": 5.0},
        messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
        license="MIT",
    )
    setup = read_setup("m", [tmp_path])
    assert (setup.model, setup.template, setup.system, setup.ctx) == (model, "{{ .Prompt }}", "Be Bob.", 4096)
    assert setup.messages == (("user", "hi"), ("assistant", "ho"))
    assert dict(setup.parameters) == {"temperature": 0.0, "stop": ["a", "b"], "top_k": 5}
    assert setup.builtin == ""


def test_a_bare_model_sets_nothing(tmp_path: Path) -> None:
    model = put(tmp_path)
    assert read_setup("m", [tmp_path]) == ModelSetup(model, "m")


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        ({"params": {"mirostat": 1}}, "its PARAMETER mirostat 1 has no counterpart"),
        ({"params": {"top_k": "many"}}, "its PARAMETER top_k many is no number"),
        ({"params": "{"}, "its PARAMETER cannot be read"),
        ({"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, "holds more than text"),
        ({"messages": {}}, "its MESSAGE cannot be read"),
        ({"adapter": "lora"}, "has an adapter"),
    ],
)
def test_what_cannot_be_honoured_is_refused(tmp_path: Path, layers: dict[str, Any], why: str) -> None:
    """With the reason, and what to do instead."""
    put(tmp_path, **layers)
    with pytest.raises(ConfigError, match=why) as caught:
        read_setup("m", [tmp_path])
    assert "start --upstream" in caught.value.hint


def test_a_layer_that_is_missing_is_an_error(tmp_path: Path) -> None:
    put(tmp_path, template="x")
    (tmp_path / "blobs" / "sha256-1").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_setup("m", [tmp_path])


SETUP = ModelSetup(Path("/m.gguf"), "m", None, "Be Bob.", (("user", "hi"), ("assistant", "ho")))


def test_a_conversation_begins_with_what_the_model_says() -> None:
    """Its system message unless there is one, then its history; nothing where there is no conversation."""
    ask = {"role": "user", "content": "q"}
    told = {"role": "system", "content": "mine"}
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert SETUP.begin([ask]) == [{"role": "system", "content": "Be Bob."}, *history, ask]
    assert SETUP.begin([told, ask]) == [*history, told, ask]
    assert SETUP.begin([]) == []


def test_it_survives_a_file(tmp_path: Path) -> None:
    setup = replace(SETUP, template="{{ .Prompt }}", parameters=(("stop", ["a"]), ("top_k", 5)))
    setup.save(tmp_path / "setup.json")
    assert ModelSetup.load(tmp_path / "setup.json") == setup
    (tmp_path / "setup.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        ModelSetup.load(tmp_path / "setup.json")


# --- which template ------------------------------------------------------------------------------

GO = "{{ range .Messages }}<{{ .Role }}>{{ .Content }}{{ end }}<assistant>"


def in_file(messages: Sequence[Message]) -> str:
    """A template in the file that makes what `GO` makes."""
    return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def other(messages: Sequence[Message]) -> str:
    return f"other {in_file(messages)}"


def shown(render: Any = in_file) -> list[str]:
    return [render(probe) for probe in PROBES]


BARE = ModelSetup(Path("/m.gguf"), "m")


def test_equal_templates_mean_the_one_in_the_file() -> None:
    """It can do more: tools, reasoning."""
    assert settle(replace(BARE, template=GO), in_file).template is None
    assert settle(BARE, in_file).template is None


def test_ollamas_template_counts_unless_the_file_has_one_that_is_able_to_do_more() -> None:
    """Then only a running Ollama can tell which one it uses."""
    setup = replace(BARE, template=GO)
    assert settle(setup, other).template == GO
    assert settle(setup, None).template == GO
    with pytest.raises(ConfigError, match="start Ollama"):
        settle(setup, other, own_source="{% if tools %}")
    assert settle(setup, other, shown(), own_source="{% if tools %}").template == GO
    assert settle(setup, other, shown(other), own_source="{% if tools %}").template is None


def test_without_any_template_the_prompt_is_all() -> None:
    assert settle(BARE, None).template == "{{ .Prompt }}"


def test_what_ollama_shows_is_believed() -> None:
    """A template that is a part of it too, if the file's makes the same; else it is refused."""
    built_in = replace(BARE, builtin="RENDERER qwen3")
    assert settle(built_in, in_file, shown()).template is None
    with pytest.raises(ConfigError, match="are others than those"):
        settle(built_in, in_file, shown(other))
    with pytest.raises(ConfigError, match="is a part of Ollama"):
        settle(built_in, in_file)


@pytest.mark.parametrize("source", ["{{ json .Messages }}", "{{ range .Messages }}{{ .Thinking }}{{ end }}"])
def test_a_template_that_is_not_understood_is_refused(source: str) -> None:
    """Unless Ollama shows that the one in the file makes the same."""
    setup = replace(BARE, template=source)
    with pytest.raises(ConfigError, match="its TEMPLATE cannot be used here"):
        settle(setup, in_file)
    assert settle(setup, in_file, shown()).template is None


def test_a_begin_of_text_makes_no_difference() -> None:
    """Tokenising adds it where it is wanted, and never twice."""

    def begun(messages: Sequence[Message]) -> str:
        return f"<s>{in_file(messages)}"

    assert settle(replace(BARE, template=GO), begun, bos="<s>").template is None
    assert settle(BARE, in_file, shown(begun), bos="<s>").template is None
