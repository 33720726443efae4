"""Real llama-servers on models of known acceptance: what they say, how they draft, and that none is left."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from specproxy.adapters.ask import post_json
from specproxy.adapters.gguf_facts import check_pair, read_facts
from specproxy.adapters.http import Endpoint, HttpTransport
from specproxy.adapters.llama_server import LanePlan, ManagedLlamaServer
from specproxy.adapters.managed import ManagedOptions, plan_managed
from specproxy.errors import ConfigError, PairError
from specproxy.records import Health
from tests.support.assistant import write_assistant
from tests.support.block_drafters import write_dflash, write_dspark
from tests.support.calibrated import CalibratedPair
from tests.support.eagle3 import write_eagle3

pytestmark = [pytest.mark.engine, pytest.mark.timeout(60)]

TOKENS = 64


def options(pair: CalibratedPair, **given: object) -> ManagedOptions:
    """One thread and a short context, with every strategy."""
    base = ManagedOptions(pair.target, pair.draft, threads=1, ctx=1024)
    return dataclasses.replace(base, **given)  # type: ignore[arg-type]  # fields of ManagedOptions


async def say(backend: ManagedLlamaServer, lane: str, prompt: str, tokens: int = TOKENS) -> dict[str, object]:
    """A greedy completion on one lane."""
    transport = HttpTransport(Endpoint.parse(backend.address(lane)))
    try:
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": False}
        status, reply = await post_json(transport.open, "/completion", body, timeout_s=30)
        assert status == 200, reply
        assert isinstance(reply, dict)
        return reply
    finally:
        await transport.aclose()


def programs() -> Sequence[object]:
    """The wheel's server, and the binary where there is one."""
    binary = os.environ.get("SPECPROXY_TEST_LLAMA_SERVER") or shutil.which("llama-server")
    return [pytest.param(None, id="wheel")] + ([pytest.param(Path(binary), id="binary")] if binary else [])


@pytest.mark.parametrize("binary", programs())
async def test_every_lane_says_the_same_and_drafts_as_calculated(
    pair: CalibratedPair, binary: Path | None
) -> None:
    plan = plan_managed(options(pair, llama_server=binary))
    assert [lane.lane.id for lane in plan.lanes][:4] == ["plain", "ngram", "mtp", "draft"]  # then sampled ones
    backend = plan.backend()
    await backend.start()
    await backend.settled()
    assert {status.health for status in backend.lanes()} == {Health.READY}
    for region in ("json", "code", "edit", "prose"):
        said = {
            status.lane.id: await say(backend, status.lane.id, "give a list of words " + pair.marker(region, 3))
            for status in backend.lanes()
        }
        assert {reply["content"] for reply in said.values()} == {pair.text(region, TOKENS, 3)}
        counts = {lane: reply["timings"] for lane, reply in said.items()}
        for drafter in ("mtp", "draft"):
            expected = pair.expect(region, drafter, TOKENS, start=3)
            got = counts[drafter]
            assert isinstance(got, dict)
            assert (got["draft_n"], got["draft_n_accepted"]) == (expected.drafted, expected.accepted)
        ngram, plain = counts["ngram"], counts["plain"]
        assert isinstance(ngram, dict)
        assert isinstance(plain, dict)
        assert "draft_n" not in plain
        assert ngram.get("draft_n_accepted", 0) > 30 if region == "edit" else "draft_n" not in ngram
    await backend.aclose()


@pytest.mark.parametrize("binary", programs())
@pytest.mark.parametrize(
    ("kind", "write", "longest"),
    [("eagle3", write_eagle3, 3), ("dflash", write_dflash, 1), ("dspark", write_dspark, 3)],
)
async def test_drafters_of_other_kinds_draft_as_calculated(
    tmp_path: Path, binary: Path | None, kind: str, write: Callable[[Path], CalibratedPair], longest: int
) -> None:
    """The drafter is known by its file; it changes no text, and guesses right as often as calculated.

    What is asked for is three tokens; the server makes that `longest`, if the drafter's blocks are shorter.
    """
    pair = write(tmp_path)
    plan = plan_managed(options(pair, llama_server=binary, strategies=(kind,)))
    assert [lane.lane.id for lane in plan.lanes] == ["plain", kind]
    backend = plan.backend()
    await backend.start()
    await backend.settled()
    assert [status.health for status in backend.lanes()] == [Health.READY] * 2
    for region in ("json", "edit", "prose"):
        reply = await say(backend, kind, "give a list of words " + pair.marker(region, 3))
        assert reply["content"] == pair.text(region, TOKENS, 3)
        timings = reply["timings"]
        assert isinstance(timings, dict)
        # its guesses are those of an MTP block
        expected = pair.expect(region, "mtp", TOKENS, n_max=longest, start=3)
        assert (timings["draft_n"], timings["draft_n_accepted"]) == (expected.drafted, expected.accepted)
    await backend.aclose()


@pytest.mark.parametrize("binary", programs())
async def test_an_assistant_drafts_as_calculated(tmp_path: Path, binary: Path | None) -> None:
    """It reads its target's cache; the embedded engine has the same counts (`test_assistant`)."""
    pair = write_assistant(tmp_path)
    plan = plan_managed(options(pair, llama_server=binary, strategies=("mtp",)))
    backend = plan.backend()
    await backend.start()
    await backend.settled()
    assert [status.health for status in backend.lanes()] == [Health.READY] * 2
    for region in ("json", "edit", "prose"):
        reply = await say(backend, "mtp", "give a list of words " + pair.marker(region, 3))
        assert reply["content"] == pair.text(region, TOKENS, 3)
        timings = reply["timings"]
        assert isinstance(timings, dict)
        expected = pair.expect(region, "mtp", TOKENS, start=3)
        assert (timings["draft_n"], timings["draft_n_accepted"]) == (expected.drafted, expected.accepted)
    await backend.aclose()


async def test_mixtures_of_experts_draft_too(moe_pair: CalibratedPair) -> None:
    facts = read_facts(moe_pair.target)
    assert (facts.is_moe, facts.has_mtp, facts.expert_count, facts.expert_used_count) == (True, True, 8, 2)
    backend = plan_managed(options(moe_pair, draft=None, strategies=("mtp",))).backend()
    await backend.start()
    await backend.settled()
    reply = await say(backend, "mtp", moe_pair.marker("json"))
    expected = moe_pair.expect("json", "mtp", TOKENS)
    assert reply["content"] == moe_pair.text("json", TOKENS)
    timings = reply["timings"]
    assert isinstance(timings, dict)
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (expected.drafted, expected.accepted)
    await backend.aclose()


async def test_combined_strategies_run(pair: CalibratedPair) -> None:
    backend = plan_managed(options(pair, draft=None, strategies=("ngram+mtp", "mtp:2"))).backend()
    await backend.start()
    await backend.settled()
    assert [(status.lane.id, status.health) for status in backend.lanes()] == [
        ("plain", Health.READY),
        ("ngram+mtp", Health.READY),
        ("mtp", Health.READY),
    ]
    both = (await say(backend, "ngram+mtp", pair.marker("edit")))["timings"]
    mtp = (await say(backend, "mtp", pair.marker("edit")))["timings"]
    assert isinstance(both, dict)
    assert isinstance(mtp, dict)
    assert both["draft_n_accepted"] / both["draft_n"] > mtp["draft_n_accepted"] / mtp["draft_n"]
    expected = pair.expect("edit", "mtp", TOKENS, n_max=2)
    assert (mtp["draft_n"], mtp["draft_n_accepted"]) == (expected.drafted, expected.accepted)
    await backend.aclose()


async def test_a_killed_lane_serves_again(pair: CalibratedPair) -> None:
    backend = plan_managed(options(pair, draft=None, strategies=("mtp",))).backend()
    await backend.start()
    await backend.settled()
    pid, before = backend.pid("mtp"), backend.address("mtp")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        while backend.address("mtp") in (before, ""):  # noqa: ASYNC110 - the real thing has no event for us
            await asyncio.sleep(0.02)
    assert (await say(backend, "mtp", pair.marker("json")))["content"] == pair.text("json", TOKENS)
    await backend.aclose()


async def test_a_draft_that_only_claims_to_draft_is_dropped(pair: CalibratedPair, stranger: Path) -> None:
    """The server loads it, stays healthy, and never drafts: /slots gives it away."""
    with pytest.raises(PairError, match="vocabulary sizes differ"):
        check_pair(read_facts(pair.target), read_facts(stranger))
    plans = [p for p in plan_managed(options(pair)).lanes if p.lane.id in ("plain", "draft")]
    command = tuple(str(stranger) if part == str(pair.draft) else part for part in plans[1].spec.command)
    fake = LanePlan(plans[1].lane, dataclasses.replace(plans[1].spec, command=command))
    backend = ManagedLlamaServer("managed", [plans[0], fake])
    await backend.start()
    await backend.settled()
    plain, draft = backend.lanes()
    assert (plain.health, draft.health) == (Health.READY, Health.DROPPED)
    assert "does not draft" in draft.note
    await backend.aclose()


async def test_a_model_that_the_server_refuses(pair: CalibratedPair, tmp_path: Path) -> None:
    """Facts can be read, but no llama-server knows the architecture."""
    content = pair.target.read_bytes().replace(b"glm4moe", b"glm4mox")
    (tmp_path / "odd.gguf").write_bytes(content)
    backend = plan_managed(ManagedOptions(tmp_path / "odd.gguf", threads=1, ctx=512)).backend()
    with pytest.raises(ConfigError, match="unknown model architecture"):
        await backend.start()


async def test_memory_estimates_are_near_what_lanes_take(pair: CalibratedPair) -> None:
    plan = plan_managed(options(pair, ctx=4096))
    backend = plan.backend()
    await backend.start()
    await backend.settled()
    await say(backend, "draft", pair.marker("json"))
    for planned, need in zip(plan.lanes, plan.memory.started, strict=True):
        pid = backend.pid(planned.lane.id)
        assert pid is not None
        private = psutil.Process(pid).memory_full_info().uss
        assert need.private / 4 < private < need.private, (need, private)
    await backend.aclose()


OWNER = """
import asyncio, signal, sys
from pathlib import Path
from specproxy.adapters.managed import ManagedOptions, plan_managed
async def main():
    plan = plan_managed(ManagedOptions(Path(sys.argv[1]), Path(sys.argv[2]), threads=1, ctx=512))
    backend = plan.backend()
    await backend.start()
    await backend.settled()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print(*(backend.pid(lane.lane.id) for lane in plan.lanes), flush=True)
    await stop.wait()
    await backend.aclose()
asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_lane_outlives_us(pair: CalibratedPair, how: signal.Signals) -> None:
    command = [sys.executable, "-c", OWNER, str(pair.target), str(pair.draft)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        lanes = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        assert len(lanes) == 4
        owner.send_signal(how)
        _, alive = psutil.wait_procs(lanes, timeout=10)
        assert alive == []
        assert owner.wait(10) == (-signal.SIGKILL if how is signal.SIGKILL else 0)
