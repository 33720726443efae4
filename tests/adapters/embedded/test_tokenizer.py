"""The parts in which long texts are cut into tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("llama_cpp")

from specproxy.adapters.embedded.tokenizer import NEAR, PART, parts

pytestmark = pytest.mark.embedded

words = st.lists(st.sampled_from(["word", "x", "\n", "  ", "long" * 700, "é", "{};"]), max_size=80)


@given(words.map(" ".join) | words.map("".join))
def test_nothing_is_lost_and_no_part_is_too_long(text: str) -> None:
    """The parts are the text."""
    found = list(parts(text))
    assert "".join(found) == text
    assert all(len(part) <= PART for part in found)


def test_parts_end_with_words() -> None:
    """Where there are any near the end: the next part begins with the space that belongs to its word."""
    found = list(parts("word " * PART))
    assert all(part.endswith("word") for part in found[:-1])
    assert all(part.startswith(" word") for part in found[1:])
    assert all(len(part) > PART - NEAR for part in found[:-1])
    assert [len(part) for part in parts("x" * (2 * PART + 1))] == [PART, PART, 1]
