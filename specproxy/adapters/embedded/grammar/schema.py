"""JSON Schema → GBNF, so that a model can only write what fits the schema.

Every text of the grammar fits the schema, with two reservations: of `oneOf` the exclusiveness is not kept, and
a model that writes an undeclared key twice is not stopped. The other way round, a few things that would fit are
left out: members come in the order of `properties`, undeclared ones are only written where
`additionalProperties` asks for them (or nothing is declared), a missing `type` is read off the other keywords,
and white space is limited. A keyword that changes what is legal and cannot be expressed raises SchemaError,
which names it; annotations are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from itertools import combinations
from typing import Any

from specproxy.adapters.embedded.grammar.automaton import Dfa, TooComplexError, lengths, words
from specproxy.adapters.embedded.grammar.formats import FORMATS
from specproxy.adapters.embedded.grammar.gbnf import Grammar, alternatives, literal, sequence
from specproxy.adapters.embedded.grammar.normal import Expander, Flat, SchemaError, both, key_of, same
from specproxy.adapters.embedded.grammar.numeric import Bounds, number
from specproxy.adapters.embedded.grammar.regex import PatternError, full_match, search, universe

__all__ = ["SchemaError", "SchemaWriter", "schema_to_gbnf"]

ORDER = ("object", "array", "string", "integer", "number", "boolean", "null")
MAX_UNIQUE = 8  # values of which `uniqueItems` keeps track
MAX_PATTERNS = 4  # patternProperties of one object
ANYTHING = Flat()


def schema_to_gbnf(schema: Any) -> str:
    """The grammar of all JSON texts that fit a schema.

    Raises:
        SchemaError: the schema is malformed, impossible, or not supported (names keyword and place).
    """
    grammar = Grammar()
    return grammar.text(grammar.rule("document", SchemaWriter(grammar, schema).root()))


class SchemaWriter:
    """Writes the rules of one schema document into a grammar."""

    def __init__(self, grammar: Grammar, document: Any) -> None:
        self._grammar = grammar
        self._document = document
        self._expander = Expander(document)
        self._done: dict[bytes, str | None] = {}
        self._space = grammar.rule("ws", '" "? | "\\n" [ \\t]{0,24}')

    def root(self) -> str:
        """The expression of the document.

        Raises:
            SchemaError: see `schema_to_gbnf`.
        """
        try:
            expression = self._visit(self._document, "#")
        except (PatternError, TooComplexError) as error:
            raise SchemaError(str(error)) from None
        except RecursionError:
            raise SchemaError("the schema is nested too deeply") from None
        if expression is None:
            raise SchemaError("nothing can fit this schema")
        return expression

    def _visit(self, schema: Any, place: str) -> str | None:
        """The expression of a schema; None if nothing fits."""
        parts = [part for flat in self._expander.expand(schema, place) if (part := self._flat(flat, place))]
        return alternatives(parts) if parts else None

    def _flat(self, flat: Flat, place: str) -> str | None:
        key = key_of(flat)
        if key in self._done:
            return self._done[key]
        # a rule of its own, so that what is inside can come back to it
        name = self._grammar.reserve(place.rpartition("/")[2])
        self._done[key] = name
        parts = self._values(flat) if flat.enum is not None else self._typed(flat, place)
        if not parts:
            self._done[key] = None
            return None
        self._grammar.define(name, alternatives(parts))
        return name

    def _typed(self, flat: Flat, place: str) -> list[str]:
        types = flat.types if flat.types is not None else _implied(flat)
        writers: dict[str, Callable[[], str | None]] = {
            "object": lambda: self._object(flat, place),
            "array": lambda: self._array(flat, place),
            "string": lambda: self._string(flat),
            "integer": lambda: self._number(flat.bounds, integer=True),
            "number": lambda: self._number(flat.bounds, integer=False),
            "boolean": lambda: '("true" | "false")',
            "null": lambda: '"null"',
        }
        if {"integer", "number"} <= types:
            types = types - {"integer"}
        return [part for kind in ORDER if kind in types and (part := writers[kind]())]

    # --- fixed values

    def _values(self, flat: Flat) -> list[str]:
        assert flat.enum is not None
        return [self._value(value) for value in flat.enum if self._conforms(value, flat)]

    def _value(self, value: Any) -> str:
        ws = self._space
        if isinstance(value, dict):
            members = [
                sequence([literal(_dump(key)), '":"', ws, self._value(item)]) for key, item in value.items()
            ]
            return sequence(['"{"', ws, f' "," {ws} '.join(members), ws, '"}"'])
        if isinstance(value, list):
            return sequence(['"["', ws, f' "," {ws} '.join(map(self._value, value)), ws, '"]"'])
        return literal(_dump(value))

    def _fits(self, value: Any, schema: Any) -> bool:
        return any(self._conforms(value, flat) for flat in self._expander.expand(schema))

    def _conforms(self, value: Any, flat: Flat) -> bool:
        """Whether a fixed value fits: the meaning of the keywords, applied to a value."""
        kinds = _kinds(value)
        if flat.types is not None and not kinds & flat.types:
            return False
        if flat.enum is not None and not any(same(value, v) for v in flat.enum):
            return False
        if "string" in kinds:
            language = self._language(flat)
            return language is None or language.accepts(value)
        if "number" in kinds:
            return _within(Decimal(repr(value)), flat.bounds)
        if isinstance(value, list):
            return self._array_conforms(value, flat)
        return not isinstance(value, dict) or self._object_conforms(value, flat)

    def _array_conforms(self, value: list[Any], flat: Flat) -> bool:
        if not flat.min_items <= len(value) <= (len(value) if flat.max_items is None else flat.max_items):
            return False
        if flat.unique and any(same(a, b) for a, b in combinations(value, 2)):
            return False
        schemas = [flat.prefix[i] if i < len(flat.prefix) else flat.items for i in range(len(value))]
        return all(self._fits(item, schema) for item, schema in zip(value, schemas, strict=True))

    def _object_conforms(self, value: Mapping[str, Any], flat: Flat) -> bool:
        highest = len(value) if flat.max_properties is None else flat.max_properties
        return (
            flat.min_properties <= len(value) <= highest
            and all(name in value for name in flat.required)
            and all(self._fits(name, schema) for name in value for schema in flat.names)
            and all(self._fits(item, _member_schema(flat, name)) for name, item in value.items())
        )

    # --- strings and numbers

    def _language(self, flat: Flat) -> Dfa | None:
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

    def _char(self) -> str:
        simple = '["\\\\bfnrt/]'
        # no lone surrogates: half of the parsers refuse them
        code = '"u" ([0-9a-cA-CefEF] [0-9a-fA-F]{3} | [dD] [0-7] [0-9a-fA-F]{2})'
        return self._grammar.rule("char", f'[^"\\\\\\x00-\\x1F\\x7F] | "\\\\" ({simple} | {code})')

    def _string(self, flat: Flat) -> str | None:
        if not flat.patterns and not any(name in FORMATS for name in flat.formats):
            if flat.max_length is not None and flat.max_length < flat.min_length:
                return None
            inner = self._grammar.repeat(self._char(), flat.min_length, flat.max_length)
            return self._grammar.rule("string", sequence([QUOTE, inner, QUOTE]))
        language = self._language(flat)
        assert language is not None
        return self._quoted(language)

    def _quoted(self, language: Dfa) -> str | None:
        if language.empty:
            return None
        return sequence([QUOTE, language.to_rules(self._grammar, "text", json=True), QUOTE])

    def _number(self, bounds: Bounds, *, integer: bool) -> str | None:
        if not bounds.free:
            language = number(bounds, integer=integer)
            return None if language.empty else language.to_rules(self._grammar, "number", json=False)
        whole = self._grammar.rule("integer", '"-"? ("0" | [1-9] [0-9]{0,17})')
        if integer:
            return whole
        return self._grammar.rule("number", f'{whole} ("." [0-9]{{1,17}})? ([eE] [+-]? [0-9]{{1,2}})?')

    # --- arrays

    def _array(self, flat: Flat, place: str) -> str | None:
        high = flat.max_items
        if high is not None and high < flat.min_items:
            return None
        if flat.unique and (high is None or high > 1):
            return self._unique(flat, place)
        inner = self._elements(flat, place, 0)
        return None if inner is None else sequence(['"["', self._space, inner, self._space, '"]"'])

    def _comma(self) -> str:
        return f'"," {self._space}'

    def _elements(self, flat: Flat, place: str, index: int) -> str | None:
        """What may stand in an array from element `index` on, with the comma before it."""
        high = flat.max_items
        if high is not None and index >= high:
            return ""
        if index == len(flat.prefix):
            return self._more_elements(flat, place, index)
        element = self._visit(flat.prefix[index], f"{place}/{index}")
        rest = self._elements(flat, place, index + 1) if element is not None else None
        if element is None or rest is None:
            return "" if index >= flat.min_items else None
        taken = sequence([self._comma() if index else "", element, rest])
        return taken if index < flat.min_items else f"({taken})?"

    def _more_elements(self, flat: Flat, place: str, index: int) -> str | None:
        low = max(0, flat.min_items - index)
        high = None if flat.max_items is None else flat.max_items - index
        # a closed tuple: draft 2020 says `items: false`, before it was `additionalItems`
        element = self._visit(flat.items, f"{place}/item")
        if element is None:
            return "" if low == 0 else None
        return self._listed(element, low, high, first=index == 0)

    def _listed(self, element: str, low: int, high: int | None, *, first: bool) -> str:
        """`low` to `high` elements with commas; `first` says that none stands before them."""
        follower = self._grammar.rule("more", f"{self._comma()} {element}")
        if not first:
            return self._grammar.repeat(follower, low, high)
        if high == 0:
            return ""
        some = sequence(
            [element, self._grammar.repeat(follower, max(0, low - 1), None if high is None else high - 1)]
        )
        return some if low else f"({some})?"

    def _unique(self, flat: Flat, place: str) -> str | None:
        """Arrays of different items: only where those are few fixed values."""
        options = self._expander.expand(flat.items, f"{place}/items")
        values: list[Any] = []
        for option in options:
            if option.enum is None or flat.prefix:
                raise SchemaError(f"'uniqueItems' at {place} is only supported with an 'enum' of items")
            values += [
                v for v in option.enum if self._conforms(v, option) and not any(same(v, w) for w in values)
            ]
        if len(values) > MAX_UNIQUE:
            raise SchemaError(f"'uniqueItems' at {place} is only supported for up to {MAX_UNIQUE} values")
        high = len(values) if flat.max_items is None else min(flat.max_items, len(values))
        names: dict[frozenset[int], str | None] = {}

        def rest(used: frozenset[int]) -> str | None:
            if used not in names:
                parts = ['""'] if len(used) >= flat.min_items else []
                for i, value in enumerate(values if len(used) < high else ()):
                    if i not in used and (after := rest(used | {i})) is not None:
                        parts.append(sequence([self._comma() if used else "", self._value(value), after]))
                names[used] = self._grammar.rule("distinct", " | ".join(parts)) if parts else None
            return names[used]

        inner = rest(frozenset())
        return None if inner is None else sequence(['"["', self._space, inner, self._space, '"]"'])

    # --- objects

    def _object(self, flat: Flat, place: str) -> str | None:
        inner = _Members(self, flat, place).write()
        return None if inner is None else sequence(['"{"', self._space, inner, self._space, '"}"'])


QUOTE = literal('"')


class _Members:
    """The members of one object: declared ones in their order, then others."""

    def __init__(self, writer: SchemaWriter, flat: Flat, place: str) -> None:
        self._writer = writer
        self._flat = flat
        self._place = place
        self._declared = list(dict.fromkeys([*flat.properties, *flat.required]))
        self._high = flat.max_properties
        # counting stops where more makes no difference
        self._cap = max(1, flat.min_properties, 0 if self._high is None else self._high + 1)
        self._rules: dict[tuple[int, int], str | None] = {}
        self._members: dict[str, str | None] = {}
        self._other: str | None = None

    def write(self) -> str | None:
        """The expression between the braces; None if nothing fits."""
        self._members = {name: self._member(name) for name in self._declared}
        self._other = self._others()
        return self._from(0, 0)

    def _member(self, name: str) -> str | None:
        writer, flat = self._writer, self._flat
        if flat.names and not all(writer._fits(name, schema) for schema in flat.names):
            return None
        value = writer._visit(_member_schema(flat, name), f"{self._place}/{name}")
        if value is None:
            return None
        return sequence([literal(_dump(name)), '":"', writer._space, value])

    def _from(self, index: int, count: int) -> str | None:
        """What may follow when declared members before `index` are settled and `count` were written."""
        key = index, min(count, self._cap)
        if key not in self._rules:
            self._rules[key] = self._follow(*key)
        return self._rules[key]

    def _follow(self, index: int, count: int) -> str | None:
        if self._high is not None and count > self._high:
            return None
        if index == len(self._declared):
            return self._rest(count)
        name = self._declared[index]
        parts = []
        member = self._members[name]
        after = self._from(index + 1, count + 1) if member is not None else None
        if member is not None and after is not None:
            parts.append(sequence([self._writer._comma() if count else "", member, after]))
        if name not in self._flat.required and (skipped := self._from(index + 1, count)) is not None:
            parts.append(skipped or '""')
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else self._writer._grammar.rule("members", " | ".join(parts))

    def _rest(self, count: int) -> str | None:
        low = max(0, self._flat.min_properties - count)
        high = None if self._high is None else self._high - count
        if self._other is None:
            return "" if low == 0 else None
        return self._writer._listed(self._other, low, high, first=count == 0)

    def _others(self) -> str | None:
        """One member that is not declared, or None if there may be none."""
        flat, writer = self._flat, self._writer
        silent = flat.additional is None
        if silent and self._declared and not flat.pattern_properties:
            return None
        rest = False if silent and (flat.pattern_properties or self._declared) else flat.additional
        keys = self._free_keys()
        if not flat.pattern_properties and keys is None:
            value = writer._visit(rest, f"{self._place}/value")
            return None if value is None else self._pair(writer._string(ANYTHING), value)
        parts = [
            self._pair(key, value)
            for language, schema in self._classes(keys or universe(), rest)
            if (value := writer._visit(schema, f"{self._place}/value")) is not None
            and (key := writer._quoted(language)) is not None
        ]
        return alternatives(parts) if parts else None

    def _pair(self, key: str | None, value: str) -> str:
        return self._writer._grammar.rule("member", sequence([key or "", '":"', self._writer._space, value]))

    def _free_keys(self) -> Dfa | None:
        """Names that are not declared and that `propertyNames` allows; None for all names."""
        language = None
        for schema in self._flat.names:
            allowed = self._strings(schema)
            language = allowed if language is None or allowed is None else language & allowed
        if self._declared:
            language = (language or universe()) - words(self._declared)
        return language

    def _strings(self, schema: Any) -> Dfa | None:
        """The strings among what fits a schema; None for all."""
        union: Dfa | None = None
        for flat in self._writer._expander.expand(schema, f"{self._place}/propertyNames"):
            if flat.types is not None and "string" not in flat.types:
                continue
            language = self._writer._language(flat)
            if language is None:
                return None
            union = language if union is None else union | language
        return union if union is not None else words(())

    def _classes(self, keys: Dfa, rest: Any) -> Iterable[tuple[Dfa, Any]]:
        """Undeclared names by the patterns that they match, with the schema that their values must fit."""
        patterns = list(self._flat.pattern_properties.items())
        if len(patterns) > MAX_PATTERNS:
            raise SchemaError(f"'patternProperties' at {self._place} has more than {MAX_PATTERNS} patterns")
        languages = [search(pattern) for pattern, _ in patterns]
        for mask in range(2 ** len(patterns)):
            chosen = [i for i in range(len(patterns)) if mask >> i & 1]
            language = keys
            for i, pattern in enumerate(languages):
                language = language & pattern if i in chosen else language - pattern
            schema = rest if not chosen else None
            for i in chosen:
                schema = both(schema, patterns[i][1])
            if not language.empty and schema is not False:
                yield language, schema


def _member_schema(flat: Flat, name: str) -> Any:
    """All that a flat schema says about the value of a member."""
    schema = flat.properties.get(name)
    known = name in flat.properties
    for pattern, more in flat.pattern_properties.items():
        if search(pattern).accepts(name):
            schema, known = both(schema, more), True
    return schema if known else flat.additional


def _implied(flat: Flat) -> frozenset[str]:
    """The types that the keywords of a schema without `type` speak of; all if none does."""
    speaking = {
        "object": flat.properties
        or flat.pattern_properties
        or flat.required
        or flat.names
        or flat.additional is not None
        or flat.min_properties
        or flat.max_properties is not None,
        "array": flat.prefix
        or flat.items is not None
        or flat.min_items
        or flat.max_items is not None
        or flat.unique,
        "string": flat.patterns or flat.formats or flat.min_length or flat.max_length is not None,
        "number": not flat.bounds.free,
    }
    found = frozenset(kind for kind, said in speaking.items() if said)
    return found or frozenset(ORDER)


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


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
