"""The learning curve: what requests took so far, and what plain would have taken, in not too many points."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specproxy.strategies.bounds import amount, whole

__all__ = ["Curve"]

_MOST_POINTS = 128


@dataclass(slots=True)
class Curve:
    """Running sums in seconds. A point is kept every `stride` requests; of too many, every other one goes."""

    requests: int = 0
    spent_s: float = 0.0
    plain_s: float = 0.0
    stride: int = 1
    points: list[tuple[int, float, float]] = field(default_factory=list)  # requests, spent_s, plain_s

    def note(self, spent_s: float, plain_s: float) -> None:
        """A request ended: what it took, loads included, and what plain would have taken by estimate."""
        self.requests += 1
        self.spent_s += spent_s
        self.plain_s += plain_s
        if self.requests % self.stride == 0:
            self.points.append((self.requests, self.spent_s, self.plain_s))
            if len(self.points) > _MOST_POINTS:
                self.points = self.points[1::2]
                self.stride *= 2

    def gains(self) -> list[tuple[int, float]]:
        """Requests so far, and the gain over plain until then: plain's time over the time spent, less 1."""
        now = (self.requests, self.spent_s, self.plain_s)
        points = self.points if self.points[-1:] == [now] or not self.requests else [*self.points, now]
        return [(n, plain / spent - 1.0 if spent > 0.0 else 0.0) for n, spent, plain in points]

    def dump(self) -> list[Any]:
        """State as JSON-serialisable data."""
        return [self.requests, self.spent_s, self.plain_s, self.stride, [list(p) for p in self.points]]

    @classmethod
    def restored(cls, state: list[Any]) -> Curve:
        """What `dump` gave."""
        requests, spent_s, plain_s, stride, points = state
        kept = [(whole(n), amount(spent), amount(plain)) for n, spent, plain in points]
        return cls(whole(requests), amount(spent_s), amount(plain_s), whole(stride, 1), kept)
