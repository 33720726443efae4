"""From options to planned lanes, and to the arguments that a llama-server is started with."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from specproxy.adapters import server_program, xllama_child
from specproxy.adapters.managed import ManagedOptions, ManagedPlan, plan_managed
from specproxy.adapters.memory import MIB
from specproxy.adapters.server_program import LaneOptions, ServerProgram, find_program, lane_arguments
from specproxy.config_values import DRAFTERS
from specproxy.errors import ConfigError, ModelFileError, PairError
from specproxy.records import Control, Strategy
from tests.support.calibrated import CalibratedPair, Region, write_pair
from tests.support.stub_router import HELP

REGIONS = (Region("a", 20, mtp=0.5, draft=0.5), Region("b", 20, mtp=0.5, draft=0.5))
NEW_HELP = (
    f"{HELP}--draft, --draft-max N                  the argument has been removed. use --spec-draft-n-max\n"
)
OLD_HELP = """
-m,    --model FNAME                    model path
-md,   --model-draft FNAME              draft model
--port PORT                             port to listen
--draft-max, --draft N                  number of tokens to draft
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> CalibratedPair:
    return write_pair(tmp_path_factory.mktemp("managed"), regions=REGIONS)


@pytest.fixture
def new(tmp_path: Path) -> Path:
    """Something that looks like a llama-server of today."""
    return fake_binary(tmp_path / "llama-server", NEW_HELP, "b11434 (abc123)")


def fake_binary(path: Path, text: str, version: str = "b1") -> Path:
    path.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then echo "version: {version}" >&2; else cat <<X\n{text}\nX\nfi\n'
    )
    path.chmod(0o755)
    return path


def after(arguments: tuple[str, ...], flag: str) -> str:
    """The value behind a flag."""
    return arguments[arguments.index(flag) + 1]


# --- the program -----------------------------------------------------------------------------------


def test_a_binary_tells_what_it_can(new: Path) -> None:
    program = find_program(new)
    assert (program.kind, program.command) == ("binary", (str(new),))
    assert program.build.startswith("llama-server b11434 (abc123) ")
    assert program.spec_types == {"none", "draft-simple", "draft-mtp", "ngram-simple"}
    assert "-md" in program.flags
    assert "--draft-max" not in program.flags  # removed, though it is listed


def test_another_content_is_another_build(tmp_path: Path) -> None:
    one = find_program(fake_binary(tmp_path / "one", NEW_HELP))
    two = find_program(fake_binary(tmp_path / "two", NEW_HELP + "\n--more N    x"))
    assert one.build != two.build


def test_the_path_comes_before_the_wheel(new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{new.parent}:/bin:/usr/bin")
    assert find_program().command == (str(new),)


@pytest.mark.engine
def test_the_wheel_stands_in_for_the_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/bin")
    program = find_program()
    assert program.kind == "wheel"
    assert program.build.startswith("xllamacpp ")
    assert {"none", "ngram-simple", "draft-simple", "draft-mtp"} <= program.spec_types


def test_no_server_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="no llama-server found") as caught:
        find_program()
    assert "specproxy[managed]" in caught.value.hint


def test_binaries_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        find_program(tmp_path / "ghost")
    with pytest.raises(ConfigError, match="does not look like a llama-server"):
        find_program(fake_binary(tmp_path / "cat", "usage: cat [FILE]"))
    text = tmp_path / "text"
    text.write_text("no program")
    with pytest.raises(ConfigError, match="cannot be run"):
        find_program(text)


# --- arguments -------------------------------------------------------------------------------------

OPTIONS = LaneOptions(Path("/m.gguf"), "m", ctx=4096, slots=2, threads=3, draft=Path("/d.gguf"))


def test_plain_says_that_it_is_plain(new: Path) -> None:
    arguments = lane_arguments(find_program(new), OPTIONS, Strategy())
    assert after(arguments, "--spec-type") == "none"
    assert after(arguments, "--port") == "0"
    assert after(arguments, "-c") == "8192"  # llama-server divides it among the slots
    assert after(arguments, "-np") == "2"
    assert after(arguments, "-t") == "3"
    assert not {"--spec-draft-n-max", "--spec-draft-model", "-ngl"} & set(arguments)


def test_drafters_get_their_lengths(new: Path) -> None:
    program = find_program(new)
    ngram = lane_arguments(program, OPTIONS, Strategy(("ngram",), 8))
    assert after(ngram, "--spec-type") == "ngram-simple"
    assert after(ngram, "--spec-ngram-simple-size-n") == "3"
    assert after(ngram, "--spec-ngram-simple-size-m") == "8"
    assert "--spec-draft-model" not in ngram
    draft = lane_arguments(program, OPTIONS, Strategy(("draft",), 5))
    assert after(draft, "--spec-draft-model") == "/d.gguf"
    assert after(draft, "--spec-draft-n-max") == "5"
    mtp = lane_arguments(program, OPTIONS, Strategy(("mtp",)))
    assert after(mtp, "--spec-draft-n-max") == "3"
    assert "--spec-draft-model" not in mtp
    both = lane_arguments(program, OPTIONS, Strategy(("ngram", "mtp"), 4))
    assert after(both, "--spec-type") == "ngram-simple,draft-mtp"


def test_a_sidecar_of_mtp_layers_drafts_as_mtp(new: Path) -> None:
    options = dataclasses.replace(OPTIONS, draft_type="draft-mtp")
    arguments = lane_arguments(find_program(new), options, Strategy(("mtp",), 3))
    assert after(arguments, "--spec-type") == "draft-mtp"
    assert after(arguments, "--spec-draft-model") == "/d.gguf"


def test_a_spec_type_that_the_binary_lacks(new: Path) -> None:
    with pytest.raises(ConfigError, match="has no spec type draft-eagle3"):
        lane_arguments(find_program(new), OPTIONS, Strategy(("draft-eagle3",)))


def test_binaries_before_spec_types(tmp_path: Path) -> None:
    program = find_program(fake_binary(tmp_path / "old", OLD_HELP))
    assert "--spec-type" not in lane_arguments(program, OPTIONS, Strategy())
    draft = lane_arguments(program, OPTIONS, Strategy(("draft",), 6))
    assert (after(draft, "-md"), after(draft, "--draft-max")) == ("/d.gguf", "6")
    with pytest.raises(ConfigError, match="cannot do mtp"):
        lane_arguments(program, OPTIONS, Strategy(("mtp",)))


WHEEL = ServerProgram(
    "wheel", ("x",), "xllamacpp", xllama_child.known_flags(), frozenset({"none", "ngram-simple", "draft-mtp"})
)


def test_the_wheel_reads_the_same_arguments() -> None:
    fields = xllama_child.parse(lane_arguments(WHEEL, OPTIONS, Strategy(("ngram", "mtp"), 4)))
    assert fields["n_ctx"] == 8192
    assert fields["port"] == 0
    assert fields["hostnames"] == ["127.0.0.1"]
    assert fields["cpuparams.n_threads"] == 3
    assert fields["speculative.ngram_simple.size_m"] == 4
    assert fields["speculative.draft.n_max"] == 4
    assert fields[xllama_child.SPEC_TYPE] == ["ngram-simple", "draft-mtp"]
    assert fields["ui"] is False


def test_the_wheel_does_not_guess() -> None:
    options = dataclasses.replace(OPTIONS, extra_args=("--flash-attentoin", "on"))
    with pytest.raises(ConfigError, match="unrecognized arguments: --flash-attentoin on") as caught:
        lane_arguments(WHEEL, options, Strategy())
    assert "llama-server binary" in caught.value.hint


@pytest.mark.engine
def test_every_known_flag_has_a_field_in_the_wheel() -> None:
    """Fields are set by name: a flag whose field is gone in a newer wheel must not go unnoticed."""
    import xllamacpp

    for path in [path for path, _ in xllama_child.FLAGS.values()] + [
        p for p, _ in xllama_child.SWITCHES.values()
    ]:
        owner = xllamacpp.CommonParams()
        for name in path.split("."):
            assert hasattr(owner, name), path
            owner = getattr(owner, name)


@pytest.mark.engine
def test_fields_reach_the_wheels_parameters() -> None:
    arguments = lane_arguments(WHEEL, dataclasses.replace(OPTIONS, alias="a"), Strategy(("ngram", "mtp"), 4))
    params = xllama_child.build(xllama_child.parse(arguments))
    assert (params.n_ctx, params.n_parallel, params.cpuparams.n_threads) == (8192, 2, 3)
    assert (params.speculative.ngram_simple.size_n, params.speculative.ngram_simple.size_m) == (3, 4)
    assert params.speculative.draft.n_max == 4
    assert len(params.speculative.types) == 2
    assert params.model_alias == {"a"}
    with pytest.raises(ConfigError, match="no spec type 'magic'"):
        xllama_child.build({xllama_child.SPEC_TYPE: ["magic"]})


# --- the plan --------------------------------------------------------------------------------------


def planned(new: Path, pair: CalibratedPair, **given: object) -> ManagedPlan:
    options = ManagedOptions(pair.target, pair.draft, threads=1, ctx=1024, llama_server=new)
    return plan_managed(dataclasses.replace(options, **given))  # type: ignore[arg-type]  # fields of ManagedOptions


def test_one_lane_a_strategy_plain_first(new: Path, pair: CalibratedPair) -> None:
    plan = planned(new, pair)
    lanes = [item.lane for item in plan.lanes]
    assert [(lane.id, lane.strategy.n_max) for lane in lanes] == [
        ("plain", None), ("ngram", 8), ("mtp", 3), ("draft", 3),
    ]  # fmt: skip
    assert len({lane.fingerprint for lane in lanes}) == 4
    assert len({lane.target for lane in lanes}) == 1
    assert {lane.control for lane in lanes} == {Control.INSTANCE}
    assert all(lane.memory_bytes > 0 for lane in lanes)
    assert plan.refused == ()


def test_what_the_model_does_not_support_is_said(new: Path, pair: CalibratedPair) -> None:
    plan = planned(new, pair, model=pair.draft, draft=None)
    assert [item.lane.id for item in plan.lanes] == ["plain", "ngram"]
    assert {item.id: item.reason for item in plan.refused} == {
        "mtp": "the model file has no MTP layers",
        "draft": "no draft model was given",
    }


def test_strategies_that_are_asked_for(new: Path, pair: CalibratedPair) -> None:
    plan = planned(new, pair, strategies=("mtp:2", "mtp:5", "ngram+mtp", "plain"))
    assert [item.lane.id for item in plan.lanes] == ["plain", "mtp:2", "mtp:5", "ngram+mtp"]
    with pytest.raises(ConfigError, match="draft is not possible: no draft model was given"):
        planned(new, pair, strategies=("draft",), draft=None)


def test_fingerprints_follow_what_bears_on_speed(new: Path, pair: CalibratedPair) -> None:
    def prints(**given: object) -> list[str]:
        return [item.lane.fingerprint for item in planned(new, pair, **given).lanes]

    base = prints()
    assert prints() == base
    assert prints(ctx=2048, alias="other", log_dir=new.parent) == base
    for change in ({"threads": 2}, {"slots": 2}, {"n_gpu_layers": 0}, {"extra_args": ("--x",)}):
        assert not set(prints(**change)) & set(base)
    without = prints(draft=None)
    assert without == base[:3]  # the draft model is no matter to lanes that do not use it


def test_a_lane_that_the_binary_cannot_do_is_refused_alone(tmp_path: Path, pair: CalibratedPair) -> None:
    old = fake_binary(tmp_path / "old", OLD_HELP)
    plan = planned(old, pair)
    assert [item.lane.id for item in plan.lanes] == ["plain", "draft"]
    assert [item.id for item in plan.refused] == ["ngram", "mtp"]


def test_memory_decides_what_starts(new: Path, pair: CalibratedPair) -> None:
    full = planned(new, pair)
    two = full.memory.started[0].total + full.memory.started[1].private
    plan = planned(new, pair, memory=two)
    assert [item.lane.id for item in plan.lanes] == ["plain", "ngram"]
    assert [item.id for item in plan.refused] == ["mtp", "draft"]
    assert "the memory setting" in plan.refused[0].reason
    with pytest.raises(ConfigError, match="does not fit: plain needs"):
        planned(new, pair, memory=MIB)


def test_context_comes_from_the_model_unless_it_is_given(new: Path, pair: CalibratedPair) -> None:
    assert planned(new, pair, ctx=None).ctx == 4096
    assert planned(new, pair, ctx=1000).ctx == 1000


def test_bad_files_are_named(new: Path, pair: CalibratedPair, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        planned(new, pair, model=tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("hello, this is no model")
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        planned(new, pair, draft=tmp_path / "text.gguf")
    stranger = write_pair(tmp_path / "s", regions=(Region("x", 150, mtp=1, draft=1),)).draft
    with pytest.raises(PairError, match=r"cannot draft for target\.gguf: vocabulary sizes differ"):
        planned(new, pair, draft=stranger)


def test_names_of_drafters_are_known_to_the_server() -> None:
    """And each of them comes back from the server's name for it."""
    for ours, theirs in server_program.SPEC_TYPES.items():
        assert theirs in DRAFTERS
        assert server_program.our_name(theirs) == ours


# --- beside somebody else's plain lane ---------------------------------------------------------------


def test_what_somebody_else_runs_is_not_planned_again(pair: CalibratedPair, new: Path) -> None:
    """Without plain no lane is a must, and it is no fault if none fits."""
    given = ManagedOptions(pair.target, llama_server=new, exclude=("plain", "mtp"))
    assert [p.lane.strategy.name for p in plan_managed(given).lanes] == ["ngram"]
    none = plan_managed(dataclasses.replace(given, memory=1))
    assert (none.lanes, [refused.id for refused in none.refused]) == ((), ["draft", "ngram"])


@pytest.mark.parametrize(("longest", "ctx"), [(512, 512), (None, 4096), (100_000, 4096)])
def test_a_context_longer_than_is_of_use_is_not_taken(
    pair: CalibratedPair, new: Path, longest: int | None, ctx: int
) -> None:
    """The server's own bounds it, as does what the model was trained for."""
    assert plan_managed(ManagedOptions(pair.target, llama_server=new, max_ctx=longest)).ctx == ctx
