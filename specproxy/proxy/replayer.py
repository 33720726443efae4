"""Teaches n-gram lanes from every finished request of the engine, whatever lane it ran on.

The engine's report has the token ids. They are replayed through the very drafter that the engine runs, one
request after another in the background, and forgotten. When requests end faster than they can be replayed, the
surplus is left out: replay is a bonus, never a load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from specproxy.errors import BackendError
from specproxy.records import PROFILE, Decision, EngineReport, Lane, LaneStatus, Observation, Outcome
from specproxy.strategies.drafters.ngram import NgramDrafter
from specproxy.strategies.replay import ReplayResult, replay

__all__ = ["ReplayAccount", "Replayer", "TakesReplays"]

WAITING = 64  # requests that may wait for their replay
ENGINE_NGRAM_MAX, ENGINE_NGRAM_MIN = 8, 3  # the engine's defaults: longest draft, shortest match

log = structlog.get_logger("specproxy")


class TakesReplays(Protocol):
    """The part of a policy that replay teaches."""

    def learn_replay(
        self, lane: Lane, observation: Observation, result: ReplayResult, source: str = "ids"
    ) -> None:
        """Take in what a lane's drafter would have done on a finished request; `source` says from what."""
        ...


@dataclass(slots=True)
class ReplayAccount:
    """How many requests were replayed, and how well that agrees with what lanes counted themselves.

    `off` sums |replayed / counted tokens a step - 1| over the `compared` requests: those that ran on the lane
    that was replayed, where that lane counts what it drafts.
    """

    replayed: int = 0
    left_out: int = 0
    compared: int = 0
    off: float = 0.0
    _counting: set[str] = field(default_factory=set)  # lanes that have counted a draft

    def note(self, lane: Lane, seen: Observation, result: ReplayResult) -> None:
        """A request was replayed on a lane; runs of our own are not counted."""
        if PROFILE in seen.workload.flags:
            return
        self.replayed += 1
        if lane.id != seen.lane or lane.fingerprint != seen.fingerprint:
            return
        if seen.draft_tokens:
            self._counting.add(lane.id)
        if lane.id in self._counting and seen.output_tokens > 1:
            self.compared += 1
            self.off += abs(result.tokens_per_step / (seen.tokens_per_step or 1.0) - 1.0)

    def json(self) -> dict[str, Any]:
        """As JSON-serialisable data."""
        error = self.off / self.compared if self.compared else None
        return {
            "replayed": self.replayed,
            "left_out": self.left_out,
            "compared": self.compared,
            "error": error,
        }


class Replayer:
    """A listener of the router; `run` does the work.

    Args:
        fetch: gives the engine's report on a request, once.
        lanes: the engine's lanes now.
        policy: what is taught.
        learn: is told every report, for the engine's own sake.
        account: where it is counted.
    """

    def __init__(
        self,
        fetch: Callable[[str], Awaitable[EngineReport | None]],
        lanes: Callable[[], Sequence[LaneStatus]],
        policy: TakesReplays,
        learn: Callable[[Observation, EngineReport], None] = lambda *_: None,
        account: ReplayAccount | None = None,
    ) -> None:
        self._fetch = fetch
        self._lanes = lanes
        self._policy = policy
        self._learn = learn
        self._account = account or ReplayAccount()
        self._waiting: asyncio.Queue[Observation] = asyncio.Queue(WAITING)

    def __call__(self, seen: Observation, decision: Decision | None) -> None:
        """Note a request that has ended on one of the engine's lanes."""
        ours = decision is not None and any(s.lane.id == decision.lane.id for s in self._lanes())
        if ours and seen.outcome is Outcome.COMPLETE and not self._waiting.full():
            self._waiting.put_nowait(seen)

    async def run(self) -> None:
        """Replay one request after another, until cancelled."""
        while True:
            seen = await self._waiting.get()
            try:
                report = await self._fetch(seen.request_id)
            except BackendError as error:
                log.debug("no report to replay", id=seen.request_id, error=str(error))
                continue
            if report is not None:
                self._learn(seen, report)
            if report is not None and len(report.output_ids) > 1:
                await self._teach(seen, report)

    async def _teach(self, seen: Observation, report: EngineReport) -> None:
        for status in self._lanes():
            lane = status.lane
            if lane.strategy.drafters != ("ngram",) or lane.target != seen.target:
                continue
            drafter = NgramDrafter(min_n=ENGINE_NGRAM_MIN)
            longest = lane.strategy.n_max or ENGINE_NGRAM_MAX
            result = await asyncio.to_thread(replay, report.prompt_ids, report.output_ids, drafter, longest)
            self._account.note(lane, seen, result)
            self._policy.learn_replay(lane, seen, result)
