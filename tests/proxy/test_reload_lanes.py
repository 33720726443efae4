"""Lanes of one Ollama that displace each other: which there are, and which one is in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from specproxy.adapters.base import LoadsLanes, ProbeResult, ServedModel, UpstreamRequest
from specproxy.adapters.gguf_facts import ModelFacts
from specproxy.adapters.weights import Weights
from specproxy.errors import LaneUnavailable
from specproxy.proxy.reload_lanes import other_way, reload_lanes
from specproxy.proxy.sidecar import Sidecar
from specproxy.records import Control, Dialect, Health, Lane, Strategy
from tests.support.fakes import Fake
from tests.support.model_facts import facts
from tests.support.sink import RecordingSink

PLAIN = ServedModel("m:latest", ctx=2048, drafting=False, mtp_layers=1)
DRAFTING = replace(PLAIN, drafting=True)
WITH_DRAFT = ServedModel("m:latest", drafting=True, draft="/d.gguf")
WITHOUT = ServedModel("m:latest", drafting=False)
OWN = Lane("m:latest", "upstream", "m:latest", Strategy(), Control.OBSERVE, "fp", models=frozenset({"m"}))
MTP_FILE = facts(mtp_layers=1, architecture="glm4moe")
NO_GRAPH = facts(mtp_layers=1, architecture="unheard-of")


@pytest.mark.parametrize(
    ("model", "file", "name"),
    [
        (PLAIN, MTP_FILE, "mtp"),
        (PLAIN, None, "mtp"),
        (PLAIN, NO_GRAPH, None),
        (DRAFTING, MTP_FILE, "plain"),
        (WITH_DRAFT, facts(), "plain"),
        (WITHOUT, facts(), None),
        (WITHOUT, None, None),
    ],
)
def test_a_reload_is_of_use_where_the_option_makes_a_difference(
    model: ServedModel, file: ModelFacts | None, name: str | None
) -> None:
    """The file says what llama.cpp can do; without it Ollama's word has to do."""
    other = other_way(model, file)
    assert (other.name if other is not None else None) == name


@pytest.mark.parametrize(("model", "name", "n"), [(PLAIN, "mtp", 3), (DRAFTING, "plain", 0)])
def test_the_other_lane_differs_by_one_option(model: ServedModel, name: str, n: int) -> None:
    """On the routes that have options; the statistics of the server's own lane go on."""
    own, other = reload_lanes(OWN, model, MTP_FILE, 4.0)
    assert own == replace(OWN, control=Control.RELOAD, load_s=4.0)
    assert (other.id, other.strategy.name, other.load_s) == (f"m:latest-{name}", name, 4.0)
    assert other.overrides == (("/options/draft_num_predict", n),)
    assert other.dialects == {Dialect.OLLAMA_CHAT, Dialect.OLLAMA_GENERATE}
    assert (other.target, other.models, other.fingerprint == OWN.fingerprint) == ("m:latest", OWN.models, False)


@asynccontextmanager
async def before_ollama(
    model: ServedModel = PLAIN, url: str = "http://127.0.0.1:9", **options: Any
) -> AsyncIterator[Sidecar]:
    """Before an Ollama with this model, and another one that is not looked after."""
    other = ServedModel("other", loaded=False, mtp_layers=1)
    found = ProbeResult(True, "ollama", "0.33.0", ("m:latest", "other"), served=(model, other))

    async def probe(url: str) -> ProbeResult:
        return found

    given: dict[str, Any] = {"may_reload": True, "weights": lambda url, model: Weights(MTP_FILE)} | options
    fleet = Sidecar([url], probe, **given)
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.aclose()


def memory(fleet: Sidecar) -> dict[str, bool]:
    """Which lanes that displace each other are in memory."""
    return {
        s.lane.id: s.resident
        for backend in fleet.backends
        for s in backend.lanes()
        if s.lane.control is Control.RELOAD
    }


def send(fleet: Sidecar, lane_id: str) -> None:
    """A request goes to a lane, and is given up at once."""
    [backend] = fleet.backends
    lane = next(s.lane for s in backend.lanes() if s.lane.id == lane_id)
    backend.open(UpstreamRequest("POST", "/api/chat", ()), lane, RecordingSink()).abort()


async def test_without_consent_nothing_is_reloaded() -> None:
    async with before_ollama(may_reload=False) as fleet:
        assert memory(fleet) == {}
        [upstream] = fleet.upstreams
        assert upstream.rung is not None
        assert (upstream.rung.number, "needs your consent" in upstream.rung.why) == (4, True)
        assert any("--reload" in advice for advice in upstream.rung.advice)


async def test_the_model_in_memory_is_the_one_that_was_used_last() -> None:
    """It starts as Ollama decodes by itself; what was asked for stays, whatever a look finds."""
    async with before_ollama() as fleet:
        assert memory(fleet) == {"m:latest": True, "m:latest-mtp": False}
        send(fleet, "m:latest-mtp")
        assert memory(fleet) == {"m:latest": False, "m:latest-mtp": True}
        await fleet._look(*fleet._servers.values())
        assert memory(fleet) == {"m:latest": False, "m:latest-mtp": True}
        send(fleet, "m:latest-mtp")
        assert memory(fleet) == {"m:latest": False, "m:latest-mtp": True}
        send(fleet, "m:latest")
        assert memory(fleet) == {"m:latest": True, "m:latest-mtp": False}
        send(fleet, "other")
        assert memory(fleet) == {"m:latest": True, "m:latest-mtp": False}
        assert {s.health for s in fleet.backends[0].lanes()} == {Health.READY}


async def test_idle_time_can_bring_a_lane_in() -> None:
    """By a request that decodes nothing, with the lane's own option; a failure changes nothing."""
    async with (
        Fake({"POST /api/generate": {"done": True, "done_reason": "load"}}) as server,
        before_ollama(url=server.url) as fleet,
    ):
        [backend] = fleet.backends
        assert isinstance(backend, LoadsLanes)
        own, other = (s.lane for s in backend.lanes() if s.lane.control is Control.RELOAD)
        await backend.load(other)
        assert memory(fleet) == {own.id: False, other.id: True}
        await backend.load(own)
        assert memory(fleet) == {own.id: True, other.id: False}
        assert server.bodies == [
            {"model": "m:latest", "stream": False, "options": {"draft_num_predict": 3}},
            {"model": "m:latest", "stream": False},
        ]
        server.routes["POST /api/generate"] = (500, {"error": "no memory"})
        with pytest.raises(LaneUnavailable, match="no memory"):
            await backend.load(other)
        assert memory(fleet) == {own.id: True, other.id: False}


async def test_loads_are_measured() -> None:
    """A guess from the file's size stands until there is one; later ones are averaged."""
    async with before_ollama() as fleet:
        lane = fleet.backends[0].lanes()[0].lane
        guess = lane.load_s
        assert guess > 1.0
        for seconds, known in ((9.0, 9.0), (19.0, 12.0)):
            fleet.loaded(lane, seconds)
            await fleet._look(*fleet._servers.values())
            assert {s.lane.load_s for s in fleet.backends[0].lanes() if s.lane.load_s} == {known}


async def test_rung_three_says_what_a_reload_is_for() -> None:
    async with before_ollama() as fleet:
        [upstream] = fleet.upstreams
        assert upstream.rung is not None
        assert (upstream.rung.number, upstream.rung.name) == (3, "reload")
        assert "plain, or mtp by draft_num_predict" in upstream.rung.why


async def test_a_model_that_no_option_changes_is_said_to_be_one() -> None:
    async with before_ollama(WITHOUT, weights=lambda url, model: Weights(facts())) as fleet:
        [upstream] = fleet.upstreams
        assert upstream.rung is not None
        assert (upstream.rung.number, memory(fleet)) == (4, {})
        assert "a reload would change nothing" in upstream.rung.why
