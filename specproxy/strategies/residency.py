"""Which lane to have in memory, where lanes displace each other.

A load is decided on before a lane is drawn: by what the rest of this run of requests would take on each lane,
and what comes after it (`switching`). Lanes that are little known are looked at with optimism, or none would
ever be loaded for the first time; what loads cost is bounded by an account of all workloads together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specproxy.records import Control, LaneStatus, Situation
from specproxy.strategies.level import features
from specproxy.strategies.pricing import Pricing, View, token_ratio
from specproxy.strategies.settings import LearnerSettings
from specproxy.strategies.switching import Dwell, future_costs
from specproxy.strategies.target import ANY, NEVER, TargetModel

__all__ = ["Load", "foresee", "note_lanes", "plan_load"]

_SWEEPS = 2
_REACH = 1.6449  # standard deviations: 90% intervals
_RESTING = "another lane was loaded a short while ago"


@dataclass(frozen=True, slots=True)
class Load:
    """A lane that is to be loaded now, and the seconds that this is expected to save.

    `trial` says that it is expected to save none, but may, and has been out of use for long.
    """

    view: View
    saving_s: float
    trial: bool = False


def note_lanes(model: TargetModel, lanes: tuple[LaneStatus, ...]) -> None:
    """Remember which lanes displace each other."""
    groups: dict[str, list[LaneStatus]] = {}
    for status in lanes:
        if status.lane.control is Control.RELOAD:
            groups.setdefault(status.lane.backend, []).append(status)
    model.movable = {name: tuple(s.lane for s in group) for name, group in groups.items()}
    model.fixed = tuple(s.lane for s in lanes if s.lane.control is not Control.RELOAD)


def foresee(model: TargetModel, settings: LearnerSettings) -> None:
    """Work on what it is worth to have each lane in memory; a little after every request."""
    speed, traffic = model.speed, model.traffic
    if not model.movable:
        return
    level = speed.level.expect(features(0.0, 1.0))
    runs = traffic.runs()
    for lanes in model.movable.values():
        costs: dict[str, list[float]] = {}
        for workload in runs:
            kind, _, temperature = workload.partition("/")
            cell = (kind, temperature)
            plain = speed.plain_belief(cell)
            plain_s = math.exp(level + plain.mean + plain.excess) * model.lengths.expect(cell, None)
            rest = [token_ratio(speed.belief(lane, cell), plain) for lane in model.fixed]
            row = []
            for lane in lanes:
                belief = speed.belief(lane, cell)
                hope = math.exp(-settings.optimism * math.sqrt(belief.variance + plain.variance))
                row.append(plain_s * min([token_ratio(belief, plain) * hope, *rest]))
            costs[workload] = row
        loads = [lane.load_s for lane in lanes]
        worth = [model.worth.get(lane.id, 0.0) for lane in lanes]
        for _ in range(_SWEEPS):
            worth = future_costs(traffic, costs, loads, worth)
        model.worth.update(zip((lane.id for lane in lanes), worth, strict=True))


def plan_load(
    model: TargetModel,
    situation: Situation,
    pricing: Pricing,
    settings: LearnerSettings,
    dwells: dict[str, Dwell],
) -> Load | None:
    """The load that pays now, if any does; the views of the others say why not."""
    waiting = [view for view in pricing.views if view.load_s > 0.0]
    found: Load | None = None
    for view in waiting:
        backend = view.status.lane.backend
        resident = next((v for v in pricing.views if _holds(v, backend)), None)
        if resident is None:
            continue
        view.allowed, view.note = False, _resting(view, situation, settings, dwells.get(backend))
        if view.note:
            continue
        saving, sure = _savings(model, pricing, resident, view, settings)
        if saving <= settings.hysteresis * view.load_s:
            view.note = f"a load takes {view.load_s:.1f} s and would save {max(saving, 0.0):.1f} s"
        elif not (view.is_plain or sure > view.load_s or _affordable(model, pricing, resident, view, settings)):
            view.note = f"a load of {view.load_s:.1f} s to try it is held back by the gate"
        elif found is None or saving - view.load_s > found.saving_s - found.view.load_s:
            found = Load(view, saving)
    if found is None:
        found = _trial(model, pricing, settings, waiting)
    if found is not None:
        found.view.allowed = True
    return found


def _trial(model: TargetModel, pricing: Pricing, settings: LearnerSettings, waiting: list[View]) -> Load | None:
    """A load only to find out, on a workload on which the lane may yet be faster; rarely, and seldom twice.

    What a lane showed on other workloads speaks against it here, or it would have been loaded, but is no proof.
    """
    for view in waiting:
        lane = view.status.lane
        resident = next((v for v in pricing.views if _holds(v, lane.backend)), None)
        if resident is None or view.note == _RESTING or view.belief.n >= 1.0:
            continue
        if view.decode_s * math.exp(-_REACH * view.sd) >= resident.decode_s:
            continue
        excess = settings.dwell_requests * max(view.central - resident.central, 0.0)
        last = model.tested.get((ANY, view.key), NEVER)
        share = settings.retest_share * max(settings.retest_first * 0.5 ** max(last.lost - 1, 0), 1.0)
        cost = view.load_s + resident.status.lane.load_s + excess
        if (model.pool.plain_s - last.plain_s) * share >= cost and _affordable(
            model, pricing, resident, view, settings
        ):
            return Load(view, 0.0, trial=True)
    return None


def _holds(view: View, backend: str) -> bool:
    lane = view.status.lane
    return view.load_s <= 0.0 and lane.control is Control.RELOAD and lane.backend == backend


def _resting(view: View, situation: Situation, settings: LearnerSettings, dwell: Dwell | None) -> str:
    if dwell is None:
        return ""
    young = 0.0 <= situation.at - dwell.at < settings.dwell_loads * view.load_s  # clocks are set back
    if young or dwell.requests < settings.dwell_requests:
        return _RESTING
    return ""


def _savings(
    model: TargetModel,
    pricing: Pricing,
    resident: View,
    view: View,
    settings: LearnerSettings,
) -> tuple[float, float]:
    """Seconds saved if `view` were in memory instead of `resident`: as hoped for, and cautiously estimated."""
    run = model.traffic.expected_run(pricing.workload)
    rest = [v.central for v in pricing.views if v.status.lane.control is not Control.RELOAD]
    later = model.traffic.trust * (
        model.worth.get(resident.status.lane.id, 0.0) - model.worth.get(view.status.lane.id, 0.0)
    )

    def seconds(of: View, deviations: float) -> float:
        fixed = of.wait_s + of.prefill_s
        return min([fixed + of.decode_s * math.exp(deviations * of.sd), *rest])

    here, hope, fear = seconds(resident, 0.0), -settings.optimism, settings.caution
    hoped = run * (seconds(resident, hope) - seconds(view, hope)) + later
    return hoped, run * (here - seconds(view, fear)) + min(later, 0.0)


def _affordable(
    model: TargetModel, pricing: Pricing, resident: View, view: View, settings: LearnerSettings
) -> bool:
    """Whether the account of all workloads can bear this load and the one back."""
    allowance = settings.allowance_requests * len(model.ledgers) + settings.allowance_loads
    room = model.pool.room(pricing.request_s, allowance, settings.allowance_share)
    return view.load_s + resident.status.lane.load_s <= room
