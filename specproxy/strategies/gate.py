"""The conservative gate: what speculation may cost against plain, in total, before it has to earn more.

For each workload a ledger compares the time that requests took on other lanes with the time that plain would
have taken. A lane may run only if, after its cautious estimate, the loss stays within::

    allowance · (plain time of one request)  +  share · (plain time of all requests so far)

This is the budget of conservative bandits (Wu et al., ICML 2016) with a start-up allowance. Gains count against
losses, but only up to `credit` requests' worth, so that a lane that once was good can't lose for long.
Requests in flight are counted at their cautious estimate until they report.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Ledger"]


@dataclass(slots=True)
class Ledger:
    """Loss against plain of one workload, in seconds. Positive `loss` is time lost."""

    loss: float = 0.0
    plain_s: float = 0.0  # plain's time for all finished requests
    requests: float = 0.0
    pending_loss: float = 0.0
    pending_plain_s: float = 0.0

    def mean_plain_s(self, this: float) -> float:
        """Plain's time for a typical request, `this` one included."""
        return (self.plain_s + this) / (self.requests + 1.0)

    def budget(self, plain_s: float, allowance: float, share: float) -> float:
        """Seconds that may be lost in total once this request, of `plain_s` on plain, has run."""
        return allowance * self.mean_plain_s(plain_s) + share * (self.plain_s + self.pending_plain_s + plain_s)

    def room(self, plain_s: float, allowance: float, share: float) -> float:
        """Seconds that this request may lose."""
        return self.budget(plain_s, allowance, share) - self.loss - max(self.pending_loss, 0.0)

    def start(self, cautious_loss: float, plain_s: float) -> None:
        """A request was sent: count it at its cautious estimate."""
        self.pending_loss += max(cautious_loss, 0.0)
        self.pending_plain_s += plain_s

    def drop(self, cautious_loss: float, plain_s: float) -> None:
        """A started request ended, whatever the outcome; `finish` follows if it says how long it took."""
        self.pending_loss = max(0.0, self.pending_loss - max(cautious_loss, 0.0))
        self.pending_plain_s = max(0.0, self.pending_plain_s - plain_s)

    def finish(self, loss: float, plain_s: float, credit: float) -> None:
        """Count a finished request: what it lost (negative: gained), and what plain would have taken."""
        self.plain_s += plain_s
        self.requests += 1.0
        self.loss = max(self.loss + loss, -credit * self.mean_plain_s(plain_s))

    def dump(self) -> list[float]:
        """State as JSON-serialisable data; what is in flight is not part of it."""
        return [self.loss, self.plain_s, self.requests]

    @classmethod
    def restored(cls, state: list[Any]) -> Ledger:
        """What `dump` gave."""
        loss, plain_s, requests = (float(v) for v in state)
        return cls(loss, plain_s, requests)
