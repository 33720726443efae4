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
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from specproxy.records import (
    Control,
    Decision,
    Lane,
    LaneStatus,
    Observation,
    Outcome,
    Situation,
)
from specproxy.strategies.admission import admit, due_for_test
from specproxy.strategies.bounds import MOST, amount, between
from specproxy.strategies.changes import Change
from specproxy.strategies.cost import LaneFacts
from specproxy.strategies.drift import DriftEvent, DriftMonitor
from specproxy.strategies.explain import Candidates, reason
from specproxy.strategies.gate import Account
from specproxy.strategies.pricing import Pricing, View, price
from specproxy.strategies.recovery import Recovery, Settled, excess
from specproxy.strategies.replay import ReplayResult
from specproxy.strategies.residency import foresee, note_lanes, plan_load
from specproxy.strategies.rules import apply_rules, available
from specproxy.strategies.settings import LearnerSettings
from specproxy.strategies.speed import arm_key, arm_of, cell_of
from specproxy.strategies.switching import Dwell
from specproxy.strategies.target import ANY, TargetModel
from specproxy.strategies.thompson import choice_probabilities, drawn, worth_exploring

__all__ = ["Learner", "LearnerSettings"]

_FORMAT = "specproxy-learner"
_VERSION = 5
_MOST_PENDING = 4096
_LEAST_REMAINING = 4.0  # requests still to come of a workload; of one that came more often, as many again
_CHOSEN = frozenset({"plain_first", "explore", "exploit", "gate", "disabled", "reload"})  # no rule before it
_expected = attrgetter("expected")


class _Pending(NamedTuple):
    """A request in flight: what it was expected to cost, to be corrected when it reports.

    `beside` counts the requests on plain's host, where that is not what the lane's host has to do. `checks`
    says that it measures plain.
    """

    target: str
    workload: str
    lane: str
    cautious_s: float
    plain_s: float
    plain_fixed_s: float
    prefix_hits: int
    beside: int | None
    checks: bool


class _Choice(NamedTuple):
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
        self._events: deque[DriftEvent | Change | Settled] = deque(maxlen=100)

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
        lanes = available(situation)
        ruled = apply_rules(situation, lanes)
        model = self.model(lanes[0].lane.target)
        pricing = price(model, situation, lanes, self._facts, self.settings.caution)
        if pricing.reloads or model.movable:
            note_lanes(model, lanes)
        if isinstance(ruled, Decision):
            pricing.of(ruled.lane).chance = 1.0
            return replace(ruled, candidates=Candidates(pricing)), pricing
        if len(ruled.lanes) < len(lanes):
            kept = [pricing.of(status.lane) for status in ruled.lanes]
            pricing = replace(pricing, views=kept, plain=pricing.plain if pricing.plain in kept else None)
        choice = self._pick(model, situation, pricing, draw)
        rule, why = choice.rule, choice.reason
        if ruled.rule:
            rule, why = ruled.rule, f"{ruled.reason}; of these, {why}"
        lane, workload = choice.view.status.lane, situation.workload
        return Decision(lane, workload, rule, why, Candidates(pricing), choice.propensity), pricing

    def idle_switch(self, lanes: Sequence[LaneStatus], at: float) -> Lane | None:
        """The lane to load while nothing is going on, or None; then the load itself costs nobody time.

        `lanes` are all ready lanes of one target, `at` is now. `loaded` is to be told when it was done. A lane
        is worth it if the traffic to come would gain by it more than half the load's time, which a wrong guess
        would cost to undo.
        """
        model = self.model(lanes[0].lane.target) if lanes else None
        if model is None or not model.traffic.last:
            return None
        note_lanes(model, tuple(lanes))
        foresee(model, self.settings)
        worth = model.worth
        best: tuple[float, Lane] | None = None
        for backend, group in model.movable.items():
            resident = next((s.lane for s in lanes if s.resident and s.lane in group), None)
            dwell = self._dwells.get(backend)
            if resident is None:
                continue
            if dwell is not None and 0.0 <= at - dwell.at < self.settings.dwell_loads * resident.load_s:
                continue
            for lane in group:
                gain = worth[resident.id] - worth[lane.id]
                if gain > 0.5 * lane.load_s and (best is None or gain > best[0]):
                    best = gain, lane
        return best[1] if best is not None else None

    def loaded(self, lane: Lane, at: float) -> None:
        """A lane was brought into memory without a request: it stays for a while, as after any load."""
        self._dwells[lane.backend] = Dwell(at)

    def _pick(self, model: TargetModel, situation: Situation, pricing: Pricing, draw: float) -> _Choice:
        plain, settings = pricing.plain, self.settings
        if plain is not None and self._needs_plain(model, plain):
            plain.chance = 1.0
            when = "again after a change" if model.speed.plain_checks else "first"
            return _Choice(plain, "plain_first", f"plain is measured {when}, to compare the others with")
        if pricing.reloads:
            loaded = self._pick_load(model, situation, pricing)
            if loaded is not None:
                return loaded
        ledger, request_s, room = model.ledger(pricing.workload), pricing.request_s, math.inf
        if plain is not None:
            room = ledger.room(request_s, settings.allowance_requests, settings.allowance_share)
        admitted = admit(pricing, ledger, room, settings)
        leader = min(admitted, key=_expected)
        tested = due_for_test(model, pricing, ledger, room, settings, leader)
        if tested is not None:
            tested.chance = 1.0
            return _Choice(tested, "explore", f"{tested.name} is out of use here and due for a test")
        usual = ledger.mean_plain_s(request_s) / request_s
        remaining = usual * max(_LEAST_REMAINING, ledger.requests)
        kept = [v for v in admitted if v is leader or worth_exploring(v, leader, remaining)]
        for view, chance in zip(kept, choice_probabilities(kept), strict=True):
            view.chance = chance
        chosen = drawn(kept, draw)
        rule, why = reason(pricing, chosen, leader)
        return _Choice(chosen, rule, why, chosen.chance)

    def _pick_load(self, model: TargetModel, situation: Situation, pricing: Pricing) -> _Choice | None:
        """A lane that is loaded for this request: plain where nothing is in memory, else where it pays."""
        plain = pricing.plain
        if plain is not None and all(view.load_s for view in pricing.views):
            plain.chance = 1.0
            return _Choice(plain, "plain_first", "nothing is in memory, so plain is loaded")
        load = plan_load(model, situation, pricing, self.settings, self._dwells)
        if load is None:
            return None
        load.view.chance = 1.0
        if load.trial:
            cost = f"a load of {load.view.load_s:.1f} s"
            return _Choice(
                load.view, "explore", f"{load.view.name} is out of use and due for a test, by {cost}"
            )
        gain = f"a load takes {load.view.load_s:.1f} s and is expected to save {load.saving_s:.1f} s"
        return _Choice(load.view, "reload", f"{gain} by {load.view.name} on this and coming requests")

    def _needs_plain(self, model: TargetModel, plain: View) -> bool:
        """Whether plain has to be measured before anything else; not where that takes a load.

        After a change no more than it takes: requests that are on their way to measure it count.
        """
        if plain.load_s:
            return False
        if plain.slot.arm.evidence < 0.9 * self.settings.plain_first:
            return True
        checks, target = model.speed.plain_checks, plain.status.lane.target
        return checks > 0 and checks > sum([p.checks for p in self._pending.values() if p.target == target])

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
            self._age(model, observation, key)
            sample = model.speed.learn(observation)
            outlier = sample.outlier
            if sample.log_ratio is not None:
                self._watch(model, observation, sample.log_ratio, sample.variance)
            self._watch_plain(model, observation, sample.variance)
        self._book(model, observation, pending, outlier=outlier)
        foresee(model, self.settings)
        model.speed.warm()

    def learn_replay(
        self, lane: Lane, observation: Observation, result: ReplayResult, source: str = "ids"
    ) -> None:
        """Take in what a lane's n-gram drafter would have done on a finished request, on whatever lane it ran.

        To be called after `learn_one`. If the request ran on that very lane, the replay teaches what the
        lane's steps really cost instead. `source` is ``ids`` for the tokens that were emitted, else one of
        `approx.REPLAY_SOURCES`: how these compare with the truth is learned from what the lane counted.
        """
        if observation.outcome is not Outcome.COMPLETE or observation.repeat or result.tokens < 2:
            return
        model = self.model(observation.target)
        key = arm_of(lane)
        fit = model.fit(key, source)
        if key == arm_key(observation.fingerprint, observation.strategy):
            counted = observation.tokens_per_step
            if fit is not None and counted is not None:
                fit.learn_one(-math.log(counted), -math.log(result.tokens_per_step))
            if not observation.load_s:
                model.speed.calibrate_replay(lane, observation, result, fit)
        else:
            model.speed.learn_replay(lane, observation.workload, result, fit)
        model.speed.warm()

    def discount(self, fingerprint: str, factor: float, kind: str | None = None) -> None:
        """Keep only this share (0 to 1) of the evidence on lanes with a fingerprint, of one kind or of all."""
        for model in self._targets.values():
            model.speed.discount(fingerprint, factor, kind)

    def take_events(self) -> list[DriftEvent | Change | Settled]:
        """Changes noticed since the last call, and choices that have settled after one, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """By target: requests since plain was measured, and the gain in time over it until then (see
        `curve.Curve.gains`)."""
        return {name: model.curve.gains() for name, model in self._targets.items()}

    def accounts(self) -> list[Account]:
        """How every workload stands with the gate, in the order in which they came."""
        chosen = self.settings
        return [
            Account(name, key, a.loss, a.allowed(chosen.allowance_requests, chosen.allowance_share), a.plain_s)
            for name, model in self._targets.items()
            for key, a in model.ledgers.items()
        ]

    def recoveries(self) -> dict[str, list[Recovery]]:
        """By target: the latest changes, oldest first, and how long it took until the choice had settled."""
        return {name: model.recoveries.rows() for name, model in self._targets.items()}

    def set_facts(self, lane_id: str, facts: LaneFacts) -> None:
        """Tell what is known about a lane beforehand; counts for cells that were not seen yet."""
        self._facts[lane_id] = facts
        for model in self._targets.values():
            model.speed.forget_priors()

    def _age(self, model: TargetModel, seen: Observation, key: str) -> None:
        """Make what a lane showed long ago as old as it is, now that there is something newer to believe."""
        ledger = model.ledger(seen.workload.key)
        before = model.tested.get((seen.workload.key, key))
        if before is None or seen.strategy == "plain" or not ledger.plain_s:
            return
        since = (ledger.plain_s - before.plain_s) / ledger.plain_s * ledger.requests - 1.0
        if since >= 1.0:
            model.speed.arm(key, seen.strategy).age(cell_of(seen.workload), since)

    def _watch(self, model: TargetModel, seen: Observation, log_ratio: float, variance: float) -> None:
        """Pass time and acceptance to the drift monitor; an alarm makes the lane start over."""
        arm = arm_key(seen.fingerprint, seen.strategy)
        if (change := model.speed.changes.hear_lane(seen, arm, log_ratio, variance)) is not None:
            self._notice(model, change)
        kind, label = seen.workload.kind, seen.lane
        tokens = float(seen.output_tokens)
        found = self.drift.learn_one(arm, kind, "time", log_ratio, tokens, seen.at, label)
        acceptance = seen.acceptance
        if acceptance is not None and found is None:
            drafted = float(seen.draft_tokens)
            found = self.drift.learn_one(arm, kind, "acceptance", acceptance, drafted, seen.at, label)
        if found is not None:
            self._notice(model, found)
            model.speed.start_over(arm, None if found.whole_lane else found.kind, found.n)

    def _watch_plain(self, model: TargetModel, seen: Observation, variance: float) -> None:
        """Tell when plain takes longer or less long than it used to: no lane's ratio to it shows that."""
        speed, level, measured = model.speed, model.speed.level.mean[0], None
        if seen.strategy == "plain" and seen.decode_s:
            measured = level + math.log(seen.decode_s / speed.plain_decode_s(seen))
        change = speed.changes.hear_level(seen, speed.plain, level, measured, variance)
        if change is not None:
            self._notice(model, change)

    def _notice(self, model: TargetModel, change: DriftEvent | Change) -> None:
        self._events.append(change)
        model.recoveries.begin(change)

    def _book(self, model: TargetModel, seen: Observation, pending: _Pending | None, *, outlier: bool) -> None:
        """Enter into the ledger what a request lost against plain."""
        if seen.decode_s is None:
            return
        key, credit = arm_key(seen.fingerprint, seen.strategy), self.settings.credit_requests
        workload = seen.workload.key
        ledger = model.ledger(workload)
        prefill_s = seen.prefill_s or 0.0
        loss, plain_s = 0.0, seen.decode_s + prefill_s
        if seen.strategy != "plain":
            plain_fixed = prefill_s if pending is None else min(pending.plain_fixed_s, prefill_s)
            plain_s = model.speed.plain_decode_s(seen, pending and pending.beside) + plain_fixed
            loss = ledger.sift(key, seen.decode_s + prefill_s - plain_s, plain_s, outlier=outlier)
        ledger.finish(loss, plain_s, credit)
        model.pool.finish(loss + seen.load_s, plain_s, credit * len(model.ledgers))
        if model.speed.knows_plain:  # else what plain would have taken is a guess, and so would be the gain
            model.curve.note(seen.decode_s + prefill_s + seen.load_s, plain_s)
        model.note_run(workload, key, ledger.plain_s, lost=loss > 0.0)

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
            dwells = {
                str(k): Dwell(between(at, -MOST, MOST), amount(n)) for k, (at, n) in state["dwells"].items()
            }
        except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
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
        lane, workload = decision.lane, pricing.workload
        view = pricing.of(lane)
        model = self.model(lane.target)
        model.traffic.note(workload)
        if model.recoveries.under_way and decision.rule in _CHOSEN:
            cost = excess(pricing.views)
            self._events.extend(model.recoveries.note(situation.workload.kind, cost, situation.at))
        if lane.control is Control.RELOAD:
            if view.load_s:
                self._dwells[lane.backend] = Dwell(situation.at)
                model.note_run(ANY, view.key, model.pool.plain_s, lost=True)
            elif lane.backend in self._dwells:
                self._dwells[lane.backend].requests += 1.0
        beside = pricing.plain or view
        hits = situation.prefix_hits.get(lane.id, 0) if situation.prefix_hits else 0
        loss_s, plain_s, fixed_s = view.loss_s, pricing.request_s, beside.wait_s + beside.prefill_s
        model.ledger(workload).start(loss_s, plain_s)
        there = situation.elsewhere.get(lane.id, situation.in_flight)
        self._pending[situation.request_id] = _Pending(
            lane.target, workload, lane.id, loss_s, plain_s, fixed_s, hits,
            beside=None if there == pricing.beside else pricing.beside,
            checks=decision.rule == "plain_first",
        )  # fmt: skip
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
