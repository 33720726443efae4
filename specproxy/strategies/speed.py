"""How fast the lanes of one target decode: the level of plain, and an arm for each strategy and fingerprint."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specproxy.records import PROFILE, Control, Lane, Observation, Strategy, TempBucket, Workload
from specproxy.strategies.approx import Calibration
from specproxy.strategies.bounds import MOST, between, logarithm, whole
from specproxy.strategies.changes import ChangeWatch, Suspicion
from specproxy.strategies.classify import KINDS
from specproxy.strategies.cost import LaneFacts, replayed_ratio
from specproxy.strategies.drafting import DraftPriors
from specproxy.strategies.level import Features, Level, LoadEffect, features
from specproxy.strategies.posterior import Arm, Belief, Cell, Scales, student_weight
from specproxy.strategies.replay import ReplayResult

__all__ = ["Sample", "Slot", "SpeedModel", "arm_key", "arm_of", "cell_of"]

_MOST_ARMS = 64
_REFERENCE = Scales(arm=1e-4, kind=0.05, cell=0.02, between=0.05, token=0.2)
_OTHER_PLAIN = Scales(arm=0.3, kind=0.05, cell=0.02, between=0.05, token=0.2)
_STEP = Scales(arm=0.5, kind=0.08, cell=0.03, between=0.05, token=0.2)
_STEP_PRIOR = 0.3
_STEP_VARIANCE = _STEP.arm**2 + _STEP.kind**2 + _STEP.cell**2
_NO_CELL = ("", "")  # a workload of which nothing is known
_NEW_PLAIN_VARIANCE = 0.25
_ALARM_VARIANCE = 0.02
_OTHERS_KEEP = 0.25  # of other kinds: what has changed on one has probably changed on them
_PLAIN_CHECKS = 2
_DOUBT = 1.0  # surprise of the level at which plain is measured once more
_LUCKY = 2.5  # standard deviations below what was believed: then it may be the machine that is faster
_LUCK = math.log(2.5)  # and as much faster at least
_FIRST = 3.0  # requests of a lane that are its first tries
_RECENT = 24
_AHEAD = 8  # priors that are worked out ahead after a request
_LEAST_VARIANCE = 1e-6  # of an observation: no request is measured to a thousandth
_OUTLIER = 3.0  # standard deviations above what was believed at which a single request is in doubt

Entry = tuple[Cell, float, float, float, float]
"""One observation as an arm learns it: cell, prior, log ratio, variance, tokens."""


def arm_key(fingerprint: str, strategy: str) -> str:
    """Statistics belong to a fingerprint and a strategy, since lanes of one engine may share the former."""
    return f"{fingerprint}/{strategy}"


def arm_of(lane: Lane) -> str:
    """The arm that runs on a lane."""
    return arm_key(lane.fingerprint, lane.strategy.name)


def cell_of(workload: Workload) -> Cell:
    """Key of a workload's cell."""
    return workload.kind, PROFILE if PROFILE in workload.flags else workload.temperature._value_


class Sample(NamedTuple):
    """What one request said about its lane.

    `log_ratio` is to plain, with its variance, and None where the level jumped, so that nothing can be said
    about it. An `outlier` took far longer than was believed possible: a stall of the machine, as far as one
    request can tell.
    """

    log_ratio: float | None
    variance: float
    outlier: bool = False


@dataclass(frozen=True, slots=True)
class Slot:
    """A lane with what belongs to it, so that a decision needs one look-up."""

    lane: Lane
    key: str
    name: str
    is_plain: bool
    reloads: bool
    arm: Arm
    load: LoadEffect


@dataclass(slots=True)
class SpeedModel:
    """Learned speeds of one target. `facts` maps lane ids to what is known about them beforehand.

    `steps` are arms like `arms`, but for the time of a step instead of a token, which depends on the machine
    and the lane, and hardly on the text. Where a reply counts accepted guesses, they tell a slower machine
    (longer steps) from worse guesses (fewer tokens a step).
    """

    scales: Scales
    half_life: float
    facts: Mapping[str, LaneFacts]
    level: Level = field(default_factory=Level)
    arms: dict[str, Arm] = field(default_factory=dict)
    steps: dict[str, Arm] = field(default_factory=dict)
    loads: dict[str, LoadEffect] = field(default_factory=dict)
    recent: dict[str, deque[Entry]] = field(default_factory=dict)  # an arm's last observations
    strategies: dict[str, Strategy] = field(default_factory=dict)  # by lane id, with draft lengths
    plain: str = ""  # key of the plain arm that others are held against
    plain_checks: int = 0  # times that plain is still to be measured after an alarm
    suspect: Suspicion | None = None  # on which the level has jumped since plain was measured
    changes: ChangeWatch = field(default_factory=ChangeWatch)
    priors: DraftPriors = field(init=False)
    slots: dict[str, Slot] = field(default_factory=dict, repr=False)
    _ahead: deque[tuple[Lane, Cell]] = field(default_factory=deque, repr=False)  # priors to be worked out

    def __post_init__(self) -> None:
        self.priors = DraftPriors(self.facts)

    # --- reading ---------------------------------------------------------------------------------

    def forget_priors(self) -> None:
        """Facts have changed: ask the cost model again for cells that were not seen yet."""
        self.priors.forget()
        self._ahead.clear()
        for slot in self.slots.values():
            self._look_ahead(slot.lane)
        for arm in self.arms.values():
            arm.refresh()

    def belief(self, lane: Lane, cell: Cell) -> Belief:
        """What is believed about a lane's arm on a workload, alone on the machine."""
        return self.belief_at(self.slot(lane), cell)

    def slot(self, lane: Lane) -> Slot:
        """A lane with its arm and load effect."""
        slot = self.slots.get(lane.id)
        return slot if slot is not None and slot.lane is lane else self._new_slot(lane)

    def belief_at(self, slot: Slot, cell: Cell) -> Belief:
        """What is believed about a slot's arm on a workload, alone on the machine."""
        found = slot.arm.known.get(cell)
        if found is None:
            lane = slot.lane
            found = slot.arm.belief(cell, self.priors.prior(lane.id, lane.strategy, cell))
        return found

    def plain_belief(self, cell: Cell) -> Belief:
        """What is believed about plain on a workload; the level itself, where plain was never seen."""
        arm = self.arms.get(self.plain)
        if arm is None:
            return Belief(0.0, 0.0)
        return arm.known.get(cell) or arm.belief(cell, 0.0)

    def plain_decode_s(self, seen: Observation, beside: float | None = None) -> float:
        """Seconds that plain would have taken to decode the tokens of a request; beside so many others, if it
        runs on another host than the request did."""
        level, _ = self.level.predict(_features(seen, beside))
        belief = self.plain_belief(cell_of(seen.workload))
        return (seen.output_tokens - 1) * math.exp(level + belief.mean + belief.excess)

    def arm(self, key: str, strategy: str) -> Arm:
        """The arm of that key, created on first use.

        The first plain arm of a target is its reference: its effect is zero by definition. A further one (a new
        build, another device) is an arm like others.
        """
        found = self.arms.get(key)
        if found is None:
            scales = self.scales
            if strategy == "plain":
                first = not any(k.endswith("/plain") for k in self.arms)
                scales = _REFERENCE if first else _OTHER_PLAIN
            found = self.arms[key] = Arm(scales, self.half_life)
            self._prune(key)
        return found

    def load_effect(self, key: str) -> LoadEffect:
        """How an arm's ratio depends on load; plain's doesn't, as it is the reference."""
        found = self.loads.get(key)
        if found is None:
            plain = key.endswith("/plain")
            found = self.loads[key] = LoadEffect.none() if plain else LoadEffect()
        return found

    # --- learning --------------------------------------------------------------------------------

    def learn(self, seen: Observation) -> Sample:
        """Split one request's log time per token into level, effect and noise, and learn each."""
        tpt = seen.time_per_token
        assert tpt is not None, "callers pass timed observations only"
        key, cell, value = arm_key(seen.fingerprint, seen.strategy), cell_of(seen.workload), math.log(tpt)
        checking = key == self.plain and self.plain_checks > 0
        if seen.strategy == "plain":
            self.plain_checks = max(0, self.plain_checks - 1)
            self.plain = self.plain or key
        arm, load = self.arm(key, seen.strategy), self.load_effect(key)
        prior = self.priors.prior(seen.lane, self._strategy(seen), cell)
        belief = arm.belief(cell, prior)
        self.level.advance(seen.at)
        x = _features(seen)
        nominal = arm.scales.variance(seen.output_tokens, seen.weight)
        noise = nominal * arm.noise(cell[0])
        if checking:
            self._judge(value - belief.mean - self.level.expect(x) + self.level.mean[0], noise)
        before = self.level.mean[0]
        level, level_var = self.level.predict(x)
        loaded, load_var = load.expect(x), load.variance(x)
        above = value - level - belief.mean - loaded
        spread = math.sqrt(noise + belief.variance + load_var + level_var)
        outlier = above > _OUTLIER * spread
        if key != self.plain and arm.evidence < _FIRST and above < -max(_LUCKY * spread, _LUCK):
            self.plain_checks = _PLAIN_CHECKS
        jumped = self._learn_steps(seen, key, x)
        if jumped is None:
            rest = value - belief.mean - loaded
            jumped = self.level.learn(x, rest, noise, belief.variance + load_var)
        if jumped:
            level, level_var = self.level.predict(x)
        if key != self.plain and jumped:
            self.plain_checks = _PLAIN_CHECKS
            self.suspect = self.suspect or Suspicion(key, cell[0], before, belief.mean, belief.n)
        elif checking and abs(self.level.surprise) > _DOUBT:
            self.plain_checks = max(self.plain_checks, 1)
        if x[2] > 0.0 and key != self.plain:
            alone = noise + level_var + belief.variance
            residual = value - level - belief.mean
            score = (residual - loaded) / math.sqrt(alone + load_var)
            load.learn(x, residual, alone / student_weight(score))
        y = value - level - load.expect(x)
        variance = nominal + level_var + load.variance(x)
        entry = (cell, prior, y, variance, float(seen.output_tokens))
        arm.learn(*entry)
        arm.last_at = max(arm.last_at, seen.at)
        if key in self.steps:
            self._tell(seen, key)
        if key == self.plain and self.priors.learn_plain(self.level.mean[0]):
            self._rebase()
        self.recent.setdefault(key, deque(maxlen=_RECENT)).append(entry)
        return Sample(None if jumped else y, noise + level_var, outlier and not jumped)

    def _judge(self, measured: float, variance: float) -> None:
        """Plain was measured after the level had jumped on another lane: was it the machine, or that lane?

        `measured` is what plain says of the level's constant, with a variance. If it was the lane, the jump is
        taken back, and the lane starts over.
        """
        suspect, now = self.suspect, self.level.mean[0]
        if suspect is None:
            return
        if self.plain_checks == 0:
            self.suspect = None
        if suspect.blames_lane(measured, now, variance):
            self.suspect = None
            self.level.mean[0], self.level.surprise = suspect.level, 0.0
            self.start_over(suspect.key, suspect.kind, 0)
            self.changes.blame(suspect, now)

    def learn_replay(
        self, lane: Lane, workload: Workload, result: ReplayResult, fit: Calibration | None
    ) -> None:
        """Take in what a lane's drafter would have done on a request that ran elsewhere.

        `fit` says how approximate replays of its sort compare with the truth, None for an exact one.
        """
        cell = cell_of(workload)
        nominal, share = replayed_ratio(self.facts.get(lane.id), result)
        arm = self.arm(arm_of(lane), lane.strategy.name)
        variance = arm.scales.variance(result.tokens)
        if fit is not None:
            nominal, variance = fit.correct(nominal), variance + fit.sd**2
        prior = self.priors.prior(lane.id, lane.strategy, cell)
        arm.learn_replay(cell, prior, nominal, share, variance, result.tokens)

    def calibrate_replay(
        self, lane: Lane, seen: Observation, result: ReplayResult, fit: Calibration | None
    ) -> None:
        """Compare a request that ran on a lane with its replay, to learn what the lane's steps really cost."""
        tpt = seen.time_per_token
        if tpt is None:
            return
        nominal, share = replayed_ratio(self.facts.get(lane.id), result)
        x = _features(seen)
        level, level_var = self.level.predict(x)
        key = arm_of(lane)
        ratio = math.log(tpt) - level - self.load_effect(key).expect(x)
        variance = _STEP.variance(seen.output_tokens, seen.weight) + level_var
        if fit is not None:
            nominal, variance = fit.correct(nominal), variance + fit.sd**2
        self.arm(key, lane.strategy.name).recalibrate(ratio, nominal, share, variance)

    def note_plain(self, key: str) -> None:
        """Hold other lanes against this plain arm; a new one makes the level uncertain again."""
        if key != self.plain:
            if self.plain and key not in self.arms:
                self.level.widen(_NEW_PLAIN_VARIANCE)
            self.plain = key

    @property
    def knows_plain(self) -> bool:
        """Whether plain, as lanes are held against it now, has been measured at all."""
        arm = self.arms.get(self.plain)
        return arm is not None and arm.evidence > 0.0

    def warm(self) -> None:
        """Bring up to date what decisions will look at, after a change; and some of what they have not yet
        asked for, so that the first request of a workload need not wait for the cost model."""
        for _ in range(min(_AHEAD, len(self._ahead))):
            lane, cell = self._ahead.popleft()
            self.priors.prior(lane.id, lane.strategy, cell)
        for arm in self.arms.values():
            arm.warm()

    def discount(self, fingerprint: str, factor: float, kind: str | None = None) -> None:
        """Keep only a share of the evidence on a fingerprint, after a change; the level is less certain too."""
        for arms in (self.arms, self.steps):
            for key, arm in arms.items():
                if key.rpartition("/")[0] == fingerprint:
                    arm.discount(factor, kind)
        self.level.widen(_ALARM_VARIANCE * (1.0 - factor))

    def start_over(self, key: str, kind: str | None, n: int) -> None:
        """An arm has changed on a kind (None: on all): forget it but for its last `n` requests.

        Perhaps it was the machine that changed, so plain is to be measured again.
        """
        if key != self.plain:
            self.plain_checks = _PLAIN_CHECKS
        again = [entry for entry in self.recent.get(key, ()) if kind is None or entry[0][0] == kind]
        self.level.widen(_ALARM_VARIANCE)
        for arms in (self.arms, self.steps):
            if key in arms:
                arms[key].discount(_OTHERS_KEEP)
                arms[key].discount(0.0, kind)  # beside anything of it, what came since would be outliers
        if key in self.arms:
            for entry in again[len(again) - min(n, len(again)) :]:
                self.arms[key].learn(*entry)

    # --- state -----------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """State as JSON-serialisable data."""
        return {
            "level": self.level.dump(),
            "arms": {key: arm.dump() for key, arm in self.arms.items()},
            "steps": {key: arm.dump() for key, arm in self.steps.items()},
            "loads": {key: load.numbers() for key, load in self.loads.items()},
            "recent": {key: [[list(e[0]), *e[1:]] for e in entries] for key, entries in self.recent.items()},
            "strategies": {lane: [list(s.drafters), s.n_max] for lane, s in self.strategies.items()},
            "priors": self.priors.dump(),
            "changes": self.changes.dump(),
            "plain": self.plain,
            "plain_checks": self.plain_checks,
            "suspect": self.suspect and list(self.suspect),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `dump` gave."""
        self.level.restore(state["level"])
        self.arms, self.steps = {}, {}
        self.slots.clear()
        for key, arm in state["arms"].items():
            self.arm(key, key.rpartition("/")[2]).restore(arm)
        for key, arm in state["steps"].items():
            self._step(key).restore(arm)
        self.loads = {key: LoadEffect.restored(entry) for key, entry in state["loads"].items()}
        for key, entries in state["recent"].items():
            kept = self.recent[key] = deque(maxlen=_RECENT)
            for (kind, temperature), prior, y, variance, tokens in entries:
                least = between(variance, _LEAST_VARIANCE, MOST), between(tokens, 1.0, MOST)
                kept.append(((str(kind), str(temperature)), logarithm(prior), logarithm(y), *least))
        self.strategies = {
            k: Strategy(tuple(map(str, names)), None if n_max is None else whole(n_max, 1))
            for k, (names, n_max) in state["strategies"].items()
        }
        self.priors.restore(state["priors"])
        self.changes = ChangeWatch.restored(state["changes"]) if "changes" in state else ChangeWatch()
        self.plain = str(state["plain"])
        self.plain_checks = whole(state["plain_checks"])
        self.suspect = None
        if (suspect := state.get("suspect")) is not None:
            self.suspect = Suspicion.restored(suspect)

    # --- inside ----------------------------------------------------------------------------------

    def _tell(self, seen: Observation, key: str) -> None:
        """Let what a request showed about drafting speak for the texts on which lanes hardly ran."""
        strategy, cell = self._strategy(seen), cell_of(seen.workload)
        step, acceptance = self.steps[key].belief(_NO_CELL, _STEP_PRIOR), seen.acceptance
        changed = self.priors.learn_step(seen.lane, step, _STEP_VARIANCE)
        if acceptance is not None:
            changed |= self.priors.learn_text(seen.lane, strategy, cell, acceptance, seen.draft_tokens)
        if changed:
            self._rebase()

    def _rebase(self) -> None:
        """Priors have changed: also for what has evidence."""
        for slot in self.slots.values():
            lane = slot.lane
            slot.arm.rebase(lambda c, lane=lane: self.priors.prior(lane.id, lane.strategy, c))  # type: ignore[misc]  # bound now

    def _learn_steps(self, seen: Observation, key: str, x: Features) -> bool | None:
        """Learn the level from the time of a step, where accepted guesses were counted.

        Returns:
            Whether the level jumped; None where nothing was counted.
        """
        decoded = seen.output_tokens - 1
        if not seen.draft_tokens or not 0 <= seen.accepted_tokens < decoded or seen.decode_s is None:
            return None
        arm, cell, load = self._step(key), cell_of(seen.workload), self.load_effect(key)
        belief = arm.belief(cell, _STEP_PRIOR)
        value = math.log(seen.decode_s / (decoded - seen.accepted_tokens)) - load.expect(x)
        nominal = _STEP.variance(seen.output_tokens, seen.weight) + load.variance(x)
        level, level_var = self.level.predict(x)
        jumped = self.level.learn(x, value - belief.mean, nominal * arm.noise(cell[0]), belief.variance)
        if jumped:
            level, level_var = self.level.predict(x)
        arm.learn(cell, _STEP_PRIOR, value - level, nominal + level_var, seen.output_tokens)
        return jumped

    def _new_slot(self, lane: Lane) -> Slot:
        name, key = lane.strategy.name, arm_of(lane)
        self.strategies[lane.id] = lane.strategy
        before = self.slots.get(lane.id)
        if before is not None and before.key != key:
            self.priors.forget(lane.id)
        reloads = lane.control is Control.RELOAD
        slot = Slot(
            lane, key, name, lane.strategy.is_plain, reloads, self.arm(key, name), self.load_effect(key)
        )
        self.slots[lane.id] = slot
        self._look_ahead(lane)
        return slot

    def _look_ahead(self, lane: Lane) -> None:
        if not lane.strategy.is_plain:
            self._ahead.extend((lane, (kind, str(t))) for kind in KINDS for t in TempBucket)

    def _strategy(self, seen: Observation) -> Strategy:
        """The strategy of an observation's lane, with its draft length where the lane was met."""
        known = self.strategies.get(seen.lane)
        return known if known is not None and known.name == seen.strategy else Strategy.parse(seen.strategy)

    def _step(self, key: str) -> Arm:
        found = self.steps.get(key)
        if found is None:
            found = self.steps[key] = Arm(_STEP, self.half_life)
        return found

    def _prune(self, keep: str) -> None:
        """Forget the arms that were used least recently (old builds, old drafts)."""
        while len(self.arms) > _MOST_ARMS:
            others = (k for k in self.arms if k not in (keep, self.plain))
            oldest = min(others, key=lambda k: self.arms[k].last_at)
            for kept in (self.arms, self.steps, self.loads, self.recent):
                kept.pop(oldest, None)
            self.slots.clear()


def _features(seen: Observation, concurrency: float | None = None) -> Features:
    """Regressors of the level for a finished request, as it ran or with so many in flight."""
    in_flight = seen.concurrency if concurrency is None else concurrency
    return features(seen.prompt_tokens + 0.5 * seen.output_tokens, in_flight)
