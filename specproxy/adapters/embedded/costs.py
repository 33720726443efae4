"""What verifying and drafting cost on this machine, in seconds: profiled at load, refined by every step.

A decode of `width` tokens behind `context` tokens takes ``base(width) + base(1) * slope(width) * context``: a
staircase in the width, which no formula knows beforehand, and a line in the context. Holds no clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

__all__ = ["CURVE", "GUESS", "StepCosts"]

# Cost of verifying w tokens in plain steps, where nothing was measured yet: a dense model on a CPU.
CURVE = ((1, 1.0), (2, 1.15), (3, 1.25), (4, 1.55), (5, 1.62), (6, 1.78), (8, 2.2), (10, 2.55), (16, 3.5))
EXPERT_SHARE = 0.9  # of the weights that a token reads, where only some experts are read
GUESS = {"mtp": 0.12, "draft": 0.15}  # cost of one guess, in plain steps
SHRINK = 2.0  # measurements at one width that count as much as the curve's shape
RATE = 0.05  # of a measurement in a running mean
OUTLIER = 1.5  # times the mean: a step that was interrupted by something else
KNOWN = 10  # measurements behind a mean that was read from a file, at most
LATE = 8  # tokens to catch up with that make a drafter's time say something about catching up
NEAR_WIDTHS = 0.5  # distance of widths, as a logarithm, at which one moves with the other by a factor of 1/e
FAR = 1024  # tokens of context below which a step says nothing about their cost
STALE = 100  # decodes after which a mean gives way to a measurement faster: the machine's speed changes
MOST_RATE = 0.3  # of a measurement in a mean, at most
SLOPE_RATE = 0.05
NEAR = 7  # bits of a context's length that make no difference to a choice
FRESH = 16  # decodes for which what was looked up is good
STEEPEST = 1e-2  # of a plain step, for each token of context


@dataclass(slots=True)
class Mean:
    """A running mean that an interruption does not upset."""

    value: float = 0.0
    n: int = 0
    at: int = 0  # decodes when it was measured last

    def add(self, sample: float, now: int = 0) -> None:
        """Count a measurement, made after `now` decodes."""
        if self.n and sample > OUTLIER * self.value:
            sample = OUTLIER * self.value
        self.n += 1
        stale = min(MOST_RATE, (now - self.at) / STALE)
        self.value += max(RATE, stale, 1 / self.n) * (sample - self.value)
        self.at = now

    def shrunk(self, expected: float) -> float:
        """The mean, held back towards what was expected while there is little evidence."""
        n = min(self.n, 1 / RATE)
        return (n * self.value + SHRINK * expected) / (n + SHRINK)


class StepCosts:
    """Seconds that verifying and drafting take. Shared by all sequences on a model.

    Before anything was measured the unit is a plain step, which is all that a choice needs.

    Args:
        slope: expected cost of a token of context, as a share of a plain step at none.
        experts: how many the model has and how many a token uses, (0, 0) for a dense one.
    """

    def __init__(self, slope: float = 0.0, experts: tuple[int, int] = (0, 0)) -> None:
        self._experts = experts
        self._widths: dict[int, Mean] = {}
        self._guesses: dict[str, Mean] = {}
        self._late: dict[str, Mean] = {}  # by drafter, of each token that it catches up with
        self._slope = slope  # for widths that were not seen far into a context
        self._slopes: dict[int, float] = {}
        self._rows: dict[int, list[float]] = {}  # kept for `steps`
        self._fresh = 0  # decodes until they are looked up again
        self._decodes = 0
        self._beside = {False: Mean(), True: Mean()}  # in a step without and with a draft

    def decoded(self, width: int, seconds: float, context: int = 0) -> None:
        """Take in a decode of `width` tokens in all, by sequences with `context` tokens on average."""
        self._decodes += 1
        self._fresh -= 1
        if self._fresh < 0 or not self.knows_plain:
            self._rows.clear()
            self._fresh = min(len(self._widths), FRESH)
        if self.knows_plain and width in self._widths and context >= FAR:
            self._steepen(width, seconds, context)
            return
        expected = self._unit * self._steepness(width) * context if self.knows_plain else 0.0
        mean = self._widths.setdefault(width, Mean())
        before = mean.value
        mean.add(max(seconds - expected, 0.3 * seconds), self._decodes)
        if before and width > 1:
            self._take_along(width, mean.value / before)

    def guessed(self, drafter: str, count: int, seconds: float, late: int = 0) -> None:
        """Take in `count` guesses; `late` is how many tokens the drafter had to catch up with before."""
        if count and late <= LATE:
            self._guesses.setdefault(drafter, Mean()).add(seconds / count, self._decodes)
        elif late > LATE:
            catching_up = max(0.0, seconds - count * self.guess(drafter))
            self._late.setdefault(drafter, Mean()).add(catching_up / (late - 1), self._decodes)

    def worked(self, seconds: float, *, drafting: bool) -> None:
        """Take in what a step of one sequence took beside decoding and guessing."""
        self._beside[drafting].add(seconds)

    def beside(self, *, drafting: bool) -> float:
        """What a step takes beside decoding and guessing: sampling, undoing, planning."""
        return self._beside[drafting].value

    def verify(self, width: int, context: int = 0) -> float:
        """A decode of `width` tokens."""
        mean = self._widths.get(width)
        if mean is not None and mean.n >= KNOWN:
            base = mean.value
        else:
            expected = self._unit * self._shape(width)
            base = expected if mean is None else mean.shrunk(expected)
        return base + self._unit * self._steepness(width) * context

    def steps(self, context: int, widest: int) -> list[float]:
        """What `verify` gives by width, up to `widest` at least; looked up anew now and then."""
        near = context >> NEAR
        row = self._rows.get(near)
        if row is None:
            row = self._rows[near] = [0.0]
        while len(row) <= widest:
            row.append(self.verify(len(row), near << NEAR))
        return row

    def guess(self, drafter: str) -> float:
        """One drafted token."""
        expected = self._unit * GUESS.get(drafter, 0.0)
        mean = self._guesses.get(drafter)
        return expected if mean is None else mean.shrunk(expected)

    def catch_up(self, drafter: str, count: int) -> float:
        """What a drafter's first guess costs more where it has to go through `count` tokens for it."""
        mean = self._late.get(drafter)
        if mean is not None and count > LATE:
            return mean.value * (count - 1)
        return self.guess(drafter) * (_curve(max(1, count)) - 1)

    @property
    def knows_plain(self) -> bool:
        """Whether a plain step was measured, which all else is compared with."""
        return 1 in self._widths

    @property
    def widths(self) -> Mapping[int, float]:
        """Seconds by width, as measured, without what context costs."""
        return {width: self._widths[width].value for width in sorted(self._widths)}

    def to_json(self) -> dict[str, Any]:
        """What was measured, as JSON-serialisable data."""
        return {
            "widths": {str(width): [mean.value, mean.n] for width, mean in self._widths.items()},
            "guesses": {name: [mean.value, mean.n] for name, mean in self._guesses.items()},
            "late": {name: [mean.value, mean.n] for name, mean in self._late.items() if mean.value},
            "slopes": {str(width): slope for width, slope in self._slopes.items()},
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take in what `to_json` gave.

        Raises:
            ValueError: it is something else.
        """
        try:
            widths = {int(width): _mean(pair) for width, pair in data["widths"].items()}
            guesses = {str(name): _mean(pair) for name, pair in data["guesses"].items()}
            late = {str(name): _mean(pair) for name, pair in data.get("late", {}).items()}
            slopes = {int(width): _bounded(float(slope)) for width, slope in data["slopes"].items()}
        except (LookupError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not the costs of steps: {error!r}") from None
        self._widths, self._guesses, self._late, self._slopes = widths, guesses, late, slopes

    def _take_along(self, width: int, moved: float) -> None:
        """What was found out about a width holds for its neighbours, if they were not measured since.

        As where tokens that are said wake other experts than those of the profile: all widths but the first
        are dearer then. Moves add up to where the mean went, so that they do not drift with its noise.
        """
        for other, mean in self._widths.items():
            if other not in (1, width):
                share = math.exp(-abs(math.log(other / width)) / NEAR_WIDTHS)
                unsure = min(1.0, (self._decodes - mean.at) / KNOWN)
                mean.value *= moved ** (share * unsure)

    def _steepen(self, width: int, seconds: float, context: int) -> None:
        """Move the slope towards what this step says of it."""
        seconds = min(seconds, OUTLIER * self.verify(width, context))
        seen = (seconds - self._widths[width].value) / (self._unit * context)
        slope = self._steepness(width)
        self._slopes[width] = _bounded(slope + SLOPE_RATE * (seen - slope))

    def _steepness(self, width: int) -> float:
        own = self._slopes.get(width)
        return own if own is not None else self._slopes.get(1, self._slope)

    def _shape(self, width: int) -> float:
        """Of widths that were not measured: between the neighbours that were, by what is expected."""
        shape = self._expected(width)
        below = [w for w in self._widths if w < width]
        above = [w for w in self._widths if w > width]
        if not below or not self.knows_plain:
            return shape
        w0 = max(below)
        c0 = self._widths[w0].value / self._unit
        if not above:
            return c0 * shape / self._expected(w0)
        w1 = min(above)
        c1 = self._widths[w1].value / self._unit
        share = (shape - self._expected(w0)) / (self._expected(w1) - self._expected(w0))
        return c0 + share * (c1 - c0)

    def _expected(self, width: int) -> float:
        """Cost of a width in plain steps before anything was measured.

        Tokens choose their experts nearly independently, so that w of them read E·(1 − (1 − k/E)^w) of E
        experts if each uses k (MoESD, arXiv 2505.19645).
        """
        experts, used = self._experts
        dense = _curve(width)
        if not 0 < used < experts:
            return dense
        spread = experts / used * (1 - (1 - used / experts) ** width)
        return max(dense, 1 - EXPERT_SHARE + EXPERT_SHARE * spread)

    @property
    def _unit(self) -> float:
        return self._widths[1].value if self.knows_plain else 1.0


def _mean(pair: Any) -> Mean:
    value, n = float(pair[0]), int(pair[1])
    if not 0 < value < 1e6 or n < 1:
        raise ValueError(f"{pair!r} is no measurement")
    return Mean(value, min(n, KNOWN))


def _bounded(slope: float) -> float:
    return min(max(slope, 0.0), STEEPEST)


def _curve(width: int) -> float:
    """`CURVE`, interpolated, and continued by its last slope."""
    for (w0, c0), (w1, c1) in pairwise(CURVE):
        if width <= w1:
            return c0 + (c1 - c0) * (width - w0) / (w1 - w0)
    (w0, c0), (w1, c1) = CURVE[-2:]
    return c1 + (c1 - c0) / (w1 - w0) * (width - w1)
