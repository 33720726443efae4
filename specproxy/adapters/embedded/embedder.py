"""Embeddings of texts: a context of its own, made when the first one is asked for."""

from __future__ import annotations

import numpy as np
from llama_cpp import llama_cpp as lib

from specproxy.adapters.embedded.batch import Batch
from specproxy.adapters.embedded.llama import Context, ContextParams, Model
from specproxy.errors import RequestError

__all__ = ["Embedder"]

POOLING = {"mean": "MEAN", "cls": "CLS", "last": "LAST", "1": "MEAN", "2": "CLS", "3": "LAST"}


class Embedder:
    """Pooled, normalised embeddings of one model: as the file says, else the mean over all tokens.

    Raises:
        ModelFileError: there is no memory for the context.
    """

    def __init__(self, model: Model, *, size: int, threads: int) -> None:
        architecture = model.meta("general.architecture") or ""
        kind = POOLING.get(model.meta(f"{architecture}.pooling_type") or "", "MEAN")
        # a text is pooled within one decode
        self._batch = Batch(size)
        self._context = Context(
            model,
            ContextParams(
                cells=size,
                sequences=1,
                outputs=size,
                batch=size,
                ubatch=size,
                threads=threads,
                threads_batch=threads,
                pooling=int(getattr(lib, f"LLAMA_POOLING_TYPE_{kind}")),
            ),
        )

    def embed(self, tokens: tuple[int, ...]) -> tuple[float, ...]:
        """The embedding of a text, of length 1.

        Raises:
            RequestError: the text is empty or too long.
            DecodeError: llama.cpp failed.
        """
        if not tokens:
            raise RequestError("the input is empty")
        if len(tokens) > self._batch.size:
            raise RequestError(
                f"input ({len(tokens)} tokens) is too large to process, the limit is {self._batch.size} tokens",
                code="exceed_context_size_error",
            )
        self._context.clear()
        self._batch.clear()
        self._batch.add(list(tokens), 0, 0, outputs=len(tokens))
        self._context.decode(self._batch)
        vector = self._context.pooled(0).astype(np.float64)
        norm = float(np.linalg.norm(vector))
        return tuple((vector / norm).tolist() if norm else vector.tolist())

    def close(self) -> None:
        """Free it."""
        self._context.close()
