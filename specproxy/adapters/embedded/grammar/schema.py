"""JSON Schema → GBNF, so that a model can only write what fits the schema.

Every text of the grammar fits the schema, with two reservations: of `oneOf` the exclusiveness is not kept, and
a model that writes an undeclared key twice is not stopped. The other way round, a few things that would fit are
left out: members come in the order of `properties`, undeclared ones are only written where
`additionalProperties` asks for them (or nothing is declared), a missing `type` is read off the other keywords,
and white space is limited. A keyword that changes what is legal and cannot be expressed raises SchemaError,
which names it; annotations are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specproxy.adapters.embedded.grammar.automaton import Dfa, TooComplexError
from specproxy.adapters.embedded.grammar.flat import Flat, SchemaError, key_of, same
from specproxy.adapters.embedded.grammar.formats import FORMATS
from specproxy.adapters.embedded.grammar.gbnf import Grammar, alternatives, literal, sequence
from specproxy.adapters.embedded.grammar.members import Members
from specproxy.adapters.embedded.grammar.normal import Expander
from specproxy.adapters.embedded.grammar.numeric import Bounds, number
from specproxy.adapters.embedded.grammar.regex import PatternError
from specproxy.adapters.embedded.grammar.values import Checker, json_text, string_language

__all__ = ["SchemaError", "SchemaWriter", "schema_to_gbnf"]

ORDER = ("object", "array", "string", "integer", "number", "boolean", "null")
MAX_UNIQUE = 8  # values of which `uniqueItems` keeps track


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
        self.grammar = grammar
        self._document = document
        self.expander = Expander(document)
        self.checker = Checker(self.expander)
        self._done: dict[bytes, str | None] = {}
        self.space = grammar.rule("ws", '" "? | "\\n" [ \\t]{0,24}')

    def root(self) -> str:
        """The expression of the document.

        Raises:
            SchemaError: see `schema_to_gbnf`.
        """
        try:
            expression = self.visit(self._document, "#")
        except (PatternError, TooComplexError) as error:
            raise SchemaError(str(error)) from None
        except RecursionError:
            raise SchemaError("the schema is nested too deeply") from None
        if expression is None:
            raise SchemaError("nothing can fit this schema")
        return expression

    def visit(self, schema: Any, place: str) -> str | None:
        """The expression of a schema; None if nothing fits."""
        parts = [part for flat in self.expander.expand(schema, place) if (part := self._flat(flat, place))]
        return alternatives(parts) if parts else None

    def _flat(self, flat: Flat, place: str) -> str | None:
        key = key_of(flat)
        if key in self._done:
            return self._done[key]
        # a rule of its own, so that what is inside can come back to it
        name = self.grammar.reserve(place.rpartition("/")[2])
        self._done[key] = name
        parts = self._values(flat) if flat.enum is not None else self._typed(flat, place)
        if not parts:
            self._done[key] = None
            return None
        self.grammar.define(name, alternatives(parts))
        return name

    def _typed(self, flat: Flat, place: str) -> list[str]:
        types = flat.types if flat.types is not None else _implied(flat)
        writers: dict[str, Callable[[], str | None]] = {
            "object": lambda: self._object(flat, place),
            "array": lambda: self._array(flat, place),
            "string": lambda: self.string(flat),
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
        return [self._value(value) for value in flat.enum if self.checker.conforms(value, flat)]

    def _value(self, value: Any) -> str:
        ws = self.space
        if isinstance(value, dict):
            members = [
                sequence([literal(json_text(key)), '":"', ws, self._value(item)]) for key, item in value.items()
            ]
            return sequence(['"{"', ws, f' "," {ws} '.join(members), ws, '"}"'])
        if isinstance(value, list):
            return sequence(['"["', ws, f' "," {ws} '.join(map(self._value, value)), ws, '"]"'])
        return literal(json_text(value))

    # --- strings and numbers

    def _char(self) -> str:
        simple = '["\\\\bfnrt/]'
        # no lone surrogates: half of the parsers refuse them
        code = '"u" ([0-9a-cA-CefEF] [0-9a-fA-F]{3} | [dD] [0-7] [0-9a-fA-F]{2})'
        return self.grammar.rule("char", f'[^"\\\\\\x00-\\x1F\\x7F] | "\\\\" ({simple} | {code})')

    def string(self, flat: Flat) -> str | None:
        if not flat.patterns and not any(name in FORMATS for name in flat.formats):
            if flat.max_length is not None and flat.max_length < flat.min_length:
                return None
            inner = self.grammar.repeat(self._char(), flat.min_length, flat.max_length)
            return self.grammar.rule("string", sequence([QUOTE, inner, QUOTE]))
        language = string_language(flat)
        assert language is not None
        return self.quoted(language)

    def quoted(self, language: Dfa) -> str | None:
        if language.empty:
            return None
        return sequence([QUOTE, language.to_rules(self.grammar, "text", json=True), QUOTE])

    def _number(self, bounds: Bounds, *, integer: bool) -> str | None:
        if not bounds.free:
            language = number(bounds, integer=integer)
            return None if language.empty else language.to_rules(self.grammar, "number", json=False)
        whole = self.grammar.rule("integer", '"-"? ("0" | [1-9] [0-9]{0,17})')
        if integer:
            return whole
        return self.grammar.rule("number", f'{whole} ("." [0-9]{{1,17}})? ([eE] [+-]? [0-9]{{1,2}})?')

    # --- arrays

    def _array(self, flat: Flat, place: str) -> str | None:
        high = flat.max_items
        if high is not None and high < flat.min_items:
            return None
        if flat.unique and (high is None or high > 1):
            return self._unique(flat, place)
        inner = self._elements(flat, place, 0)
        return None if inner is None else sequence(['"["', self.space, inner, self.space, '"]"'])

    def comma(self) -> str:
        return f'"," {self.space}'

    def _elements(self, flat: Flat, place: str, index: int) -> str | None:
        """What may stand in an array from element `index` on, with the comma before it."""
        high = flat.max_items
        if high is not None and index >= high:
            return ""
        if index == len(flat.prefix):
            return self._more_elements(flat, place, index)
        element = self.visit(flat.prefix[index], f"{place}/{index}")
        rest = self._elements(flat, place, index + 1) if element is not None else None
        if element is None or rest is None:
            return "" if index >= flat.min_items else None
        taken = sequence([self.comma() if index else "", element, rest])
        return taken if index < flat.min_items else f"({taken})?"

    def _more_elements(self, flat: Flat, place: str, index: int) -> str | None:
        low = max(0, flat.min_items - index)
        high = None if flat.max_items is None else flat.max_items - index
        # a closed tuple: draft 2020 says `items: false`, before it was `additionalItems`
        element = self.visit(flat.items, f"{place}/item")
        if element is None:
            return "" if low == 0 else None
        return self.listed(element, low, high, first=index == 0)

    def listed(self, element: str, low: int, high: int | None, *, first: bool) -> str:
        """`low` to `high` elements with commas; `first` says that none stands before them."""
        follower = self.grammar.rule("more", f"{self.comma()} {element}")
        if not first:
            return self.grammar.repeat(follower, low, high)
        if high == 0:
            return ""
        some = sequence(
            [element, self.grammar.repeat(follower, max(0, low - 1), None if high is None else high - 1)]
        )
        return some if low else f"({some})?"

    def _unique(self, flat: Flat, place: str) -> str | None:
        """Arrays of different items: only where those are few fixed values."""
        options = self.expander.expand(flat.items, f"{place}/items")
        values: list[Any] = []
        for option in options:
            if option.enum is None or flat.prefix:
                raise SchemaError(f"'uniqueItems' at {place} is only supported with an 'enum' of items")
            values += [
                v
                for v in option.enum
                if self.checker.conforms(v, option) and not any(same(v, w) for w in values)
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
                        parts.append(sequence([self.comma() if used else "", self._value(value), after]))
                names[used] = self.grammar.rule("distinct", " | ".join(parts)) if parts else None
            return names[used]

        inner = rest(frozenset())
        return None if inner is None else sequence(['"["', self.space, inner, self.space, '"]"'])

    # --- objects

    def _object(self, flat: Flat, place: str) -> str | None:
        inner = Members(self, flat, place).write()
        return None if inner is None else sequence(['"{"', self.space, inner, self.space, '"}"'])


QUOTE = literal('"')


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
