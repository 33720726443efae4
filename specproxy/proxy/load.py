"""How many requests are in flight on the whole machine, and how many were on average while one ran."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Load", "Stay"]


@dataclass(frozen=True, slots=True)
class Stay:
    """A request's time in flight: when it began, and the area under the curve until then."""

    since: float
    area: float


class Load:
    """Integrates the number of requests in flight over time: O(1) a request. Instants are monotonic seconds."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._area = 0.0
        self._at = 0.0

    def enter(self, now: float) -> Stay:
        """A request begins."""
        self._advance(now)
        self.in_flight += 1
        return Stay(now, self._area)

    def leave(self, stay: Stay, now: float) -> float:
        """A request ends; returns the mean number in flight while it ran, itself included (at least 1)."""
        self._advance(now)
        self.in_flight -= 1
        duration = now - stay.since
        return max(1.0, (self._area - stay.area) / duration) if duration > 0 else float(self.in_flight + 1)

    def idle_s(self, now: float) -> float:
        """For how long nothing has been in flight; 0 while something is."""
        return 0.0 if self.in_flight else max(0.0, now - self._at)

    def _advance(self, now: float) -> None:
        self._area += self.in_flight * max(0.0, now - self._at)
        self._at = now
