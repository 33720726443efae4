"""Prompt lookup: what followed the last few tokens when they stood earlier in prompt or output.

The idea is prompt lookup decoding (Saxena 2023) and LLMA (Yang et al. 2023, arXiv:2304.04487). Which earlier
place is copied from decides how good the guess is, so the whole rule is written down in `NgramDrafter`, and a
naive version of it in the tests is compared with the index token by token.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["NgramDrafter"]

_ID_BITS = 24  # token ids are packed into one integer a gram; vocabularies are far below 2**24
_ID_MASK = (1 << _ID_BITS) - 1


class _GramIndex:
    """Earlier places of every gram of one length: a chain from the latest occurrence back.

    ``previous[i]`` is the position before `i` at which the same gram ended, or -1. The gram that ends at
    position `i` covers ``tokens[i - n + 1 : i + 1]``. One dictionary read and one write a token.
    """

    __slots__ = ("_key", "_last", "_mask", "n", "previous")

    def __init__(self, n: int) -> None:
        self.n = n
        self.previous: list[int] = []
        self._last: dict[int, int] = {}
        self._key = 0
        self._mask = (1 << (n * _ID_BITS)) - 1

    def extend(self, tokens: Sequence[int]) -> None:
        """Index the gram that ends at each new token."""
        previous, last, key, mask = self.previous, self._last, self._key, self._mask
        append, get = previous.append, last.get
        at = len(previous)
        unfilled = self.n - 1 - at  # positions at the very start at which no gram ends yet
        for token in tokens:
            key = ((key << _ID_BITS) | (token & _ID_MASK)) & mask
            if unfilled > 0:
                unfilled -= 1
                append(-1)
            else:
                append(get(key, -1))
                last[key] = at
            at += 1
        self._key = key


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
        self._indexes: tuple[_GramIndex, ...] = ()
        self.begin(())

    def begin(self, tokens: Sequence[int]) -> None:
        """Forget the last sequence and index a prompt; linear in its length."""
        long_n = 2 * (self.min_n + 1)
        lengths = (long_n, self.min_n) if long_n <= self.max_n else (self.min_n,)
        self._indexes = tuple(_GramIndex(n) for n in lengths)
        self._tokens = []
        self.match_length = 0
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in tokens that the target has settled on."""
        self._tokens.extend(tokens)
        for index in self._indexes:
            index.extend(tokens)

    def draft(self, n_max: int) -> Sequence[int]:
        """Guess up to ``min(n_max, self.n_max)`` tokens; asking again without `extend` gives the same."""
        n_max = min(n_max, self.n_max)
        self.match_length = 0
        if n_max < 1 or not self._tokens:
            return ()
        for index in self._indexes:
            if index.previous[-1] >= 0:
                end, self.match_length = self._best_place(index)
                return self._copy(end + 1, n_max)
        return ()

    def _best_place(self, index: _GramIndex) -> tuple[int, int]:
        """End position of the best earlier occurrence, and the length of its match."""
        tokens, previous, longest = self._tokens, index.previous, self.max_n
        last = len(tokens) - 1
        best = place = previous[last]
        matched = index.n - 1  # tokens by which the best place so far agrees; every place has index.n
        for _ in range(self.depth):
            if place < matched:  # too near the start to agree over more tokens
                break
            if tokens[place - matched] == tokens[last - matched]:
                length = self._agreement(place, last, index.n)
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

    def _copy(self, start: int, n: int) -> list[int]:
        """`n` tokens from `start` on, wrapping into the copy itself at the end of what is known."""
        copied = self._tokens[start : start + n]
        period = len(copied)
        while len(copied) < n:
            copied += copied[: min(period, n - len(copied))]
        return copied
