"""Finite automata over Unicode: from regular expressions, combined as sets, written as grammar rules."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from specproxy.adapters.embedded.grammar.gbnf import (
    Grammar,
    Ranges,
    alternatives,
    char_class,
    literal,
    sequence,
)

__all__ = ["Dfa", "Nfa", "TooComplexError", "clean_ranges", "invert", "lengths", "words"]

MAX_STATES = 4_000
MAX_CODE = 0x10FFFF


class TooComplexError(ValueError):
    """An automaton would have more states than is reasonable."""


def clean_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sort ranges and join what touches."""
    out: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if low > high:
            continue
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return tuple(out)


def invert(ranges: Ranges, top: int = MAX_CODE) -> Ranges:
    """All code points that are in none of the ranges."""
    out, low = [], 0
    for first, last in ranges:
        out.append((low, first - 1))
        low = last + 1
    return clean_ranges([*out, (low, top)])


class Nfa:
    """A nondeterministic automaton that is put together piece by piece."""

    def __init__(self) -> None:
        self.silent: list[list[int]] = []
        self.arcs: list[list[tuple[int, int, int]]] = []

    def state(self) -> int:
        """A new state.

        Raises:
            TooComplexError: there are too many.
        """
        if len(self.arcs) >= 8 * MAX_STATES:
            raise TooComplexError("too many states")
        self.silent.append([])
        self.arcs.append([])
        return len(self.arcs) - 1

    def _closure(self, states: Iterable[int]) -> frozenset[int]:
        seen = set(states)
        todo = list(seen)
        while todo:
            for following in self.silent[todo.pop()]:
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
        return frozenset(seen)

    def determinise(self, start: int, accept: int) -> Dfa:
        """The equivalent deterministic automaton.

        Raises:
            TooComplexError: it is too large.
        """
        first = self._closure([start])
        numbers = {first: 0}
        rows: list[tuple[tuple[int, int, int], ...]] = []
        accepting = []
        todo = deque([first])
        while todo:
            current = todo.popleft()
            accepting.append(accept in current)
            arcs = [arc for state in current for arc in self.arcs[state]]
            row = []
            for low, high, targets in _cut(arcs):
                following = self._closure(targets)
                if following not in numbers:
                    if len(numbers) >= MAX_STATES:
                        raise TooComplexError("too many states")
                    numbers[following] = len(numbers)
                    todo.append(following)
                row.append((low, high, numbers[following]))
            rows.append(_joined(row))
        return Dfa(tuple(rows), tuple(accepting)).reduced()


def _cut(arcs: Sequence[tuple[int, int, int]]) -> Iterable[tuple[int, int, frozenset[int]]]:
    """Overlapping arcs → disjoint ranges with all their targets."""
    edges = sorted({low for low, _, _ in arcs} | {high + 1 for _, high, _ in arcs})
    for low, above in pairwise(edges):
        targets = frozenset(to for first, last, to in arcs if first <= low <= last)
        if targets:
            yield low, above - 1, targets


def _joined(row: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    out: list[tuple[int, int, int]] = []
    for low, high, to in sorted(row):
        if out and out[-1][2] == to and out[-1][1] + 1 == low:
            out[-1] = (out[-1][0], high, to)
        else:
            out.append((low, high, to))
    return tuple(out)


@dataclass(frozen=True, slots=True)
class Dfa:
    """A deterministic automaton; state 0 is the start. A row holds (low, high, target), sorted and disjoint."""

    rows: tuple[tuple[tuple[int, int, int], ...], ...]
    accepting: tuple[bool, ...]

    @property
    def empty(self) -> bool:
        """Whether it accepts nothing at all."""
        return not any(self.accepting)

    def step(self, state: int, code: int) -> int | None:
        """The state after one code point, or None where it dies."""
        return next((to for low, high, to in self.rows[state] if low <= code <= high), None)

    def accepts(self, text: str) -> bool:
        """Whether a text belongs to the language."""
        state: int | None = 0
        for char in text:
            state = self.step(state, ord(char)) if state is not None else None
        return state is not None and self.accepting[state]

    def _reachable(self) -> list[int]:
        seen, todo = {0: None}, deque([0])
        while todo:
            for _, _, to in self.rows[todo.popleft()]:
                if to not in seen:
                    seen[to] = None
                    todo.append(to)
        return list(seen)

    def _alive(self) -> set[int]:
        before: dict[int, set[int]] = {}
        for state, row in enumerate(self.rows):
            for _, _, to in row:
                before.setdefault(to, set()).add(state)
        alive = {state for state, yes in enumerate(self.accepting) if yes}
        todo = list(alive)
        while todo:
            for state in before.get(todo.pop(), ()):
                if state not in alive:
                    alive.add(state)
                    todo.append(state)
        return alive

    def reduced(self) -> Dfa:
        """An equivalent automaton without states that lead nowhere, and with states of equal rows made one.

        That is not always the smallest one, but it takes linear time where nothing can be merged.
        """
        alive = self._alive()
        kept = [state for state in self._reachable() if state in alive or state == 0]
        leader = {state: state for state in kept}

        def find(state: int) -> int:
            while leader[state] != state:
                leader[state] = state = leader[leader[state]]
            return state

        def row(state: int) -> tuple[tuple[int, int, int], ...]:
            return _joined((low, high, find(to)) for low, high, to in self.rows[state] if to in alive)

        merged = True
        while merged:
            merged = False
            seen: dict[object, int] = {}
            # from the end, so that what follows has been merged already
            for state in reversed(kept):
                if leader[state] == state:
                    leader[state] = seen.setdefault((self.accepting[state], row(state)), state)
                    merged |= leader[state] != state
        number: dict[int, int] = {}
        for state in kept:  # the start's leader comes first
            number.setdefault(find(state), len(number))
        rows = (tuple((low, high, number[to]) for low, high, to in row(state)) for state in number)
        return Dfa(tuple(rows), tuple(self.accepting[state] for state in number))

    def _combined(self, other: Dfa, accept: Callable[[bool, bool], bool]) -> Dfa:
        """Product; a side that has died goes on as None."""
        numbers: dict[tuple[int | None, int | None], int] = {(0, 0): 0}
        rows, accepting = [], []
        todo: deque[tuple[int | None, int | None]] = deque([(0, 0)])
        while todo:
            a, b = todo.popleft()
            accepting.append(accept(a is not None and self.accepting[a], b is not None and other.accepting[b]))
            mine = self.rows[a] if a is not None else ()
            theirs = other.rows[b] if b is not None else ()
            # targets of the two sides are told apart by sign
            arcs = [(low, high, to) for low, high, to in mine] + [
                (low, high, -to - 1) for low, high, to in theirs
            ]
            row = []
            for low, high, targets in _cut(arcs):
                pair = (
                    next((t for t in targets if t >= 0), None),
                    next((-t - 1 for t in targets if t < 0), None),
                )
                if pair not in numbers:
                    if len(numbers) >= 4 * MAX_STATES:
                        raise TooComplexError("too many states")
                    numbers[pair] = len(numbers)
                    todo.append(pair)
                row.append((low, high, numbers[pair]))
            rows.append(_joined(row))
        return Dfa(tuple(rows), tuple(accepting)).reduced()

    def __and__(self, other: Dfa) -> Dfa:
        return self._combined(other, lambda a, b: a and b)

    def __or__(self, other: Dfa) -> Dfa:
        return self._combined(other, lambda a, b: a or b)

    def __sub__(self, other: Dfa) -> Dfa:
        return self._combined(other, lambda a, b: a and not b)

    def to_rules(self, grammar: Grammar, hint: str, *, json: bool) -> str:
        """A rule for the language; with `json` its texts are written as inside a JSON string.

        The automaton must not be empty.

        Raises:
            TooComplexError: it would be an unreasonable number of rules.
        """
        if len(self.rows) > MAX_STATES:
            raise TooComplexError("too many states")
        names = [grammar.reserve(hint) for _ in self.rows]
        for name, row, accepting in zip(names, self.rows, self.accepting, strict=True):
            by_target: dict[int, list[tuple[int, int]]] = {}
            for low, high, to in row:
                by_target.setdefault(to, []).append((low, high))
            parts = ['""'] if accepting else []
            for to, ranges in by_target.items():
                symbol = _json_symbol(ranges) if json else char_class(clean_ranges(ranges))
                # a last state without continuation needs no rule
                if symbol:
                    parts.append(sequence([symbol, names[to] if self.rows[to] else ""]))
            grammar.define(name, " | ".join(parts))
        return names[0]


# Characters that JSON strings hold as they are; DEL is left out as llama.cpp's own grammars do
_BARE = invert(((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F), (0xD800, 0xDFFF)))
_ESCAPED = {0x22: '\\"', 0x5C: "\\\\", 0x08: "\\b", 0x0C: "\\f", 0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t"}


def _json_symbol(ranges: Iterable[tuple[int, int]]) -> str:
    """What stands in a JSON string for one character of `ranges`; empty if none of them can."""
    wanted = clean_ranges(ranges)
    bare = clean_ranges((max(low, first), min(high, last)) for low, high in wanted for first, last in _BARE)
    parts = [char_class(bare)] if bare else []
    parts += [
        literal(text) for code, text in _ESCAPED.items() if any(low <= code <= high for low, high in wanted)
    ]
    return alternatives(parts) if parts else ""


# What JSON strings of a grammar are made of: no control characters but those with a short escape
JSON_ALPHABET = clean_ranges([*_BARE, *((code, code) for code in _ESCAPED)])


def lengths(low: int, high: int | None) -> Dfa:
    """All texts of `low` to `high` characters.

    Raises:
        TooComplexError: they are too long to be counted.
    """
    last = low if high is None else high
    if last > MAX_STATES:
        raise TooComplexError("too many states")
    rows = [((0, MAX_CODE, i + 1),) for i in range(last)]
    return Dfa(
        (*rows, ((0, MAX_CODE, last),) if high is None else ()), tuple(i >= low for i in range(last + 1))
    )


def words(texts: Iterable[str]) -> Dfa:
    """The automaton of a finite set of texts."""
    nfa = Nfa()
    start, accept = nfa.state(), nfa.state()
    for text in texts:
        at = start
        for char in text:
            following = nfa.state()
            nfa.arcs[at].append((ord(char), ord(char), following))
            at = following
        nfa.silent[at].append(accept)
    return nfa.determinise(start, accept)
