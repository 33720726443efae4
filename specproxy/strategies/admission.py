"""Which lanes may be drawn: the gate, proven losses and their re-tests, and engines that explore.

Each check looks at one lane of a priced situation and either admits it or says why not. Lanes that would have
to be loaded first are decided on before, see `residency`.
"""

from __future__ import annotations

import math

from specproxy.records import Control
from specproxy.strategies.pricing import Pricing, View
from specproxy.strategies.settings import LearnerSettings
from specproxy.strategies.target import TargetModel

__all__ = ["admit", "due_for_test"]

_PAY_BACK = 10.0  # requests within which a lane that gains for sure may make up for earlier losses
_CLEAR_LOSS = 0.02  # a lane within two percent of plain is not worth the word "loses"


def admit(model: TargetModel, pricing: Pricing, settings: LearnerSettings) -> None:
    """Set `allowed` and `note` of every view that is in memory.

    Lanes are held against plain; where plain would have to be loaded, or there is none, all are admitted.
    """
    plain = pricing.plain
    room = math.inf
    if plain is not None:
        ledger = model.ledger(pricing.workload)
        room = ledger.room(pricing.request_s, settings.allowance_requests, settings.allowance_share)
    held = plain is not None and plain.load_s <= 0.0
    admitted = 0
    early = held and model.ledger(pricing.workload).requests < settings.show_first
    for view in pricing.views:
        if view.load_s <= 0.0:
            why_not = _check(pricing, view, settings, room) if held and view is not plain else ""
            if early and not why_not and view.belief.prior > 0.0 and _unknown(model, view):
                why_not = "to be tried first where it is expected to be faster"
            view.allowed, view.note = not why_not, why_not
        admitted += view.allowed
    if not admitted:  # nothing is in memory: so be it
        for view in pricing.views:
            view.allowed = True


def due_for_test(model: TargetModel, pricing: Pricing, settings: LearnerSettings, leader: View) -> View | None:
    """A lane that is out of use on this workload and should be tried again, on this request; None mostly.

    Tests of all lanes together may cost `retest_share` of plain's time, and are made on requests that are
    expected to be no longer than usual. Plain is tested as well: it is what all others are held against.
    """
    ledger = model.ledger(pricing.workload)
    if pricing.request_s > ledger.mean_plain_s(pricing.request_s):
        return None
    room = ledger.room(pricing.request_s, settings.allowance_requests, settings.allowance_share)
    now = ledger.plain_s + ledger.pending_plain_s
    plain_share = settings.retest_share
    share = plain_share / max(len(pricing.views) - 1, 1)
    workload, best = pricing.workload, leader.expected_s
    for view in pricing.views:
        cost = view.expected_s - best
        if view is leader or cost <= 0.0 or view.load_s > 0.0:
            continue
        passed = now - model.tested.get((workload, view.key), 0.0)
        if passed * (plain_share if view is pricing.plain else share) >= cost and (
            view is pricing.plain or view.loss_s <= room
        ):
            return view
    return None


def _check(pricing: Pricing, view: View, settings: LearnerSettings, room: float) -> str:
    """Why a lane may not be drawn; empty if it may."""
    belief = view.belief
    if belief.n + belief.replayed >= 1.0 and math.log(view.ratio) > max(settings.proven * view.sd, _CLEAR_LOSS):
        return "disabled: it loses to plain on this workload"
    if (
        view.status.lane.control is Control.REQUEST
        and view.name != "auto"
        and _left_to_auto(pricing, view, settings)
    ):
        return "left to the engine's own choice (auto)"
    if view.loss_s > room and not (room < 0.0 and view.loss_s * _PAY_BACK <= room):
        return "held back by the gate"
    return ""


def _unknown(model: TargetModel, view: View) -> bool:
    """Whether a lane has never run: then nothing is known of what its steps take on this machine."""
    return model.speed.arm(view.key, view.name).evidence <= 0.0 and not view.belief.replayed


def _left_to_auto(pricing: Pricing, view: View, settings: LearnerSettings) -> bool:
    """Beside an engine that chooses by itself at every step, its fixed strategies have to be clearly better."""
    backend = view.status.lane.backend
    for other in pricing.views:
        if other.name == "auto" and other.status.lane.backend == backend:
            edge = math.log(other.ratio / view.ratio)
            if edge < settings.caution * math.hypot(view.sd, other.sd):
                return True
    return False
