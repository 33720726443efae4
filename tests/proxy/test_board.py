"""The board's sums, ratios and what survives a restart."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.proxy.board import FORMAT, MAX_CELLS, RECENT, Board, ratio_to_plain, saved_s
from specproxy.proxy.cell import Cell
from specproxy.records import Outcome, TempBucket, Workload
from tests.proxy.samples import NGRAM, PLAIN, decision, observation

times = st.lists(st.floats(0.001, 0.5), min_size=1, max_size=20)


def cell(per_token: list[float]) -> Cell:
    made = Cell()
    for value in per_token:
        made.add(observation(per_token=value))
    return made


def test_sums_of_complete_requests() -> None:
    """Acceptance and speed are ratios of sums, not means of ratios."""
    board = Board()
    board.observe(observation(NGRAM, 0.01, draft_tokens=10, accepted_tokens=9))
    board.observe(observation(NGRAM, 0.03, draft_tokens=90, accepted_tokens=1))
    [row] = board.rows()
    assert (row.target, row.workload, row.lane, row.strategy) == ("m.gguf", "code/greedy", "ngram", "ngram")
    assert row.cell.acceptance == pytest.approx(0.1)
    assert row.cell.tok_s == pytest.approx(200 / 4)
    assert (row.cell.n, row.share) == (2, 1.0)


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.COMPLETE])
def test_failures_count_but_teach_nothing(outcome: Outcome) -> None:
    """An aborted or failed request shows in n and outcomes, and in no speed."""
    seen = Cell()
    seen.add(observation(outcome=outcome, draft_tokens=5))
    assert (seen.n, seen.complete, seen.drafted, seen.tok_s) == (1, 0, 0, None)
    assert seen.outcomes == {str(outcome): 1}


def test_a_load_inside_a_request_is_kept_out_of_speed() -> None:
    """Time that contains a model load says nothing about decoding."""
    seen = Cell()
    seen.add(observation(load_s=3.0))
    assert (seen.complete, seen.tok_s, seen.mean_log) == (1, None, None)


def test_cells_without_a_request_have_no_share() -> None:
    """A damaged state may hold nothing but such cells."""
    board = Board()
    board.observe(observation(NGRAM))
    state = board.dump()
    state["cells"][0][-1]["n"] = 0
    board.load(state)
    assert [row.share for row in board.rows()] == [0.0]


@given(times, times)
def test_ratio_is_of_geometric_means_and_inside_its_interval(lane: list[float], plain: list[float]) -> None:
    """The ratio is e^(mean log gap); the interval encloses it and exists from two samples a side."""
    found = ratio_to_plain([(cell(lane), cell(plain))])
    assert found is not None
    expected = math.exp(sum(map(math.log, lane)) / len(lane) - sum(map(math.log, plain)) / len(plain))
    assert found.ratio == pytest.approx(expected)
    if len(lane) > 1 and len(plain) > 1:
        assert found.lo is not None
        assert found.hi is not None
        assert found.lo <= found.ratio * (1 + 1e-9)
        assert found.hi >= found.ratio * (1 - 1e-9)
    else:
        assert (found.lo, found.hi) == (None, None)


def test_interval_covers_the_truth() -> None:
    """Of 400 simulated pairs of lanes, about 95% of the intervals hold the true ratio."""
    import numpy as np

    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(400):
        lane = cell(list(np.exp(rng.normal(-4.2, 0.2, 30))))
        plain = cell(list(np.exp(rng.normal(-4.0, 0.2, 30))))
        found = ratio_to_plain([(lane, plain)])
        assert found is not None
        assert found.lo is not None
        assert found.hi is not None
        hits += found.lo <= math.exp(-0.2) <= found.hi
    assert 0.91 <= hits / 400 <= 0.98


@given(times, times)
def test_merging_cells_equals_counting_all_in_one(a: list[float], b: list[float]) -> None:
    """Temperatures of a kind add up exactly."""
    merged, whole = cell(a), cell(a + b)
    merged.merge(cell(b))
    for name in Cell.__slots__:
        assert getattr(merged, name) == pytest.approx(getattr(whole, name)), name


def test_merging_into_an_empty_cell_keeps_times() -> None:
    """An empty cell has no first time that could win."""
    empty = Cell()
    empty.merge(cell([0.1]))
    assert (empty.first_at, empty.last_at) == (1000.0, 1000.0)


def test_share_is_of_the_workload_and_ratio_against_plain() -> None:
    """A lane's share counts requests of its own workload only; plain has no ratio."""
    board = Board()
    for _ in range(3):
        board.observe(observation(NGRAM, 0.01))
    board.observe(observation(PLAIN, 0.02))
    board.observe(observation(PLAIN, workload=Workload("prose", TempBucket.WARM)))
    rows = {(row.workload, row.lane): row for row in board.rows()}
    ngram = rows["code/greedy", "ngram"]
    assert ngram.share == 0.75
    assert ngram.ratio is not None
    assert ngram.ratio.ratio == pytest.approx(0.5)
    assert (rows["code/greedy", "plain"].ratio, rows["code/greedy", "plain"].share) == (None, 0.25)
    assert (rows["prose/warm", "plain"].ratio, rows["prose/warm", "plain"].share) == (None, 1.0)


def test_a_different_mix_of_temperatures_is_no_difference_in_speed() -> None:
    """Two lanes equally fast on each temperature have ratio 1 on the kind, whatever their plain means."""
    hot = Workload("code", TempBucket.HOT)
    board = Board()
    for lane, greedy, warm in ((PLAIN, 8, 2), (NGRAM, 2, 8)):
        for n in range(greedy):
            board.observe(observation(lane, 0.01 + n % 2 * 1e-9))
        for n in range(warm):
            board.observe(observation(lane, 0.04 + n % 2 * 1e-9, workload=hot))
    rows = {row.lane: row for row in board.rows(by_kind=True)}
    assert {(row.workload, row.cell.n, row.share) for row in rows.values()} == {("code", 10, 0.5)}
    ratio = rows["ngram"].ratio
    assert ratio is not None
    assert ratio.ratio == pytest.approx(1.0)


def test_a_request_without_a_lane_keeps_no_name_of_the_clients() -> None:
    """The model that a client asked for in vain is no target of ours."""
    seen = replace(observation(), lane="", target="made up", outcome=Outcome.UNREACHABLE)
    board = Board()
    board.observe(seen)
    assert [row.target for row in board.rows()] == [""]


def test_saved_time_counts_gains_and_losses() -> None:
    """One second decoded at half of plain's time saves one; two at twice its time lose one."""
    board = Board()
    board.observe(observation(PLAIN, 0.02))
    board.observe(observation(NGRAM, 0.01))
    assert saved_s(board.rows()) == pytest.approx(1.0)
    board = Board()
    board.observe(observation(PLAIN, 0.01))
    board.observe(observation(NGRAM, 0.02))
    assert saved_s(board.rows()) == pytest.approx(-1.0)


def test_other_fingerprints_are_left_out() -> None:
    """What an earlier set-up measured does not mix with today's lanes."""
    board = Board()
    board.observe(observation(NGRAM, 0.01))
    board.observe(observation(replace(PLAIN, fingerprint="old"), 0.02))
    [row] = board.rows({"fp-ngram", "fp-plain"})
    assert (row.lane, row.ratio, row.share) == ("ngram", None, 1.0)


def test_dump_and_load_give_the_same_board() -> None:
    """State goes through JSON and back without loss."""
    board = Board()
    board.observe(observation(NGRAM, 0.013, draft_tokens=7, accepted_tokens=3))
    board.observe(observation(PLAIN, outcome=Outcome.CLIENT_GONE))
    other = Board()
    other.load(json.loads(json.dumps(board.dump())))
    assert other.cells == board.cells


def cells(*item: object) -> dict[str, object]:
    return {"format": FORMAT, "cells": [list(item)]}


NAMES = ("t", "w", "l", "s", "f")
DAMAGED = (
    cells(*NAMES[:4], [], {}),
    cells(*NAMES, {"n": "x"}),
    cells(*NAMES, {"outcomes": []}),
    cells(*NAMES, {"outcomes": {"complete": None}}),
    cells(*NAMES, {"ttft_counts": [1]}),
    cells(*NAMES, {"total_counts": {"x": 1}}),
    cells(*NAMES, 7),
    cells(*NAMES, {"n": -1}),
    cells(*NAMES[:4], "\ud800", {"n": 1}),
    cells(*NAMES, {"n": 1, "decode_s": -1.0}),
    cells(*NAMES, {"n": 1, "ttft_s": math.nan}),
    cells(*NAMES, {"n": 10**400}),
    cells(*NAMES, {"n": 2, "drafting": 2}),
    cells(*NAMES, {"n": 1, "total_counts": {"100000": 1}}),
    cells(*NAMES, {"n": 1, "log_weight": 1.0, "log_weight2": 1.0, "log_sum": 800.0}),
    cells(*NAMES, {"n": 1, "log_weight": 1.0, "log_weight2": 1.0, "log_sum2": 1e9}),
    cells(*NAMES, {"n": 1, "log_weight": 1.0}),
)


@pytest.mark.parametrize(
    "state", [{}, {"format": 99, "cells": []}, {"format": 1}, {"format": 1, "cells": [["a"]]}, *DAMAGED]
)
def test_foreign_state_is_refused(state: dict[str, object]) -> None:
    """Damaged or newer state is a ValueError and leaves the board as it was."""
    board = Board()
    board.observe(observation())
    with pytest.raises(ValueError, match="board state"):
        board.load(state)
    assert len(board.cells) == 1


def test_memory_is_bounded() -> None:
    """Neither cells nor recent requests grow without end."""
    board = Board()
    for n in range(MAX_CELLS + 10):
        board.observe(observation(target=f"t{n}", request_id=str(n)))
    assert len(board.cells) == MAX_CELLS
    assert len(board.recent(10_000)) == RECENT
    assert board.recent(1)[0]["id"] == str(MAX_CELLS + 9)


def test_recent_rows_hold_the_reason_and_numbers() -> None:
    """Newest first, with the decision's sentence."""
    board = Board()
    board.observe(observation(request_id="a"))
    board.observe(observation(NGRAM, 0.01, request_id="b"), decision())
    first, second = board.recent()
    assert (first["id"], first["reason"], second["reason"]) == ("b", "ngram is expected to be fastest", "")
    assert first["tok_s"] == pytest.approx(100)
    assert board.recent(0) == []


def test_what_the_engines_steps_did_is_added_to_their_request() -> None:
    """It comes when the request has been counted; one that is no longer shown is nobody's."""
    board = Board()
    for name in ("a", "b", "c"):
        board.observe(observation(request_id=name))
    board.explain_steps("b", {"mtp:2": 8, "plain": 2}, "because")
    board.explain_steps("gone", {"plain": 1}, "")
    assert [(row["steps"], row["stopped_drafting"]) for row in board.recent()] == [
        ({}, ""),
        ({"mtp:2": 8, "plain": 2}, "because"),
        ({}, ""),
    ]
