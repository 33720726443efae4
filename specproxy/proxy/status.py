"""What `specproxy status`, the page and scripts are told: one JSON-serialisable dict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from specproxy.adapters.base import ProbeResult, ServedModel
from specproxy.proxy.board import Board, BoardRow, saved_s
from specproxy.proxy.cell import Cell, merged
from specproxy.records import Candidate, LaneStatus

__all__ = ["Believe", "Rung", "Upstream", "board_json", "lane_json"]

STRUCTURED = ("tool_call", "json_schema", "json")
"""Kinds whose answers are of use only once they are whole."""

Believe = Callable[[str, str], Mapping[str, Candidate]]


@dataclass(frozen=True, slots=True)
class Rung:
    """The rung of the start-up ladder that was taken: 1 request field, 2 further lanes, 3 reload, 4 observe.

    A line break in an item of `advice` stands before a command, which is not to be wrapped.
    """

    number: int
    name: str
    why: str
    advice: tuple[str, ...] = ()

    def json(self) -> dict[str, Any]:
        """As JSON-serialisable data."""
        return {"number": self.number, "name": self.name, "why": self.why, "advice": list(self.advice)}


@dataclass(slots=True)
class Upstream:
    """A server that we stand in front of, as its last probe found it; `backend` names its backend.

    `model` is the one that the rung is about: the only one, or the one that is loaded.
    """

    url: str
    backend: str = ""
    found: ProbeResult = field(default_factory=lambda: ProbeResult(False))
    model: ServedModel | None = None
    rung: Rung | None = None

    def json(self) -> dict[str, Any]:
        """As JSON-serialisable data."""
        found = self.found
        return {
            "url": self.url,
            "reachable": found.reachable,
            "kind": found.kind,
            "version": found.version,
            "models": list(found.models),
            "loading": found.loading,
            "loaded": [model.name for model in found.served if model.loaded and not model.unrouted],
            "passed_through": {model.name: model.unrouted for model in found.served if model.unrouted},
            "rung": self.rung.json() if self.rung is not None else None,
        }


def lane_json(
    status: LaneStatus, since: Mapping[str, float], address: str = "", tok_s: float | None = None
) -> dict[str, Any]:
    """A lane; `statistics_since` says when its fingerprint's statistics begin, `tok_s` is its speed lately."""
    lane = status.lane
    return {
        "id": lane.id,
        "backend": lane.backend,
        "target": lane.target,
        "models": sorted(lane.models),
        "strategy": lane.strategy.name,
        "n_max": lane.strategy.n_max,
        "control": str(lane.control),
        "health": str(status.health),
        "since": status.since,
        "note": status.note,
        "in_flight": status.in_flight,
        "tok_s": tok_s,
        "resident": status.resident,
        "memory_bytes": lane.memory_bytes,
        "load_s": lane.load_s,
        "address": address,
        "fingerprint": lane.fingerprint,
        "statistics_since": since.get(lane.fingerprint),
    }


def board_json(
    board: Board, fingerprints: Iterable[str] | None, *, believe: Believe = lambda *_: {}
) -> dict[str, Any]:
    """Tables and sums of the board; `fingerprints` None takes earlier set-ups in.

    `believe` gives what the policy believes of each lane (by id) on a target and workload; a workload's row
    shows it beside what was measured.
    """
    wanted = None if fingerprints is None else frozenset(fingerprints)
    outcomes: dict[str, int] = {}
    for cell in board.cells.values():
        for outcome, count in cell.outcomes.items():
            outcomes[outcome] = outcomes.get(outcome, 0) + count
    rows = board.rows(wanted)
    groups = {(row.target, row.workload) for row in rows}
    beliefs = {group: believe(*group) for group in groups}
    return {
        "workloads": [
            _row_json(row) | {"believed": _belief_json(beliefs[row.target, row.workload].get(row.lane))}
            for row in rows
        ],
        "kinds": [_row_json(row) for row in board.rows(wanted, by_kind=True)],
        "time_to_complete": list(_times_to_complete(board, wanted)),
        "saved_s": saved_s(rows),
        "requests": {"total": sum(outcomes.values()), "outcomes": outcomes},
    }


def _row_json(row: BoardRow) -> dict[str, Any]:
    cell = row.cell
    return {
        "target": row.target,
        "workload": row.workload,
        "lane": row.lane,
        "strategy": row.strategy,
        "n": cell.n,
        "complete": cell.complete,
        "share": row.share,
        "acceptance": cell.acceptance,
        "acceptance_lo": sure[0] if (sure := cell.acceptance_interval) else None,
        "acceptance_hi": sure[1] if sure else None,
        "drafted": cell.drafted,
        "accepted": cell.accepted,
        "tok_s": cell.tok_s,
        "ratio": row.ratio.ratio if row.ratio else None,
        "ratio_lo": row.ratio.lo if row.ratio else None,
        "ratio_hi": row.ratio.hi if row.ratio else None,
        **_time_per_token(cell),
        **_whole_ratio(row),
        "total_p50_s": cell.total_quantile(0.5),
        "total_p95_s": cell.total_quantile(0.95),
        "prefill_ms": _mean_ms(cell.prefill_s, cell.prefill_n),
        "ttft_ms": _mean_ms(cell.ttft_s, cell.ttft_n),
        "prefill_share": cell.prefill_s / cell.total_s if cell.total_s > 0 and cell.prefill_n else None,
        "output_tokens": cell.output_tokens,
        "first_at": cell.first_at,
        "last_at": cell.last_at,
    }


def _time_per_token(cell: Cell) -> dict[str, float | None]:
    """Geometric mean of time per token in milliseconds, with its 95% interval."""
    lo, hi = cell.tpt_interval or (None, None)
    return {
        "tpt_ms": 1e3 * math.exp(cell.mean_log) if cell.mean_log is not None else None,
        "tpt_lo_ms": 1e3 * lo if lo is not None else None,
        "tpt_hi_ms": 1e3 * hi if hi is not None else None,
    }


def _whole_ratio(row: BoardRow) -> dict[str, float | None]:
    """Time from request to end over what plain would have taken, if all but decoding had taken as long.

    `whole_ratio_cap` is what it would be if decoding took no time at all.
    """
    rest = max(0.0, row.cell.timed_s - row.cell.decode_s)

    def whole(ratio: float | None) -> float | None:
        return (rest + row.cell.decode_s) / (rest + row.cell.decode_s / ratio) if ratio else None

    found = row.ratio if row.cell.decode_s > 0 else None
    return {
        "whole_ratio": whole(found.ratio) if found else None,
        "whole_ratio_lo": whole(found.lo) if found else None,
        "whole_ratio_hi": whole(found.hi) if found else None,
        "whole_ratio_cap": rest / (rest + row.cell.decode_s / found.ratio) if found else None,
    }


def _times_to_complete(board: Board, wanted: frozenset[str] | None) -> Iterator[dict[str, Any]]:
    """How long tool calls and JSON took until they were whole, on plain lanes and on others."""
    parts: dict[tuple[str, str, bool], list[Cell]] = {}
    for row in board.rows(wanted, by_kind=True):
        if row.workload in STRUCTURED and row.lane:
            parts.setdefault((row.target, row.workload, row.strategy != "plain"), []).append(row.cell)
    for (target, kind, speculation), cells in sorted(parts.items()):
        cell = merged(cells)
        yield {
            "target": target,
            "workload": kind,
            "speculation": speculation,
            "n": cell.complete,
            "p50_s": cell.total_quantile(0.5),
            "p95_s": cell.total_quantile(0.95),
        }


def _belief_json(candidate: Candidate | None) -> dict[str, Any] | None:
    """Time per token relative to plain (90% interval), evidence in requests, and whether it may be chosen."""
    if candidate is None:
        return None
    return {
        "ratio": candidate.ratio,
        "ratio_lo": candidate.ratio_lo,
        "ratio_hi": candidate.ratio_hi,
        "n": candidate.n,
        "profiled": candidate.profiled,
        "allowed": candidate.allowed,
        "note": candidate.note,
    }


def _mean_ms(total_s: float, n: int) -> float | None:
    return total_s / n * 1e3 if n else None
