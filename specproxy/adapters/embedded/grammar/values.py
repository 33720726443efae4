"""What a flat schema means for strings and for fixed values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from itertools import combinations
from typing import Any

from specproxy.adapters.embedded.grammar.automaton import Dfa, TooComplexError, lengths, words
from specproxy.adapters.embedded.grammar.flat import Flat, SchemaError, both, same
from specproxy.adapters.embedded.grammar.formats import FORMATS
from specproxy.adapters.embedded.grammar.normal import Expander
from specproxy.adapters.embedded.grammar.numeric import Bounds
from specproxy.adapters.embedded.grammar.regex import full_match, search

__all__ = ["Checker", "json_text", "member_schema", "string_language"]


def string_language(flat: Flat) -> Dfa | None:
    """The strings that fit, or None for all."""
    parts = [search(pattern) for pattern in flat.patterns]
    parts += [full_match(FORMATS[name]) for name in flat.formats if name in FORMATS]
    if flat.enum is not None and flat.enum:
        parts.append(words([value for value in flat.enum if isinstance(value, str)]))
    if flat.min_length or flat.max_length is not None:
        try:
            parts.append(lengths(flat.min_length, flat.max_length))
        except TooComplexError:
            raise SchemaError(
                f"'minLength' {flat.min_length} or 'maxLength' {flat.max_length} is not supported "
                "together with 'pattern', 'format' or 'propertyNames'"
            ) from None
    if not parts:
        return None
    language = parts[0]
    for part in parts[1:]:
        language = language & part
    return language


def member_schema(flat: Flat, name: str) -> Any:
    """All that a flat schema says about the value of a member."""
    schema = flat.properties.get(name)
    known = name in flat.properties
    for pattern, more in flat.pattern_properties.items():
        if search(pattern).accepts(name):
            schema, known = both(schema, more), True
    return schema if known else flat.additional


class Checker:
    """Whether fixed values fit schemas of one document."""

    def __init__(self, expander: Expander) -> None:
        self._expander = expander

    def fits(self, value: Any, schema: Any) -> bool:
        """Whether a value fits a schema."""
        return any(self.conforms(value, flat) for flat in self._expander.expand(schema))

    def conforms(self, value: Any, flat: Flat) -> bool:
        """Whether a fixed value fits: the meaning of the keywords, applied to a value."""
        kinds = _kinds(value)
        if flat.types is not None and not kinds & flat.types:
            return False
        if flat.enum is not None and not any(same(value, v) for v in flat.enum):
            return False
        if "string" in kinds:
            language = string_language(flat)
            return language is None or language.accepts(value)
        if "number" in kinds:
            return _within(Decimal(repr(value)), flat.bounds)
        if isinstance(value, list):
            return self._arrayconforms(value, flat)
        return not isinstance(value, dict) or self._objectconforms(value, flat)

    def _arrayconforms(self, value: list[Any], flat: Flat) -> bool:
        if not flat.min_items <= len(value) <= (len(value) if flat.max_items is None else flat.max_items):
            return False
        if flat.unique and any(same(a, b) for a, b in combinations(value, 2)):
            return False
        schemas = [flat.prefix[i] if i < len(flat.prefix) else flat.items for i in range(len(value))]
        return all(self.fits(item, schema) for item, schema in zip(value, schemas, strict=True))

    def _objectconforms(self, value: Mapping[str, Any], flat: Flat) -> bool:
        highest = len(value) if flat.max_properties is None else flat.max_properties
        return (
            flat.min_properties <= len(value) <= highest
            and all(name in value for name in flat.required)
            and all(self.fits(name, schema) for name in value for schema in flat.names)
            and all(self.fits(item, member_schema(flat, name)) for name, item in value.items())
        )


def _kinds(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if value == int(value) else {"number"}
    if value is None:
        return {"null"}
    return {"string"} if isinstance(value, str) else {"array"} if isinstance(value, list) else {"object"}


def _within(value: Decimal, bounds: Bounds) -> bool:
    if bounds.low is not None and (value < bounds.low or (bounds.low_strict and value == bounds.low)):
        return False
    if bounds.high is not None and (value > bounds.high or (bounds.high_strict and value == bounds.high)):
        return False
    return all(value % step == 0 for step in bounds.multiple_of)


def json_text(value: Any) -> str:
    """A value as JSON, without escapes that it does not need."""
    return json.dumps(value, ensure_ascii=False)
