"""Hard rules: what is settled before any statistics are looked at.

Every rule is one small function over the situation; it either has nothing to say (None), or narrows the lanes
down and says why. Rules come in order of precedence: a hazard outranks a pin, since a wrong answer is worse
than a slow one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from specproxy.errors import LaneUnavailable
from specproxy.records import Decision, Health, Lane, LaneStatus, Situation, Strategy, Workload

__all__ = ["HAZARDS", "Narrowed", "alone", "apply_rules", "available", "is_asked_for"]


_READY = Health.READY


class Narrowed(NamedTuple):
    """Lanes that the rules leave to choose from. `rule` is empty where no rule applied."""

    lanes: tuple[LaneStatus, ...]
    rule: str = ""
    reason: str = ""


HAZARDS: tuple[tuple[str, str], ...] = (
    ("steering", "the request controls speculation itself, so it is left alone"),
    ("logprobs", "log-probabilities are not reliable under speculation"),
    ("images", "images and speculation do not go together on llama.cpp"),
    ("audio", "audio and speculation do not go together on llama.cpp"),
    ("many", "several completions are asked for at once"),
)
"""Workload flags that call for plain decoding, with the reason; all were seen on llama-server."""


def hazard(situation: Situation, lanes: Sequence[LaneStatus]) -> Narrowed | None:
    """Requests with a hazard go to plain; without a plain lane every lane stays, and the reason says so."""
    for flag, why in HAZARDS:
        if flag in situation.workload.flags:
            plain = tuple(s for s in lanes if s.lane.strategy.is_plain)
            if plain:
                return Narrowed(plain, "hazard", f"plain, because {why}")
            return Narrowed(tuple(lanes), "hazard", f"no plain lane to go to, although {why}")
    return None


def pin(situation: Situation, lanes: Sequence[LaneStatus]) -> Narrowed | None:
    """A strategy (or lane id) that the client asked for; ``auto`` without such a lane leaves the choice to us.

    Raises:
        LaneUnavailable: no ready lane has that strategy; the message names those that exist.
    """
    if situation.pin is None:
        return None
    found = tuple(s for s in lanes if is_asked_for(s.lane, situation.pin))
    if found:
        return Narrowed(found, "pin", f"the client asked for {situation.pin.strip()}")
    if situation.pin.strip().lower() == "auto":
        return None
    names = ", ".join(sorted({s.lane.strategy.name for s in lanes}))
    raise LaneUnavailable(
        f"no ready lane has the strategy '{situation.pin}'", hint=f"available strategies: {names}"
    )


def only(situation: Situation, lanes: Sequence[LaneStatus]) -> Narrowed | None:
    """With one lane there is nothing to choose."""
    del situation
    return Narrowed(tuple(lanes), "only", _only(lanes[0])) if len(lanes) == 1 else None


def _only(status: LaneStatus) -> str:
    return f"{status.lane.strategy.name} is the only lane that is ready"


Rule = Callable[[Situation, Sequence[LaneStatus]], Narrowed | None]
RULES: tuple[Rule, ...] = (hazard, pin, only)


def available(situation: Situation) -> tuple[LaneStatus, ...]:
    """Lanes that may take a request now.

    Raises:
        LaneUnavailable: there is none.
    """
    for status in situation.lanes:
        if status.health is not _READY:
            break
    else:
        if situation.lanes:
            return situation.lanes
    ready = [s for s in situation.lanes if s.health is _READY]
    if not ready:
        states = ", ".join(f"{s.lane.id} is {s.health}" for s in situation.lanes) or "no lane serves this model"
        raise LaneUnavailable("no lane can take the request now", hint=states)
    return tuple(ready)


def apply_rules(situation: Situation, lanes: tuple[LaneStatus, ...] | None = None) -> Decision | Narrowed:
    """Settle the request by rule, or return the lanes that are left to the learner.

    `lanes` are those that `available` gave, if it was asked already.

    A decision comes back where a rule leaves one lane; several lanes with the wanted strategy stay open, with
    the rule's name and reason.

    Raises:
        LaneUnavailable: no lane is ready, or none has the pinned strategy.
    """
    lanes = available(situation) if lanes is None else lanes
    if len(lanes) > 1 and situation.pin is None and not situation.workload.flags:
        return Narrowed(lanes)  # nothing that any rule looks at
    for rule in RULES:
        narrowed = rule(situation, lanes)
        if narrowed is None:
            continue
        if len(narrowed.lanes) == 1:
            return Decision(narrowed.lanes[0].lane, situation.workload, narrowed.rule, narrowed.reason)
        return narrowed
    return Narrowed(lanes)


def alone(workload: Workload, status: LaneStatus) -> Decision:
    """What `apply_rules` says of a request without a pin where one lane is ready, and there is no other."""
    if not workload.flags:
        return Decision(status.lane, workload, "only", _only(status))
    ruled = apply_rules(Situation(workload, (status,), at=0.0))
    assert isinstance(ruled, Decision), "one lane is always settled by rule"
    return ruled


def is_asked_for(lane: Lane, pin: str) -> bool:
    """Whether a pin means this lane: by its id, or by its strategy, with or without a length."""
    wanted = pin.strip().lower()
    if wanted == lane.id.lower():
        return True
    try:
        strategy = Strategy.parse(wanted)
    except ValueError:
        return False
    if strategy.n_max is None:
        return strategy.drafters == lane.strategy.drafters
    return strategy == lane.strategy
