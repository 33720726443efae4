"""The conservative gate: what speculation may cost against plain, in total, before it has to earn more.

For each workload a ledger compares the time that requests took on other lanes with the time that plain would
have taken. A lane may run only if, after its cautious estimate, the loss stays within::

    allowance · (plain time of one request)  +  share · (plain time of all requests so far)

This is the budget of conservative bandits (Wu et al., ICML 2016) with a start-up allowance. Gains count against
losses, but only up to `credit` requests' worth, so that a lane that once was good can't lose for long. A lane
may also run in deficit, if its cautious estimate is a gain that makes up for the deficit within ten requests.
Requests in flight are counted at their cautious estimate until they report.

One request that took far longer than anything that was believed of its lane is most likely a stall of the
machine, which plain would have met as well. It is booked at no more than plain's time, and the rest is held
until the lane's next request on this workload: if that one is out of line too, all is booked, otherwise the
rest is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specproxy.strategies.bounds import MOST, ROUNDED, amount, between

__all__ = ["Account", "Ledger"]


class Account(NamedTuple):
    """How a workload of a target stands: seconds lost to plain so far (negative: gained, up to the credit), the
    seconds that may be lost in all once one more request has run, and plain's time for all requests."""

    target: str
    workload: str
    lost_s: float
    allowed_s: float
    plain_s: float


@dataclass(slots=True)
class Ledger:
    """Loss against plain of one workload, in seconds. Positive `loss` is time lost."""

    loss: float = 0.0
    plain_s: float = 0.0  # plain's time for all finished requests
    requests: float = 0.0
    pending_loss: float = 0.0
    pending_plain_s: float = 0.0
    held: dict[str, float] = field(default_factory=dict)  # by arm: seconds in doubt

    def mean_plain_s(self, this: float) -> float:
        """Plain's time for a typical request, `this` one included."""
        return (self.plain_s + this) / (self.requests + 1.0)

    def budget(self, plain_s: float, allowance: float, share: float) -> float:
        """Seconds that may be lost in total once this request, of `plain_s` on plain, has run."""
        return allowance * self.mean_plain_s(plain_s) + share * (self.plain_s + self.pending_plain_s + plain_s)

    def room(self, plain_s: float, allowance: float, share: float) -> float:
        """Seconds that this request may lose."""
        return self.budget(plain_s, allowance, share) - self.loss - max(self.pending_loss, 0.0)

    def allowed(self, allowance: float, share: float) -> float:
        """Seconds that may be lost in total once a further request of the usual length has run."""
        if not self.requests:
            return 0.0
        return self.budget(self.plain_s / self.requests, allowance, share)

    def start(self, cautious_loss: float, plain_s: float) -> None:
        """A request was sent: count it at its cautious estimate."""
        self.pending_loss += max(cautious_loss, 0.0)
        self.pending_plain_s += plain_s

    def drop(self, cautious_loss: float, plain_s: float) -> None:
        """A started request ended, whatever the outcome; `finish` follows if it says how long it took."""
        self.pending_loss = max(0.0, self.pending_loss - max(cautious_loss, 0.0))
        self.pending_plain_s = max(0.0, self.pending_plain_s - plain_s)

    def sift(self, arm: str, loss: float, plain_s: float, *, outlier: bool) -> float:
        """The part of a request's loss that is to be booked now; the rest of an outlier's is held."""
        before = self.held.pop(arm, None)
        if not outlier or loss <= plain_s:
            return loss
        if before is not None:
            return loss + before
        self.held[arm] = loss - plain_s
        return plain_s

    def finish(self, loss: float, plain_s: float, credit: float) -> None:
        """Count a finished request: what it lost (negative: gained), and what plain would have taken."""
        self.plain_s += plain_s
        self.requests += 1.0
        self.loss = max(self.loss + loss, -credit * self.mean_plain_s(plain_s))

    def dump(self) -> list[Any]:
        """State as JSON-serialisable data; what is in flight is not part of it."""
        return [self.loss, self.plain_s, self.requests, dict(self.held)]

    @classmethod
    def restored(cls, state: list[Any]) -> Ledger:
        """What `dump` gave."""
        loss, plain_s, requests, held = state
        kept = {str(arm): amount(seconds) for arm, seconds in held.items()}
        plain_s = amount(plain_s)
        # nothing gains more than all the time that plain takes
        return cls(between(loss, -plain_s - ROUNDED, MOST), plain_s, amount(requests), held=kept)
