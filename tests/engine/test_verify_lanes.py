"""`specproxy verify` on real llama-servers: honest lanes pass, another model behind a lane does not."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from specproxy.adapters.llama_server import LanePlan, ManagedLlamaServer
from specproxy.adapters.managed import ManagedOptions, plan_managed
from specproxy.cli import main
from specproxy.cli.lane_client import LaneClient, Prompt
from specproxy.cli.quarantine import settle
from specproxy.cli.verify_run import LaneUnderTest, Round, run
from specproxy.strategies.verify import TIE_GAP, Judgement, Verdict
from tests.proxy.test_service import chat, running, settings, status_of
from tests.support.calibrated import CalibratedPair, write_pair
from tests.support.liars import BadAccepts
from tests.support.ports import free_port
from tests.support.proxy import running_proxy

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]

TOKENS = 32


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> CalibratedPair:
    """The same vocabulary and markers, other successors: it speaks fluently, and says something else."""
    return write_pair(tmp_path_factory.mktemp("foreign"), seed=77)


def with_model(plan: LanePlan, old: Path, new: Path) -> LanePlan:
    command = tuple(str(new) if part == str(old) else part for part in plan.spec.command)
    return LanePlan(plan.lane, dataclasses.replace(plan.spec, command=command))


def prompts(pair: CalibratedPair) -> list[Prompt]:
    raw = [Prompt("/v1/completions", {"prompt": f"words {pair.marker('json', k)}"}) for k in range(3)]
    chat = {"messages": [{"role": "user", "content": f"words {pair.marker('edit', 1)}"}]}
    return [*raw, Prompt("/v1/chat/completions", chat)]


async def test_a_foreign_model_is_found_and_honest_lanes_pass(
    pair: CalibratedPair, foreign: CalibratedPair
) -> None:
    """On raw prompts and on chats, with the token and the gap of each first difference."""
    options = ManagedOptions(pair.target, threads=1, ctx=1024, strategies=("ngram", "mtp"))
    plain, ngram, mtp = plan_managed(options).lanes
    backend = ManagedLlamaServer("managed", [plain, ngram, with_model(mtp, pair.target, foreign.target)])
    await backend.start()
    await backend.settled()
    lanes = [LaneUnderTest(s.lane.id, s.lane.strategy.name, s.lane.target, "m") for s in backend.lanes()]
    async with running_proxy(backend) as proxy:
        client = LaneClient(f"http://127.0.0.1:{proxy.port}", max_tokens=TOKENS)
        found: Round = await asyncio.to_thread(run, client, lanes, prompts(pair))
    same, ngrams, stranger = found.reports
    assert (same.verdict, ngrams.verdict) == (Verdict.SAME, Verdict.SAME), found.reports
    assert (same.tokens, same.unsteady) == (4 * TOKENS, 0)
    assert stranger.verdict is Verdict.FAULT
    assert len(stranger.forks) == 4
    assert all(fork.token == 0 and fork.gap is not None and fork.gap > 1 for fork in stranger.forks)


@pytest.mark.parametrize("rank", [1, 3])
async def test_forced_bad_accepts_are_found(pair: CalibratedPair, rank: int) -> None:
    """One wrong token in a text of a real model, wherever it stands; the lane is put into quarantine."""
    backend = plan_managed(ManagedOptions(pair.target, threads=1, ctx=1024, strategies=("plain",))).backend()
    await backend.start()
    await backend.settled()
    [status] = backend.lanes()
    plain = LaneUnderTest(status.lane.id, "plain", status.lane.target, "m")
    async with running_proxy(backend) as proxy:
        client = LaneClient(f"http://127.0.0.1:{proxy.port}", max_tokens=TOKENS)
        liar = BadAccepts(client, plain.id, np.random.default_rng(4), rank)
        lanes = [plain, LaneUnderTest("liar", "liar", "m", "m", "fp")]
        found: Round = await asyncio.to_thread(run, liar, lanes, prompts(pair)[:3])
    posted: list[tuple[str, dict[str, str]]] = []
    assert settle(found, lambda name, body: posted.append((name, body))) == {"liar": "put"}
    assert [lead is not None and lead > TIE_GAP for lead in liar.forced.values()] == [True] * 3
    faults = [fork for fork in found.reports[1].forks if fork.judgement is Judgement.FAULT]
    assert [fork.prompt for fork in faults] == [0, 1, 2]
    assert posted[0][1]["fingerprint"] == "fp"


async def test_a_fault_takes_the_lane_out_of_service(
    pair: CalibratedPair, foreign: CalibratedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command on a whole proxy, with another model behind a lane."""
    monkeypatch.setenv("SPECPROXY_STATE_DIR", str(tmp_path / "cli"))
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(prompt.body) + "\n" for prompt in prompts(pair)[:2]))
    options = ManagedOptions(pair.target, threads=1, ctx=1024, strategies=("ngram",))
    plain, ngram = plan_managed(options).lanes
    wrong = dataclasses.replace(with_model(ngram, pair.target, foreign.target), lane=ngram.lane)
    backend = ManagedLlamaServer("managed", [plain, wrong])
    given = settings(tmp_path, f"http://127.0.0.1:{free_port()}")
    async with running(given) as service:
        await backend.start()
        await backend.settled()
        service.router.set_backends([backend])

        command = ["verify", "--url", service.url, "--tokens", "8", "--prompts", str(file)]

        async def health() -> dict[str, str]:
            return {lane["id"]: lane["health"] for lane in (await status_of(service))["lanes"]}

        try:
            assert await asyncio.to_thread(main, command) == 1
            assert await health() == {"plain": "ready", "ngram": "quarantined"}
            reply = await chat(service, X_Specproxy_Strategy="ngram")
            assert reply.status == 400
            assert b"lane ngram is in quarantine: verify: 2 of 2 texts differ" in reply.content
            assert (await chat(service)).status == 200
        finally:
            await backend.aclose()
