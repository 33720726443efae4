"""What steps cost is found out when a model is first loaded, and known at once from then on."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from tests.support.calibrated import CalibratedPair
from tests.support.embedded import Vocabulary

# isort: split
from specproxy.adapters.embedded import measured
from specproxy.adapters.embedded.costs import StepCosts
from specproxy.adapters.embedded.engine import LlamaEngine
from specproxy.adapters.embedded.measured import MOST_FILES, WIDTHS, Measured, profile
from specproxy.adapters.embedded.options import EngineOptions
from specproxy.adapters.embedded.runtime import Runtime

pytestmark = pytest.mark.embedded


@pytest.fixture(scope="module")
def runtime(pair: CalibratedPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """The calibrated pair, loaded, with a folder for what is measured."""
    state = tmp_path_factory.mktemp("state") / "engine"
    options = EngineOptions(pair.target, pair.draft, context=512, threads=1, state=state, profile_s=20.0)
    vocabulary = Vocabulary(pair.target)
    loaded = Runtime(options, vocabulary)
    yield loaded
    loaded.close()
    vocabulary.close()


def files(runtime: Runtime) -> list[Path]:
    assert runtime.options.state is not None
    return sorted(runtime.options.state.iterdir())


def test_a_profile_measures_every_width_and_drafter(runtime: Runtime) -> None:
    costs = StepCosts()
    profile(runtime, costs, 20.0)
    assert set(costs.widths) == {width for width in WIDTHS if width <= 1 + runtime.longest}
    assert all(0 < seconds < 1 for seconds in costs.widths.values())
    assert set(costs.to_json()["guesses"]) == {"draft", "mtp"}


def test_a_profile_leaves_the_caches_empty(runtime: Runtime) -> None:
    profile(runtime, StepCosts(), 20.0)
    contexts = [runtime.context, *(drafter.context for drafter in runtime.drafters.values())]
    assert [context.last_position(0) for context in contexts] == [-1, -1, -1]


def test_a_profile_keeps_to_its_time(runtime: Runtime) -> None:
    """On a machine where every look at the clock takes a second; the plain step is measured all the same."""
    costs, ticks = StepCosts(), count()
    profile(runtime, costs, 6.0, lambda: float(next(ticks)))
    assert 1 in costs.widths
    assert len(costs.widths) <= 3
    nothing = StepCosts()
    profile(runtime, nothing, 0.0)
    assert not nothing.knows_plain


def test_what_was_measured_is_read_back_and_private(runtime: Runtime) -> None:
    first = Measured(runtime.options).costs(runtime)
    (file,) = files(runtime)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = Measured(replace(runtime.options, profile_s=0.0)).costs(runtime)  # without time to measure anything
    assert again.widths == first.widths


def test_what_was_learnt_is_saved_now_and_then(runtime: Runtime) -> None:
    now = [0.0]
    measured = Measured(runtime.options, lambda: now[0])
    costs = measured.costs(runtime)
    before = files(runtime)[0].read_bytes()
    for _ in range(50):
        costs.decoded(7, 0.5)
    measured.save_now_and_then()
    assert files(runtime)[0].read_bytes() == before
    now[0] = 1000.0
    measured.save_now_and_then()
    assert b'"7"' in files(runtime)[0].read_bytes()


def test_a_damaged_file_is_measured_anew(runtime: Runtime) -> None:
    Measured(runtime.options).costs(runtime)
    (file,) = files(runtime)
    for damage in (b"", b"[]", b'{"widths":{"1":[-1,1]}}', b"\xff"):
        file.write_bytes(damage)
        assert Measured(runtime.options).costs(runtime).knows_plain
        assert file.read_bytes().startswith(b'{"widths"')


def test_another_set_up_has_a_file_of_its_own(runtime: Runtime, pair: CalibratedPair) -> None:
    """Here by an option; what only names or places the model changes nothing."""
    Measured(runtime.options).costs(runtime)
    before = files(runtime)
    original = runtime.options
    vocabulary = Vocabulary(pair.target)
    same = Runtime(replace(original, profile_s=0.5, name="other", idle_unload_s=3.0), vocabulary)
    Measured(same.options).costs(same)
    assert files(runtime) == before
    same.close()
    other = Runtime(replace(original, flash_attention=False, profile_s=0.5), vocabulary)
    Measured(other.options).costs(other)
    assert len(files(runtime)) == len(before) + 1
    other.close()
    vocabulary.close()


@pytest.mark.parametrize("changed", ["model", "draft", "threads", "machine", "build"])
def test_costs_belong_to_one_model_draft_machine_and_build(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    before = measured._fingerprint(runtime)
    assert measured._fingerprint(runtime) == before
    if changed == "model":
        monkeypatch.setattr(runtime, "facts", replace(runtime.facts, digest="another"))
    elif changed == "draft":
        monkeypatch.setattr(runtime, "draft_digest", "another")
    elif changed == "threads":
        monkeypatch.setattr(runtime, "threads", runtime.threads + 1)
    elif changed == "machine":
        monkeypatch.setattr(measured, "machine_id", lambda: "another")
    else:
        monkeypatch.setattr(measured.importlib.metadata, "version", lambda _: "another")
    assert measured._fingerprint(runtime) != before


def test_set_ups_that_were_not_used_for_long_are_forgotten(runtime: Runtime, tmp_path: Path) -> None:
    """The oldest go when one is added; other files in the folder stay."""
    old = [tmp_path / f"costs-{i}.json" for i in range(MOST_FILES + 3)]
    for at, file in enumerate(old):
        file.write_text("{}")
        os.utime(file, (at, at))
    (tmp_path / "workloads.json").write_text("[]")
    Measured(replace(runtime.options, state=tmp_path, profile_s=0.5)).costs(runtime)
    left = {file.name for file in tmp_path.iterdir()}
    assert len(left) == MOST_FILES + 1
    assert "workloads.json" in left
    assert [file for file in old if not file.exists()] == old[:4]


async def test_the_engine_keeps_what_it_measured(pair: CalibratedPair, tmp_path: Path) -> None:
    """Its file is there once the model is loaded, and written again when it ends."""
    options = EngineOptions(pair.target, context=256, threads=1, state=tmp_path / "engine", profile_s=5.0)
    engine = LlamaEngine(options)
    await engine.start()
    (file,) = (tmp_path / "engine").iterdir()
    written = file.stat().st_mtime_ns
    await engine.aclose()
    assert file.stat().st_mtime_ns > written
