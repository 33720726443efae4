"""``auto``: who drafts at a step, and how much, by expected tokens a second.

What a step costs is learnt from the steps that one sequence had for itself (`StepCosts`, shared by all requests
on the model); how many tokens a draft gives is learnt within the request, by draft position for drafters that
run a model, by match length for copies (`Acceptance`). Both start from priors, and both forget, since text
changes. A copy's fate is known at every step, used or not, and costs nothing; a drafter that runs a model has
to be tried, and is tried more and more rarely while it fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise, repeat

from specproxy.adapters.embedded.controller import PLAIN, Plan, StepOutcome, StepView
from specproxy.records import EnginePriors

__all__ = ["AutoController", "StepCosts"]

# Cost of verifying w tokens in plain steps, where nothing was measured yet: a dense model on a CPU.
CURVE = ((1, 1.0), (2, 1.15), (3, 1.25), (4, 1.55), (5, 1.62), (6, 1.78), (8, 2.2), (10, 2.55), (16, 3.5))
GUESS = {"mtp": 0.12, "draft": 0.15}  # cost of one guess, in plain steps
PRIOR = {"mtp": 0.65, "draft": 0.65}  # first guess's chance of being right
FALL = 0.95  # of it, from position to position
COPIES = tuple(min(0.95, 0.45 + 0.07 * i) for i in range(16))  # a copied token's, by length of the match
WEIGHT, MOST_WEIGHT = 4.0, 24.0  # of priors, in tokens: of ours, and at most of the learner's
SHRINK = 3.0  # measurements at one width that count as much as the curve's shape
RATE = 0.1  # of a measurement in a running mean
OUTLIER = 3.0  # times the mean: a step that was interrupted by something else
MEMORY, IDLE_MEMORY = 0.96, 0.995  # what remains of counts after a step that shows something, and after another
STAY = 1.03  # times as good another plan has to be; the cost curve is a staircase
FIRST_TRIAL, LAST_TRIAL, AGAIN = 16, 512, 2  # steps between trials of a drafter
UNTRIED = 4  # steps until a drafter is tried at all
LATE = 8  # tokens to catch up with that make a drafter's time say nothing about a guess
TRIAL = 2  # tokens


@dataclass(slots=True)
class _Mean:
    """A running mean that an interruption does not upset."""

    value: float = 0.0
    n: int = 0

    def add(self, sample: float) -> None:
        if self.n and sample > OUTLIER * self.value:
            sample = OUTLIER * self.value
        self.n += 1
        self.value += max(RATE, 1 / self.n) * (sample - self.value)


class StepCosts:
    """Seconds that verifying and drafting take on this machine. Holds no clock.

    Before anything was measured the unit is a plain step, which is all that a choice needs.
    """

    def __init__(self) -> None:
        self._widths: dict[int, _Mean] = {}
        self._guesses: dict[str, _Mean] = {}

    def learn(self, outcome: StepOutcome) -> None:
        """Take in a step that no other sequence shared."""
        if outcome.seconds is None or outcome.late > LATE:
            return
        width, seconds = 1 + outcome.drafted, outcome.seconds - outcome.draft_seconds
        self._widths.setdefault(width, _Mean()).add(seconds)
        if outcome.drafted and outcome.plan.drafter != "ngram":
            self._guesses.setdefault(outcome.plan.drafter, _Mean()).add(outcome.draft_seconds / outcome.drafted)

    def verify(self, width: int) -> float:
        """A decode of `width` tokens."""
        expected = self._unit * _shape(width)
        mean = self._widths.get(width)
        return expected if mean is None else _shrunk(mean, expected)

    def guess(self, drafter: str) -> float:
        """One drafted token."""
        expected = self._unit * GUESS.get(drafter, 0.0)
        mean = self._guesses.get(drafter)
        return expected if mean is None else _shrunk(mean, expected)

    @property
    def knows_plain(self) -> bool:
        """Whether a plain step was measured, which all else is compared with."""
        return 1 in self._widths

    @property
    def _unit(self) -> float:
        return self._widths[1].value if self.knows_plain else 1.0


def _shrunk(mean: _Mean, expected: float) -> float:
    n = min(mean.n, 1 / RATE)
    return (n * mean.value + SHRINK * expected) / (n + SHRINK)


def _shape(width: int) -> float:
    """`CURVE`, interpolated, and continued by its last slope."""
    for (w0, c0), (w1, c1) in pairwise(CURVE):
        if width <= w1:
            return c0 + (c1 - c0) * (width - w0) / (w1 - w0)
    (w0, c0), (w1, c1) = CURVE[-2:]
    return c1 + (c1 - c0) / (w1 - w0) * (width - w1)


@dataclass(slots=True)
class Acceptance:
    """Chances that guesses are right, by a key (a draft position, or a match length), as forgetting counts.

    `expected` are chances by key to start from; what lies behind the last one is like the last one. `counts`
    are (accepted, tried) by key.
    """

    expected: Sequence[float]
    counts: list[list[float]] = field(default_factory=list)

    def chance(self, key: int, expected: float | None = None) -> float:
        """Of the guess at this key; `expected` replaces what was expected at first."""
        if expected is None:
            expected = self.expected[min(key, len(self.expected) - 1)]
        accepted, tried = self.counts[key] if key < len(self.counts) else (0.0, 0.0)
        return (WEIGHT * expected + accepted) / (WEIGHT + tried)

    def chances(self) -> Iterator[float]:
        """By draft position: each is expected to be a little below the one before, as far as that is known."""
        chance = self.chance(0)
        for position in count(1):
            yield chance
            chance = self.chance(position, FALL * chance)

    def add(self, key: int, accepted: float, tried: float) -> None:
        """Count guesses at a key."""
        while len(self.counts) <= key:
            self.counts.append([0.0, 0.0])
        self.counts[key][0] += accepted
        self.counts[key][1] += tried

    def fade(self, by: float) -> None:
        """Forget a little."""
        for pair in self.counts:
            pair[0] *= by
            pair[1] *= by


@dataclass(slots=True)
class _Trial:
    """When a drafter that is not in use is tried again, in steps."""

    wait: int = UNTRIED
    since: int = 0


class AutoController:
    """Plans the steps of one sequence by expected tokens a second; see the module.

    Args:
        costs: of this machine, shared and refined by all sequences.
        shortest: shortest match that the n-gram drafter follows, in tokens.
        priors: what the learner knows about this workload, if anything.
    """

    def __init__(self, costs: StepCosts, shortest: int, priors: EnginePriors | None = None) -> None:
        self._costs = costs
        self._shortest = shortest
        given = priors.acceptance if priors is not None else {}
        self._guesses = {
            name: Acceptance([first], _capped(given.get(name, ()))) for name, first in PRIOR.items()
        }
        self._copies = Acceptance(COPIES, _capped(priors.match_acceptance if priors is not None else ()))
        self._trials = {name: _Trial() for name in PRIOR}
        self._last = PLAIN

    def plan(self, view: StepView) -> Plan:
        """See `Controller`."""
        if view.streams == 1 and not self._costs.knows_plain:
            return PLAIN
        if (trial := self._due(view)) is not None:
            return trial
        rates = dict(self._rates(view))
        best = max(rates, key=lambda plan: rates[plan])
        if self._last in rates and rates[best] < STAY * rates[self._last]:
            return self._last
        return best

    def learn(self, outcome: StepOutcome) -> None:
        """See `Controller`."""
        self._costs.learn(outcome)
        used = outcome.plan.drafter
        for name, acceptance in self._guesses.items():
            acceptance.fade(MEMORY if name == used else IDLE_MEMORY)
            self._trials[name].since += 1
        if used in self._guesses:
            self._guessed(used, outcome)
        self._copies.fade(IDLE_MEMORY)
        if outcome.copied:
            key = outcome.match_length - self._shortest
            tried = min(outcome.copied, outcome.agreed + 1)  # what comes after a wrong token shows nothing
            self._copies.add(key, outcome.agreed, tried)
        if outcome.plan == PLAIN or outcome.drafted == outcome.plan.length:  # not what the text's end cut short
            self._last = outcome.plan

    def _guessed(self, name: str, outcome: StepOutcome) -> None:
        for position in range(min(outcome.drafted, outcome.accepted + 1)):
            self._guesses[name].add(position, position < outcome.accepted, 1)
        trial = self._trials[name]
        right = outcome.accepted == outcome.drafted
        if self._last.drafter == name:
            trial.wait = FIRST_TRIAL
        else:  # a success has to be followed up at once, or it is forgotten before the next one
            trial.wait = AGAIN if right else min(LAST_TRIAL, max(FIRST_TRIAL, 2 * trial.wait))
        trial.since = 0

    def _due(self, view: StepView) -> Plan | None:
        """A drafter that has not been used for so long that it is to be tried."""
        for name in view.ready:
            trial = self._trials.get(name)
            if trial is not None and trial.since >= trial.wait and self._last.drafter != name:
                length = min(TRIAL, view.limits[name], view.room)
                return Plan(name, length) if length > 0 else None
        return None

    def _rates(self, view: StepView) -> Iterator[tuple[Plan, float]]:
        """Tokens a second of the whole batch for everything that could be done."""
        others, costs = view.streams - 1, self._costs
        yield PLAIN, (others + 1) / costs.verify(view.streams)
        for name in view.ready:
            if name == "ngram" and not view.match_length:
                continue
            right, tokens = 1.0, 1.0
            lengths = range(1, min(view.limits[name], view.room) + 1)
            for length, chance in zip(lengths, self._chances(name, view.match_length), strict=False):
                right *= chance
                tokens += right
                seconds = costs.verify(view.streams + length) + length * costs.guess(name)
                yield Plan(name, length), (others + tokens) / seconds

    def _chances(self, name: str, match_length: int) -> Iterator[float]:
        """That each further token of a draft is right, if those before it are."""
        if name == "ngram":
            return repeat(self._copies.chance(max(0, match_length - self._shortest)))
        return self._guesses[name].chances()


def _capped(counts: Sequence[tuple[float, float]]) -> list[list[float]]:
    """The learner's counts, with a weight that this request's own text can outvote."""
    scales = [min(1.0, MOST_WEIGHT / tried) if tried > 0 else 0.0 for _, tried in counts]
    return [[accepted * scale, tried * scale] for (accepted, tried), scale in zip(counts, scales, strict=True)]
