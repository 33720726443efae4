"""The proxy's end of the engine's side channel: what reports teach is kept, and goes back as priors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson
import structlog

from specproxy.adapters.embedded.side_channel import encode_priors
from specproxy.adapters.private_file import write_private
from specproxy.proxy.board import BoardRow
from specproxy.records import AUTO, EngineReport, Lane, LaneStatus, Observation
from specproxy.strategies.engine_book import EngineBook

__all__ = ["EngineMemory"]

PLANS_SHOWN = 12

log = structlog.get_logger("specproxy")


class EngineMemory:
    """The engine's book of a proxy, and its file.

    Args:
        path: where it is kept.
        lanes: the engine's lanes now.
        explain: is told of each request its id, its steps by drafter and length, and why it stopped drafting.
    """

    def __init__(
        self,
        path: Path,
        lanes: Callable[[], Sequence[LaneStatus]],
        explain: Callable[[str, dict[str, int], str], None] = lambda *_: None,
    ) -> None:
        self._path = path
        self._lanes = lanes
        self._explain = explain
        self._book = EngineBook()
        self._changed = False

    async def load(self) -> None:
        """Read what earlier runs have learnt; a file that cannot be read is as good as none."""
        try:
            self._book.restore(orjson.loads(await asyncio.to_thread(self._path.read_bytes)))
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log.warning("what the engine had learnt is lost", path=str(self._path), error=str(error))

    async def save(self) -> None:
        """Write it, if something is new."""
        if not self._changed:
            return
        self._changed = False
        data = orjson.dumps(self._book.to_json())
        try:
            await asyncio.to_thread(write_private, self._path, data)
        except OSError as error:
            log.warning("what the engine learns is not kept", path=str(self._path), error=str(error))

    def learn(self, seen: Observation, report: EngineReport) -> None:
        """Take in a report, from any of the engine's lanes: what drafters can do is the same for all."""
        self._explain(seen.request_id, dict(report.plans), report.stopped_drafting)
        auto = self._auto()
        if auto is not None and seen.target == auto.target:
            self._book.learn(auto.fingerprint, seen.workload.key, report)
            self._changed = True

    def header(self, lane: Lane, workload: str, request_id: str) -> bytes:
        """The priors that a request takes along; empty for lanes that choose nothing."""
        auto = self._auto()
        if auto is None or lane.id != auto.id:
            return b""
        return encode_priors(self._book.priors(auto.fingerprint, workload, request_id))

    def json(self, rows: Iterable[BoardRow]) -> list[dict[str, Any]]:
        """For each workload: what `auto` did, and its speed beside the fixed strategies', as in the board."""
        auto = self._auto()
        if auto is None:
            return []
        ours = {status.lane.id: status.lane.strategy.name for status in self._lanes()}
        speeds: dict[str, dict[str, float]] = {}
        for row in rows:
            if row.target == auto.target and row.lane in ours and row.cell.tok_s is not None:
                speeds.setdefault(row.workload, {})[ours[row.lane]] = row.cell.tok_s
        told = []
        for workload, page in sorted(self._book.pages(auto.fingerprint).items()):
            by_strategy = speeds.get(workload, {})
            fixed = {name: speed for name, speed in by_strategy.items() if name != AUTO}
            plans = sorted(page.plans.items(), key=lambda pair: -pair[1])[:PLANS_SHOWN]
            told.append(
                {
                    "workload": workload,
                    "requests": round(page.requests, 1),
                    "steps": {plan: round(steps, 1) for plan, steps in plans},
                    "stopped_drafting": page.stopped,
                    "auto_tok_s": by_strategy.get(AUTO),
                    "fixed_tok_s": fixed,
                    "auto_vs_best_fixed": by_strategy[AUTO] / max(fixed.values())
                    if fixed and AUTO in by_strategy
                    else None,
                }
            )
        return told

    def _auto(self) -> Lane | None:
        lanes = (status.lane for status in self._lanes())
        return next((lane for lane in lanes if lane.strategy.is_auto), None)
