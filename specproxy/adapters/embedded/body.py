"""JSON request bodies, read field by field; every complaint names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from specproxy.errors import RequestError

__all__ = ["FieldError", "Fields", "parse_body"]


class FieldError(RequestError):
    """A field that cannot be served as asked. `param` is its path; `extra` goes into the error object."""

    def __init__(
        self,
        param: str,
        message: str,
        *,
        code: str = "invalid_request_error",
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message, code=code)
        self.param = param
        self.extra = dict(extra or {})


def parse_body(data: bytes) -> Fields:
    """Read a request body.

    Raises:
        RequestError: it is not a JSON object.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"the request body must be a JSON object, not {_kind(value)}")
    return Fields(value)


def _kind(value: object) -> str:
    names = {bool: "a boolean", str: "a string", dict: "an object", list: "an array", type(None): "null"}
    return names.get(type(value), "a number")


class Fields:
    """A JSON object with checked access. A member that is absent or null counts as not given."""

    def __init__(self, data: Mapping[str, Any], path: str = "") -> None:
        self.data = data
        self._path = path

    def path(self, name: str) -> str:
        """Full name of a member, for messages."""
        return f"{self._path}.{name}" if self._path else name

    def wrong(self, name: str, message: str) -> FieldError:
        """The error for a member, to be raised by the caller."""
        return FieldError(self.path(name), f"'{self.path(name)}' {message}")

    def has(self, name: str) -> bool:
        """Whether a member is given."""
        return self.data.get(name) is not None

    def get(self, name: str) -> Any:
        """The raw value, or None."""
        return self.data.get(name)

    def _typed(self, name: str, types: type | tuple[type, ...], what: str) -> Any:
        value = self.data.get(name)
        if value is None:
            return None
        # bool is an int to Python; to JSON it is not
        if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
            raise self.wrong(name, f"must be {what}, not {_kind(value)}")
        return value

    def text(self, name: str) -> str | None:
        value: str | None = self._typed(name, str, "a string")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value: bool | None = self._typed(name, bool, "a boolean")
        return default if value is None else value

    def number(self, name: str, low: float = float("-inf"), high: float = float("inf")) -> float | None:
        """A finite number within [low, high]."""
        value: float | None = self._typed(name, (int, float), "a number")
        if value is not None and not low <= value <= high:
            raise self.wrong(name, f"must be {_bounds(low, high)}, not {value}")
        return value

    def integer(self, name: str, low: int | None = None, high: int | None = None) -> int | None:
        """A whole number within [low, high]; ``8.0`` counts as whole."""
        value = self.number(name, float("-inf") if low is None else low, float("inf") if high is None else high)
        if value is not None and value != int(value):
            raise self.wrong(name, f"must be a whole number, not {value}")
        return None if value is None else int(value)

    def items(self, name: str) -> Sequence[Any] | None:
        value: list[Any] | None = self._typed(name, list, "an array")
        return value

    def object(self, name: str) -> Fields | None:
        value = self._typed(name, dict, "an object")
        return None if value is None else Fields(value, self.path(name))

    def objects(self, name: str) -> list[Fields]:
        """An array of objects; empty if not given."""
        found = []
        for i, value in enumerate(self.items(name) or ()):
            if not isinstance(value, dict):
                raise self.wrong(f"{name}[{i}]", f"must be an object, not {_kind(value)}")
            found.append(Fields(value, self.path(f"{name}[{i}]")))
        return found

    def texts(self, name: str) -> tuple[str, ...]:
        """A string or an array of strings; empty if not given."""
        value = self.data.get(name)
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, "must be a string or an array of strings")
        return tuple(value)

    def choice(self, name: str, allowed: Sequence[str]) -> str | None:
        """One of a few strings."""
        value = self.text(name)
        if value is not None and value not in allowed:
            raise self.wrong(name, f"must be one of {', '.join(allowed)}, not {value!r}")
        return value

    def refuse(self, neutral: Mapping[str, Sequence[Any]]) -> None:
        """Refuse members that would change the text and are not supported.

        `neutral` maps a member's name to the values with which it changes nothing.

        Raises:
            FieldError: one of them is given with another value.
        """
        for name in self.data.keys() & neutral.keys():
            value = self.data[name]
            if value is not None and value not in neutral[name]:
                raise self.wrong(name, "is not supported by this engine, and would change the text")


def _bounds(low: float, high: float) -> str:
    if high == float("inf"):
        return f"at least {low:g}"
    return f"at most {high:g}" if low == float("-inf") else f"between {low:g} and {high:g}"
