"""Tokens that a grammar leaves no choice about: a drafter that needs no model.

Keys of a JSON schema, the rest of an enum's value, a closing brace: where only one continuation is legal it is
known before the model is asked. What is forced are bytes; which tokens spell them plain decoding leaves to the
model, so they are a draft like any other, which the target judges. The tokenizer's spelling is the model's
where the model would have said the text by itself. It is not certain for the first token of a key that the
model did not expect, nor behind one that was spelt otherwise (``t`` in place of ``tracking``), nor for the last
token of a run, which the model may join with what comes behind (``",`` in place of ``"``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specproxy.adapters.embedded.grammar_sampler import Grammar
from specproxy.adapters.embedded.vocabulary import Vocabulary

__all__ = ["ForcedDrafter", "Spelling"]

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
END = -1  # in place of a byte: only the end may come
LONGEST = 24  # bytes looked ahead for a token that is wanted, at most


class Spelling:
    """How a vocabulary spells single bytes, and texts. One for all requests on a model."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.token_of = vocabulary.single_bytes()
        self.end = vocabulary.eos if vocabulary.ends(vocabulary.eos) else None
        if self.end is not None:
            self.token_of[END] = self.end
        self.byte_of = {token: byte for byte, token in self.token_of.items()}
        self.candidates: npt.NDArray[np.void] = np.zeros(len(self.byte_of), CANDIDATE)
        self.candidates["id"] = list(self.byte_of)

    def tokens(self, text: bytes) -> list[int]:
        """The tokenizer's tokens for a text; none where they would spell another one, or it is no text."""
        try:
            tokens = self._vocabulary.tokenize(text.decode(), add_special=False, parse_special=False)
        except UnicodeDecodeError:  # ends within a character
            return []
        spelt = b"".join(self._vocabulary.piece(token) for token in tokens)
        return tokens if spelt == text else self._inside(text)

    def _inside(self, text: bytes) -> list[int]:
        """As within a line, for a tokenizer that puts a space before every text."""
        tokens = self._vocabulary.tokenize("\n" + text.decode(), add_special=False, parse_special=False)
        for start in range(len(tokens)):
            if b"".join(map(self._vocabulary.piece, tokens[start:])) == text:
                return tokens[start:]
        return []

    def piece(self, token: int) -> bytes:
        """The bytes of a token."""
        return self._vocabulary.piece(token)


class ForcedDrafter:
    """Drafts what the grammar of one sequence forces.

    The look ahead is kept from step to step as far as the text has followed it.
    """

    def __init__(self, grammar: Grammar, spelling: Spelling) -> None:
        self._grammar = grammar
        self._spelling = spelling
        self._run = b""  # forced bytes from here on, as far as they were looked for
        self._ends = False  # behind them only the end may come
        self._open = True  # more may be forced behind them

    def draft(self, n_max: int) -> list[int]:
        """Up to `n_max` forced tokens. Asking again gives the same."""
        if n_max < 1:
            return []
        self._look(LONGEST * min(n_max, 4))
        tokens = self._spelling.tokens(self._run) if self._run else []
        if self._ends and self._spelling.end is not None:
            tokens.append(self._spelling.end)
        return tokens[:n_max]

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in tokens that were settled on."""
        for token in tokens:
            piece = self._spelling.piece(token)
            if piece and self._run.startswith(piece):
                self._run = self._run[len(piece) :]
            else:
                self._run, self._ends, self._open = b"", False, True

    def _look(self, most: int) -> None:
        """Look for forced bytes until there are `most` or a choice comes."""
        if not self._open or len(self._run) >= most:
            return
        ahead = self._grammar.fork()
        try:
            for byte in self._run:
                ahead.accept(self._spelling.token_of[byte])
            found = bytearray(self._run)
            while len(found) < most:
                legal = ahead.legal(self._spelling.candidates.copy())["id"]
                if len(legal) != 1:
                    self._open = False
                    break
                token = int(legal[0])
                byte = self._spelling.byte_of[token]
                if byte == END:
                    self._ends, self._open = True, False
                    break
                found.append(byte)
                ahead.accept(token)
            self._run = bytes(found)
        finally:
            ahead.close()
