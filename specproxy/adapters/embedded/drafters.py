"""The two drafters that run a model: a separate draft model, and the target's own MTP head.

Both propose greedily, for all sequences that want a draft at once: one decode gives every sequence its next
draft token. What a sequence's cache lacks (tokens that others proposed or the prompt brought) is fed in the
same decode as the first draft token, so keeping it in step costs no decode of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from specproxy.adapters.embedded.batch import Batch, Floats
from specproxy.adapters.embedded.llama import Context, DecodeError
from specproxy.adapters.embedded.prefix_cache import Slot
from specproxy.adapters.embedded.sequence import Sequence

__all__ = ["ChainedDrafter", "DraftModel", "MtpChain", "MtpHead", "rows_of_outputs"]

log = logging.getLogger(__name__)


class ChainedDrafter:
    """What draft model and MTP head have in common: proposing token by token over a cache of their own.

    Attributes:
        context: the one that makes the first guess.
        contexts: those by name that have a cache to be kept in step, each holding the same positions.
        room: tokens to be caught up with that one decode can take.
    """

    name = ""

    def __init__(self, context: Context, batch: Batch) -> None:
        self.context = context
        self.contexts = {self.name: context}
        self.batch = batch
        self.room = batch.size

    @property
    def native_s(self) -> float:
        """Seconds spent in llama.cpp's decodes so far."""
        return sum(context.native_s for context in {self.context, *self.contexts.values()})

    def missing(self, sequence: Sequence) -> int:
        """Tokens that the cache lacks, the newest one included."""
        return len(sequence.tokens) - self.held(sequence.slot)

    def held(self, slot: Slot) -> int:
        """How many of the slot's tokens the cache holds."""
        raise NotImplementedError

    def settle(self, sequence: Sequence, accepted: int) -> None:
        """Part of the draft was accepted: remember which cells stay valid."""
        raise NotImplementedError

    def feed(self, sequence: Sequence, count: int, *, outputs: int) -> int:
        """Put the next `count` of the sequence's tokens into the batch; returns where the last one is."""
        raise NotImplementedError

    def chain(self, sequence: Sequence, token: int, before: int, at: int) -> int:
        """Put the draft's token number `at` into the batch; returns where it is.

        `before` is where the token before it was in the last decode.
        """
        raise NotImplementedError

    def forget(self, slot: Slot) -> None:
        """Nothing that the cache holds of a slot can be relied on."""
        raise NotImplementedError

    def drop(self, slot: Slot, start: int) -> bool:
        """Remove a slot's positions from `start` on; False if a cache cannot go back so far."""
        dropped = [context.drop(slot.id, start) for context in self.contexts.values()]  # each is to try
        return all(dropped)

    def empty(self, slot: Slot) -> None:
        """Remove all of a slot.

        Raises:
            DecodeError: llama.cpp refuses.
        """
        for context in self.contexts.values():
            context.empty(slot.id)

    def propose(self, sequences: Seq[Sequence]) -> None:
        """Give every sequence a draft of its plan's length. A failure costs the drafts, not the sequences."""
        started = time.perf_counter()
        try:
            self._propose(sequences)
        except DecodeError as error:
            log.warning("drafting with %s failed: %s", self.name, error)
            for sequence in sequences:
                sequence.disable(self.name, str(error))
                self.forget(sequence.slot)
            return
        elapsed = (time.perf_counter() - started) / len(sequences)
        for sequence in sequences:
            sequence.draft_seconds = elapsed

    def catch_up(self, sequence: Sequence, keep: int, budget: int) -> int:
        """Feed what is missing, but for the newest `keep` tokens, up to `budget`; returns tokens fed."""
        count = min(self.missing(sequence) - keep, budget, self.room)
        if count <= 0:
            return 0
        self.batch.clear()
        try:
            self._begin(sequence, count, outputs=0)
            for context in self.contexts.values():
                context.decode(self.batch)
        except DecodeError as error:
            log.warning("keeping %s in step failed: %s", self.name, error)
            sequence.disable(self.name, str(error))
            self.forget(sequence.slot)
        return count

    def _propose(self, sequences: Seq[Sequence]) -> None:
        batch, context = self.batch, self.context
        batch.clear()
        live = [(sequence, self._begin(sequence, self.missing(sequence), outputs=1)) for sequence in sequences]
        at = 0
        while live:
            context.decode(batch)
            tokens = [int(logits.argmax()) for logits in context.logits(len(live))]
            batch.clear()
            going_on = []
            for (sequence, before), token in zip(live, tokens, strict=True):
                if at < len(sequence.draft):  # drafted by another, to be gone on from
                    token = sequence.draft[at]
                else:
                    sequence.draft.append(token)
                if at + 1 < sequence.plan.total:
                    going_on.append((sequence, self.chain(sequence, token, before, at)))
            live = going_on
            at += 1

    def _begin(self, sequence: Sequence, count: int, *, outputs: int) -> int:
        self._freshen(sequence.slot)
        return self.feed(sequence, count, outputs=outputs)

    def _freshen(self, slot: Slot) -> None:
        """Drop what rejected drafts have left behind."""
        if self.name in slot.stale:
            if not self.drop(slot, self.held(slot)):
                raise DecodeError(f"the cache of {self.name} cannot be rolled back", 0)
            slot.stale.discard(self.name)


class DraftModel(ChainedDrafter):
    """A smaller model with the target's vocabulary. It sees tokens only, so any prefix of them can stay."""

    name = "draft"

    def held(self, slot: Slot) -> int:
        """See `ChainedDrafter`."""
        return slot.n_draft

    def feed(self, sequence: Sequence, count: int, *, outputs: int) -> int:
        """See `ChainedDrafter`."""
        slot = sequence.slot
        tokens = sequence.tokens[slot.n_draft : slot.n_draft + count]
        start, _ = self.batch.add(tokens, slot.n_draft, slot.id, outputs=outputs)
        slot.n_draft += count
        return start + count - 1

    def chain(self, sequence: Sequence, token: int, before: int, at: int) -> int:  # noqa: ARG002  # the MTP head's need
        """See `ChainedDrafter`."""
        slot = sequence.slot
        slot.stale.add(self.name)
        return self.batch.add([token], slot.n_draft + at, slot.id, outputs=1)[0]

    def settle(self, sequence: Sequence, accepted: int) -> None:
        """See `ChainedDrafter`: drafted tokens that were accepted are in the cache, but for the last one."""
        sequence.slot.n_draft += min(accepted, len(sequence.draft) - 1)

    def forget(self, slot: Slot) -> None:
        """See `ChainedDrafter`."""
        slot.n_draft = 0
        self.empty(slot)


class MtpHead(ChainedDrafter):
    """The target's multi-token-prediction head, which needs the target's hidden row before every token.

    It drafts further tokens from its own hidden rows; cells made so are dropped, accepted or not, and made
    again from the target's rows.

    Raises:
        DecodeError: the head cannot be run.
    """

    name = "mtp"

    def __init__(self, context: Context, batch: Batch) -> None:
        super().__init__(context, batch)
        self._of_outputs = rows_of_outputs(context, batch)
        context.want_hidden(False)
        context.want_hidden(True, of_outputs=self._of_outputs)

    def held(self, slot: Slot) -> int:
        """See `ChainedDrafter`."""
        return slot.n_mtp

    def feed(self, sequence: Sequence, count: int, *, outputs: int) -> int:
        """See `ChainedDrafter`."""
        slot = sequence.slot
        assert sequence.hidden is not None
        rows = sequence.hidden.take(count)
        tokens = sequence.tokens[slot.n_mtp : slot.n_mtp + count]
        start, row = self.batch.add(tokens, slot.n_mtp, slot.id, outputs=outputs, rows=rows)
        slot.n_mtp += count
        return row if self._of_outputs else start + count - 1

    def chain(self, sequence: Sequence, token: int, before: int, at: int) -> int:
        """See `ChainedDrafter`; in a decode of guesses each token has logits, so both counts agree."""
        slot = sequence.slot
        slot.stale.add(self.name)
        hidden = self.context.hidden(before + 1)[before:]
        return self.batch.add([token], slot.n_mtp + at, slot.id, outputs=1, rows=hidden)[0]

    def settle(self, sequence: Sequence, accepted: int) -> None:
        """See `ChainedDrafter`: nothing drafted stays."""

    def forget(self, slot: Slot) -> None:
        """See `ChainedDrafter`."""
        slot.n_mtp = 0
        self.empty(slot)


class MtpChain(MtpHead):
    """Several prediction heads: guess k comes from head k, from the rows that the heads before it have made.

    A head's cache holds the text as that head sees it, each token with the target's row before it. llama.cpp
    has all heads' layers in the cache of a context, but runs one of them in a decode; so each head has a
    context to itself. In the decode that makes its guess a head is fed with what its cache lacks and with the
    guesses before its own, which is what llama-server feeds it with.

    Args:
        contexts: one for each head.
        batch: with room for `guesses` beside what is to be caught up with.
        guesses: tokens that all sequences together may have guessed before the last head's turn.

    Raises:
        DecodeError: a head cannot be run.
    """

    def __init__(self, contexts: Seq[Context], batch: Batch, guesses: int) -> None:
        super().__init__(contexts[0], batch)
        self.room = batch.size - guesses
        self.contexts = {f"{self.name} {head}": context for head, context in enumerate(contexts)}
        for head, context in enumerate(contexts):
            context.use_head(head)
            context.want_hidden(True, of_outputs=self._of_outputs)

    def _propose(self, sequences: Seq[Sequence]) -> None:
        heads = len(self.contexts)
        given = [self._given(sequence) for sequence in sequences if len(sequence.draft) < heads]
        if not given:  # others have drafted as far as the heads can see
            return
        for head, context in enumerate(self.contexts.values()):
            self.batch.clear()
            asked = [(each, at) for each in given if (at := self._add(each, head)) is not None]
            context.decode(self.batch)
            if not asked:
                continue
            logits = context.logits(len(asked))
            hidden = context.hidden(asked[-1][1] + 1)
            for row, (each, at) in enumerate(asked):
                draft = each.sequence.draft
                if head == len(draft):
                    draft.append(int(logits[row].argmax()))
                each.tokens.append(draft[head])
                each.rows = np.concatenate([each.rows, hidden[at : at + 1]])
        for each in given:
            each.sequence.slot.n_mtp += each.late

    def _given(self, sequence: Sequence) -> _Given:
        """What every head lacks of a sequence."""
        slot = sequence.slot
        assert sequence.hidden is not None
        self._freshen(slot)
        slot.stale.add(self.name)
        late = self.missing(sequence)
        return _Given(sequence, late, sequence.tokens[slot.n_mtp :], sequence.hidden.take(late))

    def _add(self, given: _Given, head: int) -> int | None:
        """Put into the batch what a head lacks; returns where its last row will be, or None without a guess."""
        asked = head < given.sequence.plan.total
        count = len(given.tokens) if asked else given.late
        slot = given.sequence.slot
        tokens, rows = given.tokens[:count], given.rows[:count]
        start, row = self.batch.add(tokens, slot.n_mtp, slot.id, outputs=int(asked), rows=rows)
        if not asked:
            return None
        return row if self._of_outputs else start + count - 1


@dataclass(slots=True)
class _Given:
    """Tokens, with the row before each, that heads are fed with: `late` of the text, then guesses."""

    sequence: Sequence
    late: int
    tokens: list[int]
    rows: Floats


def rows_of_outputs(context: Context, batch: Batch) -> bool:
    """Whether an MTP context makes hidden rows of tokens with logits alone, and not of all tokens.

    That differs by architecture, and llama.cpp does not tell. So two tokens are decoded, first both with
    logits, then only the second one: is the one row that comes then that of the second token, or still that
    of the first? The context must be empty, and is left so; rows are left on.

    Raises:
        DecodeError: the context cannot be run.
    """
    context.want_hidden(True, of_outputs=True)
    rows = np.zeros((2, batch.takes_rows), np.float32)
    rows[0, ::2] = rows[1, 1::2] = 1.0
    seen = []
    for outputs in (2, 1):
        batch.clear()
        batch.add([1, 2], 0, 0, outputs=outputs, rows=rows)
        context.decode(batch)
        seen.append(context.hidden(outputs).copy())
        context.clear()
    batch.clear()
    both, one = seen
    first, second = (float(np.abs(one[0] - row).sum()) for row in both)
    return second < first
