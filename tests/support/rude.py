"""A server that is well at first, and then goes wrong in one of the ways that servers go wrong."""

from __future__ import annotations

import json
from typing import Any

from tests.support.fakes import LOADING, llama_props, ollama_model
from tests.support.upstream import Conn, Received, Upstream

__all__ = ["MOODS", "RudeServer"]

HTML = b"<html><body>It works!</body></html>"
ERROR_LINE = b'data: {"error":{"message":"out of memory","code":500}}\n\n'
OLLAMA_ERROR_LINE = b'{"error":"out of memory"}\n'

MOODS: dict[str, tuple[int, str, bytes]] = {
    "another version": (404, "application/json", b'{"error":{"message":"File Not Found"}}'),
    "wrong key": (401, "application/json", b'{"error":{"message":"Invalid API Key"}}'),
    "wrong model": (404, "application/json", b'{"error":{"message":"model not found"}}'),
    "loading": (503, "application/json", json.dumps(LOADING).encode()),
    "html": (200, "text/html", HTML),
    "error line": (200, "text/event-stream", ERROR_LINE),
    "ollama's error line": (200, "application/x-ndjson", OLLAMA_ERROR_LINE),
}
"""What is answered to everything: status, type, body. `down` and `half up` answer nothing."""


class RudeServer(Upstream):
    """Of one `kind` as probes tell kinds apart, with the model ``m``. `seen` are the requests it got."""

    def __init__(self, kind: str) -> None:
        super().__init__(self._serve)
        self.kind, self.mood = kind, ""
        self.seen: list[Received] = []

    async def _serve(self, conn: Conn) -> None:
        while True:
            seen = await conn.request()
            self.seen.append(seen)
            if self.mood == "half up":
                conn.close()
                return
            _, path, _ = seen.request_line.decode().split(" ")
            if self.mood:
                await self._send(conn, *MOODS[self.mood])
                continue
            data = self._routes().get(path, None)
            status = 200 if data is not None else 404
            await self._send(conn, status, "application/json", json.dumps(data or {"error": "no"}).encode())

    async def _send(self, conn: Conn, status: int, kind: str, body: bytes) -> None:
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        await conn.send(head.encode() + body)

    def _routes(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"id": "m", "owned_by": self.kind}
        if self.kind == "ollama":
            tags = {"models": [ollama_model("m", capabilities=["completion"])]}
            show = {"modelfile": "", "model_info": {}}
            return {
                "/api/version": {"version": "0.33.0"},
                "/api/tags": tags,
                "/api/ps": tags,
                "/api/show": show,
            }
        if self.kind in ("llama-server", "in front of llama-server"):
            return {"/v1/models": {"data": [entry | {"owned_by": "llamacpp"}]}, "/props": llama_props()}
        if self.kind == "llama-router":
            entry["status"] = {"value": "loaded", "args": ["llama-server", "--model", "/m.gguf"]}
            return {"/v1/models": {"data": [entry]}, "/props": {"role": "router", "build_info": "b1"}}
        if self.kind == "llama-swap":
            return {"/v1/models": {"data": [entry]}, "/api/version": {"version": "250"}}
        return {"/v1/models": {"data": [entry]}}
