"""The generated text of a finished reply, whole or streamed, for replay: off the hot path, and not kept."""

from __future__ import annotations

from collections.abc import Iterator

from specproxy.proxy.dialects.fields import Json, mapping, objects
from specproxy.proxy.dialects.replies import parse_object

__all__ = ["reply_text"]

_FIRST, _MAIN = ("reasoning_content", "reasoning", "thinking"), ("content", "text", "response")


def reply_text(body: bytes) -> str:
    """What a model wrote, in the order in which it wrote it; empty where nothing can be read.

    Knows the replies of all dialects: documents, server-sent events and lines of JSON. Thoughts stand before
    the answer, and tool calls behind it, in about the form in which models write them: templates differ, so
    that only a reply of text alone is surely whole.
    """
    whole = parse_object(body)
    if whole is not None:
        return "".join(_pieces(whole))
    found: list[str] = []
    for line in body.splitlines():
        data = line.removeprefix(b"data:").strip()
        if data.startswith(b"{") and (event := parse_object(data)) is not None:
            found.extend(_pieces(event))
    return "".join(found)


def _pieces(event: Json) -> Iterator[str]:
    """Text of one document or one event of a stream."""
    kind = event.get("type")
    if isinstance(kind, str) and "." in kind:  # /v1/responses: deltas; the last event repeats all
        if kind.endswith(".delta") and isinstance(event.get("delta"), str):
            yield str(event["delta"])
        return
    if kind == "content_block_delta":
        yield from _texts(mapping(event.get("delta")), (*_FIRST, *_MAIN, "partial_json"))
    elif kind == "message":
        for block in objects(event.get("content")):
            yield from _texts(block, (*_FIRST, *_MAIN))
    elif "choices" in event:
        for choice in objects(event["choices"]):
            yield from _message(choice)
            yield from _message(mapping(choice.get("delta")) or mapping(choice.get("message")))
    elif "output" in event:
        for item in objects(event["output"]):
            for block in objects(item.get("content")):
                yield from _texts(block, _MAIN)
    else:
        yield from _message(event)
        yield from _message(mapping(event.get("message")))


def _message(message: Json) -> Iterator[str]:
    yield from _texts(message, (*_FIRST, *_MAIN))
    for call in objects(message.get("tool_calls")):
        function = mapping(call.get("function"))
        if isinstance(function.get("name"), str):
            yield f'{{"name": "{function["name"]}", "arguments": '
        yield from _texts(function, ("arguments",))


def _texts(message: Json, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        if isinstance(message.get(name), str):
            yield str(message[name])
