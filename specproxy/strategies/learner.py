"""The learning policy: pick the lane with the least expected time, never lose to plain by more than agreed.

Every lane is priced (`pricing`) with the time per token from a hierarchical Gaussian belief about its
logarithm relative to plain (`target`, `posterior`, `level`), whose prior is the cost model (`cost`). Lanes
are admitted by the gate and by what is proven (`admission`). Of those admitted that are worth exploring, one
is drawn by Thompson sampling, in exact choice probabilities (`thompson`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specproxy.records import (
    Candidate,
    Control,
    Decision,
    Lane,
    LaneStatus,
    Observation,
    Outcome,
    Situation,
    TempBucket,
    Workload,
)
from specproxy.strategies.admission import admit, due_for_test, switch_saving
from specproxy.strategies.cost import LaneFacts
from specproxy.strategies.drift import DriftEvent, DriftMonitor
from specproxy.strategies.pricing import Pricing, View, price
from specproxy.strategies.replay import ReplayResult
from specproxy.strategies.rules import apply_rules, available
from specproxy.strategies.settings import LearnerSettings
from specproxy.strategies.speed import arm_key, cell_of
from specproxy.strategies.switching import Dwell
from specproxy.strategies.target import TargetModel
from specproxy.strategies.thompson import choice_probabilities, worth_exploring

__all__ = ["Learner", "LearnerSettings"]

_FORMAT = "specproxy-learner"
_VERSION = 3
_MOST_PENDING = 4096
_LEAST_REMAINING = 10.0
_Z90 = 1.6449  # intervals shown are 90%


@dataclass(frozen=True, slots=True)
class _Pending:
    """A request in flight: what it was expected to cost, to be corrected when it reports."""

    target: str
    workload: str
    lane: str
    cautious_s: float
    plain_s: float
    plain_fixed_s: float
    prefix_hits: int


@dataclass(frozen=True, slots=True)
class _Choice:
    """What `_pick` found."""

    view: View
    rule: str
    reason: str
    propensity: float = 1.0


class Learner:
    """Policy that learns which lane is fastest for each workload. See the module's docstring.

    Args:
        settings: what the user may set.
        facts: what is known about lanes beforehand, by lane id; `set_facts` adds to it.
    """

    name = "learner"

    def __init__(
        self, settings: LearnerSettings | None = None, facts: Mapping[str, LaneFacts] | None = None
    ) -> None:
        self.settings = settings or LearnerSettings()
        self.drift = DriftMonitor()
        self._facts: dict[str, LaneFacts] = dict(facts or {})
        self._targets: dict[str, TargetModel] = {}
        self._pending: dict[str, _Pending] = {}
        self._dwells: dict[str, Dwell] = {}
        self._events: deque[DriftEvent] = deque(maxlen=100)

    # --- choosing --------------------------------------------------------------------------------

    def choose(self, situation: Situation, rng: np.random.Generator) -> Decision:
        """Choose a ready lane; a situation with a request id is remembered until its observation comes.

        Raises:
            LaneUnavailable: no lane is ready, or none has the pinned strategy.
        """
        decision, pricing = self.decide(situation, float(rng.random()))
        if situation.request_id:
            self._start(situation, pricing, decision)
        return decision

    def decide(self, situation: Situation, draw: float) -> tuple[Decision, Pricing]:
        """What `choose` does with a uniform draw in [0, 1), with the prices it saw; changes no statistics.

        Raises:
            LaneUnavailable: no lane is ready, or none has the pinned strategy.
        """
        ruled = apply_rules(situation)
        lanes = available(situation)
        model = self.model(lanes[0].lane.target)
        pricing = price(model, situation, lanes, self._facts, self.settings.caution)
        if isinstance(ruled, Decision):
            pricing.by_lane[ruled.lane.id].chance = 1.0
            return replace(ruled, candidates=_candidates(pricing)), pricing
        if len(ruled.lanes) < len(lanes):
            kept = [pricing.by_lane[s.lane.id] for s in ruled.lanes]
            pricing = replace(pricing, views=kept, plain=pricing.plain if pricing.plain in kept else None)
        choice = self._pick(model, situation, pricing, draw)
        rule, reason = choice.rule, choice.reason
        if ruled.rule:
            rule, reason = ruled.rule, f"{ruled.reason}; of these, {reason}"
        lane = choice.view.status.lane
        return Decision(
            lane, situation.workload, rule, reason, _candidates(pricing), choice.propensity
        ), pricing

    def idle_switch(self, lanes: Sequence[LaneStatus], at: float) -> Lane | None:
        """The lane to load while nothing is going on, or None; then the load itself costs nobody time.

        `lanes` are all lanes of one target. A lane is worth it if the traffic of late would have gained by it
        more than half the load's time, which a wrong guess would cost to undo.
        """
        model = self.model(lanes[0].lane.target) if lanes else None
        if model is None or not model.traffic.last:
            return None
        kind, _, temperature = model.traffic.last.partition("/")
        situation = Situation(Workload(kind, TempBucket(temperature)), tuple(lanes), at)
        pricing = price(model, situation, lanes, self._facts, self.settings.caution)
        resident = next(
            (v for v in pricing.views if v.status.lane.control is Control.RELOAD and not v.load_s), None
        )
        if resident is None:
            return None
        same = [v for v in pricing.views if v.load_s and v.status.lane.backend == resident.status.lane.backend]
        gains = [(switch_saving(model, situation, resident, v, self.settings), v) for v in same]
        gain, best = max(gains, key=lambda pair: pair[0], default=(0.0, resident))
        return best.status.lane if gain > 0.5 * best.load_s and best is not resident else None

    def _pick(self, model: TargetModel, situation: Situation, pricing: Pricing, draw: float) -> _Choice:
        plain = pricing.plain
        if plain is not None and self._needs_plain(model, plain):
            plain.chance = 1.0
            when = "again after a change" if model.speed.plain_checks else "first"
            return _Choice(plain, "plain_first", f"plain is measured {when}, to compare the others with")
        admit(model, situation, pricing, self.settings, self._dwells)
        admitted = [v for v in pricing.views if v.allowed]
        leader = min(admitted, key=lambda v: v.offer.expected)
        tested = due_for_test(model, situation, pricing, self.settings, leader)
        if tested is not None:
            tested.chance = 1.0
            return _Choice(tested, "explore", f"{tested.name} is out of use here and due for a test")
        ledger = model.ledger(situation.workload)
        usual = ledger.mean_plain_s(pricing.request_s) / pricing.request_s
        remaining = usual * max(_LEAST_REMAINING, ledger.requests)
        kept = [v for v in admitted if v is leader or worth_exploring(v.offer, leader.offer, remaining)]
        for view, chance in zip(kept, choice_probabilities([v.offer for v in kept]), strict=True):
            view.chance = chance
        chosen = _drawn(kept, draw)
        rule, reason = _why(pricing, chosen, leader)
        return _Choice(chosen, rule, reason, chosen.chance)

    def _needs_plain(self, model: TargetModel, plain: View) -> bool:
        """Whether plain has to be measured before anything else; not where that takes a load."""
        if plain.load_s:
            return False
        return (
            model.speed.plain_checks > 0
            or model.speed.arm(plain.key, "plain").evidence < 0.9 * self.settings.plain_first
        )

    # --- learning --------------------------------------------------------------------------------

    def learn_one(self, observation: Observation) -> None:
        """Take in one observation. Only complete requests without a load teach about speed; n-gram lanes learn
        nothing from a repeated prompt, which flatters them."""
        pending = self._finish(observation)
        if observation.outcome is not Outcome.COMPLETE or not observation.target:
            return
        model = self.model(observation.target)
        key = arm_key(observation.fingerprint, observation.strategy)
        if not observation.repeat:
            model.lengths.learn(cell_of(observation.workload), observation.output_tokens)
        if observation.prefill_s is not None and not observation.load_s:
            uncached = observation.prompt_tokens - observation.cached_tokens
            model.prefill.learn(key, uncached, observation.prefill_s)
            if pending is not None and pending.lane == observation.lane:
                model.prefill.learn_hits(key, pending.prefix_hits, observation.cached_tokens)
        if observation.time_per_token is None:
            return
        flattered = observation.repeat and "ngram" in observation.strategy
        outlier = False
        if not flattered and not observation.load_s:
            log_ratio, outlier = model.speed.learn(observation)
            if log_ratio is not None:
                self._watch(model, observation, log_ratio)
        self._book(model, observation, pending, outlier=outlier)

    def learn_replay(
        self, lane: Lane, observation: Observation, result: ReplayResult, weight: float = 1.0
    ) -> None:
        """Take in what a lane's n-gram drafter would have done on a finished request, on whatever lane it ran.

        To be called after `learn_one`. If the request ran on that very lane, the replay teaches what the
        lane's steps really cost instead. `weight` (0 to 1] says how far the replay is to be trusted, below 1
        if its token ids are approximate.
        """
        if observation.outcome is not Outcome.COMPLETE or observation.repeat or result.tokens < 2:
            return
        model = self.model(observation.target)
        if arm_key(lane.fingerprint, lane.strategy.name) == arm_key(
            observation.fingerprint, observation.strategy
        ):
            if not observation.load_s:
                model.speed.calibrate_replay(lane, observation, result)
        else:
            model.speed.learn_replay(lane, observation.workload, result, weight)

    def discount(self, fingerprint: str, factor: float, kind: str | None = None) -> None:
        """Keep only this share (0 to 1) of the evidence on lanes with a fingerprint, of one kind or of all."""
        for model in self._targets.values():
            model.speed.discount(fingerprint, factor, kind)

    def take_events(self) -> list[DriftEvent]:
        """Changes noticed since the last call, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events

    def set_facts(self, lane_id: str, facts: LaneFacts) -> None:
        """Tell what is known about a lane beforehand; counts for cells that were not seen yet."""
        self._facts[lane_id] = facts
        for model in self._targets.values():
            model.speed.forget_priors()

    def _watch(self, model: TargetModel, seen: Observation, log_ratio: float) -> None:
        """Pass time and acceptance to the drift monitor; an alarm makes the lane start over."""
        arm = arm_key(seen.fingerprint, seen.strategy)
        kind, label = seen.workload.kind, seen.lane
        tokens = float(seen.output_tokens)
        found = self.drift.learn_one(arm, kind, "time", log_ratio, tokens, seen.at, label)
        acceptance = seen.acceptance
        if acceptance is not None and found is None:
            drafted = float(seen.draft_tokens)
            found = self.drift.learn_one(arm, kind, "acceptance", acceptance, drafted, seen.at, label)
        if found is not None:
            self._events.append(found)
            model.speed.start_over(arm, None if found.whole_lane else found.kind, found.n)

    def _book(self, model: TargetModel, seen: Observation, pending: _Pending | None, *, outlier: bool) -> None:
        """Enter into the ledger what a request lost against plain."""
        if seen.decode_s is None:
            return
        key = arm_key(seen.fingerprint, seen.strategy)
        ledger = model.ledger(seen.workload)
        plain_decode_s = model.speed.plain_decode_s(seen)
        prefill_s = seen.prefill_s or 0.0
        took = seen.decode_s + prefill_s + seen.load_s
        if seen.strategy == "plain":
            ledger.finish(0.0, seen.decode_s + prefill_s, self.settings.credit_requests)
        else:
            plain_fixed = prefill_s if pending is None else min(pending.plain_fixed_s, prefill_s + seen.load_s)
            plain_s = plain_decode_s + plain_fixed
            loss = ledger.sift(key, took - plain_s, plain_s, outlier=outlier)
            ledger.finish(loss, plain_s, self.settings.credit_requests)
        model.tested[seen.workload.key, key] = ledger.plain_s

    # --- state -----------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """All state as JSON-serialisable data, without requests in flight."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "targets": {name: model.dump() for name, model in self._targets.items()},
            "drift": self.drift.dump(),
            "dwells": {backend: [dwell.at, dwell.requests] for backend, dwell in self._dwells.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `dump` gave.

        Raises:
            ValueError: the data is not a learner's, is damaged, or is of another format version.
        """
        if state.get("format") != _FORMAT:
            raise ValueError("not a learner's state")
        if state.get("version") != _VERSION:
            raise ValueError(f"learner state has version {state.get('version')}, this one reads {_VERSION}")
        targets: dict[str, TargetModel] = {}
        drift = DriftMonitor()
        try:
            for name, entry in state["targets"].items():
                targets[name] = self._new_model()
                targets[name].restore(entry)
            drift.load(state["drift"])
            dwells = {str(k): Dwell(*(float(v) for v in entry)) for k, entry in state["dwells"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"damaged learner state: {error!r}") from error
        self._targets, self.drift, self._dwells = targets, drift, dwells

    def model(self, target: str) -> TargetModel:
        """Learned state of a target, created on first use."""
        found = self._targets.get(target)
        if found is None:
            found = self._targets[target] = self._new_model()
        return found

    # --- inside ----------------------------------------------------------------------------------

    def _new_model(self) -> TargetModel:
        return TargetModel.new(self.settings, self._facts)

    def _start(self, situation: Situation, pricing: Pricing, decision: Decision) -> None:
        """Remember a request that is now under way."""
        lane = decision.lane
        view = pricing.by_lane[lane.id]
        model = self.model(lane.target)
        model.traffic.note(situation.workload.key)
        if lane.control is Control.RELOAD:
            if view.load_s:
                self._dwells[lane.backend] = Dwell(situation.at)
            elif lane.backend in self._dwells:
                self._dwells[lane.backend].requests += 1.0
        fixed_s = pricing.plain.fixed_s if pricing.plain is not None else view.fixed_s
        hits = situation.prefix_hits.get(lane.id, 0)
        pending = _Pending(
            lane.target, situation.workload.key, lane.id, view.loss_s, pricing.request_s, fixed_s, hits
        )
        model.ledger(situation.workload).start(view.loss_s, pricing.request_s)
        self._pending[situation.request_id] = pending
        if len(self._pending) > _MOST_PENDING:
            self._forget(self._pending.pop(next(iter(self._pending))))

    def _finish(self, observation: Observation) -> _Pending | None:
        pending = self._pending.pop(observation.request_id, None)
        if pending is not None:
            self._forget(pending)
        return pending

    def _forget(self, pending: _Pending) -> None:
        ledger = self.model(pending.target).ledgers.get(pending.workload)
        if ledger is not None:
            ledger.drop(pending.cautious_s, pending.plain_s)


def _why(pricing: Pricing, chosen: View, leader: View) -> tuple[str, str]:
    """Name of the branch that decided, and the reason in a sentence."""
    if chosen is not leader:
        return "explore", f"{_claim(chosen)}, which is worth finding out"
    if chosen is pricing.plain:
        best = min(pricing.views, key=lambda v: v.offer.expected)
        if best is not chosen:
            return "gate", f"{best.name} may be faster, but: {best.note}"
        if all(not v.allowed for v in pricing.views if v is not chosen):
            return "disabled", "every other lane loses to plain on this workload"
    return "exploit", f"{_claim(chosen)}, the least of all lanes"


def _claim(view: View) -> str:
    """What is expected of a lane, in words."""
    if view.is_plain:
        return "plain is expected to be fastest"
    reach = math.exp(_Z90 * view.sd)
    evidence = f"{view.belief.n:.0f} requests"
    if view.belief.replayed >= 0.5:
        evidence += f" and {view.belief.replayed:.0f} replays"
    return (
        f"{view.name} is expected to take {view.ratio:.2f} of plain's time per token "
        f"({view.ratio / reach:.2f} to {view.ratio * reach:.2f}, {evidence})"
    )


def _drawn(views: Sequence[View], draw: float) -> View:
    """The view that a uniform draw in [0, 1) falls on."""
    for view in views:
        if draw < view.chance:
            return view
        draw -= view.chance
    return max(views, key=lambda v: v.chance)


def _candidates(pricing: Pricing) -> tuple[Candidate, ...]:
    """All lanes that were priced, for the decision's record."""
    found = []
    for view in pricing.by_lane.values():
        reach = math.exp(_Z90 * view.sd)
        found.append(
            Candidate(
                view.status.lane.id,
                view.name,
                view.ratio,
                view.ratio / reach,
                view.ratio * reach,
                view.belief.n,
                view.expected_s,
                view.allowed,
                view.note,
            )
        )
    return tuple(found)
