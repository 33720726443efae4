"""``auto``: who drafts at a step, and how much, by expected tokens a second.

What a step costs is known of the machine (`costs.StepCosts`, shared by all requests on the model); how many
tokens a draft gives is learnt within the request, from the learner's priors on: by draft position for drafters
that run a model, by match length for copies, by place in the run for tokens that a grammar forces. What becomes
of a copy and of a forced token shows at every step, used or not, and costs nothing; a drafter that runs a model
has to be tried, where what may be found is worth it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specproxy.adapters.embedded.acceptance import Acceptance
from specproxy.adapters.embedded.controller import PLAIN, Plan, StepOutcome, StepView
from specproxy.adapters.embedded.costs import StepCosts
from specproxy.adapters.embedded.regimes import HOPELESS, LEVELS, Regimes
from specproxy.records import EnginePriors

__all__ = ["AutoController"]

PRIOR = {"mtp": 0.65, "draft": 0.65}  # first guess's chance of being right
BANDS = (0, 1, 2, 3, 4, 4, 5, 5, 5, 6)  # of matches, by how much longer they are than the shortest
COPIES = (0.45, 0.52, 0.59, 0.66, 0.78, 0.9, 0.96)  # a copied token's, by the band of its match
# Of a token in a forced run: the last, which the model may join with what comes behind; those before it; the
# first one; the first one behind one that was spelt otherwise, in the middle of a word.
LAST, INSIDE, FIRST, BROKEN = range(4)
FORCED = (0.7, 0.95, 0.8, 0.4)
IDLE_MEMORY = 0.995  # what remains of counts of copies after a step
STAY = 1.02  # times as good another plan has to be; the cost curve is a staircase
HORIZON = 1.0  # plain steps for which what a trial finds is believed to hold
PATIENCE = 6.0  # steps over which the cost of catching up is spread: it is paid once
PROBING = 0.004  # share of the time that trials may cost of a drafter for which nothing speaks
WORTH = 0.03  # gain that is hoped for, as a share of the speed, below which that share is less
NEW, FEW = 0.01, 2.0  # what is added to it where the learner knows nothing, and guesses that halve this
AHEAD, ENOUGH = 50.0, 6.0  # tokens for which it would gain, as a request begins; guesses that make this nothing
LEAST_ZEAL = 1 / 16  # what is left of it by trials that fail, each of which halves it
MANY = 64  # tokens by which it is told what keeping a drafter in step takes
RESTS = 3  # steps for which a plain step that was thought over is not thought over again


class _Option(NamedTuple):
    """A plan, and the tokens a second of the whole batch that it would give."""

    rate: float
    name: str = "plain"
    length: int = 0
    lead: str = ""
    lead_length: int = 0
    tokens: float = 1.0

    @property
    def plan(self) -> Plan:
        """To be done."""
        _, name, length, lead, lead_length, tokens = self
        return Plan(name, length, lead, lead_length, expected=tokens) if length else PLAIN


@dataclass(slots=True)
class _Trial:
    """When a drafter is tried for which nothing speaks.

    `new` is the share of the time that this may cost because the learner knows little of the drafter, `zeal`
    what of all shares is left after trials that have failed in this request, `since` are steps since the
    drafter was used, those of earlier requests included: shares of short ones alone would never pay for a
    trial. Until one has failed the request's trials may also cost what the drafter would gain over `ahead`
    tokens, since later ones learn from this one.
    """

    new: float
    ahead: float
    zeal: float = 1.0
    since: float = 0.0


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
        self._copies = Acceptance(COPIES, _by_band(priors.match_acceptance if priors is not None else ()))
        self._forced = Acceptance(FORCED)
        self._starts = FIRST  # what the first token of the next forced run is
        self._trials = {
            name: _Trial(
                NEW * FEW / (FEW + regimes.known),
                AHEAD * max(0.0, 1 - regimes.known / ENOUGH),
                since=_unused(name, priors),
            )
            for name, regimes in self._guesses.items()
        }
        self._kept: dict[str, tuple[tuple[float, ...], list[float]]] = {}
        self._unkept: dict[str, int] = {}  # by drafter, where in the text it is asked again whether to keep it
        self._last = PLAIN
        self._view: StepView | None = None
        self._asked = True  # whether the step to be learnt from was planned here
        self._thought = False  # whether that plan was thought over, and nothing found worth drafting
        self._rests = 0  # steps for which that holds

    def rests(self, streams: int) -> bool:
        """See `Controller`."""
        return self._rests > 0 and streams == 1

    def plan(self, view: StepView) -> Plan:
        """See `Controller`."""
        self._view, self._asked, self._thought = view, True, False
        if view.streams == 1 and not self.costs.knows_plain:
            return PLAIN
        options, last = self._options(view)
        best = max(options)
        if (trial := self._due(view, options, best.rate)) is not None:
            return trial.plan
        if last is not None and best.rate < STAY * last.rate:
            best = last  # with what it is expected to give now
        self._thought = not (best.length or view.forced or view.match_length)
        return best.plan

    def learn(self, outcome: StepOutcome) -> None:
        """See `Controller`."""
        used = outcome.plan.drafter
        self._rests = RESTS if self._thought else max(0, self._rests - 1)
        self._thought = False
        for name, regimes in self._guesses.items():
            regimes.step()
            self._trials[name].since += 1
        if used in self._guesses:
            self._guessed(used, outcome)
        self._copies.fade(IDLE_MEMORY)
        if outcome.copied:
            longer = outcome.match_length - self._shortest  # by every token that was right
            for i in range(min(outcome.copied, outcome.agreed + 1)):  # behind a wrong token nothing shows
                self._copies.add(_band(longer + i), i < outcome.agreed, 1)
        for i in range(min(outcome.shown, outcome.followed + 1)):
            self._forced.add(self._place(i, outcome.forced), i < outcome.followed, 1)
        if outcome.followed < outcome.shown:
            self._starts = BROKEN
        else:
            self._starts = INSIDE if outcome.shown < outcome.forced else FIRST
        whole = not outcome.plan.length or outcome.proposed == outcome.plan.total
        if whole and self._asked:  # not what the text's end cut short
            self._last = outcome.plan
        self._asked = False

    def levels(self) -> dict[str, tuple[float, ...]]:
        """See `Controller`."""
        return {name: tuple(regimes.counts) for name, regimes in self._guesses.items() if any(regimes.counts)}

    def keeps(self, drafter: str) -> bool:
        """See `Controller`: where what may be gained is more than what keeping it in step takes."""
        view = self._view
        if view is None or drafter not in view.ready or self._last.drafter == drafter:
            return True
        if view.position < self._unkept.get(drafter, 0):
            return False
        view = view._replace(room=max(view.room, view.limits[drafter]))
        best = max(self._options(view)[0]).rate
        upkeep = self.costs.catch_up(drafter, MANY) / MANY  # of a token, in seconds
        kept = self._gain(drafter, view, best) / best > upkeep * best
        if not kept:
            self._unkept[drafter] = view.position + MANY // 2
        return kept

    def explain(self) -> str:
        """See `Controller`."""
        view = self._view
        if view is None or self._last.length:
            return ""
        view = view._replace(room=max(view.room, 2))
        (plain, *options), _ = self._options(view)
        reasons = []
        for name in view.ready:
            best = max((option.rate for option in options if option.name == name), default=None)
            if best is None:
                reasons.append(f"{name} finds nothing to copy")
                continue
            right = self._rights(name, 1, view)[0]
            reasons.append(f"{name} would give {best / plain.rate:.2f} of plain's speed ({right:.0%} right)")
        return "; ".join(reasons)

    def _guessed(self, name: str, outcome: StepOutcome) -> None:
        lead = outcome.plan.lead_length
        hits = outcome.accepted - lead
        proposed = outcome.proposed - lead
        if hits < 0 or proposed < 1:  # the lead was wrong already
            return
        self._guesses[name].add(hits, min(proposed, hits + 1))
        trial = self._trials[name]
        if self._last.drafter == name:
            trial.since, trial.zeal = 0, 1.0
        elif hits < proposed:  # else it is tried again at once
            trial.since, trial.zeal, trial.ahead = 0, max(LEAST_ZEAL, trial.zeal / 2), 0.0

    def _due(self, view: StepView, options: Sequence[_Option], best: float) -> _Option | None:
        """A drafter that is to be tried: what may be found is worth more than the trial costs.

        What may be found is how much faster the drafter would be at each level of its chance, for as long as a
        level holds. What a trial costs are the tokens that would be had in its time, less those that it gives;
        what the drafter has to catch up with counts whole. Where even the highest level would not pay, as on a
        fast model, nothing is ever tried; where the learner was sure that nothing is to be found, seldom.
        """
        for own in options:
            name = own.name
            if name not in self._trials or own.lead or self._last.drafter == name:
                continue
            gain = self._gain(name, view, best)
            if not gain:
                continue
            tokens = own.tokens + _others(view)[1]
            seconds = tokens / own.rate
            seconds += (1 - 1 / PATIENCE) * self.costs.catch_up(name, view.late.get(name, 1))
            cost = best * seconds - tokens
            trial, plain = self._trials[name], self.costs.verify(1 + _others(view)[0], view.context)
            share = PROBING * min(1.0, gain / (WORTH * best)) + trial.new
            spared = trial.zeal * share * trial.since * plain * best + trial.ahead * gain / best
            if max(gain * HORIZON * plain, spared) > cost:
                return own
        return None

    def _gain(self, name: str, view: StepView, best: float) -> float:
        """Tokens a second by which a drafter is expected to beat the best, counting levels at which it does."""
        pairs = zip(self._guesses[name].weights(), self._speeds(name, view), strict=True)
        return sum(weight * (speed - STAY * best) for weight, speed in pairs if speed > STAY * best)

    def _speeds(self, name: str, view: StepView) -> list[float]:
        """Of a drafter in step at each level of its chance, the best length each; looked at now and then."""
        kept = self._kept.get(name)
        most = min(view.room, view.limits[name])
        key = (*_others(view), view.context >> 7, most)
        if kept is None or kept[0] != key:
            rights = [self._guesses[name].rights(most, level) for level in range(len(LEVELS))]
            view = view._replace(late={})
            speeds = [self._lengths(view, name, each)[0].rate for each in rights]
            kept = self._kept[name] = (key, speeds)
        return kept[1]

    def _options(self, view: StepView) -> tuple[list[_Option], _Option | None]:
        """Plain, and of everything else that could be done the best length each; and what was done last.

        The latter is None where it is the best of its kind, or cannot be done now.
        """
        others, tokens = _others(view)
        steps = self.costs.steps(view.context, others + 1)
        plain = _Option((tokens + 1) / (steps[others + 1] + self.costs.beside(drafting=False)))
        options, last = [plain], None if self._last.length else plain
        leads = []
        for name, most in (("forced", view.forced), ("ngram", view.limits.get("ngram", 0))):
            most = min(most, view.room)
            if most < 1 or (name == "ngram" and (name not in view.ready or not view.match_length)):
                continue
            rights = self._rights(name, most, view)
            best, same = self._lengths(view, name, rights)
            leads.append((best, rights))
            options.append(best)
            last = same or last
        for name in view.ready:
            if name not in self._guesses or not (most := min(view.room, view.limits[name])):
                continue
            rights = self._rights(name, most, view)
            best, same = self._lengths(view, name, rights)
            options.append(best)
            last = same or last
            for lead, before in leads:
                if view.room > lead.length:
                    best, same = self._lengths(view, name, rights, lead, before)
                    options.append(best)
                    last = same or last
        return options, last

    def _lengths(
        self,
        view: StepView,
        name: str,
        rights: Sequence[float],
        lead: _Option | None = None,
        before: Sequence[float] = (),
    ) -> tuple[_Option, _Option | None]:
        """The best length of one drafter, behind the lead's tokens if there are any, and the last step's."""
        costs, last = self.costs, self._last
        others, others_tokens = _others(view)
        first = 0 if lead is None else lead.length
        reached = before[first - 1] if first else 1.0
        tokens = 1.0 + sum(before[:first])
        most = min(len(rights), view.room - first)
        steps = costs.steps(view.context, others + 1 + first + most)
        guess = costs.guess(name)
        seconds = costs.catch_up(name, view.late.get(name, 1)) / PATIENCE + first * guess
        seconds += costs.beside(drafting=True)
        same = 0
        if last.drafter == name and last.lead_length == first and (lead is None or last.lead == lead.name):
            same = last.length
        best_rate = best_tokens = kept_rate = kept_tokens = 0.0
        best_length, at = 0, others + 1 + first
        for length in range(1, most + 1):
            tokens += reached * rights[length - 1]
            seconds += guess
            rate = (others_tokens + tokens) / (steps[at + length] + seconds)
            if rate > best_rate:
                best_rate, best_tokens, best_length = rate, tokens, length
            if length == same:
                kept_rate, kept_tokens = rate, tokens
        leading = "" if lead is None else lead.name
        best = _Option(best_rate, name, best_length, leading, first, best_tokens)
        kept = _Option(kept_rate, name, same, leading, first, kept_tokens) if kept_rate else None
        return best, kept

    def _rights(self, name: str, most: int, view: StepView) -> list[float]:
        """Chances that a draft is right up to each of its tokens, as far as it is worth looking."""
        if name in self._guesses:
            return self._guesses[name].rights(most)
        rights, right = [], 1.0
        for i in range(most):
            if name == "forced":
                right *= self._forced.chance(self._place(i, view.forced))
            else:
                right *= self._copies.chance(_band(view.match_length - self._shortest + i))
            rights.append(right)
            if right < HOPELESS:
                break
        return rights

    def _place(self, index: int, run: int) -> int:
        """Key of a token in a forced run."""
        if index == 0 and self._starts == BROKEN:
            return BROKEN
        return LAST if index == run - 1 else self._starts if index == 0 else INSIDE


def _others(view: StepView) -> tuple[int, float]:
    """Tokens that the other sequences feed, and those that they are expected to get."""
    width = view.streams - 1 if view.others_width is None else view.others_width
    return width, view.streams - 1 if view.others_tokens is None else view.others_tokens


def _unused(name: str, priors: EnginePriors | None) -> float:
    """Steps on the workload since a drafter was used last."""
    return 0.0 if priors is None else max(0.0, priors.steps - priors.last_used.get(name, 0.0))


def _band(longer: int) -> int:
    """Of a match that is so many tokens longer than the shortest."""
    return BANDS[longer] if longer < len(BANDS) else BANDS[-1]


def _by_band(known: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Counts by the length of the match as counts by band."""
    counts = [(0.0, 0.0)] * len(COPIES)
    for longer, (accepted, tried) in enumerate(known):
        before = counts[_band(longer)]
        counts[_band(longer)] = (before[0] + accepted, before[1] + tried)
    return counts
