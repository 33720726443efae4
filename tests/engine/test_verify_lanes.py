"""`specproxy verify` on real llama-servers: honest lanes pass, another model behind a lane does not."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from specproxy.adapters.llama_server import LanePlan, ManagedLlamaServer
from specproxy.adapters.managed import ManagedOptions, plan_managed
from specproxy.cli.lane_client import LaneClient, Prompt
from specproxy.cli.verify import LaneUnderTest, run
from specproxy.strategies.verify import LaneReport, Verdict
from tests.support.calibrated import CalibratedPair, write_pair
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
        reports: list[LaneReport] = await asyncio.to_thread(run, client, lanes, prompts(pair))
    same, ngrams, stranger = reports
    assert (same.verdict, ngrams.verdict) == (Verdict.SAME, Verdict.SAME), reports
    assert (same.tokens, same.unsteady) == (4 * TOKENS, 0)
    assert stranger.verdict is Verdict.FAULT
    assert len(stranger.forks) == 4
    assert all(fork.token == 0 and fork.gap is not None and fork.gap > 1 for fork in stranger.forks)
