"""Drafters and their targets: whose evidence is whose."""

from __future__ import annotations

from dataclasses import replace

from specproxy.proxy.board import Board
from specproxy.proxy.pairs import pairs_json
from specproxy.records import Strategy
from tests.proxy.samples import NGRAM, PLAIN, lane_status, observation

DRAFT = replace(NGRAM, id="draft", strategy=Strategy(("draft",), 3), fingerprint="fp-draft")


def test_evidence_belongs_to_a_fingerprint() -> None:
    """What an earlier draft has shown does not count for the one that came in its place."""
    board, fresh = Board(), replace(DRAFT, fingerprint="fp-new")
    for n in range(4):
        board.observe(observation(PLAIN, 0.02 + n * 1e-4))
        board.observe(observation(DRAFT, 0.01 + n * 1e-4, at=50.0, draft_tokens=10, accepted_tokens=7))
    [old] = pairs_json(board, [lane_status(PLAIN), lane_status(DRAFT)], "small.gguf")
    assert (old["drafter"], old["target"], old["since"], old["requests"]) == ("small.gguf", "m.gguf", 50.0, 4)
    assert (old["accepted"], old["drafted"], old["acceptance"]) == (28, 40, 0.7)
    assert old["ratio_lo"] < old["ratio"] < old["ratio_hi"] < 0.6
    [new] = pairs_json(board, [lane_status(fresh)])
    assert (new["drafter"], new["since"], new["requests"], new["ratio"]) == ("draft", None, 0, None)
