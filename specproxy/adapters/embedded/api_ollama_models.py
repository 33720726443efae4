"""Ollama's routes about models: /api/tags, /api/ps, /api/show, /api/version and the greeting."""

from __future__ import annotations

import datetime
import hashlib
import re
from pathlib import Path
from typing import Any

from aiohttp import web

from specproxy import __version__
from specproxy.adapters.embedded.api_ollama import now
from specproxy.adapters.embedded.body import parse_body
from specproxy.adapters.embedded.keys import SERVICE
from specproxy.adapters.embedded.ollama_options import check_model
from specproxy.adapters.embedded.replies import json_response
from specproxy.adapters.embedded.service import Service

__all__ = ["greeting", "ps", "show", "tags", "version"]

API_VERSION = "0.33.0"  # the Ollama whose API this is; clients compare it
FOREVER = "2318-01-01T00:00:00Z"  # the model stays loaded


async def greeting(_: web.Request) -> web.StreamResponse:
    """What Ollama answers at its root, by which clients find it."""
    return web.Response(text="Ollama is running")


async def version(_: web.Request) -> web.StreamResponse:
    """The API's version, and ours."""
    return json_response({"version": API_VERSION, "engine": f"specproxy {__version__}"})


async def tags(request: web.Request) -> web.StreamResponse:
    """The model under all of its names."""
    service = request.app[SERVICE]
    return json_response({"models": [_entry(service, name) for name in service.names]})


async def ps(request: web.Request) -> web.StreamResponse:
    """What is in memory now."""
    service = request.app[SERVICE]
    loaded = getattr(service.engine, "loaded", True)  # only the real engine can be asked
    extra = {"expires_at": FOREVER, "size_vram": 0, "context_length": service.card.context}
    return json_response({"models": [_entry(service, service.names[0]) | extra] if loaded else []})


async def show(request: web.Request) -> web.StreamResponse:
    """Facts about the model."""
    service = request.app[SERVICE]
    body = parse_body(await request.read())
    check_model(service, body)
    card, chat = service.card, service.chat
    capabilities = ["completion", "embedding"]
    if chat.has_tools:
        capabilities.append("tools")
    if chat.tags is not None:
        capabilities.append("thinking")
    arch = card.architecture
    return json_response(
        {
            "modelfile": f"FROM {card.path}\n",
            "parameters": "",
            "template": chat.template.source,
            "details": _details(service),
            "model_info": {
                "general.architecture": arch,
                "general.parameter_count": card.parameters,
                f"{arch}.context_length": card.train_context,
                f"{arch}.embedding_length": card.embedding,
                f"{arch}.vocab_size": card.vocab,
            },
            "capabilities": capabilities,
            "modified_at": _modified(card.path),
        }
    )


def _details(service: Service) -> dict[str, Any]:
    card = service.card
    return {
        "parent_model": "",
        "format": "gguf",
        "family": card.architecture,
        "families": [card.architecture],
        "parameter_size": _short(card.parameters),
        "quantization_level": card.quantisation,
    }


def _short(count: int) -> str:
    for limit, unit in ((1e9, "B"), (1e6, "M")):
        if count >= limit:
            return f"{count / limit:.1f}{unit}" if unit == "B" else f"{count / limit:.2f}{unit}"
    return str(count)


def _entry(service: Service, name: str) -> dict[str, Any]:
    card = service.card
    return {
        "name": name,
        "model": name,
        "modified_at": _modified(card.path),
        "size": card.size_bytes,
        "digest": _digest(card.path),
        "details": _details(service),
    }


def _modified(path: str) -> str:
    try:
        seconds = Path(path).stat().st_mtime
    except OSError:
        return now()
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


def _digest(path: str) -> str:
    """The blob's digest where the file is one of Ollama's; otherwise one of name, size and time of the file."""
    blob = re.fullmatch(r"sha256-([0-9a-f]{64})", Path(path).name)
    if blob:
        return blob[1]
    try:
        stat = Path(path).stat()
    except OSError:
        return hashlib.sha256(path.encode()).hexdigest()
    return hashlib.sha256(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()
