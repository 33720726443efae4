"""The drafter that llama-server runs as ``--spec-type ngram-simple``, token for token.

Read from llama.cpp (common/ngram-map.cpp and the server's draft limit, builds b11434 to b11549) and coded
anew. It exists so that replay tells exactly what a managed lane with that flag would have drafted; our own
drafter is `drafters.ngram`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specproxy.strategies.drafters.grams import GramIndex, previous_places

__all__ = ["NgramSimpleDrafter"]


class NgramSimpleDrafter:
    """Copies up to `m` tokens from after the latest earlier occurrence of the last `n` tokens.

    What sets it apart, with N for the number of tokens known (prompt, output, and the token just sampled):

    - nothing is drafted while N is at most ``n + m + 2``;
    - an occurrence counts only if at least one token lies between its end and the last token, and if it does
      not start at the very first token of the prompt;
    - only tokens before the last one are copied, so there may be fewer than `m` of them; if there are fewer
      than `n`, nothing is drafted, and no earlier occurrence is tried;
    - matches are all of length `n`, there is no preference for a longer one.

    Args:
        n: ``--spec-ngram-simple-size-n``.
        m: ``--spec-ngram-simple-size-m``.

    Attributes:
        match_length: `n` where the last call drafted, else 0.

    Raises:
        ValueError: `n` or `m` below 1.
    """

    name = "ngram-simple"

    def __init__(self, n: int = 12, m: int = 48) -> None:
        if n < 1 or m < 1:
            raise ValueError(f"n and m must be at least 1, not {n} and {m}")
        self.min_n = n
        self.m = m
        self.match_length = 0
        self._tokens: list[int] = []
        self._index: GramIndex | None = None
        self._previous: list[int] = []
        self.begin(())

    def begin(self, tokens: Sequence[int]) -> None:
        """Forget the last sequence and index a prompt."""
        self._tokens = []
        self._index = GramIndex(self.min_n)
        self._previous = self._index.previous
        self.match_length = 0
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in tokens that the target has settled on; the last one is the token just sampled."""
        assert self._index is not None, "a surveyed text is finished"
        self._tokens.extend(tokens)
        self._index.extend(tokens)

    def draft(self, n_max: int) -> Sequence[int]:
        """Guess up to ``min(n_max, m)`` tokens."""
        return self.draft_at(len(self._tokens), n_max)

    def survey(self, tokens: Sequence[int]) -> None:
        """Take in a finished text at once, for `draft_at`; faster than `begin`, but `extend` may not follow."""
        self._tokens = list(tokens)
        self._index = None
        self._previous = previous_places(np.asarray(self._tokens, dtype=np.int64), self.min_n)

    def draft_at(self, length: int, n_max: int) -> Sequence[int]:
        """What `draft` gave, or would have given, when only the first `length` tokens were known."""
        n, m = self.min_n, self.m
        self.match_length = 0
        if n_max < 1 or length <= n + m + 2:
            return ()
        end = self._previous[length - 1]
        if end == length - 2:
            end = self._previous[end]
        if end < n:
            return ()
        stop = min(end + 1 + m, length - 1)
        if stop - (end + 1) < n:
            return ()
        self.match_length = n
        return self._tokens[end + 1 : min(stop, end + 1 + n_max)]
