"""Which lanes fit, and what this machine has."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.adapters.machine import (
    Gpu,
    available_memory,
    gpus,
    machine_id,
    memory_stalls,
    parse_gpus,
    processor,
)
from specproxy.adapters.memory import MIB, Budget, LaneNeed, choose_ctx, lane_need, plan
from specproxy.records import Strategy
from tests.support.model_facts import facts

GIB = 1024 * MIB


def need(lane: str, private: int, shared: int = 0, gpu: int = 0) -> LaneNeed:
    return LaneNeed(lane, private, (("weights", shared),) if shared else (), gpu)


# --- what a lane needs -----------------------------------------------------------------------------


def test_mapped_weights_are_shared_and_repacked_ones_are_not() -> None:
    plain = lane_need("plain", Strategy(), facts(), None, ctx=4096, slots=1)
    assert plain.shared == (("m", 3 * GIB),)
    assert plain.private > GIB + 4096 * 131072
    unpacked = lane_need("plain", Strategy(), facts(), None, ctx=4096, slots=1, repack=False)
    assert unpacked.shared == (("m", 4 * GIB),)
    assert plain.total == unpacked.total


def test_the_cache_grows_with_context_and_slots() -> None:
    def private(ctx: int, slots: int) -> int:
        return lane_need("plain", Strategy(), facts(), None, ctx=ctx, slots=slots).private

    assert private(8192, 1) - private(4096, 1) == 4096 * 131072
    assert private(4096, 2) - private(4096, 1) == 4096 * 131072
    assert private(4097, 1) - private(4096, 1) == 256 * 131072  # the cache is padded


def test_drafters_cost_their_own() -> None:
    target = facts(mtp_layers=1, mtp_bytes=100 * MIB)
    draft = facts(
        digest="d", weight_bytes=400 * MIB, bytes_by_type=(("F16", 400 * MIB),), kv_bytes_per_token=1024
    )
    plain = lane_need("plain", Strategy(), target, draft, ctx=4096, slots=1)
    mtp = lane_need("mtp", Strategy(("mtp",), 3), target, draft, ctx=4096, slots=1)
    drafted = lane_need("draft", Strategy(("draft",), 3), target, draft, ctx=4096, slots=1)
    assert drafted.shared == (*plain.shared, ("d", 400 * MIB))
    assert plain.total < drafted.total
    assert plain.total + 100 * MIB < mtp.total


def test_recurrent_states_are_kept_for_each_drafted_token() -> None:
    def private(n_max: int, state: int) -> int:
        target = facts(state_bytes=state, mtp_layers=1)
        return lane_need("mtp", Strategy(("mtp",), n_max), target, None, ctx=512, slots=2).private

    assert private(4, 10 * MIB) - private(4, 0) == (1 + 4) * 10 * MIB * 2


def test_on_a_gpu_every_lane_holds_its_own_copy() -> None:
    lane = lane_need("plain", Strategy(), facts(), None, ctx=4096, slots=1, on_gpu=True)
    assert lane.shared == ()
    assert lane.gpu > 4 * GIB + 4096 * 131072
    assert lane.private < 100 * MIB


# --- which lanes start -----------------------------------------------------------------------------


def test_shared_weights_count_once() -> None:
    made = plan([need("plain", 100, 1000), need("ngram", 100, 1000)], Budget(1200))
    assert [lane.id for lane in made.started] == ["plain", "ngram"]
    assert made.ram == 1200


def test_a_larger_map_of_the_same_file_counts_its_difference() -> None:
    assert plan([need("plain", 0, 1000), need("mtp", 0, 1100)], Budget(1100)).ram == 1100


def test_what_does_not_fit_is_refused_with_figures() -> None:
    made = plan(
        [need("plain", 100 * MIB), need("draft", 300 * MIB), need("ngram", 100 * MIB)], Budget(220 * MIB)
    )
    assert [lane.id for lane in made.started] == ["plain", "ngram"]
    assert made.refused[0].id == "draft"
    assert made.refused[0].reason == "needs 300 MiB of memory, 120 MiB are left (free memory)"


def test_gpu_memory_is_a_budget_of_its_own() -> None:
    made = plan([need("plain", 1, gpu=GIB), need("mtp", 1, gpu=GIB)], Budget(GIB, gpu=3 * GIB // 2))
    assert [lane.id for lane in made.started] == ["plain"]
    assert "GPU memory" in made.refused[0].reason


NEEDS = st.lists(
    st.builds(need, st.uuids().map(str), st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 100)),
    max_size=8,
)


@given(NEEDS, st.integers(0, 4000), st.one_of(st.none(), st.integers(0, 400)))
def test_a_plan_never_exceeds_its_budget_and_forgets_no_lane(
    needs: list[LaneNeed], ram: int, gpu: int | None
) -> None:
    made = plan(needs, Budget(ram, gpu))
    assert made.ram <= ram
    assert gpu is None or made.gpu <= gpu
    assert {lane.id for lane in made.started} | {lane.id for lane in made.refused} == {
        lane.id for lane in needs
    }
    assert plan(made.started, Budget(ram, gpu)).refused == ()
    largest = max((size for lane in made.started for _, size in lane.shared), default=0)
    assert made.ram == sum(lane.private for lane in made.started) + largest


def test_a_budget_leaves_room_for_others() -> None:
    assert Budget.of(10 * GIB).ram == 9 * GIB
    assert Budget.of(GIB).ram == 768 * MIB
    assert Budget.of(100 * MIB).ram == 0
    assert Budget.of(10 * GIB, limit=GIB) == Budget(GIB, None, "the memory setting")
    assert Budget.of(10 * GIB, limit=100 * GIB).ram == 9 * GIB


# --- context ---------------------------------------------------------------------------------------


def lanes_at(ctx: int) -> list[LaneNeed]:
    """Two lanes at a byte a token."""
    return [need("plain", ctx), need("ngram", ctx)]


@pytest.mark.parametrize(
    ("trained", "ram", "expected"),
    [
        (32768, 100_000, 32768),  # all fits
        (32768, 40_000, 16384),  # half does
        (32768, 9_000, 8192),  # a further lane is given up before the context gets short
        (32768, 3_000, 2048),  # plain alone, as long as it fits
        (2048, 10_000, 2048),  # a model of short context
        (None, 100_000, 8192),  # the file does not say
    ],
)
def test_context_by_what_fits(trained: int | None, ram: int, expected: int) -> None:
    assert choose_ctx(trained, lanes_at, Budget(ram)) == expected


# --- the machine -----------------------------------------------------------------------------------


def test_a_cgroup_limit_binds(tmp_path: Path) -> None:
    free = available_memory(tmp_path)
    assert free.bound == "free memory"
    assert free.available > 0
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    limited = available_memory(tmp_path)
    assert (limited.available, limited.bound) == (350_000, "cgroup limit")
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path).bound == "free memory"


def test_a_version_1_cgroup_binds_too(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("5000\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("6000\n")
    (tmp_path / "memory" / "memory.stat").write_text("cache 1\n")
    assert available_memory(tmp_path).available == 0


def test_memory_stalls_are_read_where_the_system_tells_them(tmp_path: Path) -> None:
    """The worse of the machine and its cgroup."""
    machine, group, missing = (tmp_path / name for name in ("machine", "group", "missing"))
    assert memory_stalls((missing,)) == 0.0
    full = "full avg10=99.00 avg60=99.00 avg300=99.00 total=9"
    machine.write_text(f"some avg10=40.00 avg60=2.50 avg300=0.10 total=12345\n{full}\n")
    assert memory_stalls((machine, missing)) == 0.025
    group.write_text(f"some avg10=0.00 avg60=31.00 avg300=0.00 total=1\n{full}\n")
    assert memory_stalls((group, machine)) == 0.31
    group.write_text("nothing of use")
    assert memory_stalls((group,)) == 0.0
    assert 0.0 <= memory_stalls() <= 1.0


def test_gpus_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == ()
    tool.write_text("#!/bin/sh\necho 'NVIDIA GeForce RTX 3090, 24576, 20000'\n")
    tool.chmod(0o755)
    assert gpus() == (Gpu("NVIDIA GeForce RTX 3090", 24 * GIB, 20000 * MIB),)
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert gpus() == ()


def test_lines_that_are_no_gpu_are_left_out() -> None:
    assert parse_gpus("No devices were found\nA, B, [N/A], 3\n\nX, 10, 5\n") == (Gpu("X", 10 * MIB, 5 * MIB),)


def test_a_machine_has_one_name() -> None:
    assert processor()
    assert machine_id() == machine_id()
    assert machine_id((Gpu("X", 1, 1),)) not in (machine_id(), machine_id((Gpu("Y", 1, 1),)))
    assert machine_id((Gpu("X", 1, 1),)) == machine_id((Gpu("X", 1, 0),))  # what is free now is not identity
