"""How long it takes after a change until the choice has settled again.

Unsettled is a policy that pays for finding out: it measures plain anew, gives uncertain lanes a try, or keeps
from one that is thought to be the best. What a choice costs for it, by what is known when it is made, is

    Σ chance of a lane · time expected of it  /  least time expected of any lane  −  1

Once that is small over a number of requests in a row, the choice has settled, with the first of these. No noise
of measured times and no luck of the draw goes into it. Exploring among lanes that are about as good costs next
to nothing, and is no unrest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from specproxy.strategies.changes import Change
from specproxy.strategies.drift import DriftEvent

__all__ = ["Recoveries", "Recovery", "Settled", "excess"]

WINDOW = 10  # requests in a row
CLOSE = 0.02  # what the choice may cost over them, relative
_MOST = 20  # changes that are remembered


class Recovery(NamedTuple):
    """A change, and requests and seconds from its notice until the choice had settled, or until now."""

    at: float
    lane: str
    change: str
    requests: int
    seconds: float
    settled: bool


class Settled(NamedTuple):
    """The choice has settled after a change: when that is known, the statistics and the lane that had changed,
    and a sentence."""

    at: float
    arm: str
    label: str
    sentence: str


class Considered(Protocol):
    """A lane that was considered: its cost in seconds, with a load, and the chance that it was drawn."""

    @property
    def expected(self) -> float: ...
    @property
    def load_s(self) -> float: ...
    @property
    def chance(self) -> float: ...


def excess(views: Sequence[Considered]) -> float:
    """What a choice among these lanes costs over the best of them, relative, by what is expected of each."""
    costs = [view.expected + view.load_s for view in views]
    best = min(costs, default=0.0)
    if best <= 0.0:
        return 0.0
    return sum([view.chance * cost for view, cost in zip(views, costs, strict=True)]) / best - 1.0


@dataclass(slots=True)
class _Watch:
    """One change, and what the last choices since it have cost."""

    at: float
    arm: str
    label: str
    kind: str  # of text that it concerns; empty: all
    sentence: str
    requests: int = 0
    last_at: float = 0.0
    settled: bool = False
    window: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))  # when and cost

    def note(self, cost: float, at: float) -> bool:
        """Take in one choice; whether it has settled with the last ones."""
        self.requests += 1
        self.last_at = at
        self.window.append((at, cost))
        if len(self.window) < WINDOW or sum([cost for _, cost in self.window]) > CLOSE * WINDOW:
            return False
        self.requests -= WINDOW
        self.last_at, self.settled = self.window[0][0], True
        return True

    @property
    def seconds(self) -> float:
        return max(0.0, self.last_at - self.at) if self.requests else 0.0


class Recoveries:
    """What became of the latest changes of one target. Pure: instants come in with choices and changes."""

    def __init__(self) -> None:
        self._watches: deque[_Watch] = deque(maxlen=_MOST)
        self._open: list[_Watch] = []

    @property
    def under_way(self) -> bool:
        """Whether the choice has yet to settle after some change."""
        return bool(self._open)

    def begin(self, change: DriftEvent | Change) -> None:
        """A change was noticed. One that goes on from another of the same lane and kind takes its place."""
        whole = isinstance(change, DriftEvent) and change.whole_lane
        kind = "" if whole else change.kind
        watch = _Watch(change.at, change.arm, change.label, kind, change.sentence)
        self._open = [w for w in self._open if w.arm != watch.arm or (kind and w.kind != kind)]
        self._watches.append(watch)
        self._open = [*self._open, watch][-_MOST:]

    def note(self, kind: str, cost: float, at: float) -> list[Settled]:
        """A lane was chosen for a request of a kind, at that `excess`; what has settled with it."""
        heard = [watch for watch in self._open if watch.kind in ("", kind)]
        settled = [watch for watch in heard if watch.note(cost, at)]
        if settled:
            self._open = [watch for watch in self._open if not watch.settled]
        return [Settled(at, watch.arm, watch.label, _sentence(watch)) for watch in settled]

    def rows(self) -> list[Recovery]:
        """The latest changes, oldest first."""
        return [Recovery(w.at, w.label, w.sentence, w.requests, w.seconds, w.settled) for w in self._watches]


def _sentence(watch: _Watch) -> str:
    noun = f"request{'' if watch.requests == 1 else 's'}{' of ' * bool(watch.kind)}{watch.kind}"
    spent = f"{watch.requests} {noun} ({watch.seconds:.0f} s)" if watch.requests else "right"
    return f"the choice of lanes settled {spent} after it was noticed that {watch.sentence}"
