"""One seed's traffic of a world: everything that happens, whichever policy chooses.

A seed fixes kinds, lengths, what each lane would have taken on each request, and all noise, so that policies
are compared on the same requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from benchmarks.world import Kind, LaneTruth, World
from specproxy.records import Strategy
from specproxy.strategies.cost import verify_cost

__all__ = ["Stream", "draw_stream", "mean_ratio"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Drafts = dict[int, tuple[int, ...]]  # n-gram lane → steps by number of drafted tokens


@dataclass(frozen=True)
class Stream:
    """One seed's requests. Arrays are by request, or by request and lane in the world's order.

    `cost_s` is the expected time without a load, infinite on a lane that is away; `ratio` what the lane truly
    does on this request (its own variation between requests included), `noise` the factor that measured decode
    times carry.
    """

    world: World
    kinds: Ints
    prompt: Ints
    output: Ints
    in_flight: Ints
    per_token: Floats
    noise: Floats
    usage_only: npt.NDArray[np.bool_]
    ratio: Floats
    cost_s: Floats
    drafts: tuple[Drafts, ...]
    accepted: Floats

    def __len__(self) -> int:
        return len(self.kinds)

    def head(self, requests: int) -> Stream:
        """The first so many requests."""
        cut = {f.name: getattr(self, f.name)[:requests] for f in fields(self) if f.name != "world"}
        return replace(self, **cut)


def draw_stream(world: World, requests: int, seed: int) -> Stream:
    """Everything that happens in `requests` requests, whichever policy chooses."""
    rng = np.random.default_rng(seed)
    kinds = _draw_kinds(world, requests, rng)
    prompt, output = np.empty(requests, np.int64), np.empty(requests, np.int64)
    for i, kind in enumerate(world.kinds[k] for k in kinds):
        prompt[i] = max(4, rng.lognormal(math.log(kind.prompt.median), kind.prompt.sigma))
        length = max(4, int(rng.lognormal(math.log(kind.output.median), kind.output.sigma)))
        output[i] = min(length, kind.limit) if kind.limit else length
    levels, shares = zip(*world.traffic.in_flight, strict=True)
    in_flight = rng.choice(np.array(levels), size=requests, p=np.array(shares) / sum(shares))
    context = (prompt + 0.5 * output) / 1000.0
    plain = world.plain
    per_token = np.exp(plain.context_1k * context + plain.load * (in_flight - 1)) / plain.tokens_per_s
    ratio, means = np.ones((requests, len(world.lanes))), np.ones((requests, len(world.lanes)))
    accepted = np.zeros_like(ratio)
    drafts: list[Drafts] = [{} for _ in range(requests)]
    for lane in range(len(world.lanes)):
        _draw_lane(world, lane, kinds, output, in_flight, rng, ratio, means, accepted, drafts)
    fixed = prompt / plain.prefill_tokens_per_s
    cost_s = fixed[:, None] + (output * per_token)[:, None] * means
    for lane, spec in enumerate(world.lanes):
        cost_s[[world.away(spec.id, i) for i in range(requests)], lane] = math.inf
    return Stream(
        world=world,
        kinds=kinds,
        prompt=prompt,
        output=output,
        in_flight=in_flight,
        per_token=per_token,
        noise=_draw_noise(world, output, rng),
        usage_only=rng.random(requests) < world.traffic.usage_only_share,
        ratio=ratio,
        cost_s=cost_s,
        drafts=tuple(drafts),
        accepted=accepted,
    )


def _draw_kinds(world: World, requests: int, rng: np.random.Generator) -> Ints:
    shares = np.array([kind.share for kind in world.kinds])
    fresh = rng.choice(len(shares), size=requests, p=shares / shares.sum())
    stay = rng.random(requests) < 1.0 - 1.0 / world.traffic.run
    for i in range(1, requests):
        if stay[i]:
            fresh[i] = fresh[i - 1]
    return fresh.astype(np.int64)


def _draw_noise(world: World, output: Ints, rng: np.random.Generator) -> Floats:
    """Factors of measured decode times: mean one, stalls apart."""
    noise, n = world.noise, len(output)
    keep = math.exp(-1.0 / noise.swing_requests)
    swing, shocks = np.zeros(n), rng.standard_normal(n)
    for i in range(1, n):
        swing[i] = keep * swing[i - 1] + math.sqrt(1.0 - keep * keep) * shocks[i]
    sd = np.sqrt(noise.request**2 + noise.token**2 / output)
    stalls = np.where(rng.random(n) < noise.stall_share, rng.exponential(noise.stall, n), 0.0)
    return np.asarray(np.exp(sd * rng.standard_normal(n) - 0.5 * sd * sd + noise.swing * swing + stalls))


def _draw_lane(
    world: World,
    lane: int,
    kinds: Ints,
    output: Ints,
    in_flight: Ints,
    rng: np.random.Generator,
    ratio: Floats,
    means: Floats,
    accepted: Floats,
    drafts: list[Drafts],
) -> None:
    """Fill in one lane's column: true ratios, class means, acceptance, and what an n-gram drafter would do."""
    spec = world.lanes[lane]
    for i in range(len(kinds)):
        kind = world.kinds[kinds[i]]
        truth = kind.lanes.get(spec.id)
        if truth is None:
            continue
        factor, sharper = _effects(world, spec.id, kind, i)
        load = math.exp(spec.load * (in_flight[i] - 1))
        means[i, lane] = mean_ratio(world, lane, int(kinds[i]), sharper) * factor * load
        if truth.hits is not None:
            widths = _draw_widths(truth, _n_max(spec.strategy), int(output[i]) - 1, sharper, rng)
            drafts[i][lane] = widths
            ratio[i, lane] = _width_ratio(widths, int(output[i]) - 1, spec.verify) * factor * load
            accepted[i, lane] = _width_acceptance(widths, int(output[i]) - 1)
            continue
        ratio[i, lane] = _draw_ratio(truth, rng) * factor * load
        if truth.accept is not None:
            accepted[i, lane] = float(np.clip(rng.normal(truth.accept * sharper, 0.06), 0.01, 0.99))


def _draw_ratio(truth: LaneTruth, rng: np.random.Generator) -> float:
    if truth.ratios:
        return float(rng.choice(np.array(truth.ratios)))
    assert truth.ratio is not None
    return float(truth.ratio * np.exp(truth.sd * rng.standard_normal() - 0.5 * truth.sd**2))


def _draw_widths(
    truth: LaneTruth, n_max: int, tokens: int, sharper: float, rng: np.random.Generator
) -> tuple[int, ...]:
    """Steps by draft length of one output: each step finds a match or not, each draft is accepted so far."""
    assert truth.hits is not None
    assert truth.accept is not None
    hits = _blurred(truth.hits, truth.spread, rng)
    accept = _blurred(truth.accept * sharper, truth.spread, rng)
    tokens = max(tokens, 1)
    first = accept if truth.first is None else _blurred(truth.first * sharper, truth.spread, rng)
    drafted = rng.random(tokens) < hits
    runs = np.minimum(rng.geometric(1.0 - accept, tokens), n_max)
    runs[rng.random(tokens) >= first] = 0
    ends = np.cumsum(np.where(drafted, runs + 1, 1))
    steps = int(np.searchsorted(ends, tokens)) + 1
    tries = int(drafted[:steps].sum())
    return (steps - tries, *([0] * (n_max - 1)), tries)


def _blurred(chance: float, spread: float, rng: np.random.Generator) -> float:
    """A chance with normal noise on its logit."""
    chance = min(max(chance, 1e-3), 0.995)
    logit = math.log(chance / (1.0 - chance)) + spread * float(rng.standard_normal())
    return min(1.0 / (1.0 + math.exp(-logit)), 0.995)


def _width_ratio(widths: Sequence[int], tokens: int, verify: Sequence[tuple[int, float]]) -> float:
    cost = sum(count * verify_cost(verify, k + 1) for k, count in enumerate(widths) if count)
    return cost / max(tokens, 1)


def _width_acceptance(widths: Sequence[int], tokens: int) -> float:
    drafted = sum(k * count for k, count in enumerate(widths))
    return (tokens - sum(widths)) / drafted if drafted else 0.0


def _n_max(strategy: str) -> int:
    return Strategy.parse(strategy).n_max or 8


def _effects(world: World, lane: str, kind: Kind, request: int) -> tuple[float, float]:
    """Factors on ratio and acceptance by the events so far."""
    ratio = accept = 1.0
    for event in world.events:
        if event.lane == lane and event.after <= request and (not event.kinds or kind.kind in event.kinds):
            ratio, accept = ratio * event.ratio, accept * event.accept
    return ratio, accept


def mean_ratio(world: World, lane: int, kind: int, sharper: float = 1.0) -> float:
    """Expected time per token relative to plain, over the requests of a kind, without events and load."""
    spec = world.lanes[lane]
    truth = world.kinds[kind].lanes.get(spec.id)
    if truth is None:
        return 1.0
    if truth.ratio is not None:
        return truth.ratio
    if truth.ratios:
        return float(np.mean(truth.ratios))
    return _mean_of_hits(truth, _n_max(spec.strategy), spec.verify, sharper, world.kinds[kind].output.median)


@cache
def _mean_of_hits(
    truth: LaneTruth, n_max: int, verify: tuple[tuple[int, float], ...], sharper: float, tokens: float
) -> float:
    """By simulation of 800 outputs, with a seed of its own."""
    rng = np.random.default_rng(7)
    n = max(int(tokens), 2)
    draws = [_draw_widths(truth, n_max, n, sharper, rng) for _ in range(800)]
    return float(np.mean([_width_ratio(widths, n, verify) for widths in draws]))
