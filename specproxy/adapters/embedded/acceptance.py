"""Chances that tokens which cost nothing are right: copies by length of their match, and forced ones.

Three layers, each held back towards the one behind it while there is little evidence: what the learner knows
of the workload (or a general prior), what this request has shown since it began, and what it showed lately. A
prior gives way to what the request shows, so a wrong one is forgotten within some tens of guesses; a change
within the text is followed by the last layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Acceptance"]

WEIGHT = 4.0  # of a layer, in tokens, in the one before it
STEADY = 4.0  # of the whole request in what was seen lately, in tokens
DOUBT = 1.0  # of our general prior in what the learner knows: a workload copies nearly always or hardly ever
MOST_WEIGHT = 16.0  # of what the learner knows, in tokens
LONG = 0.99  # what remains of a request's counts after a guess
GIVING_WAY = 0.97  # what remains of a prior's weight after a guess


@dataclass(slots=True)
class _Cell:
    """Counts at one key, and what was expected of it."""

    expected: float
    weight: float  # of what was expected, in guesses
    hits: float = 0.0
    tried: float = 0.0
    recent_hits: float = 0.0
    recent: float = 0.0

    def chance(self) -> float:
        """Now."""
        whole = (self.weight * self.expected + self.hits) / (self.weight + self.tried)
        return (STEADY * whole + self.recent_hits) / (STEADY + self.recent)

    def add(self, hits: float, tried: float) -> None:
        """Count guesses."""
        self.weight *= GIVING_WAY**tried
        self.hits = LONG * self.hits + hits
        self.tried = LONG * self.tried + tried
        self.recent_hits += hits
        self.recent += tried


class Acceptance:
    """Chances by a key that counts up from 0.

    Args:
        expected: prior chances by key; what lies behind the last one is like the last one.
        known: the learner's pseudo-counts (accepted, tried) by key; their weight is capped.
    """

    def __init__(self, expected: Sequence[float], known: Sequence[tuple[float, float]] = ()) -> None:
        self._expected = expected
        self._cells: list[_Cell] = []
        for accepted, tried in known:
            cell = self._at(len(self._cells))
            if tried <= 0:
                continue
            scale = min(1.0, MOST_WEIGHT / tried)
            weight = DOUBT + tried * scale
            cell.expected, cell.weight = (cell.expected * DOUBT + accepted * scale) / weight, weight

    def chance(self, key: int) -> float:
        """Of the guess at this key, by itself."""
        return self._at(key).chance()

    def add(self, key: int, accepted: float, tried: float) -> None:
        """Count guesses at a key."""
        self._at(key).add(accepted, tried)

    def fade(self, by: float) -> None:
        """Forget a little of what was seen lately."""
        for cell in self._cells:
            cell.recent_hits *= by
            cell.recent *= by

    def _at(self, key: int) -> _Cell:
        while len(self._cells) <= key:
            at = min(len(self._cells), len(self._expected) - 1)
            self._cells.append(_Cell(self._expected[at], WEIGHT))
        return self._cells[key]
