"""Regular expressions as JSON Schema uses them (ECMA 262, without what is not regular) → automata.

Supported: literals, ``.``, classes, ``\\d \\w \\s`` and their opposites, ``\\uXXXX``, ``\\xXX``, groups,
alternation, all quantifiers, ``^`` and ``$`` anywhere. Refused by name: look-around, back references, word
boundaries, Unicode properties.
"""

from __future__ import annotations

from functools import lru_cache

from specproxy.adapters.embedded.grammar.automaton import (
    JSON_ALPHABET,
    MAX_CODE,
    Dfa,
    Nfa,
    TooComplexError,
    clean_ranges,
    invert,
)
from specproxy.adapters.embedded.grammar.gbnf import Ranges

__all__ = ["PatternError", "full_match", "search", "universe"]

# Marks before and after the text, by which anchors become ordinary symbols
BEGIN, END = MAX_CODE + 1, MAX_CODE + 2
DIGITS: Ranges = ((48, 57),)
WORD: Ranges = clean_ranges([(48, 57), (65, 90), (95, 95), (97, 122)])
SPACE: Ranges = clean_ranges(
    [(9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
     (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]
)  # fmt: skip
LINE_ENDS: Ranges = clean_ranges([(10, 10), (13, 13), (0x2028, 0x2029)])
CLASSES = {"d": DIGITS, "w": WORD, "s": SPACE, "D": invert(DIGITS), "W": invert(WORD), "S": invert(SPACE)}
CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
MAX_COPIES = 2_000


class PatternError(ValueError):
    """A pattern that cannot be read, or that is not supported."""


def search(pattern: str) -> Dfa:
    """Texts in which a pattern is found anywhere (`pattern` of JSON Schema).

    Raises:
        PatternError: it cannot be read, needs what is not regular, or is too complex.
    """
    return _compiled(pattern, True)


def full_match(pattern: str) -> Dfa:
    """Texts that a pattern matches as a whole. Raises as `search` does."""
    return _compiled(pattern, False)


def universe() -> Dfa:
    """All texts that a JSON string of a grammar can hold."""
    return Dfa((tuple((low, high, 0) for low, high in JSON_ALPHABET),), (True,))


@lru_cache(maxsize=256)
def _compiled(pattern: str, anywhere: bool) -> Dfa:
    try:
        marked = _Parser(pattern, anywhere).parse()
        return _unmarked(marked) & universe()
    except TooComplexError as error:
        raise PatternError(f"pattern {_shown(pattern)} is too complex: {error}") from None


def _unmarked(marked: Dfa) -> Dfa:
    """From texts between marks to the texts: start after BEGIN, accept where END leads to acceptance."""
    start = marked.step(0, BEGIN)
    if start is None:
        return Dfa(((),), (False,))
    ends = [marked.step(state, END) for state in range(len(marked.rows))]
    accepting = [end is not None and marked.accepting[end] for end in ends]
    rows = [tuple((a, min(b, MAX_CODE), to) for a, b, to in row if a <= MAX_CODE) for row in marked.rows]
    # the start becomes state 0: an extra copy of it in front
    shifted = [tuple((a, b, to + 1) for a, b, to in row) for row in (rows[start], *rows)]
    return Dfa(tuple(shifted), (accepting[start], *accepting)).reduced()


class _Parser:
    """Recursive descent; every method returns a fragment (first state, last state)."""

    def __init__(self, pattern: str, anywhere: bool) -> None:
        self._pattern = pattern
        self._anywhere = anywhere
        self._at = 0
        self._nfa = Nfa()

    def parse(self) -> Dfa:
        first, last = self._alternation()
        if self._at < len(self._pattern):
            raise self._error("unbalanced ')'")
        nfa = self._nfa
        start, accept = nfa.state(), nfa.state()
        if self._anywhere:
            around: Ranges = ((0, END),)
            nfa.arcs[start] += [(low, high, start) for low, high in around]
            nfa.arcs[accept] += [(low, high, accept) for low, high in around]
            nfa.silent[start].append(first)
            nfa.silent[last].append(accept)
        else:
            # the marks may also have been consumed by anchors of the pattern
            nfa.arcs[start].append((BEGIN, BEGIN, first))
            nfa.silent[start].append(first)
            nfa.arcs[last].append((END, END, accept))
            nfa.silent[last].append(accept)
        return nfa.determinise(start, accept)

    def _error(self, message: str) -> PatternError:
        return PatternError(f"pattern {_shown(self._pattern)}: {message} at position {self._at}")

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self) -> str:
        char = self._peek()
        if not char:
            raise self._error("it ends too early")
        self._at += 1
        return char

    def _skip(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _alternation(self) -> tuple[int, int]:
        first, last = self._nfa.state(), self._nfa.state()
        while True:
            a, b = self._sequence()
            self._nfa.silent[first].append(a)
            self._nfa.silent[b].append(last)
            if not self._skip("|"):
                return first, last

    def _sequence(self) -> tuple[int, int]:
        first = last = self._nfa.state()
        while self._peek() not in ("", "|", ")"):
            a, b = self._quantified()
            self._nfa.silent[last].append(a)
            last = b
        return first, last

    def _quantified(self) -> tuple[int, int]:
        begin = self._at
        fragment = self._atom()
        end = self._at
        low, high = self._quantifier()
        if (low, high) == (1, 1):
            return fragment
        if max(low, high or 0) > MAX_COPIES:
            raise self._error(f"more than {MAX_COPIES} repetitions")
        return self._repeated(begin, end, low, high)

    def _quantifier(self) -> tuple[int, int | None]:
        low, high = 1, 1  # type: int, int | None
        if self._skip("*"):
            low, high = 0, None
        elif self._skip("+"):
            low, high = 1, None
        elif self._skip("?"):
            low, high = 0, 1
        elif self._peek() == "{" and (bounds := self._bounds()):
            low, high = bounds
        else:
            return 1, 1
        self._skip("?")  # lazy: the same language
        return low, high

    def _bounds(self) -> tuple[int, int | None] | None:
        """``{m}``, ``{m,}`` or ``{m,n}``; otherwise the brace is a literal."""
        close = self._pattern.find("}", self._at)
        low, comma, high = self._pattern[self._at + 1 : max(close, self._at)].partition(",")
        if close < 0 or not low.isdecimal() or (high and not high.isdecimal()):
            return None
        self._at = close + 1
        if not comma:
            return int(low), int(low)
        if high and int(high) < int(low):
            raise self._error("bounds out of order")
        return int(low), int(high) if high else None

    def _again(self, begin: int, end: int) -> tuple[int, int]:
        """Another copy of an atom, by reading it again."""
        after, self._at = self._at, begin
        fragment = self._atom()
        assert self._at == end
        self._at = after
        return fragment

    def _repeated(self, begin: int, end: int, low: int, high: int | None) -> tuple[int, int]:
        nfa = self._nfa
        first = last = nfa.state()
        for _ in range(low):
            a, b = self._again(begin, end)
            nfa.silent[last].append(a)
            last = b
        if high is None:
            a, b = self._again(begin, end)
            loop = nfa.state()
            nfa.silent[last].append(loop)
            nfa.silent[loop].append(a)
            nfa.silent[b].append(loop)
            return first, loop
        out = nfa.state()
        for _ in range(high - low):
            nfa.silent[last].append(out)
            a, b = self._again(begin, end)
            nfa.silent[last].append(a)
            last = b
        nfa.silent[last].append(out)
        return first, out

    def _set(self, ranges: Ranges) -> tuple[int, int]:
        first, last = self._nfa.state(), self._nfa.state()
        self._nfa.arcs[first] += [(low, high, last) for low, high in ranges]
        return first, last

    def _atom(self) -> tuple[int, int]:
        char = self._take()
        if char == "(":
            return self._group()
        if char == "[":
            return self._set(self._class())
        if char == ".":
            return self._set(invert(LINE_ENDS))
        if char == "^":
            return self._anchor(BEGIN)
        if char == "$":
            return self._anchor(END)
        if char == "\\":
            return self._set(self._escape(in_class=False))
        if char in "*+?":
            raise self._error(f"nothing to repeat before {char!r}")
        return self._set(((ord(char), ord(char)),))

    def _anchor(self, mark: int) -> tuple[int, int]:
        return self._set(((mark, mark),))

    def _group(self) -> tuple[int, int]:
        if self._skip("?"):
            if self._skip("<") and self._peek() not in ("=", "!"):
                self._at = self._pattern.find(">", self._at) + 1
                if not self._at:
                    raise self._error("a group's name has no end")
            elif not self._skip(":"):
                raise self._error("look-around is not supported")
        fragment = self._alternation()
        if not self._skip(")"):
            raise self._error("a group is not closed")
        return fragment

    def _class(self) -> Ranges:
        negated = self._skip("^")
        ranges: list[tuple[int, int]] = []
        while not self._skip("]"):
            part = self._class_member()
            if self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                upper = self._class_member()
                if not _is_char(part) or not _is_char(upper):
                    ranges += [*part, (45, 45), *upper]  # as in [\w-.]: the hyphen is one
                    continue
                if upper[0][0] < part[0][0]:
                    raise self._error("a range is out of order")
                part = ((part[0][0], upper[0][0]),)
            ranges += part
        clean = clean_ranges(ranges)
        return invert(clean) if negated else clean

    def _class_member(self) -> Ranges:
        char = self._take()
        return self._escape(in_class=True) if char == "\\" else ((ord(char), ord(char)),)

    def _escape(self, *, in_class: bool) -> Ranges:
        char = self._take()
        if char in CLASSES:
            return CLASSES[char]
        if char in CONTROLS:
            code = CONTROLS[char]
        elif char == "b" and in_class:
            code = 8
        elif char in "xu":
            code = self._hex(2 if char == "x" else 4)
        elif char == "c":
            code = ord(self._take()) % 32
        elif char.isalnum():
            names = {
                "b": "word boundaries",
                "B": "word boundaries",
                "p": "Unicode properties",
                "P": "Unicode properties",
            }
            raise self._error(f"{names.get(char, 'back references')} are not supported")
        else:
            code = ord(char)
        return ((code, code),)

    def _hex(self, digits: int) -> int:
        if self._skip("{"):
            close = self._pattern.find("}", self._at)
            text, self._at = self._pattern[self._at : close], close + 1
        else:
            text = self._pattern[self._at : self._at + digits]
            self._at += digits
        try:
            code = int(text, 16)
        except ValueError:
            raise self._error("a character code is not hexadecimal") from None
        if code > MAX_CODE:
            raise self._error("a character code is out of range")
        return code


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 80 else pattern[:77] + "...")


def _is_char(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]
