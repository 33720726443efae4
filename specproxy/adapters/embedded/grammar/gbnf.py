"""Writing grammars in GBNF, llama.cpp's notation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

__all__ = ["Grammar", "Ranges", "alternatives", "any_until", "any_without", "char_class", "literal", "sequence"]

Ranges = tuple[tuple[int, int], ...]  # inclusive code point ranges, sorted and disjoint

# llama.cpp copies the repeated symbol and refuses about 2000 copies; blocks keep every repetition far below
BLOCK = 64
_PLAIN = re.compile(r"[A-Za-z0-9 _.,:;{}()<>/|+*=!?@#$%&'`~-]")


def literal(text: str) -> str:
    """A quoted literal."""
    return '"' + "".join(c if _PLAIN.match(c) else _escape(ord(c)) for c in text) + '"'


def char_class(ranges: Ranges) -> str:
    """A character class."""
    parts = [_member(low) if low == high else f"{_member(low)}-{_member(high)}" for low, high in ranges]
    return "[" + "".join(parts) + "]"


def _member(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else _escape(code)


def _escape(code: int) -> str:
    if code <= 0xFF:
        return f"\\x{code:02X}"
    return f"\\u{code:04X}" if code <= 0xFFFF else f"\\U{code:08X}"


def sequence(parts: Iterable[str]) -> str:
    """Parts one after the other; empty ones vanish."""
    return " ".join(part for part in parts if part and part != '""') or '""'


def alternatives(parts: Sequence[str]) -> str:
    """One of the parts, in parentheses where there are several."""
    unique = list(dict.fromkeys(parts))
    return unique[0] if len(unique) == 1 else "(" + " | ".join(unique) + ")"


class Grammar:
    """A set of rules under construction. Equal bodies share a rule; names are made unique."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._by_body: dict[str, str] = {}

    def reserve(self, hint: str) -> str:
        """A fresh rule name like `hint`, to be defined later (for recursion)."""
        base = re.sub(r"[^A-Za-z0-9]+", "-", hint).strip("-").lower()
        if not base[:1].isalpha() or base == "root":
            base = f"r-{base}".rstrip("-")
        name, count = base, 1
        while name in self._rules:
            count += 1
            name = f"{base}-{count}"
        self._rules[name] = ""
        return name

    def define(self, name: str, body: str) -> None:
        """Give a rule its body."""
        self._rules[name] = body

    def rule(self, hint: str, body: str) -> str:
        """The name of a rule with this body."""
        if body not in self._by_body:
            name = self.reserve(hint)
            self._by_body[body] = name
            self.define(name, body)
        return self._by_body[body]

    def repeat(self, symbol: str, low: int, high: int | None) -> str:
        """`symbol` (a rule name, class or literal) from `low` to `high` times; None is without limit."""
        if high is None:
            return sequence([self._exactly(symbol, low), f"{symbol}*"])
        return sequence([self._exactly(symbol, low), self._up_to(symbol, high - low)])

    def _exactly(self, symbol: str, count: int) -> str:
        blocks, rest = divmod(count, BLOCK)
        parts = []
        if blocks:
            block = self.rule("block", f"{symbol}{{{BLOCK}}}")
            parts.append(self._exactly(block, blocks) if blocks > 1 else block)
        if rest:
            parts.append(symbol if rest == 1 else f"{symbol}{{{rest}}}")
        return sequence(parts)

    def _up_to(self, symbol: str, count: int) -> str:
        if count <= BLOCK:
            return {0: "", 1: f"{symbol}?"}.get(count, f"{symbol}{{0,{count}}}")
        # fewer than all full blocks and then any rest, or all of them and what is left
        blocks, rest = divmod(count, BLOCK)
        block = self.rule("block", f"{symbol}{{{BLOCK}}}")
        few = sequence([self._up_to(block, blocks - 1), f"{symbol}{{0,{BLOCK - 1}}}"])
        all_ = sequence([self._exactly(block, blocks), self._up_to(symbol, rest)])
        return self.rule("up-to", f"{few} | {all_}")

    def text(self, root: str) -> str:
        """The grammar with `root` as its start; rules that it doesn't need are left out."""
        needed: list[str] = []
        todo = [root]
        while todo:
            name = todo.pop()
            if name in needed:
                continue
            needed.append(name)
            # literals and classes may contain what looks like a rule name
            bare = re.sub(r'"[^"]*"|\[[^\]]*\]', " ", self._rules[name])
            todo += [word for word in re.findall(r"[A-Za-z][A-Za-z0-9-]*", bare) if word in self._rules]
        rules = "".join(f"{name} ::= {self._rules[name]}\n" for name in needed)
        return f"root ::= {root}\n{rules}"


def any_until(grammar: Grammar, mark: str) -> str:
    """A rule for any text that ends with the first occurrence of `mark`.

    Built as Knuth, Morris and Pratt's automaton: one rule for each matched length of `mark`.
    """
    return _marked(grammar, mark, through=True)


def any_without(grammar: Grammar, mark: str) -> str:
    """A rule for any text in which `mark` does not occur."""
    return _marked(grammar, mark, through=False)


def _marked(grammar: Grammar, mark: str, *, through: bool) -> str:
    states = [grammar.reserve("until" if through else "without") for _ in mark]
    letters = sorted(set(mark))
    for matched, name in enumerate(states):
        parts = [] if through else ['""']
        for letter in letters:
            following = _border(mark, mark[:matched] + letter)
            if following < len(mark):
                parts.append(f"{literal(letter)} {states[following]}")
            elif through:
                parts.append(literal(letter))
        others = "[^" + "".join(_member(ord(letter)) for letter in letters) + "]"
        grammar.define(name, " | ".join([*parts, f"{others} {states[0]}"]))
    return states[0]


def _border(mark: str, text: str) -> int:
    """The longest prefix of `mark` that `text` ends with."""
    return next(n for n in range(min(len(mark), len(text)), -1, -1) if text.endswith(mark[:n]))
