"""Random texts of a GBNF grammar, by a reader of its own: an oracle for grammars that we write."""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

__all__ = ["Sampler"]

TOKEN = re.compile(
    r'\s*(?:(?P<literal>"(?:\\.|[^"\\])*")|(?P<set>\[(?:\\.|[^\]\\])*\])|(?P<name>[A-Za-z][A-Za-z0-9-]*)'
    r"|(?P<repeat>\{\d+(?:,\d*)?\})|(?P<mark>[()|*+?]))"
)
ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))")
CONTROL = {"n": "\n", "r": "\r", "t": "\t"}
UNLIKELY = "~zé漢😀Q7 _"  # what negated sets are drawn from, besides printable ASCII


def unescape(text: str) -> str:
    return ESCAPE.sub(lambda m: CONTROL.get(m[4], m[4]) if m[4] else chr(int(m[1] or m[2] or m[3], 16)), text)


@dataclass(frozen=True)
class Text:
    value: str


@dataclass(frozen=True)
class Set:
    members: tuple[tuple[int, int], ...]
    negated: bool


@dataclass(frozen=True)
class Name:
    value: str


@dataclass(frozen=True)
class Choice:
    options: tuple[tuple[object, ...], ...]


@dataclass(frozen=True)
class Repeat:
    item: object
    low: int
    high: int | None


class Sampler:
    """Reads a grammar; `sample` draws a text of it. Every rule must be able to end."""

    def __init__(self, grammar: str) -> None:
        self._rules: dict[str, Choice] = {}
        for line in grammar.splitlines():
            name, _, body = line.partition("::=")
            assert name.strip() not in self._rules, f"rule {name} is defined twice"
            self._rules[name.strip()] = self._read(body)
        self._depth = self._depths()

    def _read(self, body: str) -> Choice:
        tokens = []
        at = 0
        while body[at:].strip():
            found = TOKEN.match(body, at)
            assert found, f"cannot read {body[at : at + 40]!r}"
            tokens.append((found.lastgroup, found[found.lastgroup or 0]))
            at = found.end()
        choice, end = self._choice(tokens, 0)
        assert end == len(tokens), f"unbalanced: {body}"
        return choice

    def _choice(self, tokens: list[tuple[str | None, str]], at: int) -> tuple[Choice, int]:
        options: list[tuple[object, ...]] = []
        items: list[object] = []
        while at < len(tokens) and tokens[at] != ("mark", ")"):
            kind, text = tokens[at]
            at += 1
            if (kind, text) == ("mark", "|"):
                options.append(tuple(items))
                items = []
            elif (kind, text) == ("mark", "("):
                inner, at = self._choice(tokens, at)
                assert tokens[at] == ("mark", ")")
                at += 1
                items.append(inner)
            elif kind == "literal":
                items.append(Text(unescape(text[1:-1])))
            elif kind == "set":
                items.append(self._set(text[1:-1]))
            elif kind == "name":
                items.append(Name(text))
            else:
                items[-1] = self._repeated(items[-1], text)
        return Choice((*options, tuple(items))), at

    @staticmethod
    def _set(text: str) -> Set:
        negated = text.startswith("^")
        chars = re.findall(r"\\x..|\\u....|\\U........|\\.|.", text[negated:], re.DOTALL)
        members, at = [], 0
        while at < len(chars):
            low = high = unescape(chars[at])
            if at + 2 < len(chars) and chars[at + 1] == "-":
                high = unescape(chars[at + 2])
                at += 2
            members.append((ord(low), ord(high)))
            at += 1
        return Set(tuple(members), negated)

    @staticmethod
    def _repeated(item: object, mark: str) -> Repeat:
        if mark in "*+?":
            return Repeat(item, int(mark == "+"), 1 if mark == "?" else None)
        low, comma, high = mark[1:-1].partition(",")
        return Repeat(item, int(low), int(high) if high else None if comma else int(low))

    def _depths(self) -> dict[str, float]:
        """The least nesting with which each rule can end."""
        depths = dict.fromkeys(self._rules, float("inf"))
        changed = True
        while changed:
            changed = False
            for name, rule in self._rules.items():
                depth = 1 + self._least(rule, depths)
                if depth < depths[name]:
                    depths[name] = depth
                    changed = True
        endless = [name for name, depth in depths.items() if depth == float("inf")]
        assert not endless, f"rules that cannot end: {endless}"
        return depths

    def _least(self, item: object, depths: dict[str, float]) -> float:
        if isinstance(item, Name):
            return depths[item.value]
        if isinstance(item, Choice):
            return min(max((self._least(i, depths) for i in option), default=0) for option in item.options)
        if isinstance(item, Repeat) and item.low:
            return self._least(item.item, depths)
        return 0

    def sample(self, random: Random, depth: int = 60) -> str:
        """A random text; beyond `depth` nested rules the shortest way out is taken."""
        return self._draw(Name("root"), random, depth)

    def _draw(self, item: object, random: Random, depth: int) -> str:
        if isinstance(item, Text):
            return item.value
        if isinstance(item, Set):
            return self._member(item, random)
        if isinstance(item, Name):
            return self._draw(self._rules[item.value], random, depth - 1)
        if isinstance(item, Repeat):
            more = random.choice((0, 1, 2, 5)) if depth > 0 else 0
            high = item.low + more if item.high is None else min(item.high, item.low + more)
            return "".join(self._draw(item.item, random, depth) for _ in range(random.randint(item.low, high)))
        assert isinstance(item, Choice)
        options = item.options
        if depth <= 0:
            least = min(self._least(Choice((o,)), self._depth) for o in options)
            options = tuple(o for o in options if self._least(Choice((o,)), self._depth) == least)
        return "".join(self._draw(i, random, depth) for i in random.choice(options))

    @staticmethod
    def _member(item: Set, random: Random) -> str:
        if not item.negated:
            low, high = random.choice(item.members)
            return chr(random.randint(low, min(high, low + 200)))
        while True:
            char = random.choice([*UNLIKELY, chr(random.randint(33, 126))])
            if not any(low <= ord(char) <= high for low, high in item.members):
                return char
