"""The n-gram drafter's index against a naive reading of its own rule."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.strategies.base import Drafter
from specproxy.strategies.drafters.ngram import NgramDrafter


def places(tokens: list[int], n: int) -> list[int]:
    """End positions of earlier occurrences of the last `n` tokens, latest first, by looking at all of them."""
    if len(tokens) <= n:
        return []
    suffix = tokens[-n:]
    return [end for end in range(len(tokens) - 2, n - 2, -1) if tokens[end - n + 1 : end + 1] == suffix]


def agreement(tokens: list[int], end: int, max_n: int) -> int:
    """Tokens over which the text up to `end` agrees with the end of the sequence."""
    length = 0
    while length < min(max_n, end + 1) and tokens[end - length] == tokens[len(tokens) - 1 - length]:
        length += 1
    return length


def naive(tokens: list[int], n_max: int, min_n: int, max_n: int, depth: int) -> tuple[list[int], int]:
    """The rule in the docstring of NgramDrafter, with no index: draft and match length."""
    long_n = 2 * (min_n + 1)
    for n in (long_n, min_n):
        if n > max_n:
            continue
        found = places(tokens, n)[:depth]
        if found:
            end = max(found, key=lambda e: (agreement(tokens, e, max_n), e))
            grown = list(tokens)
            for _ in range(n_max):
                grown.append(grown[end + 1 + len(grown) - len(tokens)])
            return grown[len(tokens) :], agreement(tokens, end, max_n)
    return [], 0


@given(
    prompt=st.lists(st.integers(0, 4), max_size=60),
    output=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), max_size=20),
    min_n=st.integers(1, 4),
    extra=st.integers(0, 8),
    depth=st.sampled_from([1, 2, 32]),
    n_max=st.integers(1, 20),
)
def test_index_agrees_with_naive_rule(
    prompt: list[int], output: list[list[int]], min_n: int, extra: int, depth: int, n_max: int
) -> None:
    """After every step the draft and its match length are those of the rule, whatever the step sizes."""
    drafter = NgramDrafter(min_n=min_n, max_n=min_n + extra, depth=depth)
    drafter.begin(prompt)
    seen = list(prompt)
    for step in [[], *output]:
        drafter.extend(step)
        seen += step
        expected, length = naive(seen, n_max, min_n, min_n + extra, depth)
        assert list(drafter.draft(n_max)) == expected
        assert drafter.match_length == length


@given(st.lists(st.integers(0, 3), max_size=80), st.integers(0, 80))
def test_prompt_and_extension_are_the_same_to_it(tokens: list[int], cut: int) -> None:
    """It makes no difference which tokens came as the prompt."""
    one, two = NgramDrafter(min_n=2), NgramDrafter(min_n=2)
    one.begin(tokens)
    two.begin(tokens[:cut])
    two.extend(tokens[cut:])
    assert list(one.draft(9)) == list(two.draft(9))
    assert one.match_length == two.match_length


def test_prefers_the_longer_match_then_the_later() -> None:
    """An earlier place that agrees over more tokens beats a later one; equals go to the later."""
    drafter = NgramDrafter(min_n=2, max_n=5)
    drafter.begin([9, 1, 2, 50, 8, 1, 2, 60, 9, 1, 2])
    assert list(drafter.draft(1)) == [50]
    assert drafter.match_length == 3
    drafter.begin([7, 1, 2, 50, 7, 1, 2, 60, 7, 1, 2])
    assert list(drafter.draft(1)) == [60]


def test_continues_a_period_beyond_what_is_known() -> None:
    """A source that overlaps the end goes on with its own copy."""
    drafter = NgramDrafter(min_n=3)
    drafter.begin([5, 1, 2, 3, 1, 2, 3])
    assert list(drafter.draft(8)) == [1, 2, 3, 1, 2, 3, 1, 2]
    drafter.begin([4, 4, 4, 4])
    assert list(drafter.draft(5)) == [4] * 5


def test_no_earlier_place_is_no_guess() -> None:
    """Without a match of min_n tokens nothing is drafted, and the match length says so."""
    drafter = NgramDrafter(min_n=3)
    drafter.begin([1, 2, 3, 1, 2])
    assert not drafter.draft(4)
    assert drafter.match_length == 0
    drafter.begin([])
    assert not drafter.draft(4)


def test_begin_forgets_the_last_sequence() -> None:
    """Nothing of an earlier request is ever copied into a later one."""
    drafter = NgramDrafter(min_n=2)
    drafter.begin([1, 2, 3, 4])
    drafter.begin([1, 2])
    assert not drafter.draft(4)


def test_length_limits() -> None:
    """The caller's limit and the drafter's own both hold; zero is no draft."""
    drafter = NgramDrafter(min_n=1, n_max=3)
    drafter.begin([1, 1, 1])
    assert len(drafter.draft(10)) == 3
    assert len(drafter.draft(2)) == 2
    assert not drafter.draft(0)


@pytest.mark.parametrize("bad", [{"min_n": 0}, {"min_n": 4, "max_n": 3}, {"n_max": 0}, {"depth": 0}])
def test_bad_parameters(bad: dict[str, int]) -> None:
    """Parameters that make no sense are refused."""
    with pytest.raises(ValueError, match=r"need|must"):
        NgramDrafter(**bad)


def test_long_prompts() -> None:
    """A prompt of 100k tokens and grams that occur thousands of times stay within the depth."""
    rng = random.Random(3)
    drafter = NgramDrafter()
    tokens = [rng.randrange(3) for _ in range(100_000)]
    drafter.begin(tokens)
    expected, length = naive(tokens, 8, 3, 16, 32)
    assert list(drafter.draft(8)) == expected
    assert drafter.match_length == length


def test_is_a_drafter() -> None:
    """It implements the protocol that engine and replay rely on."""
    assert isinstance(NgramDrafter(), Drafter)
