"""What a request is expected to take on each lane: the terms of the objective, and how sure they are.

::

    wait + load·[not resident] + uncached prompt / prefill rate + expected output · time per token
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, sqrt

from specproxy.records import Lane, LaneStatus, Situation
from specproxy.strategies.cost import LaneFacts
from specproxy.strategies.level import features
from specproxy.strategies.posterior import Belief, Cell
from specproxy.strategies.speed import Slot, SpeedModel, cell_of
from specproxy.strategies.target import TargetModel
from specproxy.strategies.thompson import raised

__all__ = ["LOSES", "Pricing", "View", "price", "token_ratio"]

LOSES = "disabled: it loses to plain on this workload"
"""Note of a lane whose loss is proven."""


@dataclass(slots=True)
class View:
    """One lane as a decision sees it; times in seconds.

    `ratio` is the expected time per token relative to plain, `sd` the standard deviation of its logarithm.
    `expected`, `central` and `spread` are the cost without a load as the draw sees it: posterior mean, median,
    and standard deviation to first order. `loss_s` is what the lane may lose to plain by a cautious estimate,
    loads on either side not counted. `allowed`, `note` and `chance` are filled in by the decision.
    """

    status: LaneStatus
    slot: Slot
    belief: Belief
    ratio: float
    sd: float
    wait_s: float
    load_s: float
    prefill_s: float
    decode_s: float
    expected: float
    central: float
    spread: float
    loss_s: float = 0.0
    allowed: bool = True
    note: str = ""
    chance: float = 0.0

    @property
    def name(self) -> str:
        """The strategy's name."""
        return self.slot.name

    @property
    def is_plain(self) -> bool:
        """Whether the lane decodes plainly."""
        return self.slot.is_plain

    @property
    def key(self) -> str:
        """The arm's key."""
        return self.slot.key

    @property
    def fixed_s(self) -> float:
        """Seconds before the first token."""
        return self.wait_s + self.load_s + self.prefill_s

    @property
    def expected_s(self) -> float:
        """Seconds for the whole request."""
        return self.wait_s + self.load_s + self.prefill_s + self.decode_s


@dataclass(slots=True)
class Pricing:
    """All lanes of one situation. `plain` is the lane that the others are held against, if there is one.

    `workload` is the key of the request's. `decode_s` is plain's expected decode time, `output` the expected
    output in tokens, `request_s` plain's time for the whole request, as far as plain is resident and free.
    `views` are the lanes left to choose from, `priced` all of them; `beside` counts requests on plain's host.
    """

    cell: Cell
    workload: str
    output: float
    decode_s: float
    request_s: float
    views: list[View]
    plain: View | None
    priced: list[View]
    beside: int = 0
    reloads: bool = False  # whether any lane is under reload control

    def of(self, lane: Lane) -> View:
        """The view of a lane that was priced."""
        return next(view for view in self.priced if view.status.lane is lane)


def price(
    model: TargetModel,
    situation: Situation,
    lanes: Sequence[LaneStatus],
    facts: Mapping[str, LaneFacts],
    caution: float,
) -> Pricing:
    """Work out every lane's expected time. `caution` is how many standard deviations `View.loss_s` looks up."""
    speed = model.speed
    cell = cell_of(situation.workload)
    slots, reference = _slots(speed, lanes)
    output = model.lengths.expect(cell, situation.max_tokens)
    context, elsewhere = situation.prompt_tokens + 0.5 * output, situation.elsewhere
    beside = situation.in_flight
    if elsewhere and reference >= 0:
        beside = elsewhere.get(lanes[reference].lane.id, beside)
    x = features(context, beside)
    plain = speed.plain_belief(cell)
    base, doubt = plain.mean + plain.excess, plain.variance
    per_token = exp(speed.level.expect(x) + base)
    decode_s = per_token * output
    views, reloads = [], False
    hits, prompt, prefill = situation.prefix_hits, situation.prompt_tokens, model.prefill
    loaded = x[2] > 0.0
    here = x
    for status, slot in zip(lanes, slots):  # noqa: B905  # made side by side above
        lane, key = status.lane, slot.key
        belief = slot.arm.known.get(cell) or speed.belief_at(slot, cell)
        mean, variance = belief.mean + belief.excess - base, belief.variance
        if elsewhere:
            here = features(context, elsewhere.get(lane.id, situation.in_flight))
            loaded = here[2] > 0.0
            more, more_variance = speed.level.step(x, here)
            mean, variance = mean + more, variance + more_variance
        if loaded:
            mean += slot.load.expect(here)
            variance += slot.load.variance(here)
        uncached = prompt - prefill.trusted(key, hits.get(lane.id, 0)) if hits else prompt
        rate = prefill.known.get(key)
        if rate is None or uncached <= 0.0:
            prefill_s = prefill.seconds(key, uncached, per_token)
        else:
            prefill_s = uncached * rate
        load_s = wait_s = 0.0
        if slot.reloads:
            reloads, load_s = True, 0.0 if status.resident else lane.load_s
        if status.in_flight:
            wait_s = _wait(status, facts.get(lane.id), decode_s)
        ratio = exp(mean)
        lane_s, fixed_s = decode_s * ratio, wait_s + prefill_s
        sd = 0.0 if key == speed.plain else sqrt(variance + doubt)
        cost = fixed_s + lane_s * raised(variance), fixed_s + lane_s, lane_s * sqrt(variance)
        views.append(View(status, slot, belief, ratio, sd, wait_s, load_s, prefill_s, lane_s, *cost))
    pricing = Pricing(cell, "/".join(cell), output, decode_s, decode_s, views, None, views, beside, reloads)
    if reference >= 0:
        _hold_against(pricing, views[reference], caution)
    return pricing


def _slots(speed: SpeedModel, lanes: Sequence[LaneStatus]) -> tuple[list[Slot], int]:
    """Each lane with its arm, and where among them the plain one is that others are held against, or -1."""
    known = speed.slots
    found: list[Slot] = []
    reference = -1
    for status in lanes:
        slot = known.get(status.lane.id)
        if slot is None or slot.lane is not status.lane:
            slot = speed.slot(status.lane)
        if reference < 0 and slot.is_plain:
            reference = len(found)
            speed.note_plain(slot.key)
        found.append(slot)
    return found, reference


def token_ratio(belief: Belief, plain: Belief) -> float:
    """Expected time per token relative to plain, noise between requests included."""
    return exp(belief.mean + belief.excess - plain.mean - plain.excess)


def _hold_against(pricing: Pricing, plain: View, caution: float) -> None:
    """Fill in what each lane may lose to plain."""
    pricing.plain = plain
    pricing.request_s += plain.prefill_s
    base = pricing.decode_s + plain.prefill_s + plain.wait_s
    for view in pricing.views:
        if view is not plain:
            worst = view.decode_s * exp(caution * view.sd)
            view.loss_s = worst + view.prefill_s + view.wait_s - base


def _wait(status: LaneStatus, facts: LaneFacts | None, decode_s: float) -> float:
    """Expected queueing, where the number of slots is known: the requests ahead, each half done."""
    if facts is None or facts.slots is None or status.in_flight < facts.slots:
        return 0.0
    return 0.5 * decode_s * (status.in_flight - facts.slots + 1) / facts.slots
