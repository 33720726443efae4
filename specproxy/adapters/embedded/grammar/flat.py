"""One alternative of a JSON schema, flat: no references, no combinators; and how two of them become one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import orjson

from specproxy.adapters.embedded.grammar.numeric import Bounds
from specproxy.adapters.embedded.grammar.regex import search

__all__ = ["TYPES", "Flat", "SchemaError", "both", "key_of", "merge", "same"]

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


class SchemaError(ValueError):
    """A schema that is malformed, or that needs what a grammar cannot express. Names keyword and place."""


@dataclass(frozen=True, slots=True)
class Flat:
    """One alternative: everything in it must hold. Fields of other types than a value's do not concern it."""

    types: frozenset[str] | None = None
    enum: tuple[Any, ...] | None = None
    bounds: Bounds = field(default_factory=Bounds)
    patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    min_length: int = 0
    max_length: int | None = None
    properties: Mapping[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    pattern_properties: Mapping[str, Any] = field(default_factory=dict)
    additional: Any = None  # a schema, or None where nothing is said
    names: tuple[Any, ...] = ()  # schemas of property names
    min_properties: int = 0
    max_properties: int | None = None
    prefix: tuple[Any, ...] = ()
    items: Any = None
    min_items: int = 0
    max_items: int | None = None
    unique: bool = False


def same(a: object, b: object) -> bool:
    """Equality of JSON values: 1 equals 1.0, but not true."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


def both(a: Any, b: Any) -> Any:
    """A schema for values that fit two schemas; None means no restriction."""
    if a is None or a is True:
        return b
    if b is None or b is True or a is b:
        return a
    return False if a is False or b is False else {"allOf": [a, b]}


def key_of(flat: Flat) -> bytes:
    """An identity for equal alternatives."""
    return orjson.dumps(flat, default=_plain, option=orjson.OPT_PASSTHROUGH_SUBCLASS)


def _plain(value: object) -> Any:
    return sorted(value) if isinstance(value, frozenset) else str(value)


def merge(a: Flat, b: Flat) -> Flat | None:
    """What fits both; None if that is nothing for certain."""
    types = _types(a.types, b.types)
    enum = _enum(a.enum, b.enum)
    if types == frozenset() or enum == ():
        return None
    length = max(len(a.prefix), len(b.prefix))
    return Flat(
        types=types,
        enum=enum,
        bounds=_bounds(a.bounds, b.bounds),
        patterns=tuple(dict.fromkeys(a.patterns + b.patterns)),
        formats=tuple(dict.fromkeys(a.formats + b.formats)),
        min_length=max(a.min_length, b.min_length),
        max_length=_least(a.max_length, b.max_length),
        properties={
            name: both(_property(a, name), _property(b, name))
            for name in dict.fromkeys([*a.properties, *b.properties])
        },
        required=tuple(dict.fromkeys(a.required + b.required)),
        pattern_properties=_pattern_properties(a, b),
        additional=both(a.additional, b.additional),
        names=a.names + b.names,
        min_properties=max(a.min_properties, b.min_properties),
        max_properties=_least(a.max_properties, b.max_properties),
        prefix=tuple(both(_item(a, i), _item(b, i)) for i in range(length)),
        items=both(a.items, b.items),
        min_items=max(a.min_items, b.min_items),
        max_items=_least(a.max_items, b.max_items),
        unique=a.unique or b.unique,
    )


def _types(a: frozenset[str] | None, b: frozenset[str] | None) -> frozenset[str] | None:
    if a is None or b is None:
        return b if a is None else a
    shared = a & b
    if ("integer" in a and "number" in b) or ("number" in a and "integer" in b):
        shared |= {"integer"}
    return shared


def _enum(a: tuple[Any, ...] | None, b: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    if a is None or b is None:
        return b if a is None else a
    return tuple(v for v in a if any(same(v, w) for w in b))


def _least(a: int | None, b: int | None) -> int | None:
    return min((x for x in (a, b) if x is not None), default=None)


def _bounds(a: Bounds, b: Bounds) -> Bounds:
    low, low_strict = _tighter(a.low, a.low_strict, b.low, b.low_strict, lambda x, y: x > y)
    high, high_strict = _tighter(a.high, a.high_strict, b.high, b.high_strict, lambda x, y: x < y)
    return Bounds(low, low_strict, high, high_strict, tuple(dict.fromkeys(a.multiple_of + b.multiple_of)))


def _tighter(
    a: Decimal | None,
    a_strict: bool,
    b: Decimal | None,
    b_strict: bool,
    tighter: Callable[[Decimal, Decimal], bool],
) -> tuple[Decimal | None, bool]:
    if a is None or b is None:
        return (b, b_strict) if a is None else (a, a_strict)
    if a == b:
        return a, a_strict or b_strict
    return (a, a_strict) if tighter(a, b) else (b, b_strict)


def _property(flat: Flat, name: str) -> Any:
    """What an alternative says about a property, by whatever keyword; None if nothing."""
    if name in flat.properties:
        return flat.properties[name]
    matching = [schema for pattern, schema in flat.pattern_properties.items() if search(pattern).accepts(name)]
    if not matching:
        return flat.additional
    result = None
    for schema in matching:
        result = both(result, schema)
    return True if result is None else result


def _pattern_properties(a: Flat, b: Flat) -> dict[str, Any]:
    merged = {}
    for pattern in dict.fromkeys([*a.pattern_properties, *b.pattern_properties]):
        mine = a.pattern_properties.get(pattern, a.additional if not a.pattern_properties else None)
        theirs = b.pattern_properties.get(pattern, b.additional if not b.pattern_properties else None)
        merged[pattern] = both(mine, theirs)
    return merged


def _item(flat: Flat, index: int) -> Any:
    return flat.prefix[index] if index < len(flat.prefix) else flat.items
