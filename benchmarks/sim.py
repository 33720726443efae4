"""Traffic of a world, played against policies.

Every policy sees the same requests, and is charged what a request is expected to take on the lane it chose,
given kind, lengths, context and load, without the noise that it sees. The oracle knows these expectations and
the whole sequence: it takes the cheapest path through it, loads included, by dynamic programming.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from benchmarks.stream import Stream
from benchmarks.world import World
from specproxy.records import (
    Control,
    Health,
    Lane,
    LaneStatus,
    Observation,
    Outcome,
    Situation,
    Strategy,
    TimingSource,
    Workload,
)
from specproxy.strategies.base import Policy
from specproxy.strategies.learner import Learner
from specproxy.strategies.recovery import Settled
from specproxy.strategies.replay import ReplayResult

__all__ = ["LaneTable", "Run", "informed_path", "observe", "oracle_path", "play", "replayed"]

Floats = npt.NDArray[np.float64]
TARGET = "target"
PATIENCE, SWEEPS = 0.995, 1600  # what the next request counts; what lies beyond the sweeps, e^-8


@dataclass
class Run:
    """What a policy did: expected seconds of every request, loads included, the lanes, the changes that it
    noticed, and when its choice had settled after one."""

    cost_s: Floats
    lanes: npt.NDArray[np.int64]
    rules: list[str] = field(default_factory=list)
    decide_s: list[float] = field(default_factory=list)
    events: list[tuple[int, str]] = field(default_factory=list)
    settled: list[tuple[int, str]] = field(default_factory=list)


def oracle_path(stream: Stream) -> Floats:
    """Expected seconds of each request on the cheapest path through the whole stream, loads included."""
    lanes = stream.world.lanes
    backends = sorted({lane.backend for lane in lanes if lane.control == "reload"})
    if not backends:
        return np.asarray(stream.cost_s.min(axis=1))
    # State: what is resident, of the one backend under reload control; other lanes leave it as it is.
    resident = [i for i, lane in enumerate(lanes) if lane.control == "reload"]
    best = np.array([0.0 if s == 0 else math.inf for s in range(len(resident))])
    back: list[npt.NDArray[np.int64]] = []
    costs: list[Floats] = []
    free = [i for i, lane in enumerate(lanes) if lane.control != "reload"]
    for row in stream.cost_s:
        stay = min((row[i] for i in free), default=math.inf)
        step = np.full((len(resident), len(resident)), math.inf)
        for old in range(len(resident)):
            for new, lane in enumerate(resident):
                step[old, new] = row[lane] + (0.0 if old == new else lanes[lane].load_s)
            step[old, old] = min(step[old, old], stay)
        total = best[:, None] + step
        back.append(total.argmin(axis=0))
        best = total.min(axis=0)
        costs.append(step)
    path = np.empty(len(stream))
    state = int(best.argmin())
    for i in range(len(stream) - 1, -1, -1):
        old = int(back[i][state])
        path[i] = costs[i][old, state]
        state = old
    return path


def informed_path(stream: Stream) -> Floats:
    """Expected seconds of each request by the policy that knows all there is to learn, and not what comes.

    It knows what each lane takes on each kind on average, each kind's share, and how long runs are on average:
    a Markov decision process over the kind of the request and the lane in memory (Puterman 1994, ch. 6, value
    iteration). What it takes more than the oracle, nobody can learn. For worlds in which nothing changes.
    """
    world, kinds = stream.world, range(len(stream.world.kinds))
    moved = [i for i, lane in enumerate(world.lanes) if lane.control == "reload"]
    free = [i for i, lane in enumerate(world.lanes) if lane.control != "reload"]
    loads = np.array([[0.0 if old == new else world.lanes[new].load_s for new in moved] for old in moved])
    means = np.array([stream.cost_s[stream.kinds == k].mean(axis=0) for k in kinds])  # of kinds that came
    shares = np.array([world.kinds[k].share for k in kinds])
    stays = 1.0 - 1.0 / world.traffic.run
    change = stays * np.eye(len(shares)) + (1.0 - stays) * shares / shares.sum()

    def costs(k: int, rest: Floats) -> Floats:
        """By lane in memory: what comes of taking each lane, the ones that move first."""
        stay = [means[k, i] + PATIENCE * rest[:, None] for i in free]
        return np.hstack([means[k, moved] + loads + PATIENCE * rest, *stay])

    values = rests = np.zeros((len(shares), len(moved)))
    for _ in range(SWEEPS):
        rests = change @ values
        values = np.array([costs(k, rests[k]).min(axis=1) for k in kinds])
    best = np.array([costs(k, rests[k]).argmin(axis=1) for k in kinds])
    path, resident = np.empty(len(stream)), 0
    for i, k in enumerate(stream.kinds):
        choice = int(best[k, resident])
        path[i] = stream.cost_s[i, (*moved, *free)[choice]]
        if choice < len(moved):
            path[i] += loads[resident, choice]
            resident = choice
    return path


def play(stream: Stream, policy: Policy, seed: int, *, replay: bool = True, timed: bool = False) -> Run:
    """Let a policy choose for every request; observations come when the request would have ended.

    Args:
        stream: the requests.
        policy: fresh.
        seed: of the policy's own randomness.
        replay: whether a learner gets the replays of n-gram lanes.
        timed: whether to time every choice.
    """
    table = LaneTable(stream.world)
    rng = np.random.default_rng(seed)
    waiting: deque[tuple[int, Callable[[], None]]] = deque()
    run = Run(np.empty(len(stream)), np.empty(len(stream), np.int64))
    at = 0.0
    for i in range(len(stream)):
        while waiting and waiting[0][0] <= i:
            waiting.popleft()[1]()
        situation = _situation(stream, table, i, at)
        started = time.thread_time() if timed else 0.0
        decision = policy.choose(situation, rng)
        if timed:
            run.decide_s.append(time.thread_time() - started)
        lane = table.index[decision.lane.id]
        load_s = table.use(lane)
        run.cost_s[i] = stream.cost_s[i, lane] + load_s
        run.lanes[i] = lane
        run.rules.append(decision.rule)
        at += run.cost_s[i] / stream.in_flight[i]
        seen = observe(stream, table, i, lane, load_s, at)
        waiting.append((i + int(stream.in_flight[i]), _teach(policy, stream, table, seen, i, replay, run)))
    return run


def _teach(
    policy: Policy, stream: Stream, table: LaneTable, seen: Observation, i: int, replay: bool, run: Run
) -> Callable[[], None]:
    """What is to be done when the request has ended."""

    def teach() -> None:
        policy.learn_one(seen)
        if isinstance(policy, Learner):
            if replay:
                for lane, widths in stream.drafts[i].items():
                    if stream.cost_s[i, lane] == math.inf:
                        continue
                    policy.learn_replay(table.status[lane].lane, seen, replayed(widths, seen.output_tokens))
            for event in policy.take_events():
                kept = run.settled if isinstance(event, Settled) else run.events
                kept.append((i, event.sentence))

    return teach


class LaneTable:
    """Lane records of a world, and what is resident. Events may change fingerprints."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.status = []
        seen: set[str] = set()
        for spec in world.lanes:
            lane = Lane(
                id=spec.id,
                backend=spec.backend if spec.control == "reload" else spec.id,
                target=TARGET,
                strategy=Strategy.parse(spec.strategy),
                control=Control(spec.control),
                fingerprint=f"{world.name}:{spec.id}",
                load_s=spec.load_s,
            )
            resident = spec.control != "reload" or spec.backend not in seen
            seen.add(spec.backend)
            self.status.append(LaneStatus(lane, Health.READY, resident=resident))
        self.index = {spec.id: i for i, spec in enumerate(world.lanes)}

    def use(self, lane: int) -> float:
        """Run a request on a lane; the load that it takes, in seconds."""
        used = self.status[lane]
        if used.resident:
            return 0.0
        for i, status in enumerate(self.status):
            if status.lane.control is Control.RELOAD and status.lane.backend == used.lane.backend:
                self.status[i] = replace(status, resident=i == lane)
        return used.lane.load_s

    def begin(self, request: int) -> None:
        """Apply new fingerprints that come with this request."""
        for event in self.world.events:
            if event.after == request and event.fingerprint is not None:
                i = self.index[event.lane]
                lane = replace(self.status[i].lane, fingerprint=event.fingerprint)
                self.status[i] = replace(self.status[i], lane=lane)


def _situation(stream: Stream, table: LaneTable, i: int, at: float) -> Situation:
    table.begin(i)
    kind = stream.world.kinds[stream.kinds[i]]
    return Situation(
        workload=Workload(kind.kind, kind.temperature),
        lanes=tuple(s for s, cost in zip(table.status, stream.cost_s[i], strict=True) if cost < math.inf),
        at=at,
        prompt_tokens=int(stream.prompt[i]),
        max_tokens=kind.limit,
        in_flight=int(stream.in_flight[i]),
        request_id=str(i),
    )


def observe(stream: Stream, table: LaneTable, i: int, lane: int, load_s: float, at: float) -> Observation:
    """What a request of a stream shows on a lane, `load_s` of a load included, when it ends at that time."""
    kind = stream.world.kinds[stream.kinds[i]]
    record, output = table.status[lane].lane, int(stream.output[i])
    decode_s = (output - 1) * stream.per_token[i] * stream.ratio[i, lane] * stream.noise[i]
    drafted = _drafted(stream, i, lane, output)
    usage_only = bool(stream.usage_only[i])
    return Observation(
        request_id=str(i),
        at=at,
        workload=Workload(kind.kind, kind.temperature),
        lane=record.id,
        strategy=record.strategy.name,
        fingerprint=record.fingerprint,
        target=TARGET,
        outcome=Outcome.COMPLETE,
        source=TimingSource.USAGE if usage_only else TimingSource.SERVER,
        prompt_tokens=int(stream.prompt[i]),
        output_tokens=output,
        prefill_s=float(stream.prompt[i] / stream.world.plain.prefill_tokens_per_s),
        decode_s=float(decode_s),
        draft_tokens=0 if usage_only else drafted,
        accepted_tokens=0 if usage_only else round(drafted * float(stream.accepted[i, lane])),
        load_s=load_s,
        concurrency=float(stream.in_flight[i]),
        weight=0.5 if usage_only else 1.0,
    )


def _drafted(stream: Stream, i: int, lane: int, output: int) -> int:
    """Drafted tokens of one request on one lane; for draft models and heads, what their acceptance implies."""
    widths = stream.drafts[i].get(lane)
    if widths is not None:
        return sum(k * count for k, count in enumerate(widths))
    accept = float(stream.accepted[i, lane])
    if not accept:
        return 0
    n_max = Strategy.parse(stream.world.lanes[lane].strategy).n_max or 3
    return max(1, round(n_max * output / (1.0 + n_max * accept)))


def replayed(widths: tuple[int, ...], output: int) -> ReplayResult:
    """Steps by number of drafted tokens, as a replay tells them."""
    tokens = max(output - 1, 0)
    drafted = sum(k * count for k, count in enumerate(widths))
    return ReplayResult(
        tokens=tokens,
        steps=sum(widths),
        drafted=drafted,
        accepted=max(0, tokens - sum(widths)),
        widths=widths,
        by_position=(),
        by_match=(),
        censored=0,
    )
