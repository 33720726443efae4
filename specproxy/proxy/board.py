"""Running totals for status, metrics and the dashboard: one cell for each workload and lane.

Only sums are kept, so a cell has the same size after a million requests, cells add up exactly (a kind is the
sum of its temperatures), and what is stored restores to what was. The policy keeps its own statistics; these
are for people.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from specproxy.records import Decision, Observation, Outcome

__all__ = [
    "TPT_BOUNDS",
    "TTFT_BOUNDS",
    "Board",
    "BoardRow",
    "Cell",
    "Ratio",
    "merged",
    "ratio_to_plain",
    "saved_s",
]

FORMAT = 1
RECENT = 200  # decisions that are remembered
MAX_CELLS = 4096  # far above kinds × temperatures × lanes; a bound all the same
Z95 = 1.96

TTFT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
TPT_BOUNDS = (0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5)  # seconds a token

Key = tuple[str, str, str, str, str]  # target, workload, lane, strategy, fingerprint
Group = tuple[str, str, str, str]


@dataclass(slots=True)
class Cell:
    """Sums over the requests of one workload on one lane.

    `n` counts all requests, `complete` those that ended well; every other figure is of complete ones. The
    `log_*` sums are of ln(time per token), each request weighted by `Observation.weight`.
    """

    n: int = 0
    complete: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    drafted: int = 0
    accepted: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    decode_tokens: int = 0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    prefill_n: int = 0
    ttft_s: float = 0.0
    ttft_n: int = 0
    total_s: float = 0.0
    log_weight: float = 0.0
    log_weight2: float = 0.0
    log_sum: float = 0.0
    log_sum2: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)
    ttft_counts: list[int] = field(default_factory=lambda: [0] * (len(TTFT_BOUNDS) + 1))
    tpt_counts: list[int] = field(default_factory=lambda: [0] * (len(TPT_BOUNDS) + 1))
    tpt_s: float = 0.0

    def add(self, seen: Observation) -> None:
        """Count one observation."""
        self.n += 1
        self.first_at = min(self.first_at or seen.at, seen.at)
        self.last_at = max(self.last_at, seen.at)
        self.outcomes[str(seen.outcome)] = self.outcomes.get(str(seen.outcome), 0) + 1
        if seen.outcome is not Outcome.COMPLETE:
            return
        self.complete += 1
        self.total_s += seen.total_s
        self.drafted += seen.draft_tokens
        self.accepted += seen.accepted_tokens
        self.output_tokens += seen.output_tokens
        self.prompt_tokens += seen.prompt_tokens
        self.cached_tokens += seen.cached_tokens
        if seen.prefill_s is not None:
            self.prefill_s += seen.prefill_s
            self.prefill_n += 1
        if seen.ttft_s is not None:
            self.ttft_s += seen.ttft_s
            self.ttft_n += 1
            self.ttft_counts[bisect_left(TTFT_BOUNDS, seen.ttft_s)] += 1
        self._add_speed(seen)

    def _add_speed(self, seen: Observation) -> None:
        per_token = seen.time_per_token
        if per_token is None or seen.decode_s is None or seen.load_s > 0:
            return
        self.decode_tokens += seen.output_tokens - 1
        self.decode_s += seen.decode_s
        self.tpt_counts[bisect_left(TPT_BOUNDS, per_token)] += 1
        self.tpt_s += per_token
        log = math.log(per_token)
        self.log_weight += seen.weight
        self.log_weight2 += seen.weight**2
        self.log_sum += seen.weight * log
        self.log_sum2 += seen.weight * log * log

    def merge(self, other: Cell) -> None:
        """Add another cell's sums to this one."""
        self.first_at = min(filter(None, (self.first_at, other.first_at)), default=0.0)
        self.last_at = max(self.last_at, other.last_at)
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for outcome, count in other.outcomes.items():
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + count
        self.ttft_counts = [a + b for a, b in zip(self.ttft_counts, other.ttft_counts, strict=True)]
        self.tpt_counts = [a + b for a, b in zip(self.tpt_counts, other.tpt_counts, strict=True)]

    @property
    def acceptance(self) -> float | None:
        """Accepted / drafted tokens over all requests."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tok_s(self) -> float | None:
        """Decoded tokens a second of decoding."""
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else None

    @property
    def mean_log(self) -> float | None:
        """Weighted mean of ln(time per token)."""
        return self.log_sum / self.log_weight if self.log_weight > 0 else None

    @property
    def samples(self) -> float:
        """Effective number of requests behind `mean_log` (Kish)."""
        return self.log_weight**2 / self.log_weight2 if self.log_weight2 > 0 else 0.0

    @property
    def log_variance(self) -> float | None:
        """Variance of `mean_log`, or None below two samples."""
        mean, n = self.mean_log, self.samples
        if mean is None or n < 2:
            return None
        spread = max(0.0, self.log_sum2 / self.log_weight - mean**2) * n / (n - 1)
        return spread / n


_SUMS = (
    "n", "complete", "drafted", "accepted", "output_tokens", "prompt_tokens", "cached_tokens", "decode_tokens",
    "decode_s", "prefill_s", "prefill_n", "ttft_s", "ttft_n", "total_s", "log_weight", "log_weight2", "log_sum",
    "log_sum2", "tpt_s",
)  # fmt: skip


def merged(cells: Sequence[Cell]) -> Cell:
    """The sum of cells; a single one is given back as it is, so treat the result as read-only."""
    if len(cells) == 1:
        return cells[0]
    whole = Cell()
    for cell in cells:
        whole.merge(cell)
    return whole


@dataclass(frozen=True, slots=True)
class Ratio:
    """Time per token relative to plain, with a 95% interval where there is enough to tell."""

    ratio: float
    lo: float | None
    hi: float | None


def ratio_to_plain(pairs: Iterable[tuple[Cell, Cell]]) -> Ratio | None:
    """Geometric mean of time per token over plain's, from unpaired requests of the same workloads.

    `pairs` are (lane's cell, plain's cell), one for each workload: log gaps are averaged, weighted by the
    lane's samples, so that another mix of workloads on the two lanes cannot pass for a difference in speed. The
    interval is Welch's on the log scale, with the normal quantile; workloads with fewer than two samples on
    either side count only where there is no other. None where nothing can be compared.
    """
    gaps = []
    for cell, plain in pairs:
        if cell.mean_log is not None and plain.mean_log is not None:
            known = cell.log_variance is not None and plain.log_variance is not None
            variance = (cell.log_variance or 0.0) + (plain.log_variance or 0.0) if known else None
            gaps.append((cell.mean_log - plain.mean_log, variance, cell.samples))
    if not gaps:
        return None
    sound = [(gap, variance, weight) for gap, variance, weight in gaps if variance is not None]
    if not sound:
        return Ratio(math.exp(sum(g * w for g, _, w in gaps) / sum(w for _, _, w in gaps)), None, None)
    total = sum(w for _, _, w in sound)
    mean = sum(g * w for g, _, w in sound) / total
    half = Z95 * math.sqrt(sum(v * (w / total) ** 2 for _, v, w in sound))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


@dataclass(frozen=True, slots=True)
class BoardRow:
    """A line of the board. `workload` is a workload's key or, if kinds were asked for, its kind.

    `share` is of the requests of this workload and target, `ratio` None for plain.
    """

    target: str
    workload: str
    lane: str
    strategy: str
    cell: Cell
    ratio: Ratio | None
    share: float


class Board:
    """All cells, and the latest decisions."""

    def __init__(self) -> None:
        self.cells: dict[Key, Cell] = {}
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)

    def observe(self, seen: Observation, decision: Decision | None = None) -> None:
        """Count a finished request; `decision` adds its reason to the recent ones."""
        target = seen.target if seen.lane else ""  # without a lane it is a name that the client made up
        key = (target, seen.workload.key, seen.lane, seen.strategy, seen.fingerprint)
        cell = self.cells.get(key)
        if cell is None and len(self.cells) < MAX_CELLS:
            cell = self.cells[key] = Cell()
        if cell is not None:
            cell.add(seen)
        self._recent.append(_recent_row(seen, decision))

    def recall(self, seen: Iterable[Observation]) -> None:
        """Show requests of an earlier run among the recent ones, without counting them again."""
        self._recent.extend(_recent_row(observation, None) for observation in seen)

    def recent(self, limit: int = RECENT) -> list[dict[str, Any]]:
        """The latest requests, newest first: numbers and names only."""
        rows = list(self._recent)[-limit:] if limit > 0 else []
        return rows[::-1]

    def rows(self, fingerprints: Iterable[str] | None = None, *, by_kind: bool = False) -> list[BoardRow]:
        """Lanes' cells by workload, or by kind (temperatures together).

        With `fingerprints`, only those groups: what the lanes of today have shown.
        """
        wanted = None if fingerprints is None else set(fingerprints)
        lanes: dict[
            Group, dict[str, list[Cell]]
        ] = {}  # (target, shown workload, lane, strategy) → workload → cells
        plain: dict[tuple[str, str], list[Cell]] = {}
        totals: dict[tuple[str, str], int] = {}
        for (target, workload, lane, strategy, fingerprint), cell in sorted(self.cells.items()):
            if wanted is not None and fingerprint not in wanted:
                continue
            shown = workload.partition("/")[0] if by_kind else workload
            lanes.setdefault((target, shown, lane, strategy), {}).setdefault(workload, []).append(cell)
            totals[target, shown] = totals.get((target, shown), 0) + cell.n
            if strategy == "plain":
                plain.setdefault((target, workload), []).append(cell)
        bases = {key: merged(cells) for key, cells in plain.items()}
        return [_row(group, cells, bases, totals[group[:2]]) for group, cells in lanes.items()]

    def since(self) -> dict[str, float]:
        """When the statistics of each fingerprint begin (seconds since the epoch)."""
        found: dict[str, float] = {}
        for (*_, fingerprint), cell in self.cells.items():
            found[fingerprint] = min(cell.first_at, found.get(fingerprint, math.inf))
        return found

    def dump(self) -> dict[str, Any]:
        """All cells as JSON-serialisable data."""
        names = list(Cell.__slots__)
        cells = [
            [*key, {name: copy(getattr(cell, name)) for name in names}] for key, cell in self.cells.items()
        ]
        return {"format": FORMAT, "cells": cells}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `dump` gave.

        Raises:
            ValueError: the data is of another format.
        """
        if state.get("format") != FORMAT:
            raise ValueError(f"board state has format {state.get('format')!r}, not {FORMAT}")
        try:
            cells = {tuple(item[:5]): Cell(**item[5]) for item in state["cells"]}
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"board state is damaged: {error}") from error
        self.cells = cells


def saved_s(rows: Iterable[BoardRow]) -> float:
    """Decode seconds saved against plain at its mean speed on the same workload; losses count too."""
    return sum(row.cell.decode_s * (1 / row.ratio.ratio - 1) for row in rows if row.ratio is not None)


def _row(
    group: Group, parts: Mapping[str, list[Cell]], plain: Mapping[tuple[str, str], Cell], total: int
) -> BoardRow:
    target, shown, lane, strategy = group
    cells = {workload: merged(part) for workload, part in parts.items()}
    pairs = [(cell, plain[target, name]) for name, cell in cells.items() if (target, name) in plain]
    ratio = None if strategy == "plain" else ratio_to_plain(pairs)
    whole = merged(list(cells.values()))
    return BoardRow(target, shown, lane, strategy, whole, ratio, whole.n / total)


def _recent_row(seen: Observation, decision: Decision | None) -> dict[str, Any]:
    per_token = seen.time_per_token
    return {
        "id": seen.request_id,
        "at": seen.at,
        "workload": seen.workload.key,
        "lane": seen.lane,
        "strategy": seen.strategy,
        "rule": seen.rule,
        "reason": decision.reason if decision else "",
        "outcome": str(seen.outcome),
        "status": seen.status,
        "streamed": seen.streamed,
        "timings": str(seen.source),
        "prompt_tokens": seen.prompt_tokens,
        "cached_tokens": seen.cached_tokens,
        "output_tokens": seen.output_tokens,
        "acceptance": seen.acceptance,
        "tok_s": 1 / per_token if per_token else None,
        "ttft_s": seen.ttft_s,
        "prefill_s": seen.prefill_s,
        "decode_s": seen.decode_s,
        "total_s": seen.total_s,
        "concurrency": seen.concurrency,
        "repeat": seen.repeat,
    }
