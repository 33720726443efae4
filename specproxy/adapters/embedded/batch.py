"""Tokens for one llama_decode."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

__all__ = ["Batch", "Floats"]

Floats = npt.NDArray[np.float32]

FEW = 9  # tokens


class Batch:
    """Tokens for one decode, in arrays that are allocated once.

    Args:
        size: most tokens it can hold.
        width: floats of a hidden row given beside each token, or 0 for tokens alone.

    Attributes:
        n: tokens in it now.
        n_out: how many of them ask for logits.
    """

    def __init__(self, size: int, width: int = 0) -> None:
        self.size = size
        self.n = 0
        self.n_out = 0
        self._token = np.zeros(size, np.int32)
        self._pos = np.zeros(size, np.int32)
        self._seq = np.zeros(size, np.int32)
        self._out = np.zeros(size, np.int8)
        self._ones = np.ones(size, np.int32)
        self._rows = np.zeros((size, width), np.float32) if width else None
        self._seq_at = self._seq.ctypes.data + np.arange(size, dtype=np.uintp) * self._seq.itemsize
        self._ramp = np.arange(size, dtype=np.int32)
        self._items = tuple(a.data for a in (self._token, self._pos, self._seq, self._out))
        raw = lib.llama_batch()
        for field, array in (
            ("token", self._token),
            ("pos", self._pos),
            ("n_seq_id", self._ones),
            ("seq_id", self._seq_at),
            ("logits", self._out),
            ("embd", self._rows),
        ):
            if array is not None:
                pointer = dict(lib.llama_batch._fields_)[field]
                setattr(raw, field, ctypes.cast(array.ctypes.data, pointer))
        self.raw = raw

    @property
    def takes_rows(self) -> int:
        """Floats of a hidden row that is given beside each token; 0 for tokens alone."""
        return 0 if self._rows is None else self._rows.shape[1]

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        return self.size - self.n

    def clear(self) -> None:
        """Empty it."""
        self.n = self.n_out = 0

    def add(
        self, tokens: list[int], pos: int, seq: int, *, outputs: int, rows: Floats | None = None
    ) -> tuple[int, int]:
        """Append consecutive tokens of one sequence, the last `outputs` of which are to give logits.

        Args:
            tokens: token ids.
            pos: position of the first.
            seq: sequence id.
            outputs: how many logits rows are wanted, from the end.
            rows: a hidden row for each token, shape (len(tokens), width).

        Returns:
            Index of the first token in the batch, and of the first logits row among the outputs.
        """
        count = len(tokens)
        start, first_row = self.n, self.n_out
        end = start + count
        if count <= FEW:  # item by item is faster than five numpy calls
            token_at, pos_at, seq_at, out_at = self._items
            for i, token in enumerate(tokens):
                token_at[start + i] = token
                pos_at[start + i] = pos + i
                seq_at[start + i] = seq
                out_at[start + i] = i >= count - outputs
        else:
            self._token[start:end] = tokens
            np.add(self._ramp[:count], pos, out=self._pos[start:end])
            self._seq[start:end] = seq
            self._out[start:end] = 0
            self._out[end - outputs : end] = 1
        if rows is not None:
            assert self._rows is not None, "a batch without hidden rows"
            self._rows[start:end] = rows
        self.n = end
        self.n_out += outputs
        return start, first_row
