"""Replay: counts as a target that verifies drafts would have produced them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.strategies.base import Drafter
from specproxy.strategies.drafters.ngram import NgramDrafter
from specproxy.strategies.drafters.ngram_simple import NgramSimpleDrafter
from specproxy.strategies.replay import HindsightDrafter, replay


class Live:
    """Hides the past of a drafter, so that replay has to go step by step."""

    name = "live"

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.min_n = getattr(inner, "min_n", None)

    @property
    def match_length(self) -> int:
        return int(getattr(self._inner, "match_length", 0))

    def begin(self, tokens: Sequence[int]) -> None:
        self._inner.begin(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        self._inner.extend(tokens)

    def draft(self, n_max: int) -> Sequence[int]:
        return self._inner.draft(n_max)


class Scripted:
    """Drafts what it is told, by number of tokens known."""

    name = "scripted"

    def __init__(self, drafts: dict[int, list[int]]) -> None:
        self._drafts = drafts
        self._known = 0

    def begin(self, tokens: Sequence[int]) -> None:
        self._known = len(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        self._known += len(tokens)

    def draft(self, n_max: int) -> Sequence[int]:
        return self._drafts.get(self._known, [])[:n_max]


def drafters() -> list[Drafter]:
    return [NgramDrafter(2), NgramDrafter(1, 3, depth=2), NgramSimpleDrafter(1, 3), NgramSimpleDrafter(3, 8)]


texts = st.lists(st.integers(0, 3), max_size=60)


@given(texts, texts, st.integers(1, 9), st.booleans())
def test_past_and_step_by_step_agree(prompt: list[int], output: list[int], n_max: int, limited: bool) -> None:
    """The fast way over an indexed text counts exactly what stepping through it counts."""
    limit = len(output) if limited else None
    for drafter in drafters():
        assert isinstance(drafter, HindsightDrafter)
        fast = replay(prompt, output, drafter, n_max, max_tokens=limit)
        assert fast == replay(prompt, output, Live(drafter), n_max, max_tokens=limit)


@given(texts, texts, st.integers(1, 9), st.booleans())
def test_counts_add_up(prompt: list[int], output: list[int], n_max: int, limited: bool) -> None:
    """Every decoded token is a step's own or an accepted guess; tables and totals tell the same story."""
    limit = len(output) if limited else None
    for drafter in drafters():
        result = replay(prompt, output, drafter, n_max, max_tokens=limit)
        assert result.tokens == result.steps + result.accepted
        assert sum(k * count for k, count in enumerate(result.widths)) == result.drafted
        assert sum(result.widths) == result.steps
        assert sum(hit for hit, _ in result.by_position) == result.accepted
        assert sum(hit for hit, _ in result.by_match) == result.accepted
        assert sum(tried for _, tried in result.by_match) == sum(tried for _, tried in result.by_position)
        assert len(result.widths) <= n_max + 1
        if limited:
            assert result.censored == 0


def test_known_counts() -> None:
    """A hand-checked case: one draft accepted whole, one refused at its second guess, one refused at once."""
    output = [10, 11, 12, 13, 14, 15, 16, 17]
    # [11 12] is right, then own 13; [14 99] half right, own 15; [0] wrong, own 16; no draft, own 17
    drafter = Scripted({3: [11, 12], 6: [14, 99], 8: [0]})
    result = replay([1, 2], output, drafter, 4)
    assert (result.steps, result.tokens, result.drafted, result.accepted) == (4, 7, 5, 3)
    assert result.by_position == ((2, 3), (1, 2))
    assert result.widths == (1, 1, 2)
    assert result.by_match == ()
    assert result.tokens_per_step == pytest.approx(7 / 4)


def test_last_step_is_censored() -> None:
    """Where a text ends inside a draft its last token is the step's own; the rest was never judged."""
    result = replay([], [5, 6, 7], Scripted({1: [6, 7, 8, 9]}), 4)
    assert (result.steps, result.drafted, result.accepted, result.censored) == (1, 4, 1, 3)
    assert result.by_position == ((1, 1),)


def test_a_refused_guess_is_not_censored() -> None:
    """A draft that is wrong before the text ends was judged in full."""
    result = replay([], [5, 6, 7], Scripted({1: [9, 9, 9, 9]}), 4)
    assert (result.steps, result.accepted, result.censored) == (2, 0, 0)
    assert result.by_position == ((0, 1),)


def test_limit_shortens_drafts() -> None:
    """With one token left to produce there is nothing to draft; with two, one guess."""
    drafter = Scripted({1: [6, 7, 8], 2: [7, 8]})
    assert replay([], [5, 6, 7], drafter, 4, max_tokens=3).drafted == 1
    assert replay([], [5, 6], drafter, 4, max_tokens=2).drafted == 0


@pytest.mark.parametrize("output", [[], [1]])
def test_nothing_decoded(output: list[int]) -> None:
    """An output of no or one token has no decoding step."""
    result = replay([1, 2, 3], output, NgramDrafter(), 8)
    assert (result.tokens, result.steps, result.tokens_per_step) == (0, 0, 1.0)
    assert result.time_ratio(lambda w: float(w)) == 1.0


def test_time_ratio() -> None:
    """Steps are charged by what they verify, drafts by the token."""
    result = replay([1, 2], [10, 11, 12, 13, 14, 15, 16, 17], Scripted({3: [11, 12], 6: [14, 99], 8: [0]}), 4)
    cost = {1: 1.0, 2: 1.2, 3: 1.5}
    assert result.time_ratio(cost.__getitem__) == pytest.approx((1.0 + 1.2 + 2 * 1.5) / 7)
    assert result.time_ratio(cost.__getitem__, 0.1) == pytest.approx((1.0 + 1.2 + 2 * 1.5 + 0.5) / 7)


def test_plain_text_costs_what_plain_costs() -> None:
    """Without a draft the ratio is one."""
    result = replay([1, 2], [10, 11, 12], Scripted({}), 4)
    assert result.time_ratio(lambda w: float(w)) == 1.0
    assert result.tokens_per_step == 1.0
