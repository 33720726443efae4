"""Metrics: how many series there can be, and that the Grafana dashboard asks for none that does not exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specproxy.proxy import metrics
from specproxy.proxy.board import MAX_CELLS, Board
from specproxy.records import Outcome, TempBucket, Workload
from specproxy.strategies.classify import KINDS
from tests.proxy.samples import NGRAM, PLAIN, lane_status, observation

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "specproxy.json"
LANES = [lane_status(PLAIN), lane_status(NGRAM)]


def series(board: Board) -> list[str]:
    """Name and labels of every sample."""
    page = metrics.render(board, LANES).decode()
    return [line.rpartition(" ")[0] for line in page.splitlines() if line and not line.startswith("#")]


def full() -> Board:
    """A board on which every kind ran on both lanes, at every temperature, and failed in every way."""
    board = Board()
    for kind in KINDS:
        for temperature in TempBucket:
            for lane in (PLAIN, NGRAM):
                for outcome in Outcome:
                    seen = {"workload": Workload(kind, temperature), "outcome": outcome}
                    board.observe(observation(lane, draft_tokens=4, accepted_tokens=2, **seen))
    return board


def test_there_are_no_more_series_than_kinds_times_lanes() -> None:
    """Temperatures, fingerprints, client-made model names and more requests add none."""
    board = full()
    before = series(board)
    each = 5 + 7 + 14 + 14 + 13 + 3 * 2 + 1  # outcomes, counters, three histograms with sum and count, saved
    assert len(before) <= len(KINDS) * 2 * each + 2 * 4
    assert len(set(before)) == len(before)
    for n in range(300):
        seen = observation(NGRAM, fingerprint=f"fp{n}")
        board.observe(seen)
        board.observe(replace(seen, lane="", strategy="", fingerprint="", target=f"made up {n}"))
    added = set(series(board)) - set(before)
    assert {re.search(r'lane="(\w*)"', name)[1] for name in added} <= {""}  # type: ignore[index]  # there is a lane
    assert len(added) <= each


def test_many_set_ups_later_the_lanes_of_today_are_counted() -> None:
    """The cell that was not used for longest makes room."""
    board = Board()
    for n in range(MAX_CELLS):
        board.observe(observation(fingerprint=f"fp{n}", at=1000.0 + n))
    board.observe(observation(fingerprint="today", at=1e9))
    assert len(board.cells) == MAX_CELLS
    assert {"today", "fp1"} <= {key[4] for key in board.cells}
    assert "fp0" not in {key[4] for key in board.cells}


def test_histograms_agree_with_the_requests() -> None:
    """Count and sum of the time from request to end."""
    board = Board()
    for seconds in (0.2, 3.0, 400.0):
        board.observe(observation(total_s=seconds))
    page = metrics.render(board, LANES).decode()
    labels = 'lane="plain",model="m.gguf",strategy="plain",workload="code"'
    for name, value in (
        (f'bucket{{lane="plain",le="2.5",{labels[13:]}}}', 1.0),
        (f'bucket{{lane="plain",le="300.0",{labels[13:]}}}', 2.0),
        (f"count{{{labels}}}", 3.0),
        (f"sum{{{labels}}}", 403.2),
    ):
        assert f"specproxy_e2e_request_latency_seconds_{name} {value}\n" in page


# --- the dashboard -----------------------------------------------------------------------------------


def queries() -> Iterator[str]:
    data = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    for panel in data["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (v["query"]["query"] for v in data["templating"]["list"] if v["type"] == "query")


def exported() -> dict[str, set[str]]:
    """Labels by the name of every sample."""
    found: dict[str, set[str]] = {}
    for name in series(full()):
        found.setdefault(name.partition("{")[0], set()).update(re.findall(r'(\w+)="', name))
    return found


@pytest.mark.parametrize("query", sorted(set(queries())))
def test_the_dashboard_asks_for_what_there_is(query: str) -> None:
    """Every metric is exported, with every label that is selected or grouped by."""
    there = exported()
    names = re.findall(r"specproxy_\w+", query)
    assert names
    assert set(names) <= set(there)
    labels = set(re.findall(r'(\w+)\s*[=!]~?\s*"', query))
    for grouped in re.findall(r"by \(([^)]*)\)", query):
        labels |= {name.strip() for name in grouped.split(",")}
    labels |= set(re.findall(r"label_values\(\w+, (\w+)\)", query))
    assert all(labels <= there[name] for name in names), (labels, names)


def test_the_dashboard_shows_every_metric() -> None:
    """Nothing that is exported is missing on it."""
    shown: set[Any] = set(re.findall(r"specproxy_\w+", " ".join(queries())))
    families = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in exported()}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown} == families


def test_panels_do_not_overlap() -> None:
    """On Grafana's grid of 24 columns."""
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken
        taken |= cells
