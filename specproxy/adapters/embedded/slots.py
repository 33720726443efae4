"""The sequence ids of the caches: who has which, what idle ones keep, and where that is.

A sequence's attention walks over all cells in use, its own and others', so text that idle sequences keep slows
every step: by 2% for a thousand cells on a model of 500 MB, by 10% for seven thousand. While anybody decodes,
what idle sequences hold is therefore parked in ordinary memory, and copied back when a prompt begins like it.
"""

from __future__ import annotations

from collections.abc import Iterator

import psutil

from specproxy.adapters.embedded.llama import Context
from specproxy.adapters.embedded.prefix_cache import Choice, Slot, choose
from specproxy.adapters.embedded.runtime import Runtime

__all__ = ["Slots"]

TARGET = "target"
WORTH = 16  # tokens copied in place of one that is processed: still the faster way, on a GPU too
MEMORY_SHARE = 0.5  # of the free memory that one parked sequence may take


class Slots:
    """Places sequences in slots, with what can be used of the prefix.

    Args:
        runtime: what is loaded.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._slots = [Slot(i) for i in range(runtime.slots)]
        self._uses = 0

    def choose(self, prompt: list[int], *, mtp: bool) -> Choice:
        """Where to run a prompt; see `prefix_cache.choose`."""
        return choose(self._slots, prompt, share=not self._runtime.target.recurrent, mtp=mtp)

    def place(self, choice: Choice, tokens: list[int], *, mtp: bool) -> int:
        """Make the chosen slot ready for a prompt; returns how many of its tokens the target's cache holds.

        Args:
            choice: from `choose`.
            tokens: the prompt; the slot keeps this list, and so sees it grow.
            mtp: whether the MTP cache is going to be kept in step.
        """
        slot, source, common = choice.slot, choice.source, choice.common
        self._park_idle(but=source)
        if slot is source:
            self._unpark(source, wanted=common > 0)
        elif source.parked and source.n > WORTH * common:
            common = 0
        common = min(common, source.n)
        start = min(common, len(tokens) - 1)  # the last prompt token is decoded for its logits
        if mtp:  # the hidden row of the last position that the MTP cache covers is needed, so it is made again
            start = max(min(source.n_mtp, common, start + 1) - 1, 0)
        keep = {"draft": min(source.n_draft, common), "mtp": min(source.n_mtp, start + 1 if mtp else start)}
        fits = self._cut(slot, start) if slot is source else self._copy(source, slot, start, keep)
        if not (fits and self._covered(slot, start, keep, mtp=mtp)):
            self.forget(slot)
            start, keep = 0, {"draft": 0, "mtp": 0}
        slot.tokens, slot.n, slot.busy = tokens, start, True
        slot.n_draft, slot.n_mtp = keep["draft"], keep["mtp"]
        slot.stale.update(self._runtime.drafters)
        self._park_idle()
        return start

    def release(self, slot: Slot, tokens: list[int]) -> None:
        """A sequence has ended; its slot keeps what the caches hold of `tokens`."""
        self._uses += 1
        slot.tokens, slot.busy, slot.used = tokens[: slot.n], False, self._uses
        slot.n_draft, slot.n_mtp = min(slot.n_draft, slot.n), min(slot.n_mtp, slot.n)
        slot.stale.update(self._runtime.drafters)

    def forget(self, slot: Slot) -> None:
        """Empty a slot in every cache.

        Raises:
            DecodeError: llama.cpp refuses.
        """
        slot.tokens, slot.n, slot.parked = [], 0, {}
        self._runtime.context.empty(slot.id)
        for drafter in self._runtime.drafters.values():
            drafter.forget(slot)
        slot.stale.clear()

    def make_room(self) -> bool:
        """Forget the idle sequence whose last use is longest ago; False if there are no cells to be had so."""
        idle = [slot for slot in self._slots if not slot.busy and slot.n and not slot.parked]
        if not idle:
            return False
        self.forget(min(idle, key=lambda slot: slot.used))
        return True

    @property
    def parked_bytes(self) -> int:
        """Memory that parked sequences take."""
        return sum(slot.parked_bytes for slot in self._slots)

    def _covered(self, slot: Slot, start: int, keep: dict[str, int], *, mtp: bool) -> bool:
        """Whether the caches hold all that the next token looks at; a drafter that can begin anew does so."""
        for name, drafter in self._runtime.drafters.items():
            if not all(context.covers(slot.id, keep[name]) for context in drafter.contexts.values()):
                if mtp and name == "mtp":
                    return False
                drafter.forget(slot)
                keep[name] = 0
        return self._runtime.context.covers(slot.id, start)

    # --- parking -------------------------------------------------------------------------------------

    def _park_idle(self, but: Slot | None = None) -> None:
        """Take what idle sequences hold out of the caches."""
        if self._runtime.target.recurrent:
            return  # there are no slots beyond those that run, and states for rollback would be lost
        for slot in self._slots:
            if slot.n and not slot.busy and slot is not but and not slot.parked:
                self._park(slot, but)

    def _park(self, slot: Slot, but: Slot | None) -> None:
        """Copy a slot's cells to memory and free them; without enough memory it stays where it is.

        So does text that is longer than a window of the model.
        """
        if any(0 < context.model.window < count for _, context, count in self._held(slot)):
            return  # what is behind a window would not be saved, and a prompt could go on from the end alone
        size = sum(context.state_bytes(slot.id) for _, context, _ in self._held(slot))
        limit = self._runtime.cache_bytes
        if size > min(limit, MEMORY_SHARE * psutil.virtual_memory().available):
            return
        oldest_first = sorted((s for s in self._slots if s.parked and s is not but), key=lambda s: s.used)
        for old in oldest_first:
            if self.parked_bytes + size > limit:
                self.forget(old)
        if self.parked_bytes + size > limit:
            return
        for name, context, count in self._held(slot):
            # drafts that were rejected may stand behind what is valid
            if context.drop(slot.id, count):
                slot.parked[name] = context.save(slot.id)
        for _, context, _ in self._held(slot):
            context.empty(slot.id)
        slot.stale.clear()

    def _unpark(self, slot: Slot, *, wanted: bool) -> None:
        """Put a slot's cells back if they are wanted; whatever does not come back is forgotten."""
        parked, slot.parked = slot.parked, {}
        if not parked:
            return
        target = parked.pop(TARGET, None)
        if not wanted or target is None or not self._runtime.context.restore(slot.id, target):
            self.forget(slot)
            return
        for drafter in self._runtime.drafters.values():
            if not all(
                key in parked and context.restore(slot.id, parked[key])
                for key, context in drafter.contexts.items()
            ):
                drafter.forget(slot)

    def _held(self, slot: Slot) -> Iterator[tuple[str, Context, int]]:
        """Name, context and valid tokens of each cache that holds something of a slot."""
        yield TARGET, self._runtime.context, slot.n
        for drafter in self._runtime.drafters.values():
            if held := drafter.held(slot):
                for key, context in drafter.contexts.items():
                    yield key, context, held

    # --- cells ---------------------------------------------------------------------------------------

    def _cut(self, slot: Slot, start: int) -> bool:
        """Remove what the target's cache holds from `start` on; False if that is impossible.

        A recurrent state can go back only within the decode that made it, so at the start of a request it can
        be continued, but not cut.
        """
        if self._runtime.target.recurrent and start < slot.n:
            return False
        return self._runtime.context.drop(slot.id, start)

    def _copy(self, source: Slot, slot: Slot, start: int, keep: dict[str, int]) -> bool:
        """Give `slot` the cells that it can use, as a second owner, or out of what is parked.

        False if a cache has no room for them.
        """
        self.forget(slot)
        wanted = [(TARGET, self._runtime.context, start)]
        for name, drafter in self._runtime.drafters.items():
            wanted += [(key, context, keep[name]) for key, context in drafter.contexts.items()]
        return all(self._hand_over(context, source, slot, name, count) for name, context, count in wanted)

    def _hand_over(self, context: Context, source: Slot, slot: Slot, name: str, count: int) -> bool:
        """Give `slot`, which is empty, the first `count` positions of one cache; False if it cannot be done."""
        if not count:
            return True
        if not source.parked:
            context.share(source.id, slot.id, count)
            return True
        if name not in source.parked or not context.restore(slot.id, source.parked[name]):
            return False
        return context.drop(slot.id, count)
