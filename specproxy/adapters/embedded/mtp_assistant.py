"""A prediction head that keeps no cache: it attends to the target's own, as gemma4-assistant does.

Every guess stands at the position of the newest token, whose cell the target's cache does not hold yet. What
differs from guess to guess is the token, and the row beside it: first the target's hidden row before the newest
token, then the rows that the head itself made, which are as wide as the target's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

from specproxy.adapters.embedded.batch import Batch, Floats
from specproxy.adapters.embedded.drafters import ChainedDrafter
from specproxy.adapters.embedded.llama import Context, NoRoomError
from specproxy.adapters.embedded.prefix_cache import Slot
from specproxy.adapters.embedded.sequence import Sequence

__all__ = ["MtpAssistant"]

log = logging.getLogger(__name__)


class MtpAssistant(ChainedDrafter):
    """A drafter over the target's cache. There is nothing to keep in step, to roll back, or to park.

    Args:
        context: of the drafter's model, made over the target's context.
        batch: for as many tokens as there are sequences, with the target's rows.
    """

    name = "mtp"

    def __init__(self, context: Context, batch: Batch) -> None:
        super().__init__(context, batch)
        self.contexts = {}
        context.want_hidden(True, of_outputs=True)

    def held(self, slot: Slot) -> int:
        """See `ChainedDrafter`: whatever the target's cache holds."""
        return slot.n

    def catch_up(self, sequence: Sequence, keep: int, budget: int) -> int:  # noqa: ARG002  # other drafters' need
        """See `ChainedDrafter`: of the hidden rows only the newest one is ever needed."""
        if sequence.hidden is not None:
            sequence.hidden.newest()
        return 0

    def feed(self, sequence: Sequence, count: int, *, outputs: int) -> int:
        """See `ChainedDrafter`; the newest token is the only one that is missing."""
        assert count == 1
        assert sequence.hidden is not None
        return self._add(sequence, sequence.tokens[-1], sequence.hidden.newest(), outputs)

    def chain(self, sequence: Sequence, token: int, before: int, at: int) -> int:  # noqa: ARG002  # others' need
        """See `ChainedDrafter`; in a decode of guesses each token has logits."""
        return self._add(sequence, token, self.context.hidden(before + 1)[before:], 1)

    def _propose(self, sequences: Seq[Sequence]) -> None:
        try:
            super()._propose(sequences)
        except (
            NoRoomError
        ):  # llama.cpp looks for cells, though it fills none; the target makes room when it decodes
            log.debug("no room to draft in")

    def _add(self, sequence: Sequence, token: int, row: Floats, outputs: int) -> int:
        slot = sequence.slot
        return self.batch.add([token], slot.n, slot.id, outputs=outputs, rows=row)[0]

    def settle(self, sequence: Sequence, accepted: int) -> None:
        """See `ChainedDrafter`: nothing drafted is kept anywhere."""

    def forget(self, slot: Slot) -> None:
        """See `ChainedDrafter`: there is nothing to forget."""
