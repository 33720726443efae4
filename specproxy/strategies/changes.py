"""Was it the machine or the lane? And when to say that plain, or a lane beside it, has changed for good.

Where a lane takes longer or less long and nothing else has run, the level jumps, as if the machine had changed,
and plain is measured again: `Suspicion` says what that tells. `ChangeWatch` tells of both, once further
requests agree: stalls and swings of a machine look alike at first (a sequential test of two means; Wald 1945).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specproxy.records import Observation
from specproxy.strategies.bounds import amount, logarithm, whole

__all__ = ["Change", "ChangeWatch", "Suspicion"]

_FAR_LIKELIER = 8.0  # ln of a ratio of likelihoods
_SURE = 6.0  # the same, over the requests since
_MOST = 3.0  # that one request counts
_BURN_IN = 100  # requests before anything is told of plain
_MEMORY = 300.0  # requests that its usual level reaches back
_KNOWN = 8.0  # requests of a lane on a kind from which what it took before is known
_LEAST = math.log(1.35)  # a smaller change of plain is none
_DEVIATIONS = 4.0  # of the level's own swings
_LASTING = 10  # requests in a row


class Change(NamedTuple):
    """A change that was noticed: when, the statistics it concerns, the lane's name, a sentence, and the kind of
    text on which it showed (empty: on all)."""

    at: float
    arm: str
    label: str
    sentence: str
    kind: str = ""


class Suspicion(NamedTuple):
    """The level jumped on a lane (`key`) and a kind.

    Before that, its constant was `level`, and the logarithm of the lane's ratio to plain `ratio`, as `n`
    requests had shown.
    """

    key: str
    kind: str
    level: float
    ratio: float
    n: float

    def blames_lane(self, measured: float, now: float, variance: float) -> bool:
        """Whether plain, which says `measured` of the level's constant, is far likelier as it was than as it is
        held to be `now`."""
        excess = (measured - now) ** 2 - (measured - self.level) ** 2
        return excess > 2.0 * _FAR_LIKELIER * variance

    @classmethod
    def restored(cls, state: list[Any]) -> Suspicion:
        """What was dumped as a list."""
        key, kind, level, ratio, n = state
        return cls(str(key), str(kind), logarithm(level), logarithm(ratio), amount(n))


@dataclass(slots=True)
class _Test:
    """Whether a mean is still `before`, or `after`: ln of the ratio of likelihoods over `n` values."""

    before: float
    after: float
    score: float = 0.0
    n: int = 0

    def note(self, value: float, variance: float) -> None:
        told = ((value - self.before) ** 2 - (value - self.after) ** 2) / (2.0 * variance)
        self.score += max(-_MOST, min(told, _MOST))
        self.n += 1


@dataclass(slots=True)
class ChangeWatch:
    """Plain's usual level, ln(seconds a token) without context and load; and a lane that plain speaks against.

    That plain has changed is told once the level has been off what is usual for some requests in a row, by
    more than it ever swings, and plain was measured to be so. What it is then is usual from there on.
    """

    plain: str = ""
    n: int = 0
    usual: float = 0.0
    square: float = 0.0  # mean squared deviation
    off: int = 0  # requests in a row above what is usual; negative: below
    _plain_test: _Test | None = field(default=None, repr=False)
    _blamed: tuple[str, str] | None = field(default=None, repr=False)  # arm and kind
    _lane_test: _Test | None = field(default=None, repr=False)

    def blame(self, suspect: Suspicion, now: float) -> None:
        """Plain was measured, and it was this lane that changed when the level jumped to `now`.

        Of a lane that was hardly known there is nothing to tell.
        """
        if suspect.n < _KNOWN:
            return
        self._blamed = suspect.key, suspect.kind
        self._lane_test = _Test(suspect.ratio, suspect.ratio + now - suspect.level)

    def hear_lane(self, seen: Observation, arm: str, ratio: float, variance: float) -> Change | None:
        """Take in a lane's ln ratio to plain with its variance."""
        kind, test = seen.workload.kind, self._lane_test
        if test is None or self._blamed != (arm, kind):
            return None
        test.note(ratio, variance)
        if abs(test.score) < _SURE:
            return None
        self._lane_test = None
        if test.score < 0.0:
            return None
        before, after = math.exp(test.before), math.exp(test.after)
        verb = "rose" if after > before else "fell"
        did = f"time per token of {seen.lane} on {kind} {verb} from {before:.2f} to {after:.2f} of plain's"
        why = f"while plain takes what it took; {test.n} requests since confirm it"
        return Change(seen.at, arm, seen.lane, f"{did}, {why}", kind)

    def hear_level(
        self, seen: Observation, plain: str, level: float, measured: float | None, variance: float
    ) -> Change | None:
        """Take in the level after a request and, of one on plain, what it alone says of it, with its variance.

        `plain` is the arm; another one starts over.
        """
        if plain != self.plain:
            self.plain, self.n = plain, 0
        gap = level - self.usual if self.n else 0.0
        limit = max(_LEAST, _DEVIATIONS * math.sqrt(self.square))
        if self.n < _BURN_IN or abs(gap) <= limit:
            self.n += 1
            share = 1.0 / min(self.n, _MEMORY)
            self.usual = level if self.n == 1 else self.usual + gap * share
            self.square += (gap * gap - self.square) * share
            self.off, self._plain_test = 0, None
            return None
        if self._plain_test is None or gap * self.off < 0.0:
            self.off, self._plain_test = 0, _Test(self.usual, level)
        self.off += 1 if gap > 0.0 else -1
        if measured is not None:
            self._plain_test.note(measured, variance)
        if abs(self.off) < _LASTING or self._plain_test.score < _SURE:
            return None
        before, after = 1e3 * math.exp(self.usual), 1e3 * math.exp(level)
        verb, count = ("rose" if gap > 0.0 else "fell"), abs(self.off)
        self.usual, self.off, self._plain_test = level, 0, None
        times = f"{verb} from {before:.3g} to {after:.3g} ms within {count} requests"
        did = f"time per token of {seen.target} on plain {times}, so lanes are held against another pace"
        return Change(seen.at, plain, "plain", did)

    def dump(self) -> list[Any]:
        """State as JSON-serialisable data; tests under way begin anew."""
        return [self.plain, self.n, self.usual, self.square]

    @classmethod
    def restored(cls, state: list[Any]) -> ChangeWatch:
        """What `dump` gave."""
        plain, n, usual, square = state
        return cls(str(plain), whole(n), logarithm(usual), amount(square))
