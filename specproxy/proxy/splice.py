"""Change top-level fields of a JSON object without touching any other byte of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import orjson

__all__ = ["JsonField", "splice"]

JsonField = str | int | float | bool | tuple[str, ...]

# Strings and brackets are all that a walk over valid JSON has to look at.
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]', re.DOTALL)
_VALUE_OF = re.compile(rb"\s*:\s*")


def splice(body: bytes, *, model: str | None = None, fields: Sequence[tuple[str, JsonField]] = ()) -> bytes:
    """Replace the value of ``model`` (only where it is a string) and insert `fields` at the front.

    A field that the object already has is left as the client set it. `body` must be a valid JSON object,
    otherwise it is returned as it is. Of a repeated ``model`` every one is replaced.
    """
    start = body.find(b"{")
    if start < 0 or not (fields or model is not None):
        return body
    keys = list(_top_level_keys(body, start))
    present = {name for name, _ in keys}
    pieces = [body[: start + 1]]
    new = [orjson.dumps(name) + b":" + orjson.dumps(value) for name, value in fields if name not in present]
    if new:
        pieces.append(b",".join(new) + (b"," if keys else b""))
    done = start + 1
    for name, end in keys if model is not None else ():
        value = _string_value(body, end) if name == "model" else None
        if value is not None:
            pieces += (body[done : value[0]], orjson.dumps(model))
            done = value[1]
    pieces.append(body[done:])
    return b"".join(pieces)


def _top_level_keys(body: bytes, start: int) -> Iterator[tuple[str, int]]:
    """Every key of the outermost object, with the offset behind it."""
    depth = 0
    for match in _TOKEN.finditer(body, start):
        token = body[match.start()]
        if token in b"{[":
            depth += 1
        elif token in b"}]":
            depth -= 1
        elif depth == 1 and _VALUE_OF.match(body, match.end()):
            yield orjson.loads(match.group()), match.end()


def _string_value(body: bytes, key_end: int) -> tuple[int, int] | None:
    """Where the string value behind a key begins and ends; None for a value of another type."""
    colon = _VALUE_OF.match(body, key_end)
    if colon is None or body[colon.end() : colon.end() + 1] != b'"':
        return None
    match = _TOKEN.match(body, colon.end())
    return match.span() if match else None
