"""What a request is expected to take on each lane: the terms of the objective, and how sure they are.

::

    wait + load·[not resident] + uncached prompt / prefill rate + expected output · time per token
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specproxy.records import Control, LaneStatus, Situation
from specproxy.strategies.cost import LaneFacts
from specproxy.strategies.level import features
from specproxy.strategies.posterior import Belief, Cell
from specproxy.strategies.speed import cell_of
from specproxy.strategies.target import TargetModel
from specproxy.strategies.thompson import Offer, offer

__all__ = ["Pricing", "View", "price", "token_ratio"]


@dataclass(slots=True)
class View:
    """One lane as a decision sees it; times in seconds.

    `ratio` is the expected time per token relative to plain, `sd` the standard deviation of its logarithm,
    `offer` the cost without a load as the draw sees it, `loss_s` what the lane may lose to plain by a cautious
    estimate, loads on either side not counted. `allowed`, `note` and `chance` are filled in by the decision.
    """

    status: LaneStatus
    name: str
    is_plain: bool
    key: str
    belief: Belief
    ratio: float
    sd: float
    wait_s: float
    load_s: float
    prefill_s: float
    decode_s: float
    offer: Offer
    loss_s: float = 0.0
    allowed: bool = True
    note: str = ""
    chance: float = 0.0

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
    """

    cell: Cell
    workload: str
    output: float
    decode_s: float
    request_s: float
    views: list[View]
    plain: View | None
    by_lane: dict[str, View] = field(default_factory=dict)
    reloads: bool = False  # whether any lane is under reload control


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
    reference = None
    for status in lanes:
        if not status.lane.strategy.drafters:
            reference = status.lane
            speed.note_plain(speed.belief_of(reference, cell)[0].key)
            break
    output = model.lengths.expect(cell, situation.max_tokens)
    x = features(situation.prompt_tokens + 0.5 * output, situation.in_flight)
    plain = speed.plain_belief(cell)
    base = plain.mean + plain.excess
    per_token = math.exp(speed.level.expect(x) + base)
    decode_s = per_token * output
    views, by_lane, reloads = [], {}, False
    hits, prompt, prefill = situation.prefix_hits, situation.prompt_tokens, model.prefill
    for status in lanes:
        lane = status.lane
        slot, belief = speed.belief_of(lane, cell)
        mean, variance = belief.mean + belief.excess - base, belief.variance
        if x[2] > 0.0:
            mean += slot.load.expect(x)
            variance += slot.load.variance(x)
        uncached = prompt - prefill.trusted(slot.key, hits.get(lane.id, 0)) if hits else prompt
        prefill_s = prefill.seconds(slot.key, uncached, per_token)
        load_s = 0.0
        if lane.control is Control.RELOAD:
            reloads, load_s = True, 0.0 if status.resident else lane.load_s
        wait_s = _wait(status, facts.get(lane.id), decode_s) if status.in_flight else 0.0
        ratio = math.exp(mean)
        view = View(
            status,
            slot.name,
            slot.is_plain,
            slot.key,
            belief,
            ratio,
            0.0 if slot.key == speed.plain else math.sqrt(variance + plain.variance),
            wait_s,
            load_s,
            prefill_s,
            decode_s * ratio,
            offer(wait_s + prefill_s, decode_s * ratio, math.sqrt(variance)),
        )
        views.append(view)
        by_lane[lane.id] = view
    key = situation.workload.key
    pricing = Pricing(cell, key, output, decode_s, decode_s, views, None, by_lane, reloads)
    if reference is not None:
        _hold_against(pricing, by_lane[reference.id], caution)
    return pricing


def token_ratio(belief: Belief, plain: Belief) -> float:
    """Expected time per token relative to plain, noise between requests included."""
    return math.exp(belief.mean + belief.excess - plain.mean - plain.excess)


def _hold_against(pricing: Pricing, plain: View, caution: float) -> None:
    """Fill in what each lane may lose to plain."""
    pricing.plain = plain
    pricing.request_s += plain.prefill_s
    base = pricing.decode_s + plain.prefill_s + plain.wait_s
    for view in pricing.views:
        if view is not plain:
            worst = view.decode_s * math.exp(caution * view.sd)
            view.loss_s = worst + view.prefill_s + view.wait_s - base


def _wait(status: LaneStatus, facts: LaneFacts | None, decode_s: float) -> float:
    """Expected queueing, where the number of slots is known: the requests ahead, each half done."""
    if facts is None or facts.slots is None or status.in_flight < facts.slots:
        return 0.0
    return 0.5 * decode_s * (status.in_flight - facts.slots + 1) / facts.slots
