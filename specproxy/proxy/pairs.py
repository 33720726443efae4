"""Which drafter is held to fit which target, since when, and on what evidence that stands."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specproxy.proxy.board import Board, ratio_to_plain
from specproxy.proxy.cell import Cell, merged
from specproxy.records import LaneStatus

__all__ = ["pairs_json"]


def pairs_json(board: Board, lanes: Iterable[LaneStatus], draft: str = "") -> list[dict[str, Any]]:
    """Every pair of a drafter and a target that has a lane now, as JSON-serialisable data.

    `draft` is the name of the draft model where one was configured. Evidence is that of the lane's own
    fingerprint: a new build, draft or machine starts anew. `ratio` is time per token over plain's on the same
    workloads, with a 95% interval where there is enough to tell.
    """
    return [_pair(board, status, draft) for status in lanes if not status.lane.strategy.is_plain]


def _pair(board: Board, status: LaneStatus, draft: str) -> dict[str, Any]:
    lane = status.lane
    mine: dict[str, list[Cell]] = {}
    plain: dict[str, list[Cell]] = {}
    for (target, workload, _, strategy, fingerprint), cell in board.cells.items():
        if target == lane.target and (strategy, fingerprint) == (lane.strategy.name, lane.fingerprint):
            mine.setdefault(workload, []).append(cell)
        elif target == lane.target and strategy == "plain":
            plain.setdefault(workload, []).append(cell)
    whole = merged([cell for cells in mine.values() for cell in cells])
    shared = [(merged(cells), merged(plain[key])) for key, cells in mine.items() if key in plain]
    ratio = ratio_to_plain(shared)
    return {
        "lane": lane.id,
        "target": lane.target,
        "drafter": draft if draft and "draft" in lane.strategy.drafters else lane.strategy.name,
        "since": whole.first_at or None,
        "requests": whole.complete,
        "drafted": whole.drafted,
        "accepted": whole.accepted,
        "acceptance": whole.acceptance,
        "ratio": ratio.ratio if ratio else None,
        "ratio_lo": ratio.lo if ratio else None,
        "ratio_hi": ratio.hi if ratio else None,
    }
