"""How many tokens one event of a lane's streams stands for: what streams without usage are counted by."""

from __future__ import annotations

from specproxy.records import Observation, Outcome, TimingSource

__all__ = ["EventRates"]

_FEW_EVENTS = 5  # a stream shorter than this says little
_RATE = 0.1  # weight of the newest stream in the running mean


class EventRates:
    """Running means by lane id; 1 for a lane that has not shown its own."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def of(self, lane_id: str) -> float:
        """Tokens that one content event has stood for lately."""
        return self._means.get(lane_id, 1.0)

    def learn(self, seen: Observation, events: int) -> None:
        """Take in a reply with so many content events; one whose tokens nobody counted teaches nothing."""
        counted = seen.source in (TimingSource.SERVER, TimingSource.USAGE)
        if counted and seen.outcome is Outcome.COMPLETE and events >= _FEW_EVENTS:
            old = self.of(seen.lane)
            self._means[seen.lane] = old + _RATE * (seen.output_tokens / events - old)
