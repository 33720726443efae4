"""What drafting on some kinds of text tells about others: priors from measured steps and measured acceptance.

A lane that drafts at every step takes about the same time a step on any text; what differs is how many guesses
are right. So once its steps were timed anywhere, the ratio to be expected elsewhere is

    step / (1 + length · acceptance)

with the acceptance that the cost model thinks likely. How far a kind of text is off from that is learned as
well, as a shift of the logit that all drafters share: what one finds hard to guess, another finds hard too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specproxy.records import Strategy
from specproxy.strategies.bounds import amount, between, logarithm
from specproxy.strategies.cost import LaneFacts, drafted_tokens, log_prior
from specproxy.strategies.posterior import Belief, Cell

__all__ = ["DraftPriors"]

_Key = tuple[str, str, int | None, Cell]

_BY_STEPS = 0.9  # how far measured steps outweigh rules of thumb: acceptance is one itself
_FASTER = 0.2  # change of ln(seconds a token on plain) that is worth it
_NEWS = 0.05  # change of a logarithm that is worth working out priors anew
_PSEUDO = 1.0  # requests' worth of belief that a kind is as the cost model says
_TOKENS = 20.0  # drafted tokens at which a request's acceptance counts for half
_MEMORY = 50.0
_LEAST = 0.02  # acceptance is taken to lie between this and one less this


@dataclass(frozen=True, slots=True)
class _Rule:
    """What the cost model says: ln of the ratio, and the share of drafted tokens that should be right (None for
    plain and n-gram lanes) of drafts of this length."""

    prior: float
    expected: float | None
    length: int

    @classmethod
    def of(cls, strategy: Strategy, facts: LaneFacts | None, cell: Cell, plain_s: float = math.inf) -> _Rule:
        length = strategy.n_max or (facts.n_max if facts is not None else None) or 3
        tokens = drafted_tokens(strategy, facts, *cell)
        expected = None if tokens is None else (tokens - 1.0) / length
        return cls(log_prior(strategy, facts, *cell, plain_s), expected, length)


@dataclass(slots=True)
class DraftPriors:
    """Priors of the log ratio by lane and cell. `facts` maps lane ids to what is known about them, `plain_s` is
    what a token takes on plain, infinite before it was measured."""

    facts: Mapping[str, LaneFacts]
    plain_s: float = math.inf
    _steps: dict[str, tuple[float, float]] = field(default_factory=dict)  # by lane: ln of a step, how sure
    _texts: dict[str, list[float]] = field(default_factory=dict)  # by kind: weight, mean shift, what was told
    _rules: dict[_Key, _Rule] = field(default_factory=dict, repr=False)
    _known: dict[_Key, float] = field(default_factory=dict, repr=False)

    def prior(self, lane: str, strategy: Strategy, cell: Cell) -> float:
        """Prior mean of the log ratio of a lane on a workload."""
        key = (lane, strategy.name, strategy.n_max, cell)
        found = self._known.get(key)
        if found is None:
            rule = self._rules.get(key)
            if rule is None:
                rule = self._rules[key] = _Rule.of(strategy, self.facts.get(lane), cell, self.plain_s)
            found = self._known[key] = self._prior(lane, rule, cell[0])
        return found

    def forget(self, lane: str | None = None) -> None:
        """Ask the cost model anew; of a lane that is another now, the steps are not known either."""
        if lane is not None:
            self._steps.pop(lane, None)
        self._rules.clear()
        self._known.clear()

    def learn_plain(self, per_token: float) -> bool:
        """What a token takes on plain, ln of seconds; returns whether priors have changed."""
        if abs(per_token - math.log(self.plain_s)) < _FASTER:
            return False
        self.plain_s = math.exp(per_token)
        self._rules.clear()
        self._known.clear()
        return True

    def learn_step(self, lane: str, step: Belief, before: float) -> bool:
        """What a lane's steps take, ln in plain steps; `before` is the variance before anything was measured.

        Returns:
            Whether priors have changed.
        """
        share = 1.0 - step.variance / before
        old, known = self._steps.get(lane, (0.0, 0.0))
        if abs(share * step.mean - known * old) < _NEWS:
            return False
        self._steps[lane] = step.mean, share
        self._known.clear()
        return True

    def learn_text(self, lane: str, strategy: Strategy, cell: Cell, acceptance: float, drafted: int) -> bool:
        """How many guesses were right on a text; returns whether priors have changed."""
        expected = _Rule.of(strategy, self.facts.get(lane), cell).expected
        if expected is None:
            return False
        weight = drafted / (drafted + _TOKENS)
        text = self._texts.setdefault(cell[0], [0.0, 0.0, 0.0])
        text[0] = min(text[0], _MEMORY) + weight
        text[1] += (_logit(acceptance) - _logit(expected) - text[1]) * weight / text[0]
        if abs(self._shift(cell[0]) - text[2]) < 2.0 * _NEWS:
            return False
        text[2] = self._shift(cell[0])
        self._known.clear()
        return True

    def dump(self) -> dict[str, Any]:
        """State as JSON-serialisable data."""
        plain = None if math.isinf(self.plain_s) else math.log(self.plain_s)
        steps = {k: list(v) for k, v in self._steps.items()}
        return {"steps": steps, "texts": dict(self._texts), "plain": plain}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `dump` gave."""
        self._steps = {
            str(k): (logarithm(step), between(share, -1.0, 1.0)) for k, (step, share) in state["steps"].items()
        }
        self._texts = {
            str(k): [amount(n), logarithm(mean), logarithm(told)]
            for k, (n, mean, told) in state["texts"].items()
        }
        plain = state.get("plain")
        self.plain_s = math.inf if plain is None else math.exp(logarithm(plain))
        self._rules.clear()
        self._known.clear()

    def _prior(self, lane: str, rule: _Rule, kind: str) -> float:
        """By rules of thumb, as far as it is not known what the lane's steps take; by these otherwise."""
        told = self._steps.get(lane)
        if told is None or rule.expected is None:
            return rule.prior
        step, share = told
        shifted = 1.0 / (1.0 + math.exp(-_logit(rule.expected) - self._shift(kind)))
        by_steps = step - math.log(1.0 + rule.length * shifted)
        return rule.prior + _BY_STEPS * share * (by_steps - rule.prior)

    def _shift(self, kind: str) -> float:
        weight, mean, _ = self._texts.get(kind, (0.0, 0.0, 0.0))
        return mean * weight / (weight + _PSEUDO)


def _logit(chance: float) -> float:
    chance = max(_LEAST, min(chance, 1.0 - _LEAST))
    return math.log(chance / (1.0 - chance))
