"""The learning policy: pick the lane with the least expected time, never lose to plain by more than agreed.

For every lane the expected time of this request is::

    wait + load·[not resident] + uncached prompt / prefill rate + expected output · time per token

with the time per token from a hierarchical Gaussian belief about its logarithm relative to plain (`posterior`,
`level`; the prior is the cost model). A lane is drawn by Thompson sampling, in exact choice probabilities, from
those that the gate admits and that are worth exploring.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from specproxy.records import Candidate, Control, Decision, LaneStatus, Observation, Outcome, Situation
from specproxy.strategies.cost import LaneFacts
from specproxy.strategies.gate import Ledger
from specproxy.strategies.level import features
from specproxy.strategies.posterior import Belief, Scales
from specproxy.strategies.rules import apply_rules, available
from specproxy.strategies.target import TargetModel, arm_key
from specproxy.strategies.thompson import Offer, choice_probabilities, worth_exploring

__all__ = ["Learner", "LearnerSettings"]

_FORMAT = "specproxy-learner"
_VERSION = 1
_MOST_PENDING = 4096
_Z90 = 1.6449  # intervals shown are 90%


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """What the user may set.

    Args:
        allowance_requests: start-up loss allowed per workload, in requests' worth of plain time.
        allowance_share: further loss allowed, as a share of plain's time.
        credit_requests: how much gained time may be lost again, in requests' worth.
        caution: standard deviations above the mean at which the gate looks at a lane.
        plain_first: requests on plain before anything else is tried.
        proven: standard deviations by which a lane must lose to be disabled on a workload.
        retest_share: share of plain's time spent on re-testing disabled lanes.
        half_life: requests of a cell after which their weight has halved.
        scales: prior scales of the effects and of the noise.
    """

    allowance_requests: float = 1.0
    allowance_share: float = 0.02
    credit_requests: float = 5.0
    caution: float = 1.0
    plain_first: int = 2
    proven: float = 2.33
    retest_share: float = 0.002
    half_life: float = 200.0
    scales: Scales = field(default_factory=Scales)


@dataclass(slots=True)
class _View:
    """One lane as a decision sees it. Times in seconds; `offer` in units of plain's decode time."""

    status: LaneStatus
    key: str
    belief: Belief
    offer: Offer
    fixed_s: float
    ratio: float
    sd: float
    loss_s: float = 0.0  # cautious loss against plain
    allowed: bool = True
    note: str = ""

    @property
    def name(self) -> str:
        return self.status.lane.strategy.name


@dataclass(frozen=True, slots=True)
class _Pending:
    target: str
    workload: str
    cautious_s: float
    plain_s: float


class Learner:
    """Policy that learns which lane is fastest for each workload. See the module's docstring.

    Args:
        settings: what the user may set.
        facts: what is known about lanes beforehand, by lane id; may be extended with `set_facts`.
    """

    name = "learner"

    def __init__(
        self, settings: LearnerSettings | None = None, facts: Mapping[str, LaneFacts] | None = None
    ) -> None:
        self.settings = settings or LearnerSettings()
        self._facts: dict[str, LaneFacts] = dict(facts or {})
        self._targets: dict[str, TargetModel] = {}
        self._pending: dict[str, _Pending] = {}

    # --- choosing --------------------------------------------------------------------------------

    def choose(self, situation: Situation, rng: np.random.Generator) -> Decision:
        """Choose a ready lane; a situation with a request id is remembered until its observation comes.

        Raises:
            LaneUnavailable: no lane is ready, or none has the pinned strategy.
        """
        decision, views, plain_s = self._decide(situation, float(rng.random()))
        if situation.request_id:
            chosen = next(v for v in views if v.status.lane is decision.lane)
            self._start(situation, chosen, plain_s)
        return decision

    def _decide(self, situation: Situation, draw: float) -> tuple[Decision, list[_View], float]:
        ruled = apply_rules(situation)
        model = self._model(available(situation)[0].lane.target)
        views, plain_s = self._views(model, situation, available(situation))
        if isinstance(ruled, Decision):
            return replace(ruled, candidates=_candidates(views, plain_s)), views, plain_s
        open_views = [v for v in views if v.status in ruled.lanes]
        chosen, rule, reason, propensity = self._pick(model, situation, open_views, plain_s, draw)
        if ruled.rule:
            rule, reason = ruled.rule, f"{ruled.reason}; of these, {reason}"
        candidates = _candidates(views, plain_s)
        lane = chosen.status.lane
        return Decision(lane, situation.workload, rule, reason, candidates, propensity), views, plain_s

    def _pick(
        self, model: TargetModel, situation: Situation, views: list[_View], plain_s: float, draw: float
    ) -> tuple[_View, str, str, float]:
        """One of the views, the rule that decided, the reason, and the probability of this choice."""
        plain = next((v for v in views if v.status.lane.strategy.is_plain), None)
        if plain is not None:
            if model.arm(plain.key, "plain").evidence < self.settings.plain_first:
                return plain, "plain_first", "plain is measured first, to compare the others with", 1.0
            retest = self._admit(model, situation, views, plain, plain_s)
            if retest is not None:
                return retest, "explore", f"{retest.name} lost here before and is due for a re-test", 1.0
        best = min(views, key=lambda v: v.offer.expected)
        admitted = [v for v in views if v.allowed]
        leader = min(admitted, key=lambda v: v.offer.expected)
        remaining = max(20.0, model.ledger(situation.workload).requests)
        kept = [v for v in admitted if v is leader or worth_exploring(v.offer, leader.offer, remaining)]
        chances = choice_probabilities([v.offer for v in kept])
        chosen, propensity = _drawn(kept, chances, draw)
        if chosen is not leader:
            return chosen, "explore", f"{_claim(chosen)}, which is worth finding out", propensity
        if chosen is plain and best is not plain:
            return (
                chosen,
                "gate",
                f"{best.name} may be faster, but its loss so far or its risk is too high",
                propensity,
            )
        if chosen is plain and all(not v.allowed for v in views if v is not plain):
            return chosen, "disabled", "every other lane has lost to plain here", propensity
        return chosen, "exploit", f"{_claim(chosen)}, the least of all lanes", propensity

    def _admit(
        self, model: TargetModel, situation: Situation, views: list[_View], plain: _View, plain_s: float
    ) -> _View | None:
        """Mark lanes that the gate or a proven loss rules out; returns a disabled lane that is due a test."""
        ledger = model.ledger(situation.workload)
        room = ledger.room(plain_s, self.settings.allowance_requests, self.settings.allowance_share)
        due = None
        for view in views:
            if view is plain:
                continue
            if math.log(view.ratio) > max(self.settings.proven * view.sd, 0.02) and view.belief.n >= 1.0:
                view.allowed, view.note = False, "disabled: it loses to plain here"
                if self._is_due(model, situation, view, ledger, plain_s) and view.loss_s <= room:
                    due = view
            elif view.loss_s > room:
                view.allowed, view.note = False, "held back by the gate"
        return due

    def _is_due(
        self, model: TargetModel, situation: Situation, view: _View, ledger: Ledger, plain_s: float
    ) -> bool:
        """Whether enough plain time has passed since the last test, and this request is cheap to test on."""
        last = model.tested.get(f"{situation.workload.key}|{view.key}", 0.0)
        passed = ledger.plain_s + ledger.pending_plain_s - last
        cheap = plain_s <= ledger.mean_plain_s(plain_s)
        return cheap and passed * self.settings.retest_share >= (view.ratio - 1.0) * plain_s

    # --- views -----------------------------------------------------------------------------------

    def _views(
        self, model: TargetModel, situation: Situation, lanes: Sequence[LaneStatus]
    ) -> tuple[list[_View], float]:
        """Every lane's beliefs and costs, and plain's expected decode seconds for this request."""
        workload = situation.workload
        for status in lanes:
            if status.lane.strategy.is_plain:
                model.note_plain(arm_key(status.lane.fingerprint, "plain"))
                break
        output = model.lengths.expect((workload.kind, workload.temperature.value), situation.max_tokens)
        context = situation.prompt_tokens + 0.5 * output
        level, _ = model.level.predict(features(context, situation.in_flight + 1.0))
        plain = model.plain_belief(workload)
        per_token = math.exp(level + plain.mean + plain.excess)
        plain_s = output * per_token
        views = [self._view(model, situation, status, plain, per_token, plain_s) for status in lanes]
        base = next((v for v in views if v.status.lane.strategy.is_plain), None)
        if base is not None:
            for view in views:
                if view is not base:
                    worst = plain_s * view.ratio * math.exp(self.settings.caution * view.sd)
                    view.loss_s = worst - plain_s + view.fixed_s - base.fixed_s
        return views, plain_s

    def _view(
        self,
        model: TargetModel,
        situation: Situation,
        status: LaneStatus,
        plain: Belief,
        per_token: float,
        plain_s: float,
    ) -> _View:
        lane = status.lane
        strategy = lane.strategy.name
        key = arm_key(lane.fingerprint, strategy)
        belief = model.belief(key, lane.id, strategy, situation.workload)
        mean = belief.mean + belief.excess - plain.mean - plain.excess
        uncached = situation.prompt_tokens - situation.prefix_hits.get(lane.id, 0)
        fixed = model.prefill.seconds(key, uncached, per_token) + self._wait(status, plain_s)
        if lane.control is Control.RELOAD and not status.resident:
            fixed += lane.load_s
        sd = 0.0 if key == model.plain else math.sqrt(belief.variance + plain.variance)
        return _View(status, key, belief, Offer(fixed / plain_s, mean, belief.sd), fixed, math.exp(mean), sd)

    def _wait(self, status: LaneStatus, plain_s: float) -> float:
        """Expected queueing, where the number of slots is known: requests ahead, each half done."""
        facts = self._facts.get(status.lane.id)
        if facts is None or facts.slots is None or status.in_flight < facts.slots:
            return 0.0
        return 0.5 * plain_s * (status.in_flight - facts.slots + 1) / facts.slots

    # --- learning --------------------------------------------------------------------------------

    def learn_one(self, observation: Observation) -> None:
        """Take in one observation. Only complete requests without a load teach; n-gram lanes learn nothing
        from a repeated prompt, which flatters them."""
        self._finish(observation)
        if observation.outcome is not Outcome.COMPLETE or not observation.target:
            return
        model = self._model(observation.target)
        workload = observation.workload
        if not observation.repeat:
            model.lengths.learn((workload.kind, workload.temperature.value), observation.output_tokens)
        if observation.load_s > 0.0:
            return
        key = arm_key(observation.fingerprint, observation.strategy)
        if observation.prefill_s is not None:
            uncached = observation.prompt_tokens - observation.cached_tokens
            model.prefill.learn(key, uncached, observation.prefill_s)
        if observation.time_per_token is None:
            return
        if not (observation.repeat and "ngram" in observation.strategy):
            model.learn_speed(observation)
        model.learn_ledger(observation, self.settings.credit_requests)

    def discount(self, fingerprint: str, factor: float) -> None:
        """Keep only this share (0 to 1) of the evidence on lanes with a fingerprint, after an alarm."""
        for model in self._targets.values():
            for key, arm in model.arms.items():
                if key.rpartition("/")[0] == fingerprint:
                    arm.discount(factor)

    def set_facts(self, lane_id: str, facts: LaneFacts) -> None:
        """Tell what is known about a lane beforehand; counts for cells that were not seen yet."""
        self._facts[lane_id] = facts

    # --- state -----------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """All state as JSON-serialisable data, without requests in flight."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "targets": {name: model.dump() for name, model in self._targets.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `dump` gave.

        Raises:
            ValueError: the data is not a learner's, is damaged, or is of a newer format.
        """
        if state.get("format") != _FORMAT:
            raise ValueError("not a learner's state")
        if int(state.get("version", 0)) > _VERSION:
            raise ValueError(f"learner state has version {state['version']}, newer than {_VERSION}")
        targets: dict[str, TargetModel] = {}
        try:
            for name, entry in state["targets"].items():
                targets[name] = self._new_model()
                targets[name].restore(entry)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"damaged learner state: {error!r}") from error
        self._targets = targets

    # --- inside ----------------------------------------------------------------------------------

    def _model(self, target: str) -> TargetModel:
        found = self._targets.get(target)
        if found is None:
            found = self._targets[target] = self._new_model()
        return found

    def _new_model(self) -> TargetModel:
        return TargetModel(self.settings.scales, self.settings.half_life, self._facts)

    def _start(self, situation: Situation, chosen: _View, plain_s: float) -> None:
        model = self._model(chosen.status.lane.target)
        cautious = 0.0 if chosen.key == model.plain else chosen.loss_s
        model.ledger(situation.workload).start(cautious, plain_s)
        pending = _Pending(chosen.status.lane.target, situation.workload.key, cautious, plain_s)
        self._pending[situation.request_id] = pending
        if len(self._pending) > _MOST_PENDING:
            self._forget(self._pending.pop(next(iter(self._pending))))

    def _finish(self, observation: Observation) -> None:
        pending = self._pending.pop(observation.request_id, None)
        if pending is not None:
            self._forget(pending)

    def _forget(self, pending: _Pending) -> None:
        ledger = self._model(pending.target).ledgers.get(pending.workload)
        if ledger is not None:
            ledger.drop(pending.cautious_s, pending.plain_s)


def _drawn(views: Sequence[_View], chances: Sequence[float], draw: float) -> tuple[_View, float]:
    """The view that a uniform draw in [0, 1) falls on, and its chance."""
    for view, chance in zip(views, chances, strict=True):
        if draw < chance:
            return view, chance
        draw -= chance
    top = max(range(len(views)), key=lambda i: chances[i])
    return views[top], chances[top]


def _candidates(views: Sequence[_View], plain_s: float) -> tuple[Candidate, ...]:
    found = []
    for view in views:
        reach = math.exp(_Z90 * view.sd)
        found.append(
            Candidate(
                view.status.lane.id,
                view.name,
                view.ratio,
                view.ratio / reach,
                view.ratio * reach,
                view.belief.n,
                view.fixed_s + plain_s * view.ratio,
                view.allowed,
                view.note,
            )
        )
    return tuple(found)


def _claim(view: _View) -> str:
    """What is expected of a lane, in words."""
    if view.status.lane.strategy.is_plain:
        return "plain is expected to be fastest"
    reach = math.exp(_Z90 * view.sd)
    return (
        f"{view.name} is expected to take {view.ratio:.2f} of plain's time per token "
        f"({view.ratio / reach:.2f} to {view.ratio * reach:.2f}, {view.belief.n:.0f} requests)"
    )
