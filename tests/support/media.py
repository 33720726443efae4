"""A real picture and a real sound, as clients send them."""

from __future__ import annotations

import base64
import io
import struct
import wave
import zlib
from typing import Any

__all__ = ["PNG", "WAV", "png", "requests"]


def png(side: int = 64, noise: bytes = b"") -> bytes:
    """A PNG of `side` by `side` pixels in eight bits of grey; `noise` makes it hard to compress."""
    row = (noise * side)[:side] if noise else bytes(range(256))[:side].ljust(side, b"\0")
    raw = b"".join(b"\0" + row[i % side :] + row[: i % side] for i in range(side))
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(raw, 0 if noise else 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def _wav() -> bytes:
    sound = io.BytesIO()
    with wave.open(sound, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(b"".join(struct.pack("<h", (i % 80 - 40) * 500) for i in range(800)))
    return sound.getvalue()


PNG, WAV = png(), _wav()


def requests(picture: bytes = PNG) -> dict[str, tuple[str, dict[str, Any]]]:
    """By name: a route, and the body of a request with a picture or a sound in that API's own way."""
    data = base64.b64encode(picture).decode()
    url, say = f"data:image/png;base64,{data}", "What is this?"
    sound = {"data": base64.b64encode(WAV).decode(), "format": "wav"}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    def chat(*parts: dict[str, Any]) -> dict[str, Any]:
        return {"model": "m", "messages": [{"role": "user", "content": list(parts)}]}

    text = {"type": "text", "text": say}
    asked = [{"type": "input_text", "text": say}, {"type": "input_image", "image_url": url}]
    return {
        "chat": ("/v1/chat/completions", chat(text, {"type": "image_url", "image_url": {"url": url}})),
        "chat with sound": ("/v1/chat/completions", chat(text, {"type": "input_audio", "input_audio": sound})),
        "responses": ("/v1/responses", {"model": "m", "input": [{"role": "user", "content": asked}]}),
        "messages": ("/v1/messages", chat(text, image) | {"max_tokens": 9}),
        "ollama chat": (
            "/api/chat",
            {"model": "m", "messages": [{"role": "user", "content": say, "images": [data]}]},
        ),
        "ollama generate": ("/api/generate", {"model": "m", "prompt": say, "images": [data]}),
        "llama.cpp": (
            "/completion",
            {"prompt": {"prompt_string": f"<__media__>{say}", "multimodal_data": [data]}, "n_predict": 9},
        ),
    }
