"""Models in Ollama's folder, laid out as Ollama does it (a fake store: small files stand for models)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specproxy.adapters.ollama_store import ADAPTER_LAYER, MODEL_LAYER, find_model, is_file_name, store_folders
from specproxy.errors import ConfigError


def put(store: Path, *place: str, media: str = MODEL_LAYER, blob: bool = True, adapter: bool = False) -> Path:
    """A model at host/namespace/model/tag; returns its file."""
    digest = f"sha256:{abs(hash(place)):064x}"
    manifest = store.joinpath("manifests", *place)
    manifest.parent.mkdir(parents=True, exist_ok=True)
    template = {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:0"}
    layers = [template, {"mediaType": media, "digest": digest}]
    layers += [{"mediaType": ADAPTER_LAYER, "digest": "sha256:1"}] if adapter else []
    manifest.write_text(json.dumps({"layers": layers}))
    path = store / "blobs" / digest.replace(":", "-")
    path.parent.mkdir(exist_ok=True)
    if blob:
        path.write_bytes(b"GGUF")
    return path


OWN = ("registry.ollama.ai", "library")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("llama3.2", (*OWN, "llama3.2", "latest")),
        ("llama3.2:3b", (*OWN, "llama3.2", "3b")),
        ("me/own", ("registry.ollama.ai", "me", "own", "latest")),
        ("hf.co/owner/model:Q4_K_M", ("hf.co", "owner", "model", "Q4_K_M")),
        ("localhost:5000/a/b", ("localhost:5000", "a", "b", "latest")),
    ],
)
def test_names_are_read_as_ollama_reads_them(tmp_path: Path, name: str, place: tuple[str, ...]) -> None:
    """Host, namespace and tag have defaults; a colon before a slash belongs to the host."""
    path = put(tmp_path, *place)
    assert find_model(name, [tmp_path / "elsewhere", tmp_path]) == path


def test_an_unknown_name_says_where_was_looked_and_what_is_near(tmp_path: Path) -> None:
    """Without anything near, what to do."""
    put(tmp_path, *OWN, "qwen3", "8b")
    with pytest.raises(ConfigError, match=str(tmp_path)) as caught:
        find_model("qwen3:4b", [tmp_path])
    assert caught.value.hint == "did you mean qwen3:8b?"
    with pytest.raises(ConfigError) as caught:
        find_model("xyz", [tmp_path])
    assert caught.value.hint.startswith(
        "give a .gguf file, pull the model with Ollama first, or set OLLAMA_MODELS"
    )


def test_what_cannot_be_used(tmp_path: Path) -> None:
    """No GGUF layer, a broken entry, a file that is gone, and a model that is more than its file."""
    put(tmp_path, *OWN, "tuned", "latest", adapter=True)
    put(tmp_path, *OWN, "mlx", "latest", media="application/vnd.ollama.image.tensor")
    put(tmp_path, *OWN, "gone", "latest", blob=False)
    tmp_path.joinpath("manifests", *OWN, "mlx", "broken").write_text("{")
    for name, message in (
        ("mlx", "names no GGUF"),
        ("mlx:broken", "names no GGUF"),
        ("gone", "is missing"),
        ("tuned", "adapter"),
    ):
        with pytest.raises(ConfigError, match=message):
            find_model(name, [tmp_path])


def test_files_and_names_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What exists, ends in .gguf or looks like a path is a file; all else is a name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").touch()
    assert [is_file_name(m) for m in ("weights", "x.gguf", "./x", "/x", "~/x")] == [True] * 5
    assert [is_file_name(m) for m in ("llama3.2", "me/own", "hf.co/a/b:Q4")] == [False] * 3


def test_the_environment_names_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """OLLAMA_MODELS counts alone, as for Ollama."""
    monkeypatch.setenv("OLLAMA_MODELS", "/models")
    assert store_folders() == (Path("/models"),)
    monkeypatch.delenv("OLLAMA_MODELS")
    assert store_folders()[0] == Path.home() / ".ollama" / "models"
