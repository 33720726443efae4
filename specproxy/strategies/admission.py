"""Which lanes may be drawn: the gate, proven losses and their re-tests, reloads, and engines that explore.

Each check looks at one lane of a priced situation and either admits it or says why not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specproxy.records import Control, Situation
from specproxy.strategies.gate import Ledger
from specproxy.strategies.level import features
from specproxy.strategies.pricing import Pricing, View, token_ratio
from specproxy.strategies.settings import LearnerSettings
from specproxy.strategies.switching import Dwell, switch_gain
from specproxy.strategies.target import TargetModel

__all__ = ["admit", "due_for_test", "switch_saving"]

_CLEAR_LOSS = 0.02  # a lane within two percent of plain is not worth the word "loses"


@dataclass(frozen=True, slots=True)
class _Case:
    """What the checks look at."""

    model: TargetModel
    situation: Situation
    pricing: Pricing
    settings: LearnerSettings
    ledger: Ledger
    dwells: dict[str, Dwell]


def admit(
    model: TargetModel,
    situation: Situation,
    pricing: Pricing,
    settings: LearnerSettings,
    dwells: dict[str, Dwell],
) -> None:
    """Set `allowed` and `note` of every view but plain's. Without a plain lane only reloads are checked."""
    case = _Case(model, situation, pricing, settings, model.ledger(situation.workload), dwells)
    room = math.inf
    if pricing.plain is not None:
        room = case.ledger.room(pricing.request_s, settings.allowance_requests, settings.allowance_share)
    for view in pricing.views:
        why_not = _reload_check(case, view)
        if view is not pricing.plain and not why_not:
            why_not = _loss_check(case, view) or _engine_check(case, view)
            if not why_not and view.loss_s > room:
                why_not = "held back by the gate"
        view.allowed, view.note = not why_not, why_not
    if not any(view.allowed for view in pricing.views):  # every lane needs a reload that doesn't pay: so be it
        for view in pricing.views:
            view.allowed = True


def due_for_test(
    model: TargetModel, situation: Situation, pricing: Pricing, settings: LearnerSettings, leader: View
) -> View | None:
    """A lane that is out of use on this workload and should be tried again, on this request; None mostly.

    Tests of all lanes together may cost `retest_share` of plain's time, and are made on requests that are
    expected to be no longer than usual. Plain is tested as well: it is what all others are held against.
    """
    ledger = model.ledger(situation.workload)
    if pricing.request_s > ledger.mean_plain_s(pricing.request_s):
        return None
    room = ledger.room(pricing.request_s, settings.allowance_requests, settings.allowance_share)
    now = ledger.plain_s + ledger.pending_plain_s
    share = settings.retest_share / max(len(pricing.views) - 1, 1)
    for view in pricing.views:
        cost = view.expected_s - leader.expected_s
        if view is leader or cost <= 0.0 or view.load_s > 0.0:
            continue
        passed = now - model.tested.get((situation.workload.key, view.key), 0.0)
        affordable = view is pricing.plain or view.loss_s <= room
        if passed * share >= cost and affordable:
            return view
    return None


def _loss_check(case: _Case, view: View) -> str:
    """Lanes that were tried on this workload and lose for sure are disabled."""
    if case.pricing.plain is None or view.belief.n + view.belief.replayed < 1.0:
        return ""
    if math.log(view.ratio) > max(case.settings.proven * view.sd, _CLEAR_LOSS):
        return "disabled: it loses to plain on this workload"
    return ""


def _engine_check(case: _Case, view: View) -> str:
    """Beside an engine that chooses by itself at every step, its fixed strategies have to be clearly better."""
    lane = view.status.lane
    if lane.control is not Control.REQUEST or lane.strategy.name == "auto":
        return ""
    for other in case.pricing.views:
        if other.status.lane.backend == lane.backend and other.name == "auto":
            edge = math.log(other.ratio / view.ratio)
            if edge < case.settings.caution * math.hypot(view.sd, other.sd):
                return "left to the engine's own choice (auto)"
    return ""


def _reload_check(case: _Case, view: View) -> str:
    """A lane that would have to be loaded is admitted if that pays over what is coming."""
    if view.load_s <= 0.0:
        return ""
    backend = view.status.lane.backend
    others = (v for v in case.pricing.views if v.status.lane.backend == backend and v.status.resident)
    resident = next(others, None)
    if resident is None:
        return ""
    dwell = case.dwells.get(backend)
    if dwell is not None:
        young = case.situation.at - dwell.at < case.settings.dwell_loads * view.load_s
        if young or dwell.requests < case.settings.dwell_requests:
            return "another lane was loaded a short while ago"
    gain = switch_saving(case.model, case.situation, resident, view, case.settings)
    if gain <= case.settings.hysteresis * view.load_s:
        return f"a reload takes {view.load_s:.1f} s and would save {max(gain, 0.0):.1f} s"
    return ""


def switch_saving(
    model: TargetModel, situation: Situation, resident: View, other: View, settings: LearnerSettings
) -> float:
    """Seconds saved on this and the coming requests if `other` were in memory instead of `resident`."""
    level = model.speed.level.expect(features(0.0, 1.0))

    def saving(workload: str) -> float:
        kind, _, temperature = workload.partition("/")
        cell = (kind, temperature)
        plain = model.speed.plain_belief(cell)
        ratios = [token_ratio(model.speed.belief(view.status.lane, cell), plain) for view in (resident, other)]
        per_token = math.exp(level + plain.mean + plain.excess)
        return per_token * model.lengths.expect(cell, None) * (ratios[0] - ratios[1])

    return switch_gain(
        model.traffic,
        situation.workload.key,
        saving,
        load_back_s=resident.status.lane.load_s,
        dwell=settings.dwell_requests,
    )
