"""Prompt lookup: what followed the last few tokens when they stood earlier in prompt or output.

The idea is prompt lookup decoding (Saxena 2023) and LLMA (Yang et al. 2023, arXiv:2304.04487). Which earlier
place is copied from decides how good the guess is, so the whole rule is written down in `NgramDrafter`, and a
naive version of it in the tests is compared with the index token by token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specproxy.strategies.drafters.grams import GramIndex, previous_places

__all__ = ["NgramDrafter"]


class NgramDrafter:
    """Copies on from the best earlier occurrence of the sequence's last tokens.

    The rule: take the last `depth` places at which the last ``2 * (min_n + 1)`` tokens stood before (if that is
    at most `max_n`, and if there are any), else those of the last `min_n` tokens. Of these the one wins that
    agrees with the end of the sequence over the most tokens, counted up to `max_n`; among equals the latest.
    No place, no guess. The draft is what followed there; where it reaches the end of what is known it goes on
    with the drafted tokens themselves, so a period is continued for as long as asked.

    A draft depends on nothing but the tokens seen, so replay (`strategies.replay`) gives exactly what the
    engine got. Cost: one dictionary read and one write a token and indexed length, and a walk over at most
    `depth` places a draft.

    Args:
        min_n: shortest match that is followed, in tokens.
        max_n: longest match that is told apart.
        n_max: longest draft, whatever the caller asks for.
        depth: how many places are compared.

    Attributes:
        match_length: tokens over which the last draft's source agreed, `min_n` to `max_n`; 0 without a draft.
            Callers choose how much of a draft to use by it.

    Raises:
        ValueError: not ``1 <= min_n <= max_n``, or `n_max` or `depth` below 1.
    """

    name = "ngram"

    def __init__(self, min_n: int = 3, max_n: int = 16, n_max: int = 64, depth: int = 32) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"need 1 <= min_n <= max_n, not {min_n} and {max_n}")
        if n_max < 1 or depth < 1:
            raise ValueError(f"n_max and depth must be at least 1, not {n_max} and {depth}")
        self.min_n = min_n
        self.max_n = max_n
        self.n_max = n_max
        self.depth = depth
        self.match_length = 0
        self._tokens: list[int] = []
        self._indexes: tuple[GramIndex, ...] = ()
        self._places: tuple[tuple[int, list[int]], ...] = ()
        self._shortest: list[int] = []  # earlier places of the shortest grams: without one there are no others
        self.begin(())

    def begin(self, tokens: Sequence[int]) -> None:
        """Forget the last sequence and index a prompt; linear in its length."""
        self._tokens = []
        self._indexes = tuple(GramIndex(n) for n in self._lengths())
        self._places = tuple((index.n, index.previous) for index in self._indexes)
        self._shortest = self._places[-1][1]
        self.match_length = 0
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in tokens that the target has settled on."""
        self._tokens.extend(tokens)
        for index in self._indexes:
            index.extend(tokens)

    def draft(self, n_max: int) -> Sequence[int]:
        """Guess up to ``min(n_max, self.n_max)`` tokens; asking again without `extend` gives the same."""
        return self.draft_at(len(self._tokens), n_max)

    def survey(self, tokens: Sequence[int]) -> None:
        """Take in a finished text at once, for `draft_at`; faster than `begin`, but `extend` may not follow."""
        self._tokens = list(tokens)
        array = np.asarray(self._tokens, dtype=np.int64)
        self._indexes = ()
        self._places = tuple((n, previous_places(array, n)) for n in self._lengths())
        self._shortest = self._places[-1][1]

    def draft_at(self, length: int, n_max: int) -> Sequence[int]:
        """What `draft` gave, or would have given, when only the first `length` tokens were known."""
        last = length - 1
        if last >= 0 and n_max >= 1 and self._shortest[last] >= 0:
            n_max = min(n_max, self.n_max)
            for n, previous in self._places:
                if previous[last] >= 0:
                    end, self.match_length = self._best_place(previous, last, n)
                    return self._copy(end + 1, length, n_max)
        self.match_length = 0
        return ()

    def _lengths(self) -> tuple[int, ...]:
        """Indexed gram lengths, longest first."""
        long_n = 2 * (self.min_n + 1)
        return (long_n, self.min_n) if long_n <= self.max_n else (self.min_n,)

    def _best_place(self, previous: list[int], last: int, n: int) -> tuple[int, int]:
        """End of the best earlier occurrence of the `n` tokens up to `last`, and the length of its match."""
        tokens, longest = self._tokens, self.max_n
        best = place = previous[last]
        matched = n - 1  # tokens by which the best place so far agrees; every place has n
        for _ in range(self.depth):
            if place < matched:  # too near the start to agree over more tokens
                break
            if tokens[place - matched] == tokens[last - matched]:
                length = self._agreement(place, last, n)
                if length > matched:
                    best, matched = place, length
                    if length >= longest:
                        break
            place = previous[place]
        return best, matched

    def _agreement(self, place: int, last: int, known: int) -> int:
        """How many tokens up to `place` and up to `last` are the same, `known` of them being so already."""
        tokens, length = self._tokens, known
        limit = min(self.max_n, place + 1)
        while length < limit and tokens[place - length] == tokens[last - length]:
            length += 1
        return length

    def _copy(self, start: int, length: int, n: int) -> list[int]:
        """`n` tokens from `start` on, wrapping into the copy itself at `length`, the end of what is known."""
        copied = self._tokens[start : min(start + n, length)]
        period = len(copied)
        while len(copied) < n:
            copied += copied[: min(period, n - len(copied))]
        return copied
