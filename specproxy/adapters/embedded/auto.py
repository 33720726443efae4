"""``auto``: who drafts at a step, and how much, by expected tokens a second.

What a step costs is known of the machine (`costs.StepCosts`, shared by all requests on the model); how many
tokens a draft gives is learnt within the request, from the learner's priors on: by draft position for drafters
that run a model, by match length for copies, by place in the run for tokens that a grammar forces. What becomes
of a copy and of a forced token shows at every step, used or not, and costs nothing; a drafter that runs a model
has to be tried, where what may be found is worth it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, repeat

from specproxy.adapters.embedded.acceptance import Acceptance
from specproxy.adapters.embedded.controller import PLAIN, Plan, StepOutcome, StepView
from specproxy.adapters.embedded.costs import StepCosts
from specproxy.adapters.embedded.regimes import LEVELS, Regimes
from specproxy.records import EnginePriors

__all__ = ["AutoController"]

PRIOR = {"mtp": 0.65, "draft": 0.65}  # first guess's chance of being right
COPIES = tuple(min(0.95, 0.45 + 0.07 * i) for i in range(16))  # a copied token's, by length of the match
FORCED = (0.7, 0.95)  # the last token of a forced run, which the model may spell otherwise; those before it
IDLE_MEMORY = 0.995  # what remains of counts of copies after a step
STAY = 1.015  # times as good another plan has to be; the cost curve is a staircase
HORIZON = 1.5  # steps for which what a trial finds is believed to hold
PATIENCE = 10.0  # steps over which the cost of catching up is spread: it is paid once
FIRST_TRIAL, LAST_TRIAL = 48, 512  # steps between trials of a drafter for which nothing speaks
HOPELESS = 0.08  # chance of a draft's next token below which longer drafts are not looked at


@dataclass(slots=True)
class _Trial:
    """Steps since a drafter was used, and until it is tried although nothing speaks for it."""

    wait: int
    since: int = 0


class AutoController:
    """Plans the steps of one sequence by expected tokens a second; see the module.

    Args:
        costs: of this machine; the engine refines them, whoever decodes.
        shortest: shortest match that the n-gram drafter follows, in tokens.
        priors: what the learner knows about this workload, if anything.
    """

    def __init__(self, costs: StepCosts, shortest: int, priors: EnginePriors | None = None) -> None:
        self.costs = costs
        self._shortest = shortest
        given = priors.acceptance if priors is not None else {}
        levels = priors.levels if priors is not None else {}
        self._guesses = {
            name: Regimes(first, given.get(name, ()), levels.get(name, ())) for name, first in PRIOR.items()
        }
        self._copies = Acceptance(COPIES, priors.match_acceptance if priors is not None else ())
        self._forced = Acceptance(FORCED)
        self._trials = {name: _Trial(FIRST_TRIAL) for name in PRIOR}
        self._kept: dict[str, tuple[tuple[float, ...], list[float]]] = {}
        self._last = PLAIN
        self._view: StepView | None = None

    def plan(self, view: StepView) -> Plan:
        """See `Controller`."""
        self._view = view
        if view.streams == 1 and not self.costs.knows_plain:
            return PLAIN
        rates = dict(self._rates(view))
        best = max(rates, key=lambda plan: rates[plan])
        if (trial := self._due(view, rates, rates[best])) is not None:
            return trial
        if best != self._last and rates[best] < STAY * rates.get(self._last, 0.0):
            return next(plan for plan in rates if plan == self._last)  # with what it is expected to give now
        return best

    def learn(self, outcome: StepOutcome) -> None:
        """See `Controller`."""
        used = outcome.plan.drafter
        for name, regimes in self._guesses.items():
            regimes.step()
            self._trials[name].since += 1
        if used in self._guesses:
            self._guessed(used, outcome)
        self._copies.fade(IDLE_MEMORY)
        if outcome.copied:
            key = outcome.match_length - self._shortest
            tried = min(outcome.copied, outcome.agreed + 1)  # what comes after a wrong token shows nothing
            self._copies.add(key, outcome.agreed, tried)
        for place in range(min(outcome.shown, outcome.followed + 1)):
            self._forced.add(_place(place, outcome.forced), place < outcome.followed, 1)
        if outcome.plan == PLAIN or outcome.proposed == outcome.plan.total:  # not what the text's end cut short
            self._last = outcome.plan

    def levels(self) -> dict[str, tuple[float, ...]]:
        """See `Controller`."""
        return {name: tuple(regimes.counts) for name, regimes in self._guesses.items() if any(regimes.counts)}

    def explain(self) -> str:
        """See `Controller`."""
        view = self._view
        if view is None or self._last.length:
            return ""
        rates = dict(self._rates(replace(view, room=max(view.room, 2))))
        plain = rates.pop(PLAIN)
        reasons = []
        for name in view.ready:
            best = max((rate for plan, rate in rates.items() if plan.drafter == name), default=None)
            if best is None:
                reasons.append(f"{name} finds nothing to copy")
                continue
            chance = next(iter(self._chances(name, view)))
            reasons.append(f"{name} would give {best / plain:.2f} of plain's speed ({chance:.0%} right)")
        return "; ".join(reasons)

    def _guessed(self, name: str, outcome: StepOutcome) -> None:
        lead = outcome.plan.lead_length
        hits = outcome.accepted - lead
        proposed = outcome.proposed - lead
        if hits < 0 or proposed < 1:  # the lead was wrong already
            return
        self._guesses[name].add(hits, min(proposed, hits + 1))
        trial = self._trials[name]
        trial.since = 0
        trial.wait = FIRST_TRIAL if self._last.drafter == name else min(LAST_TRIAL, 2 * trial.wait)

    def _due(self, view: StepView, rates: dict[Plan, float], best: float) -> Plan | None:
        """A drafter that is to be tried: what may be found is worth more than the trial costs.

        What may be found is how much faster the drafter would be at each level of its chance, for as long as a
        level holds. Where even the highest would not pay, as on a fast model, nothing is ever tried; where the
        learner was sure that nothing is to be found, seldom.
        """
        for name in view.ready:
            trial = self._trials.get(name)
            if trial is None or self._last.drafter == name:
                continue
            own = [(rate, plan) for plan, rate in rates.items() if plan.drafter == name and not plan.lead]
            if not own:
                continue
            weights, speeds = self._guesses[name].weights(), self._speeds(name, view)
            gain = sum(
                weight * max(0.0, speed / best - STAY) for weight, speed in zip(weights, speeds, strict=True)
            )
            rate, plan = max(own, key=lambda pair: pair[0])
            if gain * HORIZON > 1 - rate / best or (gain > 0 and trial.since >= trial.wait):
                return plan
        return None

    def _speeds(self, name: str, view: StepView) -> list[float]:
        """Of a drafter at each level of its chance, the best length each; looked at now and then."""
        kept = self._kept.get(name)
        key = (*_others(view), view.context >> 7, min(view.room, view.limits[name]))
        if kept is None or kept[0] != key:
            speeds = [
                max(rate for _, rate in self._lengths(view, name, self._at_level(name, level, view)))
                for level in range(len(LEVELS))
            ]
            kept = self._kept[name] = (key, speeds)
        return kept[1]

    def _at_level(self, name: str, level: int, view: StepView) -> Iterator[float]:
        return islice(self._guesses[name].chances(level), view.limits[name])

    def _rates(self, view: StepView) -> Iterator[tuple[Plan, float]]:
        """Tokens a second of the whole batch for everything that could be done."""
        others, tokens = _others(view)
        yield PLAIN, (tokens + 1) / self.costs.verify(others + 1, view.context)
        leads = []
        for name, most in (("forced", view.forced), ("ngram", view.limits.get("ngram", 0))):
            if (name == "ngram" and (name not in view.ready or not view.match_length)) or not most:
                continue
            rates = list(self._lengths(view, name, islice(self._chances(name, view), most)))
            yield from rates
            if rates:
                leads.append(max(rates, key=lambda pair: pair[1])[0])
        for name in view.ready:
            if name not in self._guesses:
                continue
            chances = islice(self._chances(name, view), view.limits[name])
            yield from self._lengths(view, name, chances)
            for lead in leads:
                chances = islice(self._chances(name, view), view.limits[name])
                yield from self._lengths(view, name, chances, lead)

    def _lengths(
        self, view: StepView, name: str, chances: Iterator[float], lead: Plan = PLAIN
    ) -> Iterator[tuple[Plan, float]]:
        """Plans of all lengths of one drafter, behind the lead's tokens if there are any."""
        costs = self.costs
        others, other_tokens = _others(view)
        right, tokens, first = 1.0, 1.0, lead.length
        if first:
            for chance in islice(self._chances(lead.drafter, view), first):
                right *= chance
                tokens += right
        guess = costs.guess(name)
        late = costs.catch_up(name, view.late.get(name, 1)) / PATIENCE
        for length in range(1, view.room - first + 1):
            chance = next(chances, 0.0)
            if not chance or right < HOPELESS:
                return
            right *= chance
            tokens += right
            seconds = costs.verify(others + 1 + first + length, view.context) + (first + length) * guess + late
            plan = Plan(name, length, lead.drafter if first else "", first, expected=tokens)
            yield plan, (other_tokens + tokens) / seconds

    def _chances(self, name: str, view: StepView) -> Iterator[float]:
        """That each further token of a draft is right, if those before it are."""
        if name == "forced":
            places = (_place(i, view.forced) for i in range(view.forced))
            return (self._forced.chance(place) for place in places)
        if name == "ngram":
            return repeat(self._copies.chance(max(0, view.match_length - self._shortest)))
        return self._guesses[name].chances()


def _others(view: StepView) -> tuple[int, float]:
    """Tokens that the other sequences feed, and those that they are expected to get."""
    width = view.streams - 1 if view.others_width is None else view.others_width
    return width, view.streams - 1 if view.others_tokens is None else view.others_tokens


def _place(index: int, run: int) -> int:
    """Key of a token in a forced run: its last one, or one before it."""
    return 0 if index == run - 1 else 1
