"""Patterns → automata, compared with Python's own regular expressions."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specproxy.adapters.embedded.grammar.automaton import TooComplexError, lengths, words
from specproxy.adapters.embedded.grammar.gbnf import Grammar, any_until, any_without
from specproxy.adapters.embedded.grammar.regex import PatternError, full_match, search, universe
from tests.support.gbnf_sampler import Sampler

ATOMS = st.sampled_from(["a", "b", "c", "[ab]", "[^a]", ".", "\\w", "\\d", "(?:ab)", "1"])


def combine(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds(lambda a, b: a + b, inner, inner),
        st.builds(lambda a, b: f"({a}|{b})", inner, inner),
        st.builds(
            lambda a, q: f"(?:{a}){q}", inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,}", "+?"])
        ),
    )


PATTERNS = st.builds(
    lambda a, body, b: a + body + b,
    st.sampled_from(["", "^"]), st.recursive(ATOMS, combine, max_leaves=6), st.sampled_from(["", "$"]),
)  # fmt: skip


@settings(max_examples=150)
@given(pattern=PATTERNS, texts=st.lists(st.text("abc1é", max_size=7), min_size=20, max_size=20))
def test_finds_what_python_finds(pattern: str, texts: list[str]) -> None:
    # to Python $ also matches before a last line break, and \w knows all letters
    theirs = re.compile(pattern.removesuffix("$") + ("\\Z" if pattern.endswith("$") else ""), re.ASCII)
    ours, whole = search(pattern), full_match(pattern)
    for text in texts:
        assert ours.accepts(text) == bool(theirs.search(text)), text
        assert whole.accepts(text) == bool(theirs.fullmatch(text)), text


@settings(max_examples=60)
@given(a=PATTERNS, b=PATTERNS, texts=st.lists(st.text("abc1", max_size=6), min_size=15, max_size=15))
def test_automata_combine_as_sets(a: str, b: str, texts: list[str]) -> None:
    left, right = search(a), search(b)
    for text in texts:
        in_left, in_right = left.accepts(text), right.accepts(text)
        assert (left & right).accepts(text) == (in_left and in_right)
        assert (left | right).accepts(text) == (in_left or in_right)
        assert (left - right).accepts(text) == (in_left and not in_right)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("^[\\w\\.-_]+$", "a.^Z", "a b"),
        ("[0-9]{2,2}", "x12y", "x1y"),
        ("a|^b$|c+$", "b", "bb"),
        ("^(?<year>\\d{4})$", "2026", "26"),
        ("^\\u0041\\x42$", "AB", "ab"),
        ("^a{,2}$", "a{,2}", "aa"),
        ("^[^]$", "\n", ""),
        ("^[a-]$", "-", "b"),
        ("\\$\\^", "$^", "^$"),
    ],
)
def test_reads_ecma_syntax(pattern: str, yes: str, no: str) -> None:
    assert search(pattern).accepts(yes)
    assert not search(pattern).accepts(no)


@pytest.mark.parametrize(
    "pattern", ["a(", "a)", "[z-a]", "*a", "a{3,1}", "\\p{L}", "\\b", "(?<!a)", "\\uZZZZ", "a" * 40_000]
)
def test_refuses_what_it_cannot_read(pattern: str) -> None:
    with pytest.raises(PatternError):
        search(pattern)


def test_lengths_and_words() -> None:
    assert [lengths(2, 3).accepts("x" * n) for n in range(5)] == [False, False, True, True, False]
    assert [lengths(1, None).accepts("x" * n) for n in (0, 1, 9)] == [False, True, True]
    assert [words(["ab", "ac", ""]).accepts(t) for t in ("ab", "ac", "", "a", "abc")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert (universe() - words(["a"])).accepts("aa")
    with pytest.raises(TooComplexError):
        lengths(0, 10**6)


@settings(max_examples=60)
@given(mark=st.text("<ab/>", min_size=1, max_size=5), seed=st.integers(0, 2**32))
def test_text_around_a_mark(mark: str, seed: int) -> None:
    grammar = Grammar()
    until = Sampler(grammar.text(any_until(grammar, mark))).sample(Random(seed), depth=30)
    assert until.index(mark) == len(until) - len(mark)
    grammar = Grammar()
    assert mark not in Sampler(grammar.text(any_without(grammar, mark))).sample(Random(seed), depth=30)


@settings(max_examples=60)
@given(low=st.integers(0, 300), more=st.integers(0, 9000))
def test_repetitions_keep_their_bounds(low: int, more: int) -> None:
    grammar = Grammar()
    name = grammar.rule("all", grammar.repeat("[x]", low, low + more))
    text = grammar.text(name)
    assert all(int(n) <= 64 for n in re.findall(r"\{(?:\d+,)?(\d+)\}", text))
    assert low <= len(Sampler(text).sample(Random(low), depth=12)) <= low + more
