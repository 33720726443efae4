"""Change fields of a JSON object without touching any other byte of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import orjson

__all__ = ["JsonField", "splice"]

JsonField = str | int | float | bool | tuple[str, ...]

# Strings and brackets are all that a walk over valid JSON has to look at.
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]', re.DOTALL)
_VALUE_OF = re.compile(rb"\s*:\s*")


def splice(
    body: bytes,
    *,
    model: str | None = None,
    key: str = "model",
    fields: Sequence[tuple[str, JsonField]] = (),
) -> bytes:
    """Replace the value of `key` (only where it is a string) by `model` and insert `fields` at the front.

    A field that the object already has is left as the client set it. `body` must be a valid JSON object, as
    whoever has read its facts knows; without any object it is returned as it is. Of a repeated `key` every
    one is replaced. A name such as ``/options/n`` means the field `n` of the object `options`, which is added
    if it is missing or null.
    """
    start = body.find(b"{")
    if start < 0 or not (fields or model is not None):
        return body
    for path, inner in fields:
        if path.startswith("/"):
            parent, _, child = path[1:].partition("/")
            body = _splice_into(body, start, parent, child, inner)
    fields = [field for field in fields if not field[0].startswith("/")]
    keys = list(_top_level_keys(body, start))
    present = {name for name, _ in keys}
    pieces = [body[: start + 1]]
    new = [orjson.dumps(name) + b":" + orjson.dumps(value) for name, value in fields if name not in present]
    if new:
        pieces.append(b",".join(new) + (b"," if keys else b""))
    done = start + 1
    for name, end in keys if model is not None else ():
        value = _string_value(body, end) if name == key else None
        if value is not None:
            pieces += (body[done : value[0]], orjson.dumps(model))
            done = value[1]
    pieces.append(body[done:])
    return b"".join(pieces)


def _splice_into(body: bytes, start: int, parent: str, child: str, value: JsonField) -> bytes:
    """Insert a field into an object that is a field of the outermost one; of a repeated one, the last."""
    keys = list(_top_level_keys(body, start))
    field = orjson.dumps(child) + b":" + orjson.dumps(value)
    end = next((end for name, end in reversed(keys) if name == parent), None)
    if end is None:
        whole = orjson.dumps(parent) + b":{" + field + b"}" + (b"," if keys else b"")
        return body[: start + 1] + whole + body[start + 1 :]
    colon = _VALUE_OF.match(body, end)
    assert colon is not None, "a key has a colon behind it"
    at = colon.end()
    if body.startswith(b"null", at):
        return body[:at] + b"{" + field + b"}" + body[at + 4 :]
    if not body.startswith(b"{", at):
        return body
    inner = {name for name, _ in _top_level_keys(body, at)}
    if child in inner:
        return body
    return body[: at + 1] + field + (b"," if inner else b"") + body[at + 1 :]


def _top_level_keys(body: bytes, start: int) -> Iterator[tuple[str, int]]:
    """Every key of the object that begins at `start`, with the offset behind it."""
    depth = 0
    for match in _TOKEN.finditer(body, start):
        token = body[match.start()]
        if token in b"{[":
            depth += 1
        elif token in b"}]":
            depth -= 1
            if depth == 0:
                return
        elif depth == 1 and _VALUE_OF.match(body, match.end()):
            yield orjson.loads(match.group()), match.end()


def _string_value(body: bytes, key_end: int) -> tuple[int, int] | None:
    """Where the string value behind a key begins and ends; None for a value of another type."""
    colon = _VALUE_OF.match(body, key_end)
    if colon is None or body[colon.end() : colon.end() + 1] != b'"':
        return None
    match = _TOKEN.match(body, colon.end())
    return match.span() if match else None
