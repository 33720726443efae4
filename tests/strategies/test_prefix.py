"""What lanes have in their prompt caches, by hashed blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.strategies.prefix import BLOCK_CHARS, BLOCK_TOKENS, PrefixModel, block_hashes

KEY = b"k" * 16
texts = st.lists(st.text("ab", max_size=3 * BLOCK_CHARS), max_size=4)


@given(texts, texts)
def test_equal_beginnings_have_equal_hashes(one: list[str], two: list[str]) -> None:
    """As many as there are whole blocks in what two prompts have in common, and no more."""
    a, b = "\0".join(one), "\0".join(two)
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    first, second = block_hashes(one, KEY), block_hashes(two, KEY)
    same = next(
        (i for i, (x, y) in enumerate(zip(first, second, strict=False)) if x != y), min(len(first), len(second))
    )
    assert same == common // BLOCK_CHARS
    assert len(first) == len(a) // BLOCK_CHARS


def test_hashes_are_secret() -> None:
    """Another process has others, and a boundary between pieces is part of the prompt."""
    prompt = ["x" * BLOCK_CHARS]
    assert block_hashes(prompt, KEY) != block_hashes(prompt, b"o" * 16)
    assert (
        block_hashes(["ab" * BLOCK_CHARS, "c"], KEY)[-1:] != block_hashes(["ab" * BLOCK_CHARS + "c"], KEY)[-2:]
    )
    assert block_hashes(["\ud800" * BLOCK_CHARS], KEY), "half a character is a character here"


def test_hits_end_at_the_first_block_that_is_not_there() -> None:
    model = PrefixModel()
    model.note("a", (1, 2, 3))
    assert model.hits((1, 2, 9, 3)) == {"a": 2 * BLOCK_TOKENS}
    assert model.hits((9, 1)) == {}
    model.forget("a")
    model.forget("nobody")
    assert model.hits((1, 2)) == {}


@pytest.mark.parametrize("capacity", [BLOCK_TOKENS, 4 * BLOCK_TOKENS])
def test_what_was_used_least_is_forgotten(capacity: int) -> None:
    """And of one prompt its end before its beginning, as a prefix is of use without what follows it."""
    model = PrefixModel(capacity)
    model.note("a", tuple(range(10)))
    assert model.hits(tuple(range(10))) == {"a": capacity}
    model.note("a", (100,))
    kept = capacity // BLOCK_TOKENS
    assert model.hits((100,)) == {"a": BLOCK_TOKENS}
    assert model.hits(tuple(range(10))) == ({"a": (kept - 1) * BLOCK_TOKENS} if kept > 1 else {})
