"""Which slot a prompt runs in, and what it takes over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.adapters.embedded.prefix_cache import Slot, choose, common_prefix

TOKENS = st.lists(st.integers(0, 2), max_size=8)


def slot(i: int, tokens: list[int], *, busy: bool = False, used: int = 0, n_mtp: int = 0) -> Slot:
    return Slot(i, tokens, len(tokens), busy=busy, used=used, n_mtp=n_mtp)


@given(TOKENS, TOKENS)
def test_common_prefix(a: list[int], b: list[int]) -> None:
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


@given(st.lists(st.tuples(TOKENS, st.booleans()), min_size=1, max_size=5), TOKENS, st.booleans())
def test_a_choice_is_usable(held: list[tuple[list[int], bool]], prompt: list[int], share: bool) -> None:
    slots = [slot(i, tokens, busy=busy, used=i) for i, (tokens, busy) in enumerate(held)]
    if all(s.busy for s in slots):
        with pytest.raises(ValueError, match="idle"):
            choose(slots, prompt, share=share)
        return
    choice = choose(slots, prompt, share=share)
    assert not choice.slot.busy
    assert choice.source.tokens[: choice.common] == prompt[: choice.common]
    assert share or choice.source is choice.slot
    if share:
        assert choice.common == max(common_prefix(s.tokens, prompt) for s in slots)


def test_a_conversation_goes_on_in_its_slot() -> None:
    slots = [slot(0, [1, 2, 3, 4]), slot(1, [9, 9]), slot(2, [])]
    choice = choose(slots, [1, 2, 3, 4, 5], share=True)
    assert (choice.slot.id, choice.source.id, choice.common) == (0, 0, 4)


def test_a_common_beginning_does_not_cost_the_longer_conversation() -> None:
    slots = [slot(0, [1, 2, 3, 4, 5, 6, 7], used=5), slot(1, [9, 9], used=3), slot(2, [8], used=4)]
    choice = choose(slots, [1, 2, 30], share=True)
    assert (choice.slot.id, choice.source.id, choice.common) == (1, 0, 2)


def test_empty_slots_are_taken_before_old_ones() -> None:
    slots = [slot(0, [1], used=1), slot(1, []), slot(2, [2], used=2)]
    assert choose(slots, [7], share=True).slot.id == 1
    slots[1] = slot(1, [3], used=9)
    assert choose(slots, [7], share=True).slot.id == 0


def test_for_the_mtp_head_a_prefix_counts_as_far_as_its_cache() -> None:
    slots = [slot(0, [1, 2, 3, 4]), slot(1, [1, 2, 3], n_mtp=3)]
    assert choose(slots, [1, 2, 3, 4, 5], share=True).source.id == 0
    assert choose(slots, [1, 2, 3, 4, 5], share=True, mtp=True).source.id == 1
