"""Chances that a drafter's guesses are right, in text that changes its nature: JSON in prose, a quoted file.

The chance of a first guess is taken for one of a few levels, which holds for a while and then jumps: a hidden
Markov model, filtered guess by guess. Where it jumps to is learnt within the request, from the learner's priors
on: text of one nature keeps its level and is not upset by bad luck, mixed text is followed within two or three
guesses. Later positions of a draft have a chance that is a learnt share of the one before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["HOPELESS", "LEVELS", "Regimes"]

LEVELS = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
HOPELESS = 0.08  # chance of a draft below which longer ones are not looked at
JUMP = 0.025  # chance that the level changes from one step to the next
FLAT = 0.05  # share of the prior that is spread over all levels, whatever the learner says
DOUBT = 2.0  # first guesses that the learner has to have seen to be believed as much as `expected`
SPREAD = 0.2  # of the prior around the learner's mean
WEIGHT, MOST_WEIGHT = 5.0, 40.0  # of our prior, and of the learner's levels, in guesses
STEADY = 400.0  # guesses after which what was seen first begins to fade
FALL = 0.97  # of a chance from position to position, where nothing is known
POSITION_WEIGHT = 12.0  # of that, in guesses
LEAST_RATIO, MOST_RATIO = 0.4, 1.0  # of the chances at two positions


class Regimes:
    """The chances of one drafter within one request.

    Args:
        expected: chance of a first guess where the learner says nothing.
        known: the learner's pseudo-counts (accepted, tried) by draft position.
        levels: its counts of guesses by level, as `counts` of earlier requests gave them.
    """

    def __init__(
        self,
        expected: float,
        known: Sequence[tuple[float, float]] = (),
        levels: Sequence[float] = (),
    ) -> None:
        self.known = known[0][1] if known else 0.0  # first guesses that the learner knows of
        right = known[0][0] if known else 0.0
        mean = (DOUBT * expected + right) / (DOUBT + self.known)
        near = [math.exp(-(((level - mean) / SPREAD) ** 2)) for level in LEVELS]
        total = sum(near)
        prior = [WEIGHT * ((1 - FLAT) * each / total + FLAT / len(LEVELS)) for each in near]
        if len(levels) == len(LEVELS) and (seen := sum(levels)) > 0:
            scale = min(1.0, MOST_WEIGHT / seen)
            prior = [each + scale * level for each, level in zip(prior, levels, strict=True)]
        self._targets = prior  # where jumps lead to, as counts
        self._now = _normal(prior)
        self.counts = [0.0] * len(LEVELS)  # guesses of this request by level, as far as that is known
        self._ratios = [_ratio(known, key) for key in range(1, len(known))]
        self._positions = [[ratio * POSITION_WEIGHT, POSITION_WEIGHT] for ratio in self._ratios]
        self._passed = 0  # steps since the weights were brought up to date

    def chance(self) -> float:
        """Of a first guess, now."""
        return sum(weight * level for weight, level in zip(self.weights(), LEVELS, strict=True))

    def weights(self) -> Sequence[float]:
        """How probable each of `LEVELS` is now."""
        if self._passed:
            total, stay = sum(self._targets), (1 - JUMP) ** self._passed
            self._passed = 0
            self._now = [
                stay * now + (1 - stay) * target / total
                for now, target in zip(self._now, self._targets, strict=True)
            ]
        return self._now

    def rights(self, most: int, level: int | None = None) -> list[float]:
        """Chances that a draft is right up to each position, as if the level were known if one is given.

        Guesses that are right make a high level likelier, so the chance of a position, if all before it are
        right, may rise. The list ends where there is hardly a chance left.
        """
        weights = self.weights() if level is None else [float(i == level) for i in range(len(LEVELS))]
        found, fall, all_falls = [], 1.0, 1.0
        for position in range(most):
            if position:
                fall *= self._ratio(position)
                all_falls *= fall
            weights = [weight * chance for weight, chance in zip(weights, LEVELS, strict=True)]
            right = sum(weights) * all_falls
            found.append(right)
            if right < HOPELESS:
                break
        return found

    def step(self, count: int = 1) -> None:
        """Steps have passed: the level may have changed."""
        self._passed += count

    def add(self, hits: int, tried: int) -> None:
        """Take in a draft of which the first `hits` guesses were right, and `tried` were judged."""
        fall = 1.0
        for position in range(tried):
            if position:
                fall *= self._ratio(position)
            right = position < hits
            expected = self.chance() * fall
            self._now = _normal(
                [
                    now * (level * fall if right else 1 - level * fall)
                    for now, level in zip(self.weights(), LEVELS, strict=True)
                ]
            )
            if position:
                self._judge(position, right, expected)
        for i, weight in enumerate(self._now):
            self._targets[i] += tried * weight
            self.counts[i] += tried * weight
        if sum(self._targets) > STEADY:
            self._targets = [0.9 * each for each in self._targets]

    def _ratio(self, position: int) -> float:
        """Of the chance at a position to the one before it."""
        if position > len(self._positions):
            return FALL
        hits, expected = self._positions[position - 1]
        return min(max(hits / expected, LEAST_RATIO), MOST_RATIO)

    def _judge(self, position: int, right: bool, expected: float) -> None:
        """Learn how much less likely a later position is than its level says."""
        while len(self._positions) < position:
            self._positions.append([FALL * POSITION_WEIGHT, POSITION_WEIGHT])
        pair = self._positions[position - 1]
        ratio = self._ratio(position)
        pair[0] = 0.99 * pair[0] + right
        pair[1] = 0.99 * pair[1] + expected / ratio


def _normal(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]


def _ratio(known: Sequence[tuple[float, float]], key: int) -> float:
    """What the learner says of two neighbouring positions, mixed with `FALL` where it knows little."""
    (a, n), (b, m) = known[key - 1], known[key]
    if n <= 0 or m <= 0 or a <= 0:
        return FALL
    ratio = min(max((b / m) / (a / n), LEAST_RATIO), MOST_RATIO)
    return (POSITION_WEIGHT * FALL + m * ratio) / (POSITION_WEIGHT + m)
