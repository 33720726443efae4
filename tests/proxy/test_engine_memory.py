"""What the engine reports is kept for its workload, goes back with later requests, and is shown."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

from specproxy.adapters.embedded.side_channel import decode_priors
from specproxy.proxy.board import Board
from specproxy.proxy.engine_memory import EngineMemory
from specproxy.records import Control, DrafterReport, EngineReport, Lane, LaneStatus, Strategy
from tests.proxy.samples import CODE, lane_status, observation

AUTO, MTP = (
    Lane(name, "embedded", "m.gguf", Strategy((name,)), Control.REQUEST, f"fp-{name}")
    for name in ("auto", "mtp")
)
PLAIN = Lane("plain", "embedded", "m.gguf", Strategy(), Control.REQUEST, "fp-plain")
REPORT = EngineReport(
    "r1", "auto", 10, (DrafterReport("mtp", 8, 16, 12, by_position=((7, 8), (5, 7))),),
    plans=(("mtp:2", 8), ("plain", 2)), stopped_drafting="because",
)  # fmt: skip


def memory(path: Path, *lanes: Lane) -> EngineMemory:
    statuses: list[LaneStatus] = [lane_status(lane) for lane in lanes or (PLAIN, MTP, AUTO)]
    return EngineMemory(path / "engine" / "workloads.json", lambda: statuses)


def test_a_report_goes_back_as_priors_with_the_next_request(tmp_path: Path) -> None:
    kept = memory(tmp_path)
    kept.learn(observation(MTP), REPORT)  # what a fixed strategy has shown counts too
    priors = decode_priors(kept.header(AUTO, CODE.key, "r2"))
    assert (priors.request_id, priors.workload) == ("r2", CODE.key)
    assert priors.acceptance == {"mtp": ((7, 8), (5, 7))}


def test_lanes_that_choose_nothing_are_told_nothing(tmp_path: Path) -> None:
    assert memory(tmp_path).header(MTP, CODE.key, "r") == b""
    assert memory(tmp_path, PLAIN, MTP).header(MTP, CODE.key, "r") == b""


def test_what_another_model_does_is_not_mixed_in(tmp_path: Path) -> None:
    kept = memory(tmp_path)
    kept.learn(observation(MTP, target="another.gguf"), REPORT)
    assert decode_priors(kept.header(AUTO, CODE.key, "r")).acceptance == {}


async def test_it_outlives_a_restart_and_is_private(tmp_path: Path) -> None:
    kept = memory(tmp_path)
    await kept.save()
    assert not list(tmp_path.iterdir()), "nothing to keep yet"  # noqa: ASYNC240 - a test may block
    kept.learn(observation(AUTO), REPORT)
    await kept.save()
    (file,) = (tmp_path / "engine").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = memory(tmp_path)
    await again.load()
    assert again.header(AUTO, CODE.key, "r") == kept.header(AUTO, CODE.key, "r")


async def test_a_damaged_file_is_as_good_as_none(tmp_path: Path) -> None:
    kept = memory(tmp_path)
    (tmp_path / "engine").mkdir()
    for damage in (b"", b'{"a":1}', b'[{"fingerprint":1}]'):
        (tmp_path / "engine" / "workloads.json").write_bytes(damage)
        await kept.load()
        assert decode_priors(kept.header(AUTO, CODE.key, "r")).acceptance == {}


def test_what_was_done_on_a_request_is_told_of_it_alone(tmp_path: Path) -> None:
    """Whatever lane it ran on, and whatever model."""
    told: list[tuple[str, dict[str, int], str]] = []
    kept = EngineMemory(tmp_path / "book.json", list, lambda *of_request: told.append(of_request))
    kept.learn(observation(MTP, request_id="r7"), REPORT)
    assert told == [("r7", {"mtp:2": 8, "plain": 2}, "because")]


def test_auto_is_shown_against_the_fixed_strategies(tmp_path: Path) -> None:
    """Its steps by drafter and length, why it stopped, and its speed beside theirs."""
    kept, board = memory(tmp_path), Board()
    for lane, per_token in ((PLAIN, 0.04), (MTP, 0.025), (AUTO, 0.02)):
        board.observe(observation(lane, per_token))
    board.observe(observation(MTP, 0.001, target="z.gguf"))  # another model's
    board.observe(observation(replace(MTP, id="zelsewhere", strategy=Strategy(("draft",))), 0.001))  # not ours
    kept.learn(observation(AUTO), REPORT)
    (told,) = kept.json(board.rows(None))
    assert told["workload"] == CODE.key
    assert told["steps"] == {"mtp:2": 8, "plain": 2}
    assert told["stopped_drafting"] == "because"
    assert told["auto_vs_best_fixed"] == told["auto_tok_s"] / told["fixed_tok_s"]["mtp"]
    assert 1.2 < told["auto_vs_best_fixed"] < 1.3
    assert set(told["fixed_tok_s"]) == {"plain", "mtp"}
