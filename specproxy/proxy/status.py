"""What `specproxy status`, the page and scripts are told: one JSON-serialisable dict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specproxy.adapters.base import ProbeResult, ServedModel
from specproxy.proxy.board import Board, BoardRow, saved_s
from specproxy.records import Candidate, LaneStatus

__all__ = ["Rung", "Upstream", "board_json", "lane_json"]

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


def lane_json(status: LaneStatus, since: Mapping[str, float], address: str = "") -> dict[str, Any]:
    """A lane; `statistics_since` says when the statistics of its fingerprint begin."""
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
        "drafted": cell.drafted,
        "accepted": cell.accepted,
        "tok_s": cell.tok_s,
        "ratio": row.ratio.ratio if row.ratio else None,
        "ratio_lo": row.ratio.lo if row.ratio else None,
        "ratio_hi": row.ratio.hi if row.ratio else None,
        "prefill_ms": _mean_ms(cell.prefill_s, cell.prefill_n),
        "ttft_ms": _mean_ms(cell.ttft_s, cell.ttft_n),
        "prefill_share": cell.prefill_s / cell.total_s if cell.total_s > 0 and cell.prefill_n else None,
        "output_tokens": cell.output_tokens,
        "first_at": cell.first_at,
        "last_at": cell.last_at,
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
        "allowed": candidate.allowed,
        "note": candidate.note,
    }


def _mean_ms(total_s: float, n: int) -> float | None:
    return total_s / n * 1e3 if n else None
