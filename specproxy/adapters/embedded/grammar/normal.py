"""JSON Schema brought into a form that a grammar can be written from.

`Expander.expand` turns a schema into alternatives without references and combinators: `$ref` is resolved,
`allOf` and siblings are merged, `anyOf` and `oneOf` are distributed (of `oneOf` the exclusiveness is not kept:
a value may fit two branches), `dependentRequired`, `dependentSchemas` and simple forms of `not` become
alternatives.
Schemas of properties and items stay as they are, so that recursive schemas end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

import orjson

from specproxy.adapters.embedded.grammar.numeric import Bounds
from specproxy.adapters.embedded.grammar.regex import search

__all__ = ["TYPES", "Expander", "Flat", "SchemaError", "both", "same"]

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
MAX_ALTERNATIVES = 256
MAX_NESTING = 64

# Keywords that change what is legal and that no grammar here expresses
UNSUPPORTED = [
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "$dynamicRef",
    "$recursiveRef",
    "extends",
    "disallow",
    "divisibleBy",
    "unevaluatedItems",
    "contentSchema",
]


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


class Expander:
    """Reads one schema document."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def expand(self, schema: Any, place: str = "#") -> list[Flat]:
        """The alternatives of a schema; empty if nothing fits it.

        Raises:
            SchemaError: it is malformed, unsupported, or refers to itself without end.
        """
        return self._expand(schema, place, ())

    def _expand(self, schema: Any, place: str, refs: tuple[str, ...]) -> list[Flat]:
        if schema is True or schema is None:
            return [Flat()]
        if schema is False:
            return []
        if not isinstance(schema, dict):
            raise SchemaError(f"{place} is not a schema")
        for keyword in UNSUPPORTED:
            if keyword in schema:
                raise SchemaError(f"keyword '{keyword}' at {place} is not supported")
        found = _Reader(schema, place).flat()
        flats = [found] if found else []
        for part, where, path in self._conjuncts(schema, place, refs):
            branches = [flat for option in part for flat in self._expand(option, where, path)]
            flats = [merged for a in flats for b in branches if (merged := _merge(a, b)) is not None]
            if len(flats) > MAX_ALTERNATIVES:
                raise SchemaError(f"{place} has more than {MAX_ALTERNATIVES} alternatives")
        return _after(schema, flats)

    def _conjuncts(
        self, schema: dict[str, Any], place: str, refs: tuple[str, ...]
    ) -> Iterable[tuple[list[Any], str, tuple[str, ...]]]:
        """What else must hold, each a list of alternatives with its place and the references that led there."""
        if "$ref" in schema:
            ref = schema["$ref"]
            if ref in refs or len(refs) > MAX_NESTING:
                raise SchemaError(f"'$ref' at {place} refers to itself without end")
            yield [self._resolve(ref, place)], str(ref), (*refs, ref)
        for i, part in enumerate(_schemas(schema, "allOf", place)):
            yield [part], f"{place}/allOf/{i}", refs
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                yield _schemas(schema, keyword, place), f"{place}/{keyword}", refs
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, need in _mapping(schema, keyword, place).items():
                more = (
                    {"required": [name, *need]}
                    if isinstance(need, list)
                    else {"required": [name], "allOf": [need]}
                )
                yield [{"properties": {name: False}}, more], f"{place}/{keyword}", refs
        if "not" in schema:
            yield _negated(schema["not"], place), f"{place}/not", refs

    def _resolve(self, ref: Any, place: str) -> Any:
        if not isinstance(ref, str) or not ref.startswith("#"):
            raise SchemaError(f"'$ref' at {place} leads outside of the schema, which is not supported: {ref!r}")
        pointer = unquote(ref[1:])
        if pointer and not pointer.startswith("/"):
            return self._anchor(pointer, place)
        node = self._root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and key in node:
                node = node[key]
            elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
                node = node[int(key)]
            else:
                raise SchemaError(f"'$ref' at {place} leads nowhere: {ref!r}")
        return node

    def _anchor(self, name: str, place: str) -> Any:
        todo = [self._root]
        while todo:
            node = todo.pop()
            if isinstance(node, dict):
                if name in (node.get("$anchor"), str(node.get("$id", node.get("id", ""))).lstrip("#")):
                    return node
                todo += node.values()
            elif isinstance(node, list):
                todo += node
        raise SchemaError(f"'$ref' at {place} leads nowhere: '#{name}'")


def _after(schema: dict[str, Any], flats: list[Flat]) -> list[Flat]:
    """Keywords that look at the merged result."""
    if "unevaluatedProperties" in schema:
        rest = schema["unevaluatedProperties"]
        flats = [replace(flat, additional=rest) if flat.additional is None else flat for flat in flats]
    if schema.get("nullable") is True:  # OpenAPI
        flats = [*flats, Flat(types=frozenset({"null"}))]
    return flats


def _negated(schema: Any, place: str) -> list[Any]:
    """Alternatives for what must not hold, for the few forms that have some."""
    if schema is True or schema == {}:
        return []
    if schema is False:
        return [True]
    if isinstance(schema, dict) and schema.keys() == {"required"}:
        return [{"type": "object", "properties": {name: False}} for name in schema["required"]]
    if isinstance(schema, dict) and schema.keys() == {"type"}:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        rest = [t for t in TYPES if t not in types and not (t == "integer" and "number" in types)]
        if "integer" in types and "number" not in types:
            raise SchemaError(f"keyword 'not' at {place} is not supported with 'integer'")
        return [{"type": rest}]
    raise SchemaError(f"keyword 'not' at {place} is only supported with nothing but 'required' or 'type' in it")


def _schemas(schema: dict[str, Any], keyword: str, place: str) -> list[Any]:
    value = schema.get(keyword, [])
    if not isinstance(value, list) or (keyword in schema and not value):
        raise SchemaError(f"'{keyword}' at {place} must be a non-empty array")
    return value


def _mapping(schema: dict[str, Any], keyword: str, place: str) -> dict[str, Any]:
    value = schema.get(keyword, {})
    if not isinstance(value, dict):
        raise SchemaError(f"'{keyword}' at {place} must be an object")
    return value


class _Reader:
    """The keywords of one schema object, checked."""

    def __init__(self, schema: dict[str, Any], place: str) -> None:
        self._schema = schema
        self._place = place

    def flat(self) -> Flat | None:
        """All but references and combinators; None if it is impossible by itself."""
        schema = self._schema
        prefix, items = self._array()
        enum = self._enum()
        if enum == ():
            return None
        return Flat(
            types=self._types(),
            enum=enum,
            bounds=self._bounds(),
            patterns=(self._text("pattern"),) if "pattern" in schema else (),
            formats=(self._text("format"),) if "format" in schema else (),
            min_length=self._count("minLength") or 0,
            max_length=self._count("maxLength"),
            properties=_mapping(schema, "properties", self._place),
            required=self._required(),
            pattern_properties=_mapping(schema, "patternProperties", self._place),
            additional=schema.get("additionalProperties"),
            names=(schema["propertyNames"],) if "propertyNames" in schema else (),
            min_properties=self._count("minProperties") or 0,
            max_properties=self._count("maxProperties"),
            prefix=prefix,
            items=items,
            min_items=self._count("minItems") or 0,
            max_items=self._count("maxItems"),
            unique=schema.get("uniqueItems") is True,
        )

    def _wrong(self, keyword: str, must: str) -> SchemaError:
        return SchemaError(f"'{keyword}' at {self._place} must be {must}")

    def _types(self) -> frozenset[str] | None:
        given = self._schema.get("type")
        if given is None:
            return None
        types = [given] if isinstance(given, str) else given
        if types == ["any"]:  # draft 3
            return None
        if not isinstance(types, list) or not types or not all(t in TYPES for t in types):
            raise self._wrong("type", f"one or several of {', '.join(TYPES)}")
        return frozenset(types)

    def _enum(self) -> tuple[Any, ...] | None:
        schema = self._schema
        if "enum" not in schema:
            return (schema["const"],) if "const" in schema else None
        if not isinstance(schema["enum"], list) or not schema["enum"]:
            raise self._wrong("enum", "a non-empty array")
        values = tuple(schema["enum"])
        return tuple(v for v in values if same(v, schema["const"])) if "const" in schema else values

    def _text(self, keyword: str) -> str:
        value = self._schema[keyword]
        if not isinstance(value, str):
            raise self._wrong(keyword, "a string")
        return value

    def _count(self, keyword: str) -> int | None:
        value = self._schema.get(keyword)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            raise self._wrong(keyword, "a whole number of at least 0")
        return int(value)

    def _number(self, keyword: str) -> Decimal | None:
        value = self._schema.get(keyword)
        if value is None or isinstance(value, bool):
            return None
        if not isinstance(value, int | float):
            raise self._wrong(keyword, "a number")
        return Decimal(repr(value))

    def _bounds(self) -> Bounds:
        low, high = self._number("minimum"), self._number("maximum")
        # in draft 4 the exclusive keywords are flags
        low_strict = self._schema.get("exclusiveMinimum") is True
        high_strict = self._schema.get("exclusiveMaximum") is True
        above, below = self._number("exclusiveMinimum"), self._number("exclusiveMaximum")
        if above is not None and (low is None or above >= low):
            low, low_strict = above, True
        if below is not None and (high is None or below <= high):
            high, high_strict = below, True
        step = self._number("multipleOf")
        if step is not None and step <= 0:
            raise self._wrong("multipleOf", "above 0")
        return Bounds(low, low_strict, high, high_strict, () if step is None else (step,))

    def _required(self) -> tuple[str, ...]:
        value = self._schema.get("required", [])
        if isinstance(value, bool):
            raise self._wrong("required", "an array of names")
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self._wrong("required", "an array of names")
        return tuple(value)

    def _array(self) -> tuple[tuple[Any, ...], Any]:
        items = self._schema.get("items")
        if isinstance(items, list):  # up to draft 2019-09
            return tuple(items), self._schema.get("additionalItems")
        return tuple(_schemas(self._schema, "prefixItems", self._place)), items


def _merge(a: Flat, b: Flat) -> Flat | None:
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


def key_of(flat: Flat) -> bytes:
    """An identity for equal alternatives."""
    return orjson.dumps(flat, default=_plain, option=orjson.OPT_PASSTHROUGH_SUBCLASS)


def _plain(value: object) -> Any:
    return sorted(value) if isinstance(value, frozenset) else str(value)
