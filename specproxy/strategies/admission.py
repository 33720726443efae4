"""Which lanes may be drawn: the gate, proven losses and their re-tests, and engines that explore.

Each check looks at one lane of a priced situation and either admits it or says why not. Lanes that would have
to be loaded first are decided on before, see `residency`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specproxy.records import Control
from specproxy.strategies.gate import Ledger
from specproxy.strategies.pricing import LOSES, Pricing, View
from specproxy.strategies.settings import LearnerSettings
from specproxy.strategies.target import NEVER, TargetModel

__all__ = ["admit", "due_for_test"]

_FIRST_TRIES = 2
_LEAST_TEST = 0.1  # share of a request that a test is taken to cost, at least, of a lane that may not be drawn
_PAY_BACK = 10.0  # requests within which a lane that gains for sure may make up for earlier losses
_CLEAR_RATIO = math.exp(0.02)  # a lane within two percent of plain is not worth the word "loses"


def admit(pricing: Pricing, ledger: Ledger, room: float, settings: LearnerSettings) -> list[View]:
    """Set `allowed` and `note` of every view that is in memory, and return those that may be drawn.

    Lanes are held against plain; where plain would have to be loaded, or there is none, all are admitted.
    `room` is what the workload's ledger lets this request lose.
    """
    plain, views = pricing.plain, pricing.views
    held = plain is not None and plain.load_s <= 0.0
    early = held and ledger.requests < settings.show_first
    autos = [view for view in views if view.slot.lane.strategy.is_auto]
    for view in views:
        if view.load_s > 0.0:
            continue
        why_not = _check(view, autos, settings, room) if held and view is not plain else ""
        if early and not why_not and view.belief.prior > 0.0 and _unknown(view):
            why_not = "to be tried first where it is expected to be faster"
        view.allowed, view.note = not why_not, why_not
    admitted = [view for view in views if view.allowed]
    if not admitted:  # nothing is in memory: so be it
        for view in views:
            view.allowed = True
    return admitted or views


def due_for_test(
    model: TargetModel, pricing: Pricing, ledger: Ledger, room: float, settings: LearnerSettings, leader: View
) -> View | None:
    """A lane that is out of use on this workload and should be tried again, on this request; None mostly.

    Tests of all lanes together may cost `retest_share` of plain's time; `retest_first` times that after the
    first tries of a lane, halved by every test that it loses too. They are made on requests that are expected
    to be no longer than usual. Plain is tested as well: it is what all others are held against.
    """
    if pricing.request_s > ledger.mean_plain_s(pricing.request_s):
        return None
    now = ledger.plain_s + ledger.pending_plain_s
    plain_share, plain = settings.retest_share, pricing.plain
    share = plain_share / max(len(pricing.views) - 1, 1)
    best = leader.expected_s
    for view in pricing.views:
        if view is leader or view.load_s > 0.0:
            continue
        cost = view.central - best
        if not view.allowed:  # one that looks better than the engine's own choice, but is left to it
            cost = max(cost, _LEAST_TEST * best)
        most = plain_share if view is plain else share * settings.retest_first
        if not 0.0 < cost <= now * most or (view is not plain and view.loss_s > room):
            continue
        last = model.tested.get((pricing.workload, view.slot.key), NEVER)
        if view is not plain:  # first tries may have been unlucky; what was confirmed again and again was not
            most = max(most * 0.5 ** max(last.lost - _FIRST_TRIES, 0), share)
        if (now - last.plain_s) * most >= cost:
            return view
    return None


def _check(view: View, autos: Sequence[View], settings: LearnerSettings, room: float) -> str:
    """Why a lane may not be drawn; empty if it may."""
    belief = view.belief
    if (
        view.ratio > _CLEAR_RATIO
        and belief.n + belief.replayed + belief.profiled >= 1.0
        and math.log(view.ratio) > settings.proven * view.sd
    ):
        return LOSES
    if autos and view not in autos and _left_to_auto(view, autos, settings):
        return "left to the engine's own choice (auto)"
    if view.loss_s > room and not (room < 0.0 and view.loss_s * _PAY_BACK <= room):
        return "held back by the gate"
    return ""


def _unknown(view: View) -> bool:
    """Whether a lane has never run: then nothing is known of what its steps take on this machine."""
    return view.slot.arm.evidence <= 0.0 and not view.belief.replayed


def _left_to_auto(view: View, autos: Sequence[View], settings: LearnerSettings) -> bool:
    """Beside an engine that chooses by itself at every step, its fixed strategies have to be clearly better."""
    lane = view.status.lane
    if lane.control is not Control.REQUEST:
        return False
    for other in autos:
        if other.status.lane.backend == lane.backend:
            edge = math.log(other.ratio / view.ratio)
            if edge < settings.caution * math.hypot(view.sd, other.sd):
                return True
    return False
