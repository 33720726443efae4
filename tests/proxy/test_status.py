"""What status says of workloads: intervals, the whole request beside decoding, and times to completion."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from specproxy.proxy.board import Board
from specproxy.proxy.cell import Cell
from specproxy.proxy.status import board_json
from specproxy.records import Outcome, TempBucket, Workload
from tests.proxy.samples import NGRAM, PLAIN, observation


def mixed(prefill_s: float) -> Board:
    """Plain at 20 ms a token and n-gram at 10 ms, both behind the same prompt."""
    board = Board()
    for n in range(20):
        for lane, per_token in ((PLAIN, 0.02), (NGRAM, 0.01)):
            seen = observation(lane, per_token * (1 + n % 2 * 0.01), prefill_s=prefill_s)
            board.observe(replace(seen, total_s=(seen.decode_s or 0.0) + prefill_s))
    return board


@pytest.mark.parametrize("prefill_s", [0.0, 1.0, 8.0])
def test_decoding_beside_the_whole_request(prefill_s: float) -> None:
    """Twice as fast decoding is felt as far as the prompt lets it, and the cap says how far that could be."""
    plain, ngram = sorted(
        board_json(mixed(prefill_s), None)["kinds"], key=lambda row: row["strategy"] != "plain"
    )
    assert ngram["ratio"] == pytest.approx(0.5)
    assert ngram["whole_ratio"] == pytest.approx((prefill_s + 1.005) / (prefill_s + 2.01), rel=1e-3)
    assert ngram["whole_ratio_cap"] == pytest.approx(prefill_s / (prefill_s + 2.01), abs=1e-3)
    assert ngram["whole_ratio_lo"] < ngram["whole_ratio"] < ngram["whole_ratio_hi"]
    assert (plain["whole_ratio"], plain["whole_ratio_cap"]) == (None, None)


def test_time_per_token_has_an_interval() -> None:
    """Geometric mean with 95%, from two requests on."""
    row = next(r for r in board_json(mixed(0.0), None)["kinds"] if r["strategy"] == "plain")
    assert row["tpt_lo_ms"] < row["tpt_ms"] < row["tpt_hi_ms"]
    assert row["tpt_ms"] == pytest.approx(20.1, abs=0.05)
    board = Board()
    board.observe(observation())
    [row] = board_json(board, None)["kinds"]
    assert (row["tpt_ms"], row["tpt_lo_ms"], row["acceptance_lo"]) == (pytest.approx(20), None, None)


def test_acceptance_varies_by_request_not_by_token() -> None:
    """Of 400 simulated sets of requests that differ a lot, about 95% of the intervals hold the true share."""
    import numpy as np

    rng, hits, wide = np.random.default_rng(3), 0, 0.0
    for _ in range(400):
        cell = Cell()
        for share in rng.beta(2, 2, 40):  # mean 0.5
            cell.add(observation(draft_tokens=100, accepted_tokens=int(rng.binomial(100, share))))
        found = cell.acceptance_interval
        assert found is not None
        hits += found[0] <= 0.5 <= found[1]
        wide += (found[1] - found[0]) / 400
    assert 0.91 <= hits / 400 <= 0.98
    assert wide > 2 * 2 * 1.96 * (0.25 / 4000) ** 0.5  # far wider than if tokens were independent


def test_time_to_a_complete_tool_call_with_and_without_speculation() -> None:
    """Quantiles of the whole time, of complete requests; other kinds are left out."""
    board = Board()
    tool = Workload("tool_call", TempBucket.GREEDY)
    for n in range(1, 101):
        board.observe(observation(PLAIN, workload=tool, total_s=n / 10))
        board.observe(observation(NGRAM, workload=tool, total_s=n / 20))
    board.observe(observation(NGRAM, workload=tool, total_s=900.0, outcome=Outcome.ERROR))
    board.observe(observation(NGRAM))
    without, with_it = board_json(board, None)["time_to_complete"]
    assert [(row["speculation"], row["n"]) for row in (without, with_it)] == [(False, 100), (True, 100)]
    assert (without["p50_s"], without["p95_s"]) == (pytest.approx(5.0, rel=0.03), pytest.approx(9.5, rel=0.03))
    assert (with_it["p50_s"], with_it["p95_s"]) == (pytest.approx(2.5, rel=0.03), pytest.approx(4.75, rel=0.03))


def test_it_survives_being_stored() -> None:
    """As JSON, which knows no numbers as names."""
    board, other = mixed(1.0), Board()
    other.load(json.loads(json.dumps(board.dump())))
    other.observe(observation())
    board.observe(observation())
    assert board_json(other, None) == board_json(board, None)
