"""A fake mlx_vlm.server. What it says follows the replies of a real one: mlx-vlm 0.7.10 with mlx 0.32.4 on a
Linux CPU, with a model of its Qwen 3.5 kind that sees and an EAGLE-3 drafter, both tiny and made for it.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.support.upstream import Conn, Received, Upstream, chunk

__all__ = ["FakeMlxVlm"]

STRUCTURED = "Structured response_format is not supported with speculative decoding."
BUDGET = "thinking_budget is not supported with speculative decoding in the server."
TOKENS = 8


class FakeMlxVlm(Upstream):
    """It has the model `model`, loaded, and the files of `drafters`; `started_with` is its --draft-model.

    `settable` is whether it has settings, `key` what it wants from everybody. While `open` is not set, chats
    wait for it, and loads for `loading`. `loads` are the drafters that it loaded the model with, `chats` what
    was decoded and with which drafter.
    """

    def __init__(
        self, *drafters: str, model: str = "m", started_with: str = "", settable: bool = True, key: str = ""
    ) -> None:
        super().__init__(self._serve)
        self.drafters, self.model, self.settable, self.key = drafters, model, settable, key
        self.started_with = started_with
        self.setting: str | None = started_with or None
        self.loaded: tuple[str, str] | None = (model, started_with)
        self.loads: list[str] = []
        self.chats: list[tuple[str, dict[str, Any]]] = []
        self.asked: list[str] = []
        self.open = asyncio.Event()
        self.open.set()
        self.loading = asyncio.Event()
        self.loading.set()

    async def _serve(self, conn: Conn) -> None:
        while True:
            await self._answer(conn, await conn.request())

    async def _answer(self, conn: Conn, seen: Received) -> None:
        method, path, _ = seen.request_line.decode().split(" ")
        self.asked.append(f"{method} {path}")
        body = json.loads(seen.body) if seen.body else {}
        if self.key and seen.values(b"authorization") != [b"Bearer " + self.key.encode()]:
            await self._send(conn, 401, {"detail": "Invalid API key"})
        elif path == "/v1/chat/completions":
            await self._chat(conn, body)
        else:
            await self._send(conn, *await self._told(f"{method} {path}", body))

    async def _told(self, asked: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        match asked:
            case "GET /health":
                there = {"loaded_model": self.loaded[0] if self.loaded else None, "loaded_adapter": None}
                return 200, {"status": "healthy", **there}
            case "GET /v1/models":
                entry = {"id": self.model, "object": "model", "created": 1, "loaded": self.loaded is not None}
                return 200, {"object": "list", "data": [entry]}
            case "GET /v1/settings" if self.settable:
                return 200, {"schema": [], "current": self._current(), "fingerprint": "f"}
            case "PATCH /v1/settings" if self.settable:
                self.setting = body["draft_model"]
                told = {"op": "merge", "applied": body, "rejected": [], "reload_kinds": ["text_generation"]}
                return 200, told | {"fingerprint": "f", "current": self._current()}
            case "POST /v1/messages/count_tokens":
                if trouble := await self._load(body["model"]):
                    error = {"type": "invalid_request_error", "message": trouble}
                    return 400, {"type": "error", "error": error}
                return 200, {"input_tokens": 10}
        return 404, {"detail": "Not Found"}

    def _current(self) -> dict[str, Any]:
        return {"draft_model": self.setting, "draft_kind": None, "vision_cache_size": 20}

    async def _load(self, model: str) -> str:
        """Have a model in memory with the drafter that is set, in the place of another; returns the trouble."""
        wanted = (model, self.setting or self.started_with)
        if self.loaded == wanted:
            return ""
        self.loaded = None
        await self.loading.wait()
        if model != self.model or (wanted[1] and wanted[1] not in self.drafters):
            return "Repo id must be in the form 'repo_name' or 'namespace/repo_name'."
        self.loaded = wanted
        self.loads.append(wanted[1])
        return ""

    async def _chat(self, conn: Conn, body: dict[str, Any]) -> None:
        trouble = await self._load(body["model"])
        drafter = self.loaded[1] if self.loaded else ""
        refusal = STRUCTURED if "response_format" in body else BUDGET if "thinking_budget" in body else ""
        if trouble:
            await self._send(conn, 500, {"detail": f"An unexpected error occurred: {trouble}"})
        elif body.get("stream"):
            await conn.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
            await conn.send(b"Transfer-Encoding: chunked\r\n\r\n")
            await self._stream(conn, body, drafter, refusal if drafter else "")
        elif drafter and refusal:
            await self._send(conn, 500, {"detail": f"Generation failed: {refusal}"})
        else:
            self.chats.append((drafter, body))
            await self.open.wait()
            message = {"role": "assistant", "content": "the " * TOKENS, "reasoning": None, "tool_calls": None}
            choice = {"index": 0, "finish_reason": "stop", "message": message, "logprobs": None}
            reply = {"id": "chatcmpl-1", "model": body["model"], "choices": [choice]}
            await self._send(conn, 200, reply | _figures(drafter))

    async def _stream(self, conn: Conn, body: dict[str, Any], drafter: str, refusal: str) -> None:
        self.chats.append((drafter, body))
        await self.open.wait()
        events: list[dict[str, Any]] = []
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": body["model"]}
        for number in range(TOKENS + 1):
            delta = {"role": "assistant", "content": " the" if number < TOKENS else None}
            reason = None if number < TOKENS else "length"
            choice = {"index": 0, "finish_reason": reason, "delta": delta, "logprobs": None}
            rate = {"predicted_per_second": None if not number else 250.0}
            events.append(head | {"choices": [choice], "usage": None, "timings": rate})
        if body.get("stream_options", {}).get("include_usage"):
            events.append(head | {"choices": []} | _figures(drafter))
        if refusal:
            events = [{"error": refusal}]
        lines = [b"data: " + json.dumps(event).encode() for event in events]
        for line in lines if refusal else [*lines, b"data: [DONE]"]:
            await conn.send(chunk(line + b"\n\n"))
        await conn.send(b"0\r\n\r\n")

    async def _send(self, conn: Conn, status: int, data: dict[str, Any]) -> None:
        text = json.dumps(data).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        await conn.send(head.encode() + text)


def _figures(drafter: str) -> dict[str, Any]:
    """Usage and timings: it tells the time of all eight tokens, by the pace of the seven behind the first."""
    drafts = {"draft_kind": "eagle3", "draft_rounds": 3, "draft_n": 6, "draft_n_accepted": 4}
    return {
        "usage": {"prompt_tokens": 10, "completion_tokens": TOKENS, "total_tokens": 10 + TOKENS},
        "timings": {
            "prompt_n": 10,
            "cache_n": 0,
            "predicted_n": TOKENS,
            "prompt_ms": 20.0,
            "predicted_ms": 32.0,
            "predicted_per_token_ms": 4.0,
            "predicted_per_second": 250.0,
            "peak_memory": 0.08,
            **(drafts if drafter else dict.fromkeys(drafts)),
        },
    }
