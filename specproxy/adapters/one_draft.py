"""A server that has one draft model in memory at a time, as MLX's servers do."""

from __future__ import annotations

from specproxy.adapters.openai_compat import OpenAiBackend
from specproxy.records import Lane

__all__ = ["OneDraft"]


class OneDraft(OpenAiBackend):
    """Lanes of which one is in memory; the first is the server as it was started."""

    async def start(self) -> None:
        """It has been started without a draft."""
        first, *others = self.lanes()
        self.mark(first.lane.id, first.health, first.note)
        for status in others:
            self.mark(status.lane.id, status.health, status.note, resident=False)

    def slots(self, lane: Lane) -> int | None:
        """With a draft one request after the other; without, they are decoded together."""
        return None if lane.strategy.is_plain else 1

    def hold(self, lane: Lane | None) -> None:
        """Note what is in memory."""
        for status in self.lanes():
            here = lane is not None and status.lane.id == lane.id
            self.mark(status.lane.id, status.health, status.note, resident=here)
