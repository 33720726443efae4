"""What to measure of lanes while nobody asks for anything, and what such runs teach.

A profile gives a new set-up its first evidence: short prompts of our own, of every kind of text, on each lane
of a target that is in memory. It runs in rounds. A round is one kind, on plain and on every lane of
which it is not yet settled whether it is the fastest there, so that each ratio is to a plain of the same
minute. Kinds take turns; those on which lanes differ most come first. A lane has `RUNS` runs on a kind at most,
and all runs on the arms of a set-up have one budget of seconds.

What was done is kept by arm, as statistics are: it is not repeated after a restart, and a changed lane begins
afresh. Runs teach speeds (of decoding and of prompts) and nothing else: lengths, traffic, ledgers and drift are
of the user's requests.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from specproxy.records import Control, Lane, Observation, TempBucket
from specproxy.strategies.bounds import amount, whole
from specproxy.strategies.level import features
from specproxy.strategies.posterior import Belief, Cell
from specproxy.strategies.speed import arm_key, arm_of

if TYPE_CHECKING:
    from specproxy.strategies.target import TargetModel

__all__ = ["ORDER", "RUNS", "Profile", "Round", "learn", "next_round", "subjects", "summary"]

RUNS = 2
"""Runs of a lane on a kind. With more, what lanes take on our prompts would be known far better than how like
the user's these are."""

ORDER = (
    "code_edit",
    "chat",
    "json_schema",
    "prose",
    "code",
    "grounded",
    "tool_call",
    "translation",
    "math",
    "creative",
    "json",
)
"""Kinds in the order in which they are measured: where text is copied or bound and where it is free first."""

_SETTLED = 2.33  # standard deviations behind the fastest lane
_RUN_S = 3.0  # that decoding should take in a run
_LEAST_TOKENS, _MOST_TOKENS = 32, 96
_TYPICAL_CONTEXT = 150.0
_MOST_ARMS = 256


class Round(NamedTuple):
    """One kind, the lanes to run a prompt of it on, in order, and how many tokens to ask for."""

    kind: str
    lanes: tuple[Lane, ...]
    tokens: int


@dataclass(slots=True)
class Profile:
    """What was measured of each arm: runs by kind, and the seconds that they took, broken-off ones included.

    `refused` are arms and kinds that cannot be measured: the server says no, or takes far too long.
    """

    runs: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    refused: set[tuple[str, str]] = field(default_factory=set)

    def left(self, arm: str, kind: str) -> int:
        """Runs of an arm on a kind that are still to be made."""
        return 0 if (arm, kind) in self.refused else RUNS - self.runs.get(arm, {}).get(kind, 0)

    def spend(self, arm: str, seconds: float) -> None:
        """A run took so long, whatever became of it."""
        self.seconds[arm] = self.seconds.pop(arm, 0.0) + seconds  # the arm that was used last stands last
        while len(self.seconds) > _MOST_ARMS:
            oldest = next(iter(self.seconds))
            del self.seconds[oldest]
            self.runs.pop(oldest, None)
            self.refused = {pair for pair in self.refused if pair[0] != oldest}

    def count(self, arm: str, kind: str) -> None:
        """A run of an arm on a kind was made."""
        kinds = self.runs.setdefault(arm, {})
        kinds[kind] = min(kinds.get(kind, 0) + 1, RUNS)

    def refuse(self, arm: str, kind: str) -> None:
        """Measure this arm on this kind no more."""
        self.refused.add((arm, kind))

    def spent(self, arms: Iterable[str]) -> float:
        """Seconds that these arms have taken together."""
        return sum(self.seconds.get(arm, 0.0) for arm in set(arms))

    def dump(self) -> dict[str, Any]:
        """State as JSON-serialisable data."""
        return {
            "runs": {arm: dict(kinds) for arm, kinds in self.runs.items()},
            "seconds": dict(self.seconds),
            "refused": sorted(map(list, self.refused)),
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Profile:
        """What `dump` gave."""
        runs = {
            str(arm): {str(kind): whole(n) for kind, n in kinds.items()} for arm, kinds in state["runs"].items()
        }
        seconds = {str(arm): amount(seconds) for arm, seconds in state["seconds"].items()}
        return cls(runs, seconds, {(str(arm), str(kind)) for arm, kind in state["refused"]})


def subjects(lanes: Sequence[Lane]) -> tuple[Lane, ...]:
    """Of the lanes of one target those that are worth measuring, plain first; none where there is no choice.

    One lane of each arm. Beside an engine's own choice (auto) its fixed strategies are hardly ever used.
    """
    chosen: dict[str, Lane] = {}
    auto = {lane.backend for lane in lanes if lane.control is Control.REQUEST and lane.strategy.is_auto}
    for lane in sorted(lanes, key=lambda lane: not lane.strategy.is_plain):
        fixed = lane.backend in auto and not (lane.strategy.is_auto or lane.strategy.is_plain)
        if not fixed:
            chosen.setdefault(arm_of(lane), lane)
    found = tuple(chosen.values())
    plain = sum(lane.strategy.is_plain for lane in found)
    return found if 0 < plain < len(found) else ()


def next_round(model: TargetModel, lanes: Sequence[Lane], kinds: Collection[str] = ORDER) -> Round | None:
    """What to measure next of these lanes (see `subjects`), of some kinds; None where nothing is left to do."""
    plain = next((lane for lane in lanes if lane.strategy.is_plain), None)
    best: Round | None = None
    most = 0
    for kind in ORDER:
        if plain is None or kind not in kinds or (arm_of(plain), kind) in model.profile.refused:
            continue
        left = {lane.id: model.profile.left(arm_of(lane), kind) for lane in lanes}
        others = [lane for lane in _open(model, plain, lanes, kind) if left[lane.id] > 0]
        rounds = max((left[lane.id] for lane in others), default=0)
        if rounds > most:
            order = (plain, *others) if rounds == RUNS else (*reversed(others), plain)
            best, most = Round(kind, order, _tokens(model)), rounds
    return best


def learn(model: TargetModel, seen: Observation) -> None:
    """Take in a finished run."""
    arm = arm_key(seen.fingerprint, seen.strategy)
    model.profile.count(arm, seen.workload.kind)
    if seen.prefill_s is not None:
        model.prefill.learn(arm, seen.prompt_tokens - seen.cached_tokens, seen.prefill_s)
    if seen.time_per_token is not None and not seen.load_s:
        model.speed.learn(seen)
        model.speed.warm()


def summary(model: TargetModel, lanes: Sequence[Lane]) -> str:
    """What a profile of these lanes has found, in a sentence; empty where it found nothing."""
    arms = [arm_of(lane) for lane in lanes]
    kinds = [kind for kind in ORDER if any(kind in model.profile.runs.get(arm, ()) for arm in arms)]
    best: dict[str, list[str]] = {}
    for kind in kinds:
        ratios = {lane.strategy.name: _belief(model, lane, kind).mean for lane in lanes}
        best.setdefault(min(ratios, key=lambda name: (ratios[name], name != "plain")), []).append(kind)
    if not kinds:
        return ""
    took = f"profiled {len(lanes)} lanes on {len(kinds)} kinds in {model.profile.spent(arms):.0f} s"
    fastest = sorted(best.items(), key=lambda item: len(item[1]))
    parts = [f"{name} on {', '.join(on)}" for name, on in fastest[:-1]]
    name, on = fastest[-1]
    parts.append(f"{name} on the other {len(on)}" if parts and len(on) > 1 else f"{name} on {', '.join(on)}")
    if len(fastest) == 1:
        parts = [f"{name} on all"]
    return f"{took}; expected to be fastest: {'; '.join(parts)}"


def _open(model: TargetModel, plain: Lane, lanes: Sequence[Lane], kind: str) -> list[Lane]:
    """Lanes other than plain between which, and plain, the choice is not settled on a kind."""
    beliefs = {lane.id: _belief(model, lane, kind) for lane in lanes}
    leader = min(lanes, key=lambda lane: beliefs[lane.id].mean)
    fastest = beliefs[leader.id]

    def rivals(lane: Lane) -> bool:
        belief = beliefs[lane.id]
        return belief.mean - fastest.mean < _SETTLED * math.sqrt(belief.variance + fastest.variance)

    running = [lane for lane in lanes if lane is not leader and rivals(lane)]
    return [lane for lane in lanes if lane is not plain and running and (lane is leader or lane in running)]


def _belief(model: TargetModel, lane: Lane, kind: str) -> Belief:
    """What is believed of a lane on requests of a kind as users mostly make them, relative to plain."""
    cell: Cell = (kind, TempBucket.WARM.value)
    if lane.strategy.is_plain:
        return Belief(0.0, 0.0)
    plain, own = model.speed.plain_belief(cell), model.speed.belief(lane, cell)
    mean = own.mean + own.excess - plain.mean - plain.excess
    return Belief(mean, own.variance + plain.variance)


def _tokens(model: TargetModel) -> int:
    """Tokens that a run should have: as many as plain decodes in some seconds, once that is known."""
    if not model.speed.knows_plain:
        return _LEAST_TOKENS
    per_token = math.exp(model.speed.level.expect(features(_TYPICAL_CONTEXT, 1.0)))
    return int(min(max(_RUN_S / per_token, _LEAST_TOKENS), _MOST_TOKENS))
