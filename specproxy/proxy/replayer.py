"""Teaches n-gram lanes from every finished request of the engine, whatever lane it ran on.

The engine's report has the token ids. They are replayed through the very drafter that the engine runs, one
request after another in the background, and forgotten. When requests end faster than they can be replayed, the
surplus is left out: replay is a bonus, never a load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import structlog

from specproxy.errors import BackendError
from specproxy.records import Decision, EngineReport, Lane, LaneStatus, Observation, Outcome
from specproxy.strategies.drafters.ngram import NgramDrafter
from specproxy.strategies.replay import ReplayResult, replay

__all__ = ["Replayer", "TakesReplays"]

WAITING = 64  # requests that may wait for their replay
ENGINE_NGRAM_MAX, ENGINE_NGRAM_MIN = 8, 3  # the engine's defaults: longest draft, shortest match

log = structlog.get_logger("specproxy")


class TakesReplays(Protocol):
    """The part of a policy that replay teaches."""

    def learn_replay(self, lane: Lane, observation: Observation, result: ReplayResult) -> None:
        """Take in what a lane's drafter would have done on a finished request."""
        ...


class Replayer:
    """A listener of the router; `run` does the work.

    Args:
        fetch: gives the engine's report on a request, once.
        lanes: the engine's lanes now.
        policy: what is taught.
        learn: is told every report, for the engine's own sake.
    """

    def __init__(
        self,
        fetch: Callable[[str], Awaitable[EngineReport | None]],
        lanes: Callable[[], Sequence[LaneStatus]],
        policy: TakesReplays,
        learn: Callable[[Observation, EngineReport], None] = lambda *_: None,
    ) -> None:
        self._fetch = fetch
        self._lanes = lanes
        self._policy = policy
        self._learn = learn
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
            self._policy.learn_replay(lane, seen, result)
