"""Puts the model name that the client asked for back into a reply whose lane was selected by another name."""

from __future__ import annotations

import re
from collections.abc import Sequence

import orjson

__all__ = ["Renamer"]


class Renamer:
    """Replaces ``"model":"theirs"`` by ``"model":"asked"`` in a stream of JSON, whatever its pieces are.

    `key` is what stands for ``model`` there.

    Within a JSON string both quotes of a key are escaped, so what looks like the key is one. Pieces stay
    pieces, but for the beginning of a name at a piece's end, which is kept back for the next one.
    """

    def __init__(self, theirs: str, asked: str, key: str = "model") -> None:
        start = orjson.dumps(key) + b":"
        self._old = [start + between + orjson.dumps(theirs) for between in (b"", b" ")]
        self._pattern = re.compile(b"(" + re.escape(start) + b" ?)" + re.escape(orjson.dumps(theirs)))
        name = orjson.dumps(asked)
        self._replace = lambda match: match[1] + name
        self._held = b""

    def feed(self, parts: Sequence[bytes]) -> list[bytes]:
        """What can be passed on after these pieces; may be nothing."""
        out = []
        for part in parts:
            data = self._held + part if self._held else part
            self._held = b""
            data = self._pattern.sub(self._replace, data)
            if kept := self._unfinished(data):
                self._held, data = data[-kept:], data[:-kept]
            if data:
                out.append(data)
        return out

    def end(self) -> bytes:
        """What was kept back; the stream has ended."""
        held, self._held = self._held, b""
        return held

    def _unfinished(self, data: bytes) -> int:
        """Bytes at the end that may be the beginning of the name."""
        start = data.rfind(b'"', max(0, len(data) - max(map(len, self._old)) + 1))
        best = 0
        while start >= 0:
            tail = data[start:]
            if any(old.startswith(tail) for old in self._old):
                best = len(tail)
            start = data.rfind(b'"', max(0, len(data) - max(map(len, self._old)) + 1), start)
        return best
