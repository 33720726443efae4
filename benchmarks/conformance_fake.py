"""A fake Ollama that streams: the form of its replies is that of Ollama 0.33, what they say is fixed.

It serves machines without Ollama, and says so wherever it is used. Ids and times are new in every reply, as the
real one's are.
"""

from __future__ import annotations

import json
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["fake_ollama"]

WORDS = ("Red", ",", " green", " and", " blue", ".")
DETAILS = {"format": "gguf", "family": "llama", "parameter_size": "134.52M", "quantization_level": "F16"}
SHOWN: dict[str, Any] = {"model_info": {"general.architecture": "llama"}, "capabilities": ["completion"]}
JSON, NDJSON, SSE = "application/json; charset=utf-8", "application/x-ndjson", "text/event-stream"
NO_EMBEDDINGS = "This server does not support embeddings. Start it with `--embeddings`"


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _figures() -> dict[str, Any]:
    took = time.monotonic_ns() % 1_000_000
    return {
        "done_reason": "stop", "total_duration": 9_000_000 + took, "load_duration": 100_000 + took,
        "prompt_eval_count": 9, "prompt_eval_duration": 2_000_000 + took,
        "eval_count": len(WORDS), "eval_duration": 5_000_000 + took,
    }  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "fake-ollama", ""
    model = ""

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    # --- replies ---

    def reply(self, data: Any, status: int = 200, kind: str = JSON) -> None:
        """One whole reply: an object as JSON, or text as it is."""
        body = (data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def stream(self, kind: str, pieces: list[str]) -> None:
        """A reply in chunks, one for each piece."""
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in (*pieces, ""):
            data = piece.encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def body(self) -> Any:
        """The request's JSON; None if it is not."""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            data = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            return json.loads(data)
        except ValueError:
            return None

    # --- methods ---

    def do_GET(self) -> None:
        """Routes that only tell something."""
        entry = {"name": self.model, "model": self.model, "digest": "5" * 64, "size": 1, "details": DETAILS}
        listed = {"id": self.model, "object": "model", "created": 1_700_000_000, "owned_by": "library"}
        match self.path.partition("?")[0]:
            case "/":
                self.reply("Ollama is running", kind="text/plain; charset=utf-8")
            case "/api/version":
                self.reply({"version": "0.33.0"})
            case "/api/tags":
                self.reply({"models": [{**entry, "capabilities": ["completion"]}]})
            case "/api/ps":
                self.reply({"models": [{**entry, "expires_at": _now(), "context_length": 4096}]})
            case "/v1/models":
                self.reply({"object": "list", "data": [listed]}, kind="application/json")
            case path if path == f"/v1/models/{self.model}":
                self.reply(listed, kind="application/json")
            case _:
                self.reply("404 page not found", 404, "text/plain")

    do_HEAD = do_GET  # noqa: N815 - the name that http.server looks for

    def do_DELETE(self) -> None:
        """Nothing can be taken away here."""
        self.body()
        if self.path == "/api/delete":
            self.reply({"error": "model 'absent' not found"}, 404)
        else:
            self.reply("404 page not found", 404, "text/plain")

    def do_POST(self) -> None:
        """Routes of inference, and those that find nothing."""
        body, path = self.body(), self.path.partition("?")[0]
        routes = {
            "/api/chat": self.say_native,
            "/api/generate": self.say_native,
            "/v1/chat/completions": self.say_openai,
            "/v1/completions": self.say_openai,
            "/v1/responses": self.say_responses,
            "/v1/messages": self.say_anthropic,
        }
        if path.startswith("/api/blobs/"):
            self.reply({"error": "digest mismatch"}, 400)
        elif not isinstance(body, dict):
            self.reply({"error": "unexpected EOF"}, 400)
        elif path in ("/api/embed", "/api/embeddings", "/v1/embeddings"):
            self.reply({"error": NO_EMBEDDINGS}, 501)
        elif path == "/api/create":
            self.reply({"error": "neither 'from' or 'files' was specified"}, 400)
        elif body.get("model", self.model) != self.model or path == "/api/copy":
            self.reply({"error": "model 'absent' not found"}, 404)
        elif path == "/api/show":
            self.reply({"modelfile": "FROM /nowhere", "details": DETAILS, **SHOWN})
        elif path in routes:
            routes[path](body)
        else:
            self.reply("404 page not found", 404, "text/plain")

    # --- inference ---

    def say_native(self, body: Any) -> None:
        """``/api/chat`` and ``/api/generate``."""
        chat = self.path == "/api/chat"

        def line(text: str, **more: Any) -> str:
            said = {"message": {"role": "assistant", "content": text}} if chat else {"response": text}
            head = {"model": self.model, "created_at": _now(), **said}
            return json.dumps({**head, "done": bool(more), **more}) + "\n"

        if body.get("think"):
            self.reply({"error": f'"{self.model}" does not support thinking'}, 400)
        elif body.get("stream") is False:
            self.reply(json.loads(line("".join(WORDS), **_figures())))
        else:
            self.stream(NDJSON, [*map(line, WORDS), line("", **_figures())])

    def say_openai(self, body: Any) -> None:
        """``/v1/chat/completions`` and ``/v1/completions``."""
        chat = "chat" in self.path
        if chat and not isinstance(body.get("messages"), list):
            error = {"message": "[] is too short - 'messages'", "type": "invalid_request_error", "code": None}
            self.reply({"error": {**error, "param": None}}, 400, "application/json")
            return
        usage = {"prompt_tokens": 9, "completion_tokens": len(WORDS), "total_tokens": 9 + len(WORDS)}
        number = f"chatcmpl-{secrets.randbelow(1000)}"

        def thing(text: str, end: str | None, *, part: bool, **more: Any) -> dict[str, Any]:
            said: dict[str, Any] = {"text": text}
            if chat:
                said = {"delta" if part else "message": {"role": "assistant", "content": text}}
            kind = ("chat.completion" if chat else "text_completion") + (".chunk" if part and chat else "")
            choice = {"index": 0, **said, "finish_reason": end}
            head = {"id": number, "object": kind, "created": int(time.time()), "model": self.model}
            return {**head, "system_fingerprint": "fp_ollama", "choices": [choice], **more}

        if not body.get("stream"):
            self.reply(thing("".join(WORDS), "stop", part=False, usage=usage), kind="application/json")
            return
        events = [thing(word, None, part=True) for word in WORDS] + [thing("", "stop", part=True)]
        if (body.get("stream_options") or {}).get("include_usage"):
            events.append({**thing("", None, part=True, usage=usage), "choices": []})
        self.stream(SSE, [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"])

    def say_responses(self, body: Any) -> None:
        """``/v1/responses``."""
        text = {"type": "output_text", "text": "".join(WORDS), "annotations": []}
        item = {"id": f"msg_{secrets.token_hex(4)}", "type": "message", "role": "assistant"}
        whole = {
            "id": f"resp_{secrets.token_hex(4)}", "object": "response", "created_at": int(time.time()),
            "status": "completed", "model": self.model, "tools": [], "tool_choice": "auto",
            "parallel_tool_calls": True, "output": [{**item, "status": "completed", "content": [text]}],
        }  # fmt: skip
        if not body.get("stream"):
            self.reply(whole, kind="application/json")
            return
        place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        deltas = [{"type": "response.output_text.delta", "delta": word, **place} for word in WORDS]
        events: list[dict[str, Any]] = [*deltas, {"type": "response.completed", "response": whole}]
        self.stream(SSE, [_event(event) for event in events])

    def say_anthropic(self, body: Any) -> None:
        """``/v1/messages``."""
        head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant"}
        usage = {"input_tokens": 9, "output_tokens": len(WORDS)}
        text = {"type": "text", "text": "".join(WORDS)}
        whole = {**head, "model": self.model, "content": [text], "stop_reason": "end_turn", "usage": usage}
        if not body.get("messages"):
            error = {"type": "invalid_request_error", "message": "messages is required"}
            self.reply({"type": "error", "error": error}, 400)
            return
        if not body.get("stream"):
            self.reply(whole, kind="application/json")
            return
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        deltas = [
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}}
            for word in WORDS
        ]
        stop = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}
        start = {"type": "message_start", "message": {**whole, "content": [], "stop_reason": None}}
        events: list[dict[str, Any]] = [start, block, *deltas, {"type": "content_block_stop", "index": 0}]
        self.stream(SSE, [_event(event) for event in [*events, stop, {"type": "message_stop"}]])


def _event(event: dict[str, Any]) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that has hung up is none."""
        if not isinstance(sys.exception(), ConnectionError):
            raise


@contextmanager
def fake_ollama(model: str) -> Iterator[str]:
    """Serve a model of this name; the URL."""
    handler = type("Handler", (_Handler,), {"model": model})
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="fake Ollama")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
