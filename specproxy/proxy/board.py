"""Running totals for status, metrics and the dashboard: one cell for each workload and lane.

Only sums are kept, so a cell has the same size after a million requests, cells add up exactly (a kind is the
sum of its temperatures), and what is stored restores to what was. The policy keeps its own statistics; these
are for people.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

from specproxy.proxy.cell import Z95, Cell, merged
from specproxy.proxy.quantiles import is_bucket
from specproxy.records import Decision, Observation, Outcome

__all__ = ["Board", "BoardRow", "Ratio", "ratio_to_plain", "saved_s"]

FORMAT = 1
RECENT = 200  # decisions that are remembered
MOST = 1e30  # no sum of a cell comes near
MAX_CELLS = 4096  # far above kinds × temperatures × lanes; a bound all the same

Key = tuple[str, str, str, str, str]  # target, workload, lane, strategy, fingerprint
Group = tuple[str, str, str, str]


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
        if cell is None:
            if len(self.cells) >= MAX_CELLS:  # many set-ups later: the one that was not used for longest goes
                del self.cells[min(self.cells, key=lambda known: self.cells[known].last_at)]
            cell = self.cells[key] = Cell()
        cell.add(seen)
        self._recent.append(_recent_row(seen, decision))

    def recall(self, seen: Iterable[Observation]) -> None:
        """Show requests of an earlier run among the recent ones, without counting them again."""
        self._recent.extend(_recent_row(observation, None) for observation in seen)

    def explain_steps(self, request_id: str, steps: dict[str, int], stopped: str) -> None:
        """Add to a recent request what the engine's steps did, by drafter and length, and why it stopped."""
        row = next((row for row in reversed(self._recent) if row["id"] == request_id), None)
        if row is not None:
            row |= {"steps": steps, "stopped_drafting": stopped}

    def withdraw(self, request_ids: Container[str]) -> None:
        """Show these requests no longer among the recent ones: they will be counted once more."""
        kept = [row for row in self._recent if row["id"] not in request_ids]
        self._recent.clear()
        self._recent.extend(kept)

    def recent(self, limit: int = RECENT) -> list[dict[str, Any]]:
        """The latest requests, newest first: numbers and names only."""
        rows = list(self._recent)[-limit:] if limit > 0 else []
        return rows[::-1]

    def speeds(self) -> dict[str, float]:
        """Decoded tokens a second on each lane, over the recent requests."""
        sums: dict[str, tuple[int, float]] = {}
        for row in self._recent:
            if row["tok_s"] is not None and row["outcome"] == Outcome.COMPLETE:
                tokens, seconds = sums.get(row["lane"], (0, 0.0))
                sums[row["lane"]] = tokens + row["output_tokens"] - 1, seconds + row["decode_s"]
        return {lane: tokens / seconds for lane, (tokens, seconds) in sums.items()}

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
            cells = {_key(item): _restored(item[5]) for item in state["cells"]}
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(f"board state is damaged: {error}") from error
        self.cells = cells


def _key(item: list[Any]) -> Key:
    target, workload, lane, strategy, fingerprint = names = item[:5]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"{names!r} names no cell")
    "".join(names).encode()  # UnicodeEncodeError, a ValueError, where a name could be shown nowhere
    return target, workload, lane, strategy, fingerprint


def _restored(values: dict[str, Any]) -> Cell:
    """A cell from what `Board.dump` gave; JSON has made texts of the buckets' numbers.

    Raises:
        TypeError, ValueError: no requests add up to such a cell.
    """
    cell, fresh = Cell(**values), Cell()
    for name in Cell.__slots__:
        value, usual = getattr(cell, name), getattr(fresh, name)
        numbers = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        alike = type(value) is type(usual) or {type(value), type(usual)} == {int, float}
        if not alike or not all(type(number) in (int, float) for number in numbers):
            raise TypeError(f"{name} of a cell is {value!r}")
        if isinstance(usual, list) and len(value) != len(usual):
            raise ValueError(f"{name} of a cell has {len(value)} buckets")
        least = -MOST if name == "log_sum" else 0
        if not all(least <= number <= MOST for number in numbers):
            raise ValueError(f"{name} of a cell is {value!r}")
    cell.total_counts = {int(bucket): count for bucket, count in cell.total_counts.items()}
    if not (cell.is_possible and all(map(is_bucket, cell.total_counts))):
        raise ValueError(f"no requests make a cell like {values!r}"[:300])
    return cell


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
    return BoardRow(target, shown, lane, strategy, whole, ratio, whole.n / max(1, total))


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
        "drafted": seen.draft_tokens,
        "accepted": seen.accepted_tokens,
        "acceptance": seen.acceptance,
        "tok_s": 1 / per_token if per_token else None,
        "ttft_s": seen.ttft_s,
        "prefill_s": seen.prefill_s,
        "decode_s": seen.decode_s,
        "total_s": seen.total_s,
        "concurrency": seen.concurrency,
        "repeat": seen.repeat,
        "steps": {},
        "stopped_drafting": "",
    }
