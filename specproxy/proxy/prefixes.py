"""Which lane probably has a prompt's beginning in its cache, so that no conversation is moved for nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from specproxy.records import Control, Lane, LaneStatus, Turn
from specproxy.strategies.prefix import PrefixModel, block_hashes

__all__ = ["PrefixMemory"]


class PrefixMemory:
    """What ran where, as hashes under `key` (random by default). No prompt text is kept.

    Lanes of one backend that differ by a request field share its cache. A lane that came up anew, or was
    displaced in memory, has lost its own.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key or os.urandom(32)
        self._model = PrefixModel()
        self._since: dict[str, float] = {}  # when what we remember of a cache began

    def blocks(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        """Hashes of a prompt's beginnings, a block longer each."""
        return block_hashes((part for turn in turns for part in (turn.role, turn.text)), self._key)

    def note(self, lane: Lane, blocks: Sequence[int]) -> None:
        """A prompt with these blocks ran on a lane."""
        if blocks:
            self._model.note(_cache_of(lane), blocks)

    def hits(self, blocks: Sequence[int], statuses: Sequence[LaneStatus]) -> Mapping[str, int]:
        """Prompt tokens that each lane probably has cached, by lane id; lanes without any are left out."""
        if not blocks:
            return {}
        for status in statuses:
            cache = _cache_of(status.lane)
            if not status.resident:
                self._model.forget(cache)
            if self._since.setdefault(cache, status.since) < status.since:
                self._model.forget(cache)
                self._since[cache] = status.since
        found = self._model.hits(blocks)
        return {s.lane.id: n for s in statuses if (n := found.get(_cache_of(s.lane)))}


def _cache_of(lane: Lane) -> str:
    return f"{lane.backend}/" if lane.control is Control.REQUEST else lane.id
