"""Sampling one token from one row of logits: llama-server's chain in its order, and a draw of our own.

The chain is llama.cpp's (penalties, DRY, top-k, typical, top-p, min-p, temperature, behind the logit bias: the
default of llama-server, whose other stages are off by default), run on the candidates that can matter. Showing
it the whole vocabulary would cost more than all else that happens between two decodes. The draw is ours: the
random number for an output position depends on seed and position alone, so that the text is the same whichever
strategy proposed the tokens ("sample and match": a draft token stays if it is the one drawn).
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

from specproxy.adapters.embedded.grammar_sampler import Grammar
from specproxy.adapters.embedded.types import Sampling
from specproxy.adapters.embedded.vocabulary import Vocabulary
from specproxy.errors import BackendError, RequestError

__all__ = ["Sampler", "uniform"]

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
MASK = 2**64 - 1
BLOCK = 64  # logits a block when looking for the k highest
GRAMMAR_TRIES = 512  # candidates shown to the grammar before the whole vocabulary is


def uniform(seed: int, position: int, draw: int = 0) -> float:
    """A number in [0, 1) for an output position: SplitMix64 (Steele et al. 2014) as a hash of its counter."""
    state = (seed * 0xD1342543DE82EF95 + (2 * position + draw + 1) * 0x9E3779B97F4A7C15) & MASK
    for _ in range(2):
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return (state >> 11) / 2**53


class Sampler:
    """Draws the tokens of one sequence, one output position after the other.

    Args:
        sampling: as asked by the request.
        vocabulary: of the target.
        seed: what all randomness comes from.
        context: tokens that ``-1`` stands for in windows of penalties.
        prompt: tokens that penalties see besides those that are accepted.

    Attributes:
        greedy: whether the tokens are simply those of `highest`, and `accept` need not be called.

    Raises:
        RequestError: the grammar does not parse.
    """

    def __init__(
        self, sampling: Sampling, vocabulary: Vocabulary, seed: int, context: int, prompt: Sequence[int]
    ) -> None:
        self._seed = seed
        self._position = 0
        self._vocab = vocabulary.size
        self._sampling = sampling
        self._bias = _Bias.of(_biases(sampling, vocabulary))
        self._remembers = _has_memory(sampling)
        self._whole = sampling.dry_multiplier != 0  # the chain has to see every logit
        self._recent: deque[int] = deque(maxlen=_window(sampling, context))  # what penalties are for
        self._grammar = Grammar(sampling.grammar, vocabulary) if sampling.grammar else None
        # the chain would leave the token with the highest logit
        self._plain = sampling.temperature <= 0 and sampling.typical_p >= 1 and not self._remembers
        self.greedy = self._plain and self._grammar is None
        self._chain = None if self._plain else self._build(sampling, vocabulary, context)
        if self._remembers:
            for token in prompt[-context:]:
                self._remember(token)

    def sample(self, row: Floats) -> int:
        """The token at the next output position, from its logits, shape (n_vocab,). Call `accept` with it.

        Raises:
            BackendError: the grammar allows no token at all.
        """
        token = self.highest(row) if self._plain else self._draw(self._candidates(row), draw=0)
        if self._grammar is None or (token is not None and self._grammar.allows(token)):
            if token is None:
                raise BackendError("sampling left no token to choose from")
            return token
        return self._legal(row)

    @property
    def grammar(self) -> Grammar | None:
        """Where the text stands in its grammar, if it has one."""
        return self._grammar

    def highest(self, row: Floats) -> int:
        """The token with the highest logit, bias included; shape (n_vocab,)."""
        token = int(row.argmax())
        return token if self._bias is None else self._bias.highest(row, token)

    def accept(self, token: int) -> None:
        """Go on to the next position, this token having been chosen."""
        self._position += 1
        if self._grammar is not None:
            self._grammar.accept(token)
        if self._remembers:
            self._remember(token)

    def close(self) -> None:
        """Free what llama.cpp holds; idempotent."""
        if self._chain is not None:
            lib.llama_sampler_free(self._chain)
            self._chain = None
        if self._grammar is not None:
            self._grammar.close()

    def _remember(self, token: int) -> None:
        lib.llama_sampler_accept(self._chain, token)
        self._recent.append(token)

    def _candidates(self, row: Floats) -> npt.NDArray[np.void]:
        """Every token, or only those that may be among the `top_k` highest when the chain comes to top-k.

        Penalties change recent tokens alone, so what comes out on top is one of those, or was there before.
        """
        if self._bias is not None:
            row = self._bias.added(row)
        k = self._top_k() + len(self._recent)
        if self._whole or k >= self._vocab:
            return _candidate_array(np.arange(self._vocab), row)
        ids = _highest(row, k)
        if self._recent:
            ids = np.union1d(ids, np.array(self._recent))
        return _candidate_array(ids, row[ids])

    def _top_k(self) -> int:
        if self._sampling.temperature <= 0 and self._sampling.typical_p >= 1:
            return 1
        return self._sampling.top_k if self._sampling.top_k > 0 else self._vocab

    def _draw(self, candidates: npt.NDArray[np.void], draw: int) -> int | None:
        """Run the chain, then choose among what it leaves; None if it leaves nothing possible."""
        if self._plain:
            best = int(candidates["logit"].argmax())
            return int(candidates["id"][best]) if candidates["logit"][best] > -np.inf else None
        array = lib.llama_token_data_array(
            ctypes.cast(candidates.ctypes.data, lib.llama_token_data_p), len(candidates), -1, False
        )
        lib.llama_sampler_apply(self._chain, ctypes.byref(array))
        left = candidates[: array.size]
        logits = left["logit"].astype(np.float64)
        highest = logits.max(initial=-np.inf)
        if highest == -np.inf:
            return None
        if self._sampling.temperature <= 0:
            return int(left["id"][logits.argmax()])
        # in order of ids: noise in the logits then never swaps the places of two tokens
        order = left["id"].argsort()
        total = np.exp(logits[order] - highest).cumsum()
        at = int(total.searchsorted(uniform(self._seed, self._position, draw) * total[-1], side="right"))
        return int(left["id"][order[min(at, len(order) - 1)]])

    def _legal(self, row: Floats) -> int:
        """Sample again with the grammar before the chain, as llama-server does when the token was illegal.

        Only the first part of the vocabulary is shown to the grammar if that is sure to give the same: top-k
        needs no more legal tokens than its k.
        """
        assert self._grammar is not None
        if self._bias is not None:
            row = self._bias.added(row)
        k = self._top_k()
        if not self._remembers and k < GRAMMAR_TRIES < self._vocab:
            ids = _highest(row, GRAMMAR_TRIES)
            candidates = self._grammar.legal(_candidate_array(ids, row[ids]))
            if len(candidates) >= k:
                token = self._draw(candidates, draw=1)
                if token is not None:
                    return token
        candidates = self._grammar.legal(_candidate_array(np.arange(self._vocab), row))
        token = self._draw(candidates, draw=1) if len(candidates) else None
        if token is None:
            raise BackendError("the grammar allows no token here")
        return token

    def _build(self, sampling: Sampling, vocabulary: Vocabulary, context: int) -> ctypes.c_void_p:
        """llama.cpp's chain, without a final draw; stages that change nothing are left out."""
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        if not chain:
            raise BackendError("llama.cpp gave no sampler chain")
        stages = []
        if _penalises(sampling):
            stages.append(
                lib.llama_sampler_init_penalties(
                    vocabulary.size,
                    _window(sampling, context),
                    sampling.repeat_penalty,
                    sampling.frequency_penalty,
                    sampling.presence_penalty,
                )
            )
        if sampling.dry_multiplier:
            stages.append(_dry(sampling, vocabulary, context))
        if sampling.top_k > 0:
            stages.append(lib.llama_sampler_init_top_k(sampling.top_k))
        if sampling.typical_p < 1:
            stages.append(lib.llama_sampler_init_typical(sampling.typical_p, 0))
        if sampling.top_p < 1:
            stages.append(lib.llama_sampler_init_top_p(sampling.top_p, 0))
        if sampling.min_p > 0:
            stages.append(lib.llama_sampler_init_min_p(sampling.min_p, 0))
        stages.append(lib.llama_sampler_init_temp(sampling.temperature))
        for stage in stages:
            if not stage:
                lib.llama_sampler_free(chain)
                raise BackendError("llama.cpp gave no sampler")
            lib.llama_sampler_chain_add(chain, stage)
        return chain  # type: ignore[no-any-return]  # llama_cpp is untyped here


class _Bias:
    """What is added to the logits of some tokens."""

    def __init__(self, biases: dict[int, float]) -> None:
        self._ids = np.fromiter(biases.keys(), np.intp, len(biases))
        self._values = np.fromiter(biases.values(), np.float32, len(biases))
        self._biased = frozenset(biases)
        self._only_down = bool((self._values <= 0).all())

    @classmethod
    def of(cls, biases: dict[int, float]) -> _Bias | None:
        """None if there are none."""
        return cls(biases) if biases else None

    def added(self, row: Floats) -> Floats:
        """A copy of the logits with the bias."""
        row = row.copy()
        row[self._ids] += self._values
        return row

    def highest(self, row: Floats, token: int) -> int:
        """The highest token with the bias, `token` being the highest without it."""
        if self._only_down and token not in self._biased:
            return token
        return int(self.added(row).argmax())


def _window(sampling: Sampling, context: int) -> int:
    """Tokens that penalties look back over."""
    if not _penalises(sampling):
        return 0
    # llama.cpp takes memory for all of it, and ends the process where there is none
    return context if sampling.repeat_last_n < 0 else min(sampling.repeat_last_n, context)


def _penalises(sampling: Sampling) -> bool:
    strength = (sampling.repeat_penalty - 1, sampling.frequency_penalty, sampling.presence_penalty)
    return sampling.repeat_last_n != 0 and any(strength)


def _has_memory(sampling: Sampling) -> bool:
    """Whether what was said before changes the logits."""
    return _penalises(sampling) or sampling.dry_multiplier != 0


def _biases(sampling: Sampling, vocabulary: Vocabulary) -> dict[int, float]:
    """Biases as asked, the file's forbidden tokens, and the end tokens if they are to be ignored."""
    biases = dict(sampling.logit_bias)
    for token in biases:
        if not 0 <= token < vocabulary.size:
            raise RequestError(f"logit_bias names token {token}, but the vocabulary has {vocabulary.size}")
    biases |= dict.fromkeys(vocabulary.suppressed, -np.inf)
    if sampling.ignore_eos:
        biases |= dict.fromkeys(vocabulary.end_tokens(), -np.inf)
    return biases


def _dry(sampling: Sampling, vocabulary: Vocabulary, context: int) -> ctypes.c_void_p:
    breakers = [text.encode() for text in sampling.dry_sequence_breakers]
    window = context if sampling.dry_penalty_last_n < 0 else min(sampling.dry_penalty_last_n, context)
    return lib.llama_sampler_init_dry(  # type: ignore[no-any-return]  # llama_cpp is untyped here
        vocabulary.handle,
        sampling.dry_multiplier,
        sampling.dry_base,
        sampling.dry_allowed_length,
        window,
        (ctypes.c_char_p * len(breakers))(*breakers),
        len(breakers),
    )


def _candidate_array(ids: Ids, logits: Floats) -> npt.NDArray[np.void]:
    candidates = np.zeros(len(ids), CANDIDATE)
    candidates["id"] = ids
    candidates["logit"] = logits
    return candidates


def _highest(row: Floats, k: int) -> Ids:
    """Indices of the `k` highest logits, in no order.

    The k-th highest of the blocks' maxima is a lower bound for the k-th highest logit, and cheap: it leaves few
    candidates to sort.
    """
    if k == 1:
        return np.array([row.argmax()])
    blocks = len(row) // BLOCK
    if blocks <= k:
        return np.argpartition(row, len(row) - k)[-k:]
    maxima = row[: blocks * BLOCK].reshape(blocks, BLOCK).max(axis=1)
    bound = np.partition(maxima, blocks - k)[blocks - k]
    ids = np.flatnonzero(row >= bound)
    if len(ids) <= k:
        return ids
    return ids[np.argpartition(row[ids], len(ids) - k)[-k:]]
