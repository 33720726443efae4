"""A GBNF grammar over tokens, asked about as few of them as possible: it costs microseconds a token."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

from specproxy.adapters.embedded.llama import captured_log
from specproxy.adapters.embedded.vocabulary import Vocabulary
from specproxy.errors import BackendError, RequestError

__all__ = ["Grammar"]


class Grammar:
    """Where a text stands in a grammar.

    llama.cpp ends the process when a grammar accepts a token that it does not allow, so `accept` asks first.

    Raises:
        RequestError: the grammar does not parse.
    """

    def __init__(self, gbnf: str, vocabulary: Vocabulary) -> None:
        if "\0" in gbnf:
            raise RequestError("the grammar holds a NUL character")
        with captured_log() as lines:
            handle = lib.llama_sampler_init_grammar(vocabulary.handle, gbnf.encode(), b"root")
            if not handle:
                raise RequestError(f"failed to parse grammar: {' '.join(lines) or 'no root rule'}")
        self._begin(handle)

    def _begin(self, handle: ctypes.c_void_p) -> None:
        self._handle: ctypes.c_void_p | None = handle
        self._one = lib.llama_token_data(0, 1.0, 0.0)
        self._array = lib.llama_token_data_array(ctypes.pointer(self._one), 1, -1, False)
        self._asked: int | None = None  # the token that was last found to be legal here

    def allows(self, token: int) -> bool:
        """Whether a token may come next."""
        self._one.id, self._one.logit = token, 1.0
        self._array.size = 1
        lib.llama_sampler_apply(self._handle, ctypes.byref(self._array))
        legal = bool(self._one.logit != -np.inf)
        self._asked = token if legal else None
        return legal

    def legal(self, candidates: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        """Those of the candidates (llama_token_data) that may come next."""
        array = lib.llama_token_data_array(
            ctypes.cast(candidates.ctypes.data, lib.llama_token_data_p), len(candidates), -1, False
        )
        lib.llama_sampler_apply(self._handle, ctypes.byref(array))
        legal: npt.NDArray[np.void] = candidates[candidates["logit"] != -np.inf]
        return legal

    def accept(self, token: int) -> None:
        """Go on behind a token.

        Raises:
            BackendError: the grammar does not allow it here.
        """
        if token != self._asked and not self.allows(token):
            raise BackendError(f"the grammar does not allow token {token} here")
        lib.llama_sampler_accept(self._handle, token)
        self._asked = None

    def fork(self) -> Grammar:
        """Another one that stands at the same place and goes on by itself, to be closed by itself.

        Raises:
            BackendError: llama.cpp refuses.
        """
        handle = lib.llama_sampler_clone(self._handle)
        if not handle:
            raise BackendError("llama.cpp cannot copy the grammar's state")
        other = Grammar.__new__(Grammar)
        other._begin(handle)
        return other

    def legal_start(self, tokens: Sequence[int]) -> int:
        """How many of the tokens, from the first one on, may come next one after the other."""
        if not tokens or not self.allows(tokens[0]):
            return 0
        ahead = self.fork()
        try:
            for i, token in enumerate(tokens):
                if not ahead.allows(token):
                    return i
                if i + 1 < len(tokens):
                    ahead.accept(token)
        finally:
            ahead.close()
        return len(tokens)

    def close(self) -> None:
        """Free it; idempotent."""
        if self._handle:
            lib.llama_sampler_free(self._handle)
            self._handle = None
