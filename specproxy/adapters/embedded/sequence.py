"""One request on the decode thread: its tokens and its text."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specproxy.adapters.embedded.controller import PLAIN, Controller, StepOutcome
from specproxy.adapters.embedded.forced import ForcedDrafter
from specproxy.adapters.embedded.prefix_cache import Slot
from specproxy.adapters.embedded.sampler import Sampler
from specproxy.adapters.embedded.tally import Tally
from specproxy.adapters.embedded.text import TextStream
from specproxy.adapters.embedded.types import Finished, GenerateRequest, TokenEvent, TokenLogprob
from specproxy.adapters.embedded.vocabulary import Vocabulary
from specproxy.strategies.drafters.ngram import NgramDrafter

__all__ = ["HiddenRows", "Sequence", "Sink"]

Floats = npt.NDArray[np.float32]


class Sink(Protocol):
    """Where the events of a request go."""

    @property
    def full(self) -> bool:
        """Whether the reader is behind: the sequence pauses until it has caught up."""
        ...


class HiddenRows:
    """Hidden rows of the target that the MTP head has not been fed yet, oldest first."""

    def __init__(self, width: int) -> None:
        self._rows = np.zeros((32, width), np.float32)
        self.n = 0

    def push(self, rows: Floats) -> None:
        """Append copies of rows, shape (k, width)."""
        end = self.n + len(rows)
        if end > len(self._rows):
            grown = np.zeros((2 * end, self._rows.shape[1]), np.float32)
            grown[: self.n] = self._rows[: self.n]
            self._rows = grown
        self._rows[self.n : end] = rows
        self.n = end

    def reset(self, *, start: bool) -> None:
        """Empty it; with `start`, put in the zero row that stands before position 0."""
        self.n = 0
        if start:
            self.push(np.zeros((1, self._rows.shape[1]), np.float32))

    def newest(self) -> Floats:
        """The last row, shape (1, width), valid until the next call; those before it are removed."""
        self.take(self.n - 1)
        return self._rows[:1]

    def take(self, count: int) -> Floats:
        """The first `count` rows, removed."""
        taken = self._rows[:count].copy()
        self._rows[: self.n - count] = self._rows[count : self.n]
        self.n -= count
        return taken


class Sequence:
    """A request that is being generated.

    While it decodes, the target's cache holds all its tokens but the last one, which every step feeds together
    with the draft: ``len(tokens) == slot.n + 1``.
    """

    def __init__(
        self,
        request: GenerateRequest,
        sink: Sink,
        sampler: Sampler,
        vocabulary: Vocabulary,
        controller: Controller,
        limit: int,
    ) -> None:
        self.request = request
        self.sink = sink
        self.sampler = sampler
        self.controller = controller
        self.tokens = list(request.prompt)
        self.n_prompt = len(self.tokens)
        self.limit = limit  # most output tokens
        self.slot = Slot(-1)
        self.tally = Tally()
        self.cached = 0
        self.drafters: tuple[str, ...] = ()
        self.limits: dict[str, int] = {}
        self.ngram: NgramDrafter | None = None
        self.hidden: HiddenRows | None = None  # with the MTP cache kept in step
        self.plan = PLAIN
        self.draft: list[int] = []
        self.proposed = 0  # tokens of the draft before the grammar cut it
        self.forced: ForcedDrafter | None = None
        self.draft_seconds = 0.0
        self.copied: list[int] = []  # what the n-gram drafter proposes, whoever drafts
        self.match_length = 0
        self.run: list[int] = []  # what the grammar forces from here on
        self.late = 0  # tokens that the drafter lacked before this step
        self.load_ms = 0.0
        self._vocabulary = vocabulary
        self._ends = vocabulary.end_tokens().union(request.sampling.stop_tokens)
        self._text = TextStream(request.sampling.stop)
        self._pieces = ""
        self._unsent: list[int] = []
        self._unsent_logprobs: list[TokenLogprob] = []
        self._started = self._first = 0.0

    @property
    def prefilling(self) -> bool:
        """Whether part of the prompt is still to be processed."""
        return len(self.tokens) == self.n_prompt

    @property
    def n_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.n_prompt

    def begin(self) -> None:
        """The prompt is going to be processed now."""
        self._started = time.perf_counter()

    def take(self, token: int, row: Floats) -> str:
        """Settle on a token, drawn from `row`; returns why the sequence ends with it, or an empty text."""
        request, text = self.request, self._text
        if self.prefilling:
            self._first = time.perf_counter()
        self.tokens.append(token)
        if token in self._ends:
            return "stop"
        self._pieces += text.push(self._vocabulary.piece(token, special=token in request.render_tokens))
        self._unsent.append(token)
        if request.sampling.logprobs is not None:
            self._unsent_logprobs.append(self._logprob(token, row, request.sampling.logprobs))
        if text.stopped_by:
            return "stop"
        return "length" if self.n_output >= self.limit else ""

    def event(self) -> TokenEvent | None:
        """What became final since the last call, if anything."""
        if not self._pieces:
            return None
        event = TokenEvent(self._pieces, tuple(self._unsent), tuple(self._unsent_logprobs))
        self._pieces = ""
        self._unsent.clear()
        self._unsent_logprobs.clear()
        return event

    def finish(self, reason: str) -> tuple[TokenEvent | None, Finished]:
        """The last text, held back until now, and the totals."""
        now = time.perf_counter()
        self._pieces += self._text.finish()
        first = self._first or now
        end = Finished(
            reason=reason,
            stop_text=self._text.stopped_by,
            prompt_n=self.n_prompt - self.cached,
            cached_n=self.cached,
            prompt_ms=1000 * (first - self._started) if self._started else 0.0,
            predicted_n=self.n_output,
            predicted_ms=1000 * (now - first),
            draft_n=self.tally.drafted,
            draft_n_accepted=self.tally.accepted,
            load_ms=self.load_ms,
            report=self.tally.report(
                self.request,
                self.controller,
                self.tokens[self.n_prompt :],
                self.ngram.min_n if self.ngram is not None else 0,
            ),
        )
        return self.event(), end

    def draft_nothing(self) -> None:
        """The next step is a plain one, unless it is planned otherwise."""
        self.plan, self.draft, self.proposed, self.draft_seconds = PLAIN, [], 0, 0.0
        self.copied, self.match_length, self.run, self.late = [], 0, [], 0

    def prune(self) -> None:
        """Cut the draft at the first token that the grammar does not allow: the rest would be in vain."""
        self.proposed = len(self.draft)
        grammar = self.sampler.grammar
        if grammar is not None and self.draft and self.plan.drafter != "forced":
            del self.draft[grammar.legal_start(self.draft) :]

    def disable(self, drafter: str, reason: str) -> None:
        """Go on without a drafter."""
        self.drafters = tuple(name for name in self.drafters if name != drafter)
        self.tally.stopped = f"{drafter}: {reason}"
        self.draft_nothing()
        if drafter == "mtp":
            self.hidden = None

    def outcome(self, accepted: int, new: Seq[int], seconds: float | None) -> StepOutcome:
        """This step, for the controller and the report; `new` are the tokens that it gave."""
        if not (self.proposed or self.copied or self.run):
            return StepOutcome(PLAIN, self.match_length, 0, 0, seconds, self.draft_seconds, late=self.late)
        plan = self.plan if self.proposed else PLAIN
        return StepOutcome(
            plan,
            self.match_length,
            len(self.draft),
            accepted,
            seconds,
            self.draft_seconds,
            copied=min(len(self.copied), len(new)),
            agreed=_agreement(self.copied, new),
            late=self.late,
            proposed=self.proposed,
            forced=len(self.run),
            shown=min(len(self.run), len(new)),
            followed=_agreement(self.run, new),
        )

    def _logprob(self, token: int, row: Floats, alternatives: int) -> TokenLogprob:
        """Log probabilities before any sampling stage, as llama-server gives them."""
        highest = row.max()
        total = float(highest) + float(np.log(np.exp(row - highest).sum(dtype=np.float64)))
        top: Seq[int] = ()
        if alternatives:
            k = min(alternatives, len(row))
            ids = np.argpartition(row, len(row) - k)[-k:]
            top = ids[np.argsort(-row[ids], kind="stable")].tolist()
        piece = self._vocabulary.piece
        return TokenLogprob(
            token,
            piece(token, special=True),
            float(row[token]) - total,
            tuple((i, piece(i, special=True), float(row[i]) - total) for i in top),
        )


def _agreement(guesses: Seq[int], tokens: Seq[int]) -> int:
    """How many guesses are right, from the first one on."""
    pairs = enumerate(zip(guesses, tokens, strict=False))
    return next((i for i, (guess, token) in pairs if guess != token), min(len(guesses), len(tokens)))
