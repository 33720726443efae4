"""A fake of mlx_lm.server, as mlx-lm 0.32.2 answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.support.upstream import Conn, Upstream

__all__ = ["FakeMlx"]

Key = tuple[str, str | None, str | None]  # model, adapter, draft
FIELDS = ("model", "draft_model")
DEFAULT = "default_model"


class FakeMlx(Upstream):
    """Started with `model`, without a draft; `others` can be loaded too, and nothing else.

    Speaks HTTP/1.0, with one request for each connection, and a stream ends with it. An error is a text under
    ``error``: a 404 where it cannot load something, or make a prompt; what goes wrong within an answer ends it.

    One set of models is in memory, the last one asked for: `key`, None after one that could not be loaded, and
    `loads` counts. Requests with a draft are served one by one, as are those with a seed; others together:
    `most` is how many there were at once. An answer waits for `open`.
    """

    def __init__(self, model: str, *others: str, listed: bool = True) -> None:
        super().__init__(self._serve)
        self.model, self.there, self.listed = model, {model, *others}, listed
        self.key: Key | None = (model, None, None)
        self.loads = self.most = self._together = 0
        self.chats: list[dict[str, Any]] = []
        self.waiting = 0
        self.open = asyncio.Event()
        self.open.set()
        self._turn = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()

    async def _serve(self, conn: Conn) -> None:
        seen = await conn.request()
        method, path, _ = seen.request_line.decode().split(" ")
        if method == "GET":
            await self._get(conn, path)
        elif path in ("/v1/chat/completions", "/chat/completions", "/v1/completions"):
            await self._post(conn, seen.body, chat="chat" in path)
        else:
            await self._send(conn, 404, b"Not Found")
        conn.close()

    async def _send(self, conn: Conn, status: int, body: bytes, *, length: bool = False) -> None:
        told = f"Content-Length: {len(body)}\r\n" if length else ""
        head = f"HTTP/1.0 {status} X\r\nContent-type: application/json\r\n{told}\r\n"
        await conn.send(head.encode() + body)

    async def _get(self, conn: Conn, path: str) -> None:
        if path == "/health":
            await self._send(conn, 200, b'{"status": "ok"}')
        elif path.startswith("/v1/models"):  # of a cache; without one it breaks off
            entries = [{"id": name, "object": "model", "created": 1} for name in sorted(self.there)]
            await self._send(conn, 200, json.dumps({"object": "list", "data": entries}).encode() * self.listed)
        else:
            await self._send(conn, 404, b"Not Found")

    async def _post(self, conn: Conn, body: bytes, *, chat: bool) -> None:
        try:
            asked = json.loads(body)
        except ValueError as error:
            text = f"Invalid JSON in request body: {error}"
            return await self._send(conn, 400, json.dumps({"error": text}).encode())
        if not isinstance(asked, dict):
            return await self._send(conn, 400, b'{"error": "Request should be a JSON dictionary"}')
        self.chats.append(asked)
        if not isinstance(asked.get("max_tokens", 1), int):
            return await self._send(conn, 400, b'{"error": "max_tokens must be of type int"}')
        names = [None if (name := asked.get(field, DEFAULT)) == DEFAULT else name for field in FIELDS]
        key: Key = (names[0] or self.model, asked.get("adapters"), names[1])
        alone = key[2] is not None or asked.get("seed") is not None
        self.waiting += 1
        async with self._turn:  # others wait behind the one that waits for those before it to be done
            if alone or key != self.key:
                await self._idle.wait()
            refusal = self._load(key)
            if refusal:
                self.waiting -= 1
                return await self._send(conn, 404, json.dumps({"error": refusal}).encode())
            if alone:
                return await self._answer(conn, asked, chat=chat)
            self._idle.clear()
            self._together += 1
        try:
            await self._answer(conn, asked, chat=chat)
        finally:
            self._together -= 1
            if not self._together:
                self._idle.set()

    def _load(self, key: Key) -> str:
        """Why these models cannot be had; empty where they are in memory now."""
        if key == self.key:
            return ""
        self.key = None
        for name in (key[0], key[2]):
            if name is not None and name not in self.there:
                return f"404 Client Error. Repository Not Found for url: {name}."
        self.key, self.loads = key, self.loads + 1
        return ""

    async def _answer(self, conn: Conn, asked: dict[str, Any], *, chat: bool) -> None:
        self.waiting -= 1
        self.most = max(self.most, self._together)
        await self.open.wait()
        usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
        whole = {"id": "x", "object": "chat.completion", "model": asked.get("model", DEFAULT), "created": 1}
        if not asked.get("stream"):
            done = {"index": 0, "finish_reason": "stop"} | _text("one two three", "message", chat=chat)
            data = json.dumps(whole | {"choices": [done], "usage": usage}).encode()
            await self._send(conn, 200, data, length=True)
            return
        head = b"HTTP/1.0 200 OK\r\nContent-type: text/event-stream\r\nCache-Control: no-cache\r\n\r\n"
        await conn.send(head + b": keepalive 0/9\n\n: keepalive 9/9\n\n")
        for piece, reason in (("one", None), (" two", None), (" three", "stop")):
            choice = {"index": 0, "finish_reason": reason} | _text(piece, "delta", chat=chat)
            await conn.send(_event(whole | {"choices": [choice]}))
        if (asked.get("stream_options") or {}).get("include_usage"):
            await conn.send(_event(whole | {"choices": [], "usage": usage}))
        await conn.send(b"data: [DONE]\n\n")


def _text(text: str, place: str, *, chat: bool) -> dict[str, Any]:
    return {place: {"role": "assistant", "content": text}} if chat else {"text": text}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"
