"""JSON Schema brought into a form that a grammar can be written from.

`Expander.expand` turns a schema into alternatives without references and combinators: `$ref` is resolved,
`allOf` and siblings are merged, `anyOf` and `oneOf` are distributed (of `oneOf` the exclusiveness is not kept:
a value may fit two branches), `dependentRequired`, `dependentSchemas` and simple forms of `not` become
alternatives.
Schemas of properties and items stay as they are, so that recursive schemas end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from specproxy.adapters.embedded.grammar.flat import TYPES, Flat, SchemaError, merge, same
from specproxy.adapters.embedded.grammar.numeric import Bounds

__all__ = ["Expander"]

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

MAX_COUNT = 2**53  # more characters, items or members than any text has


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
            flats = [merged for a in flats for b in branches if (merged := merge(a, b)) is not None]
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
        wanted = "a whole number of at least 0"
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise self._wrong(keyword, wanted)
        if value > MAX_COUNT:
            return MAX_COUNT
        if value != int(value):
            raise self._wrong(keyword, wanted)
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
