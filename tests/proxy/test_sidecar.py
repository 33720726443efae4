"""Servers that others run: found, lost, found again; their lanes follow what they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from specproxy.adapters.base import ProbeResult, ServedModel, UpstreamRequest
from specproxy.adapters.probe import Prober
from specproxy.adapters.weights import Weights
from specproxy.config import Settings
from specproxy.errors import UpstreamClosed, UpstreamConnectError
from specproxy.proxy import sidecar
from specproxy.proxy.beside import Beside, Wish
from specproxy.proxy.nobody import NobodyHome
from specproxy.proxy.sidecar import Sidecar
from specproxy.records import Control, Health, Lane, Strategy
from tests.support.client import RawClient, post
from tests.support.fakes import fake_llama_swap
from tests.support.model_facts import facts
from tests.support.proxy import running_proxy
from tests.support.sink import RecordingSink

LLAMA = ProbeResult(True, "llama-server", "b11549", ("m.gguf",))
OLLAMA = ProbeResult(True, "ollama", "0.33", ("qwen3:8b", "llama3:latest"))
AWAY = ProbeResult(False)


class Town:
    """What a probe finds at each URL; counts the looks."""

    def __init__(self, **found: ProbeResult) -> None:
        self.found = found
        self.looks = 0
        self.looked = asyncio.Event()

    async def probe(self, url: str) -> ProbeResult:
        self.looks += 1
        self.looked.set()
        return self.found.get(url.rpartition("/")[2].replace(".", "_"), AWAY)


async def started(town: Town, *urls: str) -> Sidecar:
    fleet = Sidecar([f"http://{url}" for url in urls], town.probe)
    await fleet.start()
    return fleet


async def test_a_llama_server_is_one_lane_for_any_model_name() -> None:
    """It answers whatever name a request gives, so its lane names none."""
    fleet = await started(Town(one=LLAMA), "one")
    [status] = fleet.backends[0].lanes()
    assert (status.health, status.lane.target, status.lane.models) == (Health.READY, "m.gguf", frozenset())
    assert (status.lane.control, status.lane.strategy) == (Control.OBSERVE, Strategy())
    await fleet.aclose()


async def test_ollama_is_a_lane_for_each_model() -> None:
    """Statistics of different models never mix; foreign Origins are kept from its own check."""
    fleet = await started(Town(one=OLLAMA), "one")
    lanes = [status.lane for status in fleet.backends[0].lanes()]
    assert [(lane.id, lane.target, lane.models) for lane in lanes] == [
        ("qwen3:8b", "qwen3:8b", frozenset({"qwen3:8b"})),
        ("llama3:latest", "llama3:latest", frozenset({"llama3:latest", "llama3"})),
    ]
    assert len({lane.fingerprint for lane in lanes}) == 2
    assert fleet.backends[0].transport.endpoint.strip_origin  # type: ignore[attr-defined]  # an HttpBackend
    await fleet.aclose()


async def test_llama_swap_is_a_lane_for_each_model() -> None:
    """What it starts a server for is its own affair: a request goes there as it is, also for another model."""
    async with fake_llama_swap("a", "b", loaded="b") as server:
        fleet = Sidecar([server.url], Prober())
        await fleet.start()
        assert {s.lane.models for s in fleet.backends[0].lanes()} == {frozenset({"a"}), frozenset({"b"})}
        assert {s.health for s in fleet.backends[0].lanes()} == {Health.READY}
        assert not any(asked.startswith("POST") for asked in server.asked)
        async with running_proxy(*fleet.backends) as proxy:
            client = await RawClient.connect(proxy.port)
            for name, status in (("a", 200), ("b", 200), ("alias", 404)):
                body = {"model": name, "messages": [{"role": "user", "content": "hello"}]}
                reply = await client.ask(post("/v1/chat/completions", json.dumps(body).encode()))
                assert (reply.status, server.bodies[-1]) == (status, body)
            client.close()
            assert [seen.target for seen in proxy.seen[:2]] == ["a", "b"]
        await fleet.aclose()


async def test_two_servers_share_no_lane_and_no_statistics() -> None:
    """The same models on two Ollamas are lanes of their own: the machines may differ."""
    fleet = await started(Town(one=OLLAMA, two=OLLAMA), "one", "two")
    lanes = [status.lane for backend in fleet.backends for status in backend.lanes()]
    assert len(lanes) == len({lane.id for lane in lanes}) == len({lane.fingerprint for lane in lanes}) == 4
    await fleet.aclose()


def serving(name: str) -> ProbeResult:
    return ProbeResult(True, "llama-server", "b1", (name,), served=(ServedModel(name),))


async def test_of_several_llama_servers_the_first_takes_what_nobody_names() -> None:
    """The others are asked for by their model; one with the same model is another lane of it."""
    town = Town(one=serving("a"), two=serving("b"), three=serving("a"))
    fleet = await started(town, "one", "two", "three")
    lanes = [backend.lanes()[0].lane for backend in fleet.backends]
    assert [(lane.target, lane.models) for lane in lanes] == [
        ("a", frozenset()),
        ("b", frozenset({"b"})),
        ("a", frozenset()),
    ]
    town.found["one"] = AWAY
    await fleet._look(*fleet._servers.values())
    assert fleet.backends[1].lanes()[0].lane.models == {"b"}  # not for as long as the first one is away
    await fleet.aclose()


async def test_servers_with_the_same_model_are_a_choice() -> None:
    """Each is told of the other, if that decodes in another way."""
    drafting = ServedModel("a", drafting=True)
    town = Town(one=serving("a"), two=ProbeResult(True, "llama-server", "b1", ("a",), served=(drafting,)))
    fleet = await started(town, "one", "two")
    rungs = [upstream.rung for upstream in fleet.upstreams]
    assert [rung and (rung.number, rung.why) for rung in rungs] == [
        (2, "plain here, server at http://two, on the same model"),
        (2, "server here, plain at http://one, on the same model"),
    ]
    town.found["two"] = AWAY
    await fleet._look(*fleet._servers.values())
    assert [upstream.rung and upstream.rung.number for upstream in fleet.upstreams] == [4, None]
    await fleet.aclose()


async def test_another_version_starts_new_statistics() -> None:
    """The fingerprint follows kind, version and model."""
    seen = []
    for found in (LLAMA, ProbeResult(True, "llama-server", "b11600", ("m.gguf",)), LLAMA):
        fleet = await started(Town(one=found), "one")
        seen.append(fleet.backends[0].lanes()[0].lane.fingerprint)
        await fleet.aclose()
    assert seen[0] == seen[2] != seen[1]


async def test_a_named_server_keeps_its_place_while_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unhealthy with the address in the note; ready when a look finds it; the change is told."""
    monkeypatch.setattr(sidecar, "RETRY_S", 0.0)
    town = Town()
    fleet = Sidecar(["http://one"], town.probe)
    changes = asyncio.Event()
    fleet.on_change(changes.set)
    await fleet.start()
    [status] = fleet.backends[0].lanes()
    assert status.health is Health.UNHEALTHY
    assert "http://one" in status.note
    town.found["one"] = LLAMA
    await changes.wait()
    assert [s.health for s in fleet.backends[0].lanes()] == [Health.READY]
    assert [u.found for u in fleet.upstreams] == [LLAMA]
    await fleet.aclose()


async def test_a_server_that_is_busy_is_not_away() -> None:
    """A single-threaded server says nothing while it answers somebody: it keeps its lanes."""
    town = Town(one=LLAMA)
    fleet = await started(town, "one")
    town.found["one"] = ProbeResult(False, silent=True)
    await fleet._look(fleet._servers["http://one"])
    assert [s.health for s in fleet.backends[0].lanes()] == [Health.READY]
    assert fleet.upstreams[0].found == LLAMA
    await fleet.aclose()


async def test_a_server_that_loads_is_ready_once_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lane says what it waits for, and the next look is soon."""
    monkeypatch.setattr(sidecar, "RETRY_S", 0.0)
    town = Town(one=ProbeResult(True, "llama-server", loading=True))
    fleet = Sidecar(["http://one"], town.probe)
    changes = asyncio.Event()
    fleet.on_change(changes.set)
    await fleet.start()
    assert [(s.health, s.note) for s in fleet.backends[0].lanes()] == [(Health.UNHEALTHY, "it is loading")]
    changes.clear()
    town.found["one"] = LLAMA
    await changes.wait()
    assert [(s.health, s.lane.target) for s in fleet.backends[0].lanes()] == [(Health.READY, "m.gguf")]
    await fleet.aclose()


async def test_of_the_usual_places_only_those_that_answer_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are looked at; who is not there is no upstream of ours."""
    monkeypatch.setattr(sidecar, "USUAL_URLS", ("http://one", "http://two", "http://three"))
    town = Town(two=OLLAMA, three=LLAMA)
    fleet = await started(town)
    assert town.looks == 3
    assert [u.url for u in fleet.upstreams] == ["http://two", "http://three"]
    assert len(fleet.backends) == 2
    assert len({backend.name for backend in fleet.backends}) == 2
    await fleet.aclose()


async def test_nobody_at_all_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in names every place that was looked at; there is no lane."""
    monkeypatch.setattr(sidecar, "USUAL_URLS", ("http://one", "http://two"))
    fleet = await started(Town())
    [backend] = fleet.backends
    sink = RecordingSink()
    lane = Lane("x", "nobody", "", Strategy(), Control.OBSERVE, "")
    backend.open(UpstreamRequest("GET", "/", ()), lane, sink)
    assert sink.calls == []
    error = await sink.heard("fail")
    assert isinstance(error, UpstreamConnectError)
    assert "http://one, http://two" in error.message
    assert backend.lanes() == ()
    await fleet.aclose()


async def test_an_aborted_exchange_with_nobody_says_nothing() -> None:
    """As for every backend: after abort the sink hears nothing."""
    sink = RecordingSink()
    lane = Lane("x", "nobody", "", Strategy(), Control.OBSERVE, "")
    NobodyHome(["http://one"]).open(UpstreamRequest("GET", "/", ()), lane, sink).abort()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sink.calls == []


LOADED = ServedModel("qwen3:8b", path="/blob", digest="d1", ctx=4096)
UNROUTED = ServedModel("embed", loaded=False, unrouted="it generates no text")


def ollama(*served: ServedModel, version: str = "0.33.0") -> ProbeResult:
    return ProbeResult(True, "ollama", version, tuple(m.name for m in served), served=served)


class Wishes(Beside):
    """Notes what is wished for instead of starting it."""

    def __init__(self, changed: Callable[[], None]) -> None:
        super().__init__("beside", Settings(), changed)
        self.wishes: list[tuple[Wish | None, str]] = []
        self.aways = 0

    def follow(self, wish: Wish | None, trouble: str = "") -> None:
        self.wishes.append((wish, trouble))
        self._wish, self.trouble = wish, trouble

    async def planned(self) -> None:
        """At once."""

    def away(self) -> None:
        self.aways += 1


async def with_wishes(town: Town) -> tuple[Sidecar, Wishes]:
    made: list[Wishes] = []

    def make(name: str, suffix: str, changed: Callable[[], None]) -> Beside:
        made.append(Wishes(changed))
        return made[-1]

    fleet = Sidecar(["http://one"], town.probe, weights=lambda url, model: Weights(facts()), beside=make)
    await fleet.start()
    return fleet, made[0]


async def looked(fleet: Sidecar) -> None:
    """Look at every server once more."""
    for server in fleet._servers.values():
        await fleet._look(server)


async def test_models_without_a_choice_are_no_lanes() -> None:
    """What generates no text, runs in the cloud or on MLX is passed through."""
    fleet = await started(Town(one=ollama(LOADED, UNROUTED)), "one")
    assert [s.lane.id for s in fleet.backends[0].lanes()] == ["qwen3:8b"]
    await fleet.aclose()


async def test_lanes_beside_follow_the_loaded_model() -> None:
    """They come with it, stay when it is put out of memory, change with its content, and go with it."""
    town = Town(one=ollama(replace(LOADED, loaded=False)))
    fleet, beside = await with_wishes(town)
    assert beside.wishes[-1] == (None, "Ollama has no model loaded; they come with the first one")
    town.found["one"] = ollama(LOADED)
    await looked(fleet)
    wish = beside.wishes[-1][0]
    assert wish is not None
    assert (wish.kind, wish.lane.target, wish.model) == ("ollama", "qwen3:8b", LOADED)
    before = len(beside.wishes)
    town.found["one"] = ollama(replace(LOADED, loaded=False, ctx=None))
    await looked(fleet)
    assert len(beside.wishes) == before
    town.found["one"] = ollama(replace(LOADED, digest="d2"))
    await looked(fleet)
    second = beside.wishes[-1][0]
    assert second is not None
    assert second.lane.fingerprint != wish.lane.fingerprint
    town.found["one"] = ollama(UNROUTED)
    await looked(fleet)
    assert beside.wishes[-1] == (None, "")
    town.found["one"] = AWAY
    await looked(fleet)
    assert beside.aways == 1
    await fleet.aclose()


async def test_a_wish_beside_ollama_says_why_llama_servers_will_not_do() -> None:
    """A version whose defaults are not known is not stood in for; a further Ollama of that version is."""
    fleet, beside = await with_wishes(Town(one=ollama(LOADED, version="0.20.1")))
    wish = beside.wishes[-1][0]
    assert wish is not None
    assert (wish.version, "0.20.1 are not known here" in wish.trouble) == ("0.20.1", True)
    await fleet.aclose()


async def test_what_is_known_of_models_reaches_the_learner() -> None:
    """From the file of the model that is looked after, from the server's word for the others."""
    moe = ServedModel("moe", loaded=False, experts=8, experts_used=2)
    fleet = Sidecar(
        ["http://one"],
        Town(one=ollama(LOADED, moe)).probe,
        weights=lambda url, model: Weights(facts(block_count=7)),
    )
    await fleet.start()
    known = fleet.facts()
    assert (known["qwen3:8b"].layers, known["moe"].layers) == (7, 0)
    assert (known["moe"].experts, known["moe"].experts_used) == (8, 2)
    await fleet.aclose()


async def test_beside_a_model_of_our_own_there_is_no_ladder_to_climb() -> None:
    """Its lanes are what was asked for; nobody is told to start others."""
    for alone in (True, False):
        fleet = Sidecar(
            ["http://one"], Town(one=ollama(LOADED)).probe, weights=lambda *_: Weights(), alone=alone
        )
        await fleet.start()
        assert (fleet.upstreams[0].rung is not None) is alone
        await fleet.aclose()


async def test_a_look_that_fails_is_not_the_last() -> None:
    """Whatever went wrong with it, the server is found by the next one."""
    town, broken = Town(one=ollama(LOADED)), [True]

    def weights(url: str, model: ServedModel) -> Weights:
        if broken.pop() if broken else False:
            raise RuntimeError("odd file")
        return Weights()

    fleet = Sidecar(["http://one"], town.probe, weights=weights)
    await fleet.start()
    assert not fleet.upstreams[0].found.reachable
    await looked(fleet)
    assert [s.health for s in fleet.backends[0].lanes()] == [Health.READY]
    await fleet.aclose()


async def test_a_failed_connection_marks_the_lane_and_hurries_the_next_look() -> None:
    """The retry interval is not waited out; a response that merely broke off marks nothing."""
    town = Town(one=LLAMA)
    fleet = await started(town, "one")
    lane = fleet.backends[0].lanes()[0].lane
    fleet.lane_failed(lane, UpstreamClosed("broke off"))
    assert fleet.backends[0].lanes()[0].health is Health.READY
    town.looked.clear()
    fleet.lane_failed(lane, UpstreamConnectError("refused"))
    assert fleet.backends[0].lanes()[0].health is Health.UNHEALTHY
    while fleet.backends[0].lanes()[0].health is not Health.READY:  # noqa: ASYNC110 - told by no event
        await asyncio.sleep(0)
    assert town.looked.is_set()
    await fleet.aclose()


async def test_a_failed_connection_is_looked_into_until_the_server_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look at which it says nothing does not leave its lanes marked until the next regular one."""
    monkeypatch.setattr(sidecar, "RETRY_S", 0.0)
    town = Town(one=LLAMA)
    fleet = await started(town, "one")
    town.found["one"] = ProbeResult(False, silent=True)
    town.looked.clear()
    fleet.lane_failed(fleet.backends[0].lanes()[0].lane, UpstreamConnectError("refused"))
    await town.looked.wait()
    assert fleet.backends[0].lanes()[0].health is Health.UNHEALTHY
    town.found["one"] = LLAMA
    while fleet.backends[0].lanes()[0].health is not Health.READY:  # noqa: ASYNC110 - told by no event
        await asyncio.sleep(0)
    await fleet.aclose()


async def test_only_what_is_loaded_is_at_hand() -> None:
    """A model that is not in memory would have to be loaded."""
    served = (ServedModel("here", loaded=True), ServedModel("gone", loaded=False))
    found = ProbeResult(True, "ollama", "0.33", ("here", "gone"), served=served)
    fleet = Sidecar(["http://127.0.0.1:9"], Town(**{"127_0_0_1:9": found}).probe)
    await fleet.start()
    near = {status.lane.target: status.lane for status in fleet.backends[0].lanes()}
    assert {name: fleet.at_hand(lane) for name, lane in near.items()} == {"here": True, "gone": False}
    assert not fleet.at_hand(replace(near["here"], backend="another"))
    await fleet.aclose()


def test_the_usual_places() -> None:
    """Ollama's port, llama-server's old and new one, and LM Studio's."""
    assert [url.rpartition(":")[2] for url in sidecar.USUAL_URLS] == ["11434", "8080", "9931", "1234"]
    assert all(url.startswith("http://127.0.0.1:") for url in sidecar.USUAL_URLS)
