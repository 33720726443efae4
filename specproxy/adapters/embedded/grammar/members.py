"""The members of JSON objects in a grammar."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from specproxy.adapters.embedded.grammar.automaton import Dfa, words
from specproxy.adapters.embedded.grammar.flat import Flat, SchemaError, both
from specproxy.adapters.embedded.grammar.gbnf import Grammar, alternatives, literal, sequence
from specproxy.adapters.embedded.grammar.normal import Expander
from specproxy.adapters.embedded.grammar.regex import search, universe
from specproxy.adapters.embedded.grammar.values import Checker, json_text, member_schema, string_language

__all__ = ["Members", "Writer"]

MAX_PATTERNS = 4  # patternProperties of one object
ANYTHING = Flat()


class Writer(Protocol):
    """What members need of the writer of a document."""

    grammar: Grammar
    expander: Expander
    checker: Checker
    space: str

    def visit(self, schema: Any, place: str) -> str | None:
        """The expression of a schema; None if nothing fits."""
        ...

    def comma(self) -> str:
        """The expression between two members."""
        ...

    def listed(self, element: str, low: int, high: int | None, *, first: bool) -> str:
        """`low` to `high` elements with commas; `first` says that none stands before them."""
        ...

    def string(self, flat: Flat) -> str | None:
        """The expression of a string."""
        ...

    def quoted(self, language: Dfa) -> str | None:
        """The expression of a JSON string out of a language."""
        ...


class Members:
    """The members of one object: declared ones in their order, then others."""

    def __init__(self, writer: Writer, flat: Flat, place: str) -> None:
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
        if flat.names and not all(writer.checker.fits(name, schema) for schema in flat.names):
            return None
        value = writer.visit(member_schema(flat, name), f"{self._place}/{name}")
        if value is None:
            return None
        return sequence([literal(json_text(name)), '":"', writer.space, value])

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
            parts.append(sequence([self._writer.comma() if count else "", member, after]))
        if name not in self._flat.required and (skipped := self._from(index + 1, count)) is not None:
            parts.append(skipped or '""')
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else self._writer.grammar.rule("members", " | ".join(parts))

    def _rest(self, count: int) -> str | None:
        low = max(0, self._flat.min_properties - count)
        high = None if self._high is None else self._high - count
        if self._other is None:
            return "" if low == 0 else None
        return self._writer.listed(self._other, low, high, first=count == 0)

    def _others(self) -> str | None:
        """One member that is not declared, or None if there may be none."""
        flat, writer = self._flat, self._writer
        silent = flat.additional is None
        if silent and self._declared and not flat.pattern_properties:
            return None
        rest = False if silent and (flat.pattern_properties or self._declared) else flat.additional
        keys = self._free_keys()
        if not flat.pattern_properties and keys is None:
            value = writer.visit(rest, f"{self._place}/value")
            return None if value is None else self._pair(writer.string(ANYTHING), value)
        parts = [
            self._pair(key, value)
            for language, schema in self._classes(keys or universe(), rest)
            if (value := writer.visit(schema, f"{self._place}/value")) is not None
            and (key := writer.quoted(language)) is not None
        ]
        return alternatives(parts) if parts else None

    def _pair(self, key: str | None, value: str) -> str:
        return self._writer.grammar.rule("member", sequence([key or "", '":"', self._writer.space, value]))

    def _free_keys(self) -> Dfa | None:
        """Names that are not declared and that `propertyNames` allows; None for all names."""
        language = None
        for schema in self._flat.names:
            allowed = self._strings(schema)
            if allowed is not None:
                language = allowed if language is None else language & allowed
        if self._declared:
            language = (language or universe()) - words(self._declared)
        return language

    def _strings(self, schema: Any) -> Dfa | None:
        """The strings among what fits a schema; None for all."""
        union: Dfa | None = None
        for flat in self._writer.expander.expand(schema, f"{self._place}/propertyNames"):
            if flat.types is not None and "string" not in flat.types:
                continue
            language = string_language(flat)
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
