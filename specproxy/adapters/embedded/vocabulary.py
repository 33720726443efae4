"""Text to tokens and back, for one model file, on whichever thread."""

from __future__ import annotations

import ctypes
from pathlib import Path

from llama_cpp import llama_cpp as lib

from specproxy.adapters.embedded.llama import Model, ModelParams
from specproxy.errors import BackendError

__all__ = ["Vocabulary"]

PIECE = 64  # bytes; longer tokens are rare


class Vocabulary:
    """A model's vocabulary, loaded without its weights: it stays when the weights are unloaded.

    Raises:
        ModelFileError: the file cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        self._model = Model(path, ModelParams(vocab_only=True))
        self.handle = self._model.vocab
        self.size = self._model.n_vocab
        self.bos = int(lib.llama_vocab_bos(self.handle))
        self.eos = int(lib.llama_vocab_eos(self.handle))
        self.suppressed = self._suppressed()
        # all at once: with the caches cold after a decode, asking for one token costs as much as fifty here
        self._ends = frozenset(i for i in range(self.size) if lib.llama_vocab_is_eog(self.handle, i))
        self._pieces = self._all_pieces()

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text."""
        raw = text.encode("utf-8", "surrogatepass")
        size = len(raw) + 8
        while True:
            buffer = (lib.llama_token * size)()
            count = int(
                lib.llama_tokenize(self.handle, raw, len(raw), buffer, size, add_special, parse_special)
            )
            if count >= 0:
                return list(buffer[:count])
            if -count <= size:
                raise BackendError("the text is too long for the tokenizer")
            size = -count

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes that a token stands for; control tokens are empty unless `special`.

        Raises:
            BackendError: there is no such token.
        """
        if not 0 <= token < self.size:
            raise BackendError(f"token {token} is not in the vocabulary of {self.size}")
        known = self._pieces[token]
        return known if known or not special else self._read_piece(token, special=True)

    def single_bytes(self) -> dict[int, int]:
        """A token for each byte that has one of its own."""
        return {piece[0]: i for i, piece in reversed(list(enumerate(self._pieces))) if len(piece) == 1}

    def ends(self, token: int) -> bool:
        """Whether a token ends the generation."""
        return token in self._ends

    def end_tokens(self) -> frozenset[int]:
        """All tokens that end the generation."""
        return self._ends

    def meta(self, key: str) -> str | None:
        """A metadata value of the file as text, or None."""
        return self._model.meta(key)

    def close(self) -> None:
        """Free it."""
        self._model.close()

    def _all_pieces(self) -> list[bytes]:
        buffer = ctypes.create_string_buffer(PIECE)
        pieces: list[bytes] = []
        for token in range(self.size):
            count = lib.llama_token_to_piece(self.handle, token, buffer, PIECE, 0, False)
            pieces.append(buffer.raw[:count] if count >= 0 else self._read_piece(token, special=False))
        return pieces

    def _read_piece(self, token: int, *, special: bool) -> bytes:
        size = PIECE
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = int(lib.llama_token_to_piece(self.handle, token, buffer, size, 0, special))
            if count >= 0:
                return buffer.raw[:count]
            size = -count

    def _suppressed(self) -> tuple[int, ...]:
        """Tokens that the model's file forbids (``tokenizer.ggml.suppress_tokens``)."""
        count = ctypes.c_int32(0)
        tokens = lib.llama_vocab_get_suppress_tokens(self.handle, ctypes.byref(count))
        return tuple(int(tokens[i]) for i in range(count.value)) if tokens else ()
