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
from specproxy.strategies.level import Features, features
from specproxy.strategies.posterior import Belief, Cell
from specproxy.strategies.speed import arm_key, cell_of
from specproxy.strategies.target import TargetModel
from specproxy.strategies.thompson import Offer

__all__ = ["Pricing", "View", "price", "token_ratio"]


@dataclass(slots=True)
class View:
    """One lane as a decision sees it; times in seconds.

    `ratio` is the expected time per token relative to plain, `sd` the standard deviation of its logarithm,
    `offer` the cost in units of plain's decode time, `loss_s` what the lane may lose to plain by a cautious
    estimate. `allowed`, `note` and `chance` are filled in by the decision.
    """

    status: LaneStatus
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
    def name(self) -> str:
        """The strategy's name."""
        return self.status.lane.strategy.name

    @property
    def is_plain(self) -> bool:
        """Whether it is a plain lane."""
        return self.status.lane.strategy.is_plain

    @property
    def fixed_s(self) -> float:
        """Seconds before the first token."""
        return self.wait_s + self.load_s + self.prefill_s

    @property
    def expected_s(self) -> float:
        """Seconds for the whole request."""
        return self.fixed_s + self.decode_s


@dataclass(slots=True)
class Pricing:
    """All lanes of one situation. `plain` is the lane that the others are held against, if there is one.

    `decode_s` is plain's expected decode time, `output` the expected output in tokens, `request_s` plain's time
    for the whole request, as far as plain is resident and free.
    """

    cell: Cell
    output: float
    decode_s: float
    request_s: float
    views: list[View]
    plain: View | None
    by_lane: dict[str, View] = field(default_factory=dict)


def price(
    model: TargetModel,
    situation: Situation,
    lanes: Sequence[LaneStatus],
    facts: Mapping[str, LaneFacts],
    caution: float,
) -> Pricing:
    """Work out every lane's expected time. `caution` is how many standard deviations `View.loss_s` looks up."""
    cell = cell_of(situation.workload)
    reference = next((s for s in lanes if s.lane.strategy.is_plain), None)
    if reference is not None:
        model.speed.note_plain(arm_key(reference.lane.fingerprint, "plain"))
    output = model.lengths.expect(cell, situation.max_tokens)
    x = features(situation.prompt_tokens + 0.5 * output, situation.in_flight)
    level = model.speed.level.expect(x)
    plain = model.speed.plain_belief(cell)
    base = level + plain.mean + plain.excess
    per_token = math.exp(base)
    views = [_view(model, situation, status, cell, plain, per_token, output, x, facts) for status in lanes]
    by_lane = {view.status.lane.id: view for view in views}
    decode_s = per_token * output
    pricing = Pricing(cell, output, decode_s, decode_s, views, None, by_lane)
    if reference is not None:
        against = pricing.plain = by_lane[reference.lane.id]
        pricing.request_s += against.prefill_s
        for view in views:
            if view is not against:
                worst = decode_s * view.ratio * math.exp(caution * view.sd)
                view.loss_s = worst - decode_s + view.fixed_s - against.fixed_s
    return pricing


def token_ratio(belief: Belief, plain: Belief) -> float:
    """Expected time per token relative to plain, noise between requests included."""
    return math.exp(belief.mean + belief.excess - plain.mean - plain.excess)


def _view(
    model: TargetModel,
    situation: Situation,
    status: LaneStatus,
    cell: Cell,
    plain: Belief,
    per_token: float,
    output: float,
    x: Features,
    facts: Mapping[str, LaneFacts],
) -> View:
    lane = status.lane
    key = arm_key(lane.fingerprint, lane.strategy.name)
    belief = model.speed.belief(lane, cell)
    mean = belief.mean + belief.excess - plain.mean - plain.excess
    variance = belief.variance
    if x[2] > 0.0:
        effect = model.speed.load_effect(key)
        mean += effect.expect(x)
        variance += effect.variance(x)
    cached = model.prefill.trusted(key, situation.prefix_hits.get(lane.id, 0))
    prefill_s = model.prefill.seconds(key, max(situation.prompt_tokens - cached, 0.0), per_token)
    load_s = lane.load_s if lane.control is Control.RELOAD and not status.resident else 0.0
    decode_s = per_token * output
    wait_s = _wait(status, facts.get(lane.id), decode_s)
    return View(
        status,
        key,
        belief,
        math.exp(mean),
        0.0 if key == model.speed.plain else math.sqrt(variance + plain.variance),
        wait_s,
        load_s,
        prefill_s,
        decode_s * math.exp(mean),
        Offer((wait_s + load_s + prefill_s) / decode_s, mean, math.sqrt(variance)),
    )


def _wait(status: LaneStatus, facts: LaneFacts | None, decode_s: float) -> float:
    """Expected queueing, where the number of slots is known: the requests ahead, each half done."""
    if facts is None or facts.slots is None or status.in_flight < facts.slots:
        return 0.0
    return 0.5 * decode_s * (status.in_flight - facts.slots + 1) / facts.slots
