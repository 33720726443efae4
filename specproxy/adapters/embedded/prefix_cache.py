"""What the KV caches hold of each sequence, and which of it a new prompt can use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["Choice", "Slot", "choose", "common_prefix"]


@dataclass(slots=True)
class Slot:
    """One sequence id of the caches.

    The target's cache holds ``tokens[:n]`` at positions 0 to n - 1, and nothing else. The draft model's holds
    the first `n_draft` of the tokens, the MTP cache the first `n_mtp` (each with the hidden state before it);
    both may hold rejected drafts behind that, to be dropped before the next use (`stale`). With `parked` the
    caches hold nothing of it: what they held is there, by the name of the cache.
    """

    id: int
    tokens: list[int] = field(default_factory=list, repr=False)
    n: int = 0
    n_draft: int = 0
    n_mtp: int = 0
    stale: set[str] = field(default_factory=set)
    busy: bool = False
    used: int = 0  # counter of the last use, for eviction
    parked: dict[str, npt.NDArray[np.uint8]] = field(default_factory=dict, repr=False)

    @property
    def parked_bytes(self) -> int:
        """Memory that parked content takes."""
        return sum(state.nbytes for state in self.parked.values())


@dataclass(frozen=True, slots=True)
class Choice:
    """Run in `slot`, with the first `common` tokens of the prompt from `source` (which may be the same)."""

    slot: Slot
    source: Slot
    common: int


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])


def choose(slots: Sequence[Slot], prompt: list[int], *, share: bool, mtp: bool = False) -> Choice:
    """Where to run a prompt: on top of the slot that begins like it, or beside that slot.

    Running on top of an idle slot loses what it holds behind the common prefix, so that is done only if the
    prefix is at least half of it. Otherwise, and if the slot is busy, the least recently used idle slot gets
    the prefix as a second owner of the same cells (`share`), or starts from nothing. With `mtp` a prefix counts
    as far as the MTP cache covers it.

    Raises:
        ValueError: every slot is busy.
    """
    idle = [slot for slot in slots if not slot.busy]
    if not idle:
        raise ValueError("no idle slot")

    def useful(slot: Slot) -> int:
        common = common_prefix(slot.tokens[: slot.n], prompt)
        return min(common, slot.n_mtp) if mtp else common

    useful_of = {slot.id: useful(slot) for slot in slots}
    oldest = min(idle, key=lambda slot: (slot.n > 0, slot.used))
    source = max(slots if share else idle, key=lambda slot: (useful_of[slot.id], not slot.busy, -slot.n))
    common = useful_of[source.id]
    if not common:
        return Choice(oldest, oldest, 0)
    in_place = not source.busy and (2 * common >= source.n or len(idle) == 1)
    if in_place:
        return Choice(source, source, common)
    if not share:
        return Choice(oldest, oldest, useful_of[oldest.id])
    return Choice(min((s for s in idle if s is not source), key=lambda s: (s.n > 0, s.used)), source, common)
