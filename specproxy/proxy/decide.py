"""Asks the policy for a decision, and gets by without one where it fails or has nothing to choose from."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from specproxy.errors import LaneUnavailable, RequestError
from specproxy.proxy.quarantine import held_back
from specproxy.proxy.ticket import safest
from specproxy.records import Decision, Health, LaneStatus, Situation
from specproxy.strategies.base import Policy
from specproxy.strategies.rules import is_asked_for

__all__ = ["decide"]

log = logging.getLogger(__name__)


def decide(
    policy: Policy, situation: Situation, statuses: Sequence[LaneStatus], rng: np.random.Generator
) -> Decision:
    """The policy's choice. Without a ready lane the safest other one is tried: health may lag behind.

    `statuses` are all lanes of the target, those among them that the situation leaves out.
    """
    if situation.lanes[0].health is not Health.READY:
        status = safest(situation.lanes)
        if status is None:
            states = ", ".join(f"{s.lane.id} is {s.health}" for s in situation.lanes)
            raise LaneUnavailable("no lane can take the request now", hint=states)
        reason = f"no lane is ready, and {status.lane.id} is {status.health}"
        return Decision(status.lane, situation.workload, "unready", reason)
    try:
        return policy.choose(situation, rng)
    except LaneUnavailable as error:
        if situation.pin is None:
            raise
        held = held_back(situation.pin, statuses)
        if held is None and any(is_asked_for(s.lane, situation.pin) for s in statuses):
            raise  # it is away for now, and worth asking for again
        raise held or RequestError(error.message, hint=error.hint) from error
    except Exception:
        log.exception("the policy failed")
        status = safest(situation.lanes) or situation.lanes[0]
        return Decision(status.lane, situation.workload, "policy_failed", "the policy failed; see the log")
