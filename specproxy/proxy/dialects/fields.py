"""Reading JSON that anyone may have sent: a value of the wrong type counts as absent."""

from __future__ import annotations

import math
from collections.abc import Iterator

__all__ = [
    "Json",
    "chosen_tool",
    "copies",
    "flag",
    "items",
    "limit",
    "mapping",
    "number",
    "objects",
    "steering",
    "text",
    "whole",
]

Json = dict[str, object]

# Fields by which clients control speculation themselves: LM Studio and mlx_lm.server take `draft_model` and
# `num_draft_tokens`, llama-server up to b9108 and its forks `speculative.*`, Ollama `draft_num_predict`.
_STEERING = frozenset(
    {"draft_model", "num_draft_tokens", "draft_num_predict", "speculative", "speculative_config"}
)


def text(value: object) -> str | None:
    """The value if it is a string."""
    return value if isinstance(value, str) else None


def flag(value: object) -> bool:
    """Whether the value is exactly true."""
    return value is True


def whole(value: object) -> int | None:
    """The value as an integer; a float with an integral value counts, a boolean does not."""
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    return None


def number(value: object) -> float | None:
    """The value as a finite float; a boolean does not count."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def mapping(value: object) -> Json:
    """The value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def items(value: object) -> list[object]:
    """The value if it is an array, else an empty one."""
    return value if isinstance(value, list) else []


def objects(value: object) -> Iterator[Json]:
    """The objects in an array."""
    return (item for item in items(value) if isinstance(item, dict))


def limit(*values: object) -> int | None:
    """The first token limit that is an integer from 0 up; servers take negative ones as "no limit"."""
    for value in values:
        count = whole(value)
        if count is not None and count >= 0:
            return count
    return None


def copies(data: Json) -> int:
    """How many answers are asked for (`n`); at least one."""
    return max(1, whole(data.get("n")) or 1)


def steering(data: Json, prefix: str = "") -> tuple[str, ...]:
    """Names of the fields by which the client itself controls speculation, in order of appearance."""
    return tuple(prefix + key for key in data if key in _STEERING or key.startswith("speculative."))


def chosen_tool(tools: int, choice: object) -> str:
    """OpenAI's `tool_choice` as none, auto, required or named; without tools nothing can be chosen."""
    if not tools:
        return "none"
    if isinstance(choice, str):
        return {"none": "none", "required": "required", "any": "required"}.get(choice, "auto")
    named = mapping(choice)
    kind = named.get("type")
    if kind == "allowed_tools":
        mode = mapping(named.get("allowed_tools")).get("mode", named.get("mode"))
        return "required" if mode == "required" else "auto"
    if kind in ("auto", "none", "required"):
        return str(kind)
    return "named" if named else "auto"
