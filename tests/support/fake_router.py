"""A fake of llama-server in router mode, after what b11434 was seen to answer.

Sections are loaded when they are asked for, also by a mere question that names one, and the least recently used
one goes when there are too many.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.upstream import Conn, Upstream

__all__ = ["FakeRouter", "arguments"]

NO_MODEL = {"code": 400, "message": "model name is missing from the request", "type": "invalid_request_error"}


def arguments(model: str, *flags: str, alias: str = "m") -> list[str]:
    """The command line of a section, as the router shows it."""
    base = ["llama-server", "--host", "127.0.0.1", "--log-colors", "off", "--port", "0", "--alias", alias]
    return [*base, "--ctx-size", "2048", "--model", model, "--parallel", "1", *flags]


class FakeRouter(Upstream):
    """`sections` maps names to command lines; `misfits` claim to draft and do not.

    What is loaded by command is loading for `slow` looks more.
    """

    def __init__(
        self,
        sections: dict[str, list[str]],
        *,
        models_max: int = 4,
        autoload: bool = True,
        misfits: frozenset[str] = frozenset(),
        broken: frozenset[str] = frozenset(),
        slow: int = 0,
    ) -> None:
        super().__init__(self._serve)
        self.sections, self.models_max, self.autoload = sections, models_max, autoload
        self.misfits, self.broken, self.slow = misfits, broken, slow
        self.loading: dict[str, int] = {}  # how many more looks find it so
        self.loaded: list[str] = []  # least recently used first
        self.failed: set[str] = set()
        self.asked: list[str] = []

    async def _serve(self, conn: Conn) -> None:
        while True:
            seen = await conn.request()
            method, target, _ = seen.request_line.decode().split(" ")
            self.asked.append(f"{method} {target}")
            status, data = self._answer(method, target, json.loads(seen.body) if seen.body else {})
            text = json.dumps(data, separators=(",", ":")).encode()
            head = (
                f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            await conn.send(head.encode() + b"%x\r\n%b\r\n0\r\n\r\n" % (len(text), text))

    def _answer(self, method: str, target: str, body: dict[str, Any]) -> tuple[int, Any]:
        parts = urlsplit(target)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        if parts.path in ("/models", "/v1/models") and method == "GET":
            return 200, {"data": [self._entry(name) for name in sorted(self.sections)], "object": "list"}
        if parts.path == "/props" and "model" not in query:
            return 200, {
                "role": "router",
                "max_instances": self.models_max,
                "models_autoload": self.autoload,
                "model_path": "none",
                "build_info": "b11434-abc",
            }
        if parts.path in ("/models/load", "/models/unload"):
            return self._command(parts.path, str(body.get("model")))
        name = unquote(query.get("model", "")) if method == "GET" else str(body.get("model") or "")
        if not name:
            return 400, {"error": NO_MODEL}
        mere_question = method == "GET" and name in self.loaded  # uses nothing
        if not mere_question and (problem := self._use(name, query.get("autoload") != "false")):
            return problem
        return 200, self._reply(parts.path, name)

    def _use(self, name: str, may_load: bool) -> tuple[int, Any] | None:
        """Load a section for a question that names it; returns what is answered if that cannot be."""
        if name not in self.sections:
            message = f"model '{name}' not found"
            return 400, {"error": {"code": 400, "message": message, "type": "invalid_request_error"}}
        if name not in self.loaded and not (self.autoload and may_load):
            message = "model is not loaded"
            return 400, {"error": {"code": 400, "message": message, "type": "invalid_request_error"}}
        if name in self.broken:
            self.failed.add(name)
            message = f"model name={name} failed to load"
            return 500, {"error": {"code": 500, "message": message, "type": "server_error"}}
        if name in self.loaded:
            self.loaded.remove(name)
        self.loaded.append(name)
        while self.models_max and len(self.loaded) > self.models_max:
            self.loaded.pop(0)
        return None

    def _command(self, path: str, name: str) -> tuple[int, Any]:
        if path == "/models/unload":
            if name not in self.loaded:
                return 400, {"error": {"code": 400, "message": "model is not running"}}
            self.loaded.remove(name)
        elif name not in self.sections:
            return 404, {"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}}
        elif name in self.loaded or name in self.loading:
            return 400, {"error": {"code": 400, "message": "model is already running"}}
        elif self.slow:
            self.loading[name] = self.slow
        else:
            self._use(name, True)
        return 200, {"success": True}

    def _entry(self, name: str) -> dict[str, Any]:
        status: dict[str, Any] = {"value": "unloaded", "args": self.sections[name]}
        if self.loading.get(name) == 0:
            del self.loading[name]
            self._use(name, True)
        if name in self.loaded:
            status["value"] = "loaded"
        elif name in self.loading:
            self.loading[name] -= 1
            status["value"] = "loading"
        elif name in self.failed:
            status |= {"failed": True, "exit_code": 1}
        return {
            "id": name,
            "aliases": [],
            "tags": [],
            "object": "model",
            "owned_by": "llamacpp",
            "status": status,
            "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
            "source": "preset",
        }

    def _reply(self, path: str, name: str) -> Any:
        words = self.sections[name]
        drafts = "--spec-type" in words and "none" not in words and name not in self.misfits
        if path == "/slots":
            return [{"id": 0, "speculative": drafts, "is_processing": False}]
        timings: dict[str, Any] = {"prompt_n": 2, "prompt_ms": 1.0, "predicted_n": 8, "predicted_ms": 8.0}
        if drafts:
            timings |= {"draft_n": 6, "draft_n_accepted": 5}
        return {
            "choices": [{"finish_reason": "length", "index": 0, "message": {"content": name}}],
            "created": 1,
            "model": name,
            "usage": {"completion_tokens": 8, "prompt_tokens": 2, "total_tokens": 10},
            "timings": timings,
        }
