"""The growing gram index and the one made in one go, against a plain dictionary of tuples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.strategies.drafters import grams
from specproxy.strategies.drafters.grams import GramIndex, previous_places


def naive(tokens: list[int], n: int) -> list[int]:
    """Position before i at which the same gram ended, by a dictionary of the grams themselves."""
    last: dict[tuple[int, ...], int] = {}
    previous = []
    for at in range(len(tokens)):
        gram = tuple(tokens[max(0, at - n + 1) : at + 1])
        previous.append(last.get(gram, -1) if len(gram) == n else -1)
        if len(gram) == n:
            last[gram] = at
    return previous


texts = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 300_000)), max_size=120)


@given(texts, st.integers(1, 9), st.integers(1, 7))
def test_growing_index(tokens: list[int], n: int, step: int) -> None:
    """Any split into extensions gives the same chain."""
    index = GramIndex(n)
    for at in range(0, len(tokens), step):
        index.extend(tokens[at : at + step])
    assert index.previous == naive(tokens, n)


@given(texts, st.integers(1, 9))
def test_whole_text(tokens: list[int], n: int) -> None:
    """Sorting gives the chain that growing gives."""
    assert previous_places(np.asarray(tokens, dtype=np.int64), n) == naive(tokens, n)


def test_hash_collisions_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where different grams share a hash the answer is still exact."""
    monkeypatch.setattr(grams, "_hashes", lambda tokens, n: np.zeros(len(tokens) - n + 1, dtype=np.uint64))
    tokens = [1, 2, 3, 1, 2, 3, 1, 2]
    assert previous_places(np.asarray(tokens, dtype=np.int64), 2) == naive(tokens, 2)
