"""llama-server's ngram-simple: a straightforward search against the index, and its odd rules one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.strategies.base import Drafter
from specproxy.strategies.drafters.ngram_simple import NgramSimpleDrafter


def by_search(tokens: list[int], n: int, m: int) -> list[int]:
    """The rule as the server applies it: history and sampled token apart, all places looked at."""
    history, sampled = tokens[:-1], tokens[-1:]
    if len(history) <= n + m + 1:
        return []
    pattern = (history + sampled)[-n:]
    starts = [s for s in range(1, len(history) - n) if history[s : s + n] == pattern]
    if not starts:
        return []
    copied = history[starts[-1] + n :][:m]
    return copied if len(copied) >= n else []


@given(
    st.lists(st.integers(0, 2), max_size=30),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_agrees_with_search(prompt: list[int], output: list[list[int]], n: int, m: int) -> None:
    """Draft for draft the same as a search through the whole history."""
    drafter = NgramSimpleDrafter(n, m)
    drafter.begin(prompt)
    seen = list(prompt)
    for step in output:
        drafter.extend(step)
        seen += step
        assert list(drafter.draft(99)) == by_search(seen, n, m)


def test_short_history_is_not_drafted_from() -> None:
    """Nothing until more than n + m + 2 tokens are known."""
    drafter = NgramSimpleDrafter(1, 2)
    drafter.begin([7, 5, 6, 9, 5])
    assert not drafter.draft(9)
    drafter.begin([7, 5, 6, 9, 8, 5])
    assert list(drafter.draft(9)) == [6, 9]
    assert drafter.match_length == 1


def test_first_token_starts_no_match() -> None:
    """An occurrence at the very start of the prompt is passed over."""
    drafter = NgramSimpleDrafter(1, 2)
    drafter.begin([5, 6, 9, 8, 7, 5])
    assert not drafter.draft(9)


def test_too_few_tokens_to_copy_is_no_draft() -> None:
    """A match so near the end that fewer than n tokens follow gives nothing, though an earlier one exists."""
    drafter = NgramSimpleDrafter(2, 3)
    drafter.begin([0, 1, 2, 9, 9, 9, 1, 2, 1, 2])
    assert not drafter.draft(9)


def test_limit_cuts_the_draft() -> None:
    """The server's room for tokens cuts a draft short, below n too."""
    drafter = NgramSimpleDrafter(2, 3)
    drafter.begin([0, 1, 2, 3, 4, 5, 6, 1, 2])
    assert list(drafter.draft(9)) == [3, 4, 5]
    assert list(drafter.draft(1)) == [3]
    assert not drafter.draft(0)


@pytest.mark.parametrize("bad", [{"n": 0}, {"m": 0}])
def test_bad_parameters(bad: dict[str, int]) -> None:
    """Lengths below one are refused."""
    with pytest.raises(ValueError, match="at least 1"):
        NgramSimpleDrafter(**bad)


def test_is_a_drafter() -> None:
    """It implements the protocol that replay relies on."""
    assert isinstance(NgramSimpleDrafter(), Drafter)
