"""Models that Ollama has pulled, found in its own folder: no server needs to run, and nothing is copied.

A manifest under ``manifests/HOST/NAMESPACE/MODEL/TAG`` lists layers by digest; the one of the model's media
type is a GGUF file under ``blobs/``.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from specproxy.errors import ConfigError

__all__ = ["find_model", "is_file_name", "locate_model", "read_layers", "store_folders", "stored_models"]

NOWHERE = (
    "give a .gguf file, pull the model with Ollama first, or set OLLAMA_MODELS if its models lie elsewhere"
)

MODEL_LAYER = "application/vnd.ollama.image.model"
ADAPTER_LAYER = "application/vnd.ollama.image.adapter"
TEXT_LAYERS = frozenset({"template", "prompt", "system", "params", "messages"})
HOST, NAMESPACE, TAG = "registry.ollama.ai", "library", "latest"
SYSTEM_FOLDER = Path(
    "/usr/share/ollama/.ollama/models"
)  # of the service that Ollama's installer sets up on Linux


def locate_model(model: str) -> tuple[Path, str]:
    """The GGUF file of a model that is given as a file or by its name in Ollama, and that name (else empty).

    Raises:
        ConfigError: Ollama has no such model. A file is not looked at.
    """
    if is_file_name(model):
        return Path(model).expanduser(), ""
    return find_model(model, store_folders()), model


def is_file_name(model: str) -> bool:
    """Whether a model is given as a file rather than by a name in Ollama."""
    path = Path(model).expanduser()
    return path.exists() or path.suffix.lower() == ".gguf" or model.startswith(("/", ".", "~"))


def store_folders() -> tuple[Path, ...]:
    """Where Ollama keeps models: ``OLLAMA_MODELS``, or the usual places."""
    if named := os.environ.get("OLLAMA_MODELS"):
        return (Path(named).expanduser(),)
    return Path.home() / ".ollama" / "models", SYSTEM_FOLDER


def find_model(name: str, folders: Sequence[Path]) -> Path:
    """The GGUF file of a model by its name in Ollama, such as ``llama3.2`` or ``hf.co/owner/model:Q4_K_M``.

    Raises:
        ConfigError: there is no such model, or its file cannot be used.
    """
    for folder in folders:
        manifest = folder.joinpath("manifests", *_parts(name))
        if manifest.is_file():
            return _blob(folder, manifest, name)
    looked = " and ".join(str(folder) for folder in folders)
    known = sorted({found for folder in folders for found in _names(folder)})
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else NOWHERE
    raise ConfigError(f"model: no file {name}, and Ollama has no such model in {looked}", hint=hint)


def read_layers(name: str, folders: Sequence[Path]) -> tuple[Path, dict[str, str], dict[str, Any]]:
    """Of a model by its name in Ollama the GGUF file, the texts of its other layers by kind (``template``,
    ``system``, ``params``, …), and its configuration.

    Raises:
        ConfigError: there is no such model, or its files cannot be used.
    """
    model = find_model(name, folders)
    store = model.parent.parent
    manifest = json.loads(store.joinpath("manifests", *_parts(name)).read_text(encoding="utf-8"))

    def text(layer: Any) -> str:
        return (store / "blobs" / str(layer["digest"]).replace(":", "-")).read_text(encoding="utf-8")

    try:
        layers = {
            kind: text(layer)
            for layer in manifest["layers"]
            if (kind := str(layer["mediaType"]).rpartition(".")[2]) in TEXT_LAYERS
        }
        config = json.loads(text(manifest["config"])) if manifest.get("config") else {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"model: what {name} says besides its weights cannot be read: {error}", hint=f"ollama pull {name}"
        ) from error
    return model, layers, config if isinstance(config, dict) else {}


def stored_models(folders: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Name and GGUF file of every model in these stores; those that cannot be used are left out."""
    for folder in folders:
        for name in sorted(_names(folder)):
            with suppress(ConfigError):
                yield name, find_model(name, [folder])


def _parts(name: str) -> tuple[str, ...]:
    """Host, namespace, model and tag of a name, with Ollama's defaults for those that are left out."""
    path, colon, tag = name.rpartition(":") if ":" in name.rpartition("/")[2] else (name, "", "")
    given = path.split("/")
    host = given.pop(0) if len(given) > 2 else HOST
    namespace = given.pop(0) if len(given) > 1 else NAMESPACE
    return host, namespace, *given, tag if colon else TAG


def _blob(folder: Path, manifest: Path, name: str) -> Path:
    try:
        listed = json.loads(manifest.read_text(encoding="utf-8"))["layers"]
        layers = {str(layer["mediaType"]): str(layer["digest"]) for layer in listed}
        digest = layers[MODEL_LAYER]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"model: Ollama's entry for {name} names no GGUF file ({manifest})",
            hint="models in other formats cannot be shared; give a .gguf file",
        ) from error
    if ADAPTER_LAYER in layers:
        raise ConfigError(
            f"model: {name} has an adapter, without which it would say something else",
            hint="merge the adapter into a .gguf file, or stay with Ollama: start --upstream",
        )
    path = folder / "blobs" / digest.replace(":", "-")
    if not path.is_file():
        raise ConfigError(f"model: the file of {name} is missing: {path}", hint=f"ollama pull {name}")
    return path


def _names(folder: Path) -> Iterator[str]:
    """Every model in a store, by the short name that Ollama shows."""
    root = folder / "manifests"
    for manifest in root.glob("*/*/*/*"):
        host, namespace, model, tag = manifest.relative_to(root).parts
        short = model if (host, namespace) == (HOST, NAMESPACE) else f"{namespace}/{model}"
        yield f"{short if host == HOST else f'{host}/{short}'}:{tag}"
