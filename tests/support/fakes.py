"""Fakes of servers that others run: they answer fixed routes with JSON, over real sockets, and note what they
were asked. What they say follows the replies of llama-server (b11549) and the sources of Ollama 0.33."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.support.upstream import Conn, Received, Upstream

__all__ = ["Fake", "fake_llama_server", "fake_llama_swap", "fake_ollama", "llama_props", "ollama_model"]

LOADING = {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}


class Fake(Upstream):
    """A server with fixed answers: ``"GET /path"`` → (status, data), or data alone for 200; else 404."""

    def __init__(self, routes: Mapping[str, Any], port: int = 0) -> None:
        super().__init__(self._answer, port=port)
        self.routes = dict(routes)
        self.asked: list[str] = []
        self.bodies: list[Any] = []

    async def _answer(self, conn: Conn) -> None:
        while True:
            await self.reply(conn, await conn.request())

    async def reply(self, conn: Conn, seen: Received) -> None:
        """Answer one request."""
        method, path, _ = seen.request_line.decode().split(" ")
        self.asked.append(f"{method} {path}")
        body = json.loads(seen.body) if seen.body else None
        self.bodies.append(body)
        found = self.routes.get(f"{method} {path}", (404, {"error": "no such route"}))
        found = found(body) if callable(found) else found
        status, data = found if isinstance(found, tuple) else (200, found)
        text = json.dumps(data).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        await conn.send(head.encode() + text)


def llama_props(**changes: Any) -> dict[str, Any]:
    """What ``/props`` of llama-server says, as far as anybody here reads it."""
    return {
        "default_generation_settings": {"n_ctx": 2048, "params": {}},
        "total_slots": 2,
        "model_alias": "m",
        "model_path": "/models/m.gguf",
        "modalities": {"vision": True, "audio": False},
        "media_marker": "<__media_1__>",
        "build_info": "b11549-abc",
    } | changes


def fake_llama_server(*, speculative: bool = False, honours: bool = False, port: int = 0, **props: Any) -> Fake:
    """A llama-server with one model; an old one `honours` the field that switches drafting off."""
    name = props.get("model_alias", "m")
    return Fake(
        {
            "GET /v1/models": {"data": [{"id": name, "owned_by": "llamacpp", "meta": {"n_params": 7}}]},
            "GET /props": llama_props(**props),
            "GET /slots": [{"id": 0, "n_ctx": 2048, "speculative": speculative, "is_processing": False}],
            "GET /health": {"status": "ok"},
            "POST /completion": lambda body: _completion(body, drafts=speculative, honours=honours),
        },
        port,
    )


def _completion(body: Any, *, drafts: bool, honours: bool) -> Any:
    """Five tokens; drafts are in the timings, unless the field switches them off."""
    timings = {"prompt_n": 3, "prompt_ms": 1.0, "predicted_n": 5, "predicted_ms": 5.0}
    if drafts and not (honours and body.get("speculative.n_max") == 0):
        timings |= {"draft_n": 9, "draft_n_accepted": 4}
    return {"content": "five tokens of text", "stop": True, "timings": timings}


def fake_llama_swap(*names: str, loaded: str = "") -> Fake:
    """A llama-swap (its source of August 2026): it tells a version where Ollama does, has no properties of its
    own, and starts a server for the model that a request names."""

    def entry(name: str) -> dict[str, Any]:
        status = {"value": "loaded" if name == loaded else "unloaded"}
        return {"id": name, "object": "model", "owned_by": "llama-swap", "status": status}

    def answer(body: Any) -> Any:
        if body.get("model") not in names:
            return 404, {"error": "no router for model"}
        done = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
        timings = {"prompt_n": 1, "prompt_ms": 2.0, "predicted_n": 8, "predicted_ms": 70.0}
        return {"model": body["model"], "choices": [done], "timings": timings}

    return Fake(
        {
            "GET /v1/models": {"object": "list", "data": [entry(name) for name in names]},
            "GET /api/version": {"version": "250", "commit": "abcd", "build_date": "unknown"},
            "GET /props": (400, {"error": "missing or invalid 'model' key"}),
            "GET /health": "OK",
            "POST /v1/chat/completions": answer,
        }
    )


def ollama_model(name: str, **changes: Any) -> dict[str, Any]:
    """An entry of ``/api/tags``."""
    return {
        "name": name,
        "model": name,
        "size": 5_000_000_000,
        "digest": f"digest-of-{name}",
        "details": {
            "format": "gguf",
            "family": "qwen3",
            "parameter_size": "8B",
            "quantization_level": "Q4_K_M",
        },
        "capabilities": ["completion", "tools"],
    } | changes


def fake_ollama(
    *models: dict[str, Any], loaded: Mapping[str, int] | None = None, show: Any = None, port: int = 0
) -> Fake:
    """An Ollama with these models; `loaded` maps names to context lengths, `show` is said of every model."""
    running = [
        {**model, "context_length": (loaded or {})[model["name"]], "size_vram": 0}
        for model in models
        if model["name"] in (loaded or {})
    ]
    return Fake(
        {
            "GET /api/version": {"version": "0.33.0"},
            "GET /v1/models": {"data": [{"id": m["name"], "owned_by": "library"} for m in models]},
            "GET /api/tags": {"models": list(models)},
            "GET /api/ps": {"models": running},
            "POST /api/show": show or {"modelfile": "", "model_info": {}},
            "POST /api/chat": _ollama_chat,
        },
        port,
    )


def _ollama_chat(body: Any) -> Any:
    """The prompt that is made of a chat, as the templates of the calibrated models make it; else an answer."""
    if body.get("_debug_render_only"):
        return {"_debug_info": {"rendered_template": "".join(m["content"] for m in body["messages"])}}
    return {"model": body["model"], "message": {"role": "assistant", "content": "from ollama"}, "done": True}
