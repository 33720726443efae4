"""A small OpenAI-compatible server for tests of the whole proxy, in the test's event loop."""

from __future__ import annotations

import json

from tests.support.upstream import Conn, Received, Upstream

__all__ = ["MODEL", "openai_like"]

MODEL = "test-model"


def _reply(status: str, data: object) -> bytes:
    body = json.dumps(data).encode()
    return b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        status.encode(),
        len(body),
        body,
    )


COMPLETION = {
    "id": "c1",
    "object": "chat.completion",
    "model": MODEL,
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "four words of text"}, "finish_reason": "stop"}
    ],
    "usage": {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11},
    "timings": {"prompt_n": 7, "prompt_ms": 10.0, "predicted_n": 4, "predicted_ms": 30.0},
}


def openai_like(port: int = 0, model: str = MODEL, seen: list[Received] | None = None) -> Upstream:
    """Lists one model, completes every chat with the same text, knows nothing else; `seen` gets requests."""
    kept = [] if seen is None else seen

    async def script(conn: Conn) -> None:
        while True:
            request = await conn.request()
            kept.append(request)
            method, path, _ = request.request_line.decode().split(" ")
            if path == "/v1/models":
                await conn.send(
                    _reply("200 OK", {"object": "list", "data": [{"id": model, "object": "model"}]})
                )
            elif (method, path) == ("POST", "/v1/chat/completions"):
                await conn.send(_reply("200 OK", COMPLETION))
            else:
                await conn.send(_reply("404 Not Found", {"error": {"message": "no such route"}}))

    return Upstream(script, port=port)
