"""Further lanes beside a server, on stub processes: planned, offered, replaced, kept while it is away."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specproxy.adapters import ollama_serve
from specproxy.adapters.base import ServedModel, UpstreamRequest
from specproxy.adapters.llama_server import LanePlan
from specproxy.adapters.machine import Gpu
from specproxy.adapters.managed import ManagedOptions, ManagedPlan
from specproxy.adapters.memory import Budget, MemoryPlan, Refusal
from specproxy.adapters.server_program import ServerProgram
from specproxy.adapters.supervise import ChildSpec
from specproxy.adapters.twin import Twin
from specproxy.adapters.weights import Listener, Weights
from specproxy.config import Settings
from specproxy.errors import ConfigError, PairError, UpstreamClosed
from specproxy.proxy import beside as module
from specproxy.proxy.beside import AWAY_S, Beside, Shared, Wish
from specproxy.records import Control, Dialect, Health, Lane, Strategy
from tests.support.fakes import Fake
from tests.support.model_facts import facts
from tests.support.ports import free_port
from tests.support.sink import RecordingSink

MODEL = ServedModel("m", ctx=8192)
OWN = Lane("upstream", "upstream", "m", Strategy(), Control.OBSERVE, "fp", models=frozenset({"m"}))
WISH = Wish("http://127.0.0.1:1", "llama-server", OWN, MODEL, facts(path=Path("/m.gguf")))
PROGRAM = ServerProgram("binary", (), "b1", frozenset(), frozenset())


class Planner:
    """Plans an n-gram lane on a stub, and remembers what it was asked; `error` once stands for a failure."""

    def __init__(self) -> None:
        self.asked: list[ManagedOptions] = []
        self.errors: list[ConfigError] = []
        self.program = PROGRAM
        self.ctx = 8192
        self.names: tuple[str, ...] = ("ngram",)
        self.planning: Callable[[], None] = lambda: None

    def __call__(self, options: ManagedOptions) -> ManagedPlan:
        self.asked.append(options)
        self.planning()
        if self.errors:
            raise self.errors.pop(0)
        plans = tuple(self.lane(name, options.backend) for name in self.names)
        refused = (Refusal("mtp", "the model file has no MTP layers"),)
        fitting = MemoryPlan((), (), 300, 0, Budget(1000))
        return ManagedPlan(options, self.program, WISH.facts, None, self.ctx, plans, fitting, refused)

    def lane(self, name: str, backend: str) -> LanePlan:
        lane = Lane(name, backend, "file", Strategy.parse(name), Control.INSTANCE, f"print-{name}")
        command = (sys.executable, "-m", "tests.support.stub_server", "--drafts")
        return LanePlan(lane, ChildSpec(f"lane {name}", command))


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Planner:
    planner = Planner()
    monkeypatch.setattr(module, "plan_managed", planner)
    monkeypatch.setattr(module.machine, "gpus", tuple)
    monkeypatch.setattr(module, "compare_servers", the_same)
    return planner


async def the_same(url: str, lane_url: str) -> Twin:
    return Twin(tools=True)


class Watched:
    """A `Beside` whose changes can be waited for, and whose clock stands."""

    def __init__(self, name: str = "beside", shared: Shared | None = None, **settings: Any) -> None:
        self.now = 0.0
        self.changes = 0
        self._news = asyncio.Event()
        given = Settings.model_validate({"manage": True} | settings)
        self.beside = Beside(name, given, self._change, shared=shared, clock=lambda: self.now)

    def _change(self) -> None:
        self.changes += 1
        self._news.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            self._news.clear()
            await self._news.wait()

    def lanes(self) -> dict[str, Health]:
        backend = self.beside.backend
        return {s.lane.id: s.health for s in backend.lanes()} if backend is not None else {}


@asynccontextmanager
async def watched(
    name: str = "beside", shared: Shared | None = None, **settings: Any
) -> AsyncIterator[Watched]:
    it = Watched(name, shared, **settings)
    try:
        yield it
    finally:
        await it.beside.aclose()


async def test_a_lane_stands_for_the_servers_model(planner: Planner) -> None:
    """Target and names are the server's, so that statistics compare; what the server does is not done again."""
    async with watched(threads=3) as it:
        it.beside.follow(WISH)
        await it.until(lambda: it.lanes() == {"ngram": Health.READY})
        assert it.beside.backend is not None
        [status] = it.beside.backend.lanes()
        assert (status.lane.target, status.lane.models, status.lane.ctx) == ("m", frozenset({"m"}), 0)
        assert Dialect.LLAMACPP in status.lane.dialects
        assert Dialect.OLLAMA_CHAT not in status.lane.dialects
        assert it.beside.address(status.lane).startswith("http://127.0.0.1:")
        assert it.beside.facts()["ngram"].layers == 32
        [options] = planner.asked
        assert (options.model, options.threads, options.alias) == (Path("/m.gguf"), 3, "m")
        assert (options.exclude, options.max_ctx) == (("plain",), 8192)


async def test_the_same_wish_changes_nothing(planner: Planner) -> None:
    async with watched() as it:
        it.beside.follow(WISH)
        await it.until(lambda: it.lanes() == {"ngram": Health.READY})
        it.beside.follow(replace(WISH))
        await it.beside.planned()
        assert len(planner.asked) == 1


async def test_another_model_gets_other_lanes(planner: Planner) -> None:
    """The old ones are gone before the new ones are planned: they may not fit together."""
    async with watched() as it:
        it.beside.follow(WISH)
        await it.until(lambda: it.lanes() == {"ngram": Health.READY})
        first = it.beside.backend
        other = replace(OWN, target="other")
        it.beside.follow(replace(WISH, lane=other))
        await it.until(lambda: it.beside.backend not in (None, first))
        assert first is not None
        assert {s.health for s in first.lanes()} == {Health.STOPPED}
        await it.until(lambda: it.lanes() == {"ngram": Health.READY})
        assert it.beside.backend is not None
        assert it.beside.backend.lanes()[0].lane.target == "other"


async def test_a_wish_in_the_meantime_is_the_one_that_counts(planner: Planner) -> None:
    """Only the first and the last of three are planned for."""
    async with watched() as it:
        for target in ("a", "b", "c"):
            it.beside.follow(replace(WISH, lane=replace(OWN, target=target)))
        await it.until(lambda: it.lanes() == {"ngram": Health.READY})
        assert it.beside.backend is not None
        assert it.beside.backend.lanes()[0].lane.target == "c"
        assert len(planner.asked) == 1


async def test_lanes_outlive_their_server_for_a_while(planner: Planner) -> None:
    """A restart does not cost them; a server that stays away does."""
    async with watched() as it:
        it.beside.follow(WISH)
        await it.until(lambda: it.lanes() == {"ngram": Health.READY})
        it.beside.away()
        it.now = AWAY_S - 1
        it.beside.follow(WISH)
        it.now = AWAY_S + 1
        it.beside.away()
        assert it.lanes() == {"ngram": Health.READY}
        it.now += AWAY_S
        it.beside.away()
        await it.until(lambda: it.lanes() == {})
        assert it.beside.plan is None


async def test_lanes_beside_two_servers_share_the_memory(planner: Planner) -> None:
    """The second ones are planned once the first ones are up, with what these have left of the limit."""
    shared = Shared()
    async with watched("one", shared, memory=1000) as one, watched("two", shared, memory=1000) as two:
        ready: list[bool] = []
        planner.planning = lambda: ready.append(one.lanes() == {"ngram": Health.READY})
        for it in (one, two):
            it.beside.follow(WISH)
        await two.until(lambda: two.lanes() == {"ngram": Health.READY})
        assert ready == [False, True]
        assert [options.memory for options in planner.asked] == [1000, 700]
        one.beside.follow(None)
        await one.until(lambda: not shared.taken.get("one"))
        two.beside.follow(replace(WISH, url="http://again"))
        await two.until(lambda: len(planner.asked) == 3)
        assert planner.asked[-1].memory == 1000


async def test_lanes_finish_what_they_answer_before_they_are_stopped(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are offered to nobody meanwhile."""
    looks: list[str] = []
    looked, go = asyncio.Event(), asyncio.Event()

    async def idle(address: str) -> None:
        looks.append(address)
        looked.set()
        await go.wait()

    monkeypatch.setattr(module, "_idle", idle)
    async with watched() as it:
        it.beside.follow(WISH)
        await it.until(lambda: it.lanes() == {"ngram": Health.READY})
        running = it.beside.backend
        assert running is not None
        address = running.address("ngram")
        it.beside.follow(None)
        await looked.wait()
        assert looks == [address]
        assert it.beside.backend is None
        assert running.lanes()[0].health is Health.READY
        go.set()
        await it.until(lambda: running.lanes()[0].health is Health.STOPPED)


async def test_a_lane_is_idle_once_no_slot_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or when nobody is there, or it does not say."""
    monkeypatch.setattr(module, "IDLE_POLL_S", 0.0)
    busy = [{"is_processing": False}, {"is_processing": True}]
    async with Fake(
        {"GET /slots": lambda _: busy if server.asked.count("GET /slots") < 4 else busy[:1]}
    ) as server:
        await module._idle(server.url)
        assert server.asked.count("GET /slots") == 4
        server.routes["GET /slots"] = (501, {"error": "off"})
        await module._idle(server.url)
    await module._idle(f"http://127.0.0.1:{free_port()}")


async def test_a_shorter_context_is_said_to_the_router(planner: Planner) -> None:
    """And Ollama's lanes always keep to theirs, as Ollama shortens chats that are too long."""
    planner.ctx = 4096
    async with watched() as it:
        it.beside.follow(WISH)
        await it.until(lambda: it.beside.plan)
        assert it.beside.plan is not None
        assert [p.lane.ctx for p in it.beside.plan.lanes] == [4096]


async def test_nothing_that_fits_is_no_trouble(planner: Planner) -> None:
    """The plan says what was left out and why; no process is started."""
    planner.names = ()
    async with watched() as it:
        it.beside.follow(WISH)
        await it.beside.planned()
        assert it.beside.plan is not None
        assert (it.beside.plan.lanes, it.beside.backend) == ((), None)


async def test_what_cannot_be_planned_is_trouble(planner: Planner) -> None:
    """With its reason, until another wish."""
    planner.errors = [ConfigError("no llama-server found", hint="get one")]
    async with watched() as it:
        it.beside.follow(WISH)
        await it.beside.planned()
        assert it.beside.trouble == "no llama-server found (get one)"
        it.beside.follow(replace(WISH, on_gpu=False))
        await it.until(lambda: it.lanes() == {"ngram": Health.READY})
        assert it.beside.trouble == ""


async def test_a_draft_that_does_not_fit_is_left_out(planner: Planner) -> None:
    """The other lanes come up, and the rung says what is wrong with it."""
    planner.errors = [PairError("d.gguf cannot draft for m.gguf")]
    async with watched(draft="d.gguf") as it:
        it.beside.follow(WISH)
        await it.until(lambda: it.beside.plan)
        assert [options.draft for options in planner.asked] == [Path("d.gguf"), None]
        assert it.beside.plan is not None
        assert it.beside.plan.warnings == ("d.gguf cannot draft for m.gguf.",)


@pytest.mark.parametrize(("on_gpu", "starts"), [(True, False), (False, True)])
async def test_no_lane_on_the_processor_beside_a_gpu(
    planner: Planner, monkeypatch: pytest.MonkeyPatch, on_gpu: bool, starts: bool
) -> None:
    """It would be many times slower, and each try of it would be felt."""
    monkeypatch.setattr(module.machine, "gpus", lambda: (Gpu("card", 1, 1),))
    planner.program = replace(PROGRAM, kind="wheel")
    async with watched() as it:
        it.beside.follow(replace(WISH, on_gpu=on_gpu))
        await it.beside.planned()
        assert (it.beside.plan is not None) is starts
        assert ("has a GPU" in it.beside.trouble) is not starts


@pytest.mark.parametrize("kind", ["ollama", "llama-server"])
@pytest.mark.parametrize(
    ("twin", "offered"),
    [(Twin(tools=True), True), (Twin(overrides=(("top_k", 9),)), True), (Twin("no"), False)],
)
async def test_lanes_are_compared_before_they_are_offered(
    planner: Planner, monkeypatch: pytest.MonkeyPatch, kind: str, twin: Twin, offered: bool
) -> None:
    """Until then there is a plan to see, and no backend; what came of it is on the lanes."""
    seen: list[object] = []

    async def compare(url: str, *more: object) -> Twin:
        seen.extend((it.beside.backend, it.beside.plan is not None, url, more[-1]))
        return twin

    monkeypatch.setattr(module, "compare_prompts" if kind == "ollama" else "compare_servers", compare)
    async with watched() as it:
        it.beside.follow(replace(WISH, kind=kind))
        await it.until(lambda: it.beside.backend or it.beside.trouble)
        assert seen[:3] == [None, True, WISH.url]
        assert str(seen[3]).startswith("http://127.0.0.1:")
        assert (it.lanes() == {"ngram": Health.READY}) is offered
        assert it.beside.trouble == twin.reason
        assert (it.beside.plan is not None) is offered
        if it.beside.backend is not None:
            [status] = it.beside.backend.lanes()
            assert (status.lane.tools, status.lane.media) == (twin.tools, False)
            assert status.lane.overrides == twin.overrides
            assert status.lane.ctx == (8192 if kind == "ollama" else 0)
            assert (status.lane.dialects == {Dialect.OPENAI_CHAT}) is (kind == "ollama")


async def test_a_server_that_does_not_answer_is_compared_later(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may just be busy; another wish need not wait for it."""
    calls: list[str] = []

    async def compare(url: str, lane_url: str) -> Twin:
        calls.append(url)
        if len(calls) == 1:
            raise UpstreamClosed("no whole reply within 20 s")
        if url == "http://slow":
            it.beside.follow(replace(WISH, url="http://quick"))
            await asyncio.Event().wait()
        return Twin()

    monkeypatch.setattr(module, "COMPARE_AGAIN_S", 0.0)
    monkeypatch.setattr(module, "compare_servers", compare)
    async with watched() as it:
        it.beside.follow(replace(WISH, url="http://slow"))
        await it.until(lambda: it.lanes() == {"ngram": Health.READY})
        assert calls == ["http://slow", "http://slow", "http://quick"]


def test_a_wish_needs_weights_and_a_server_that_can_be_stood_in_for() -> None:
    weights = Weights(facts(), listener=Listener(("llama-server", "-ngl", "0"), Path("/")))
    wish = Wish.of("http://x", "llama-server", OWN, MODEL, weights)
    assert wish is not None
    assert not wish.on_gpu
    assert Wish.of("http://x", "vllm", OWN, MODEL, weights) is None
    assert Wish.of("http://x", "llama-server", OWN, MODEL, Weights(reason="elsewhere")) is None
    assert Wish.of("http://x", "llama-server", OWN, MODEL, None) is None


# --- beside Ollama -------------------------------------------------------------------------------


@pytest.fixture
def ollama_wish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wish:
    """Lanes beside an Ollama whose program is a stub, and whose store has the model."""
    program = tmp_path / "ollama"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.support.stub_ollama "$@"\n')
    program.chmod(0o755)
    (tmp_path / "manifests").mkdir()
    blob = tmp_path / "blobs" / "sha256-m"
    monkeypatch.setattr(module, "find_ollama", lambda listener: program)
    monkeypatch.setattr(ollama_serve, "read_facts", lambda path: facts(path=path))
    monkeypatch.setattr(ollama_serve, "measure_budget", lambda options: (Budget(1 << 40), ()))
    own = replace(OWN, target="m:latest", models=frozenset({"m", "m:latest"}))
    model = ServedModel("m:latest", ctx=2048, drafting=False)
    return Wish("http://127.0.0.1:1", "ollama", own, model, facts(path=blob), version="0.33.0", trouble="old")


async def test_beside_ollama_further_ones_answer_on_every_route(ollama_wish: Wish) -> None:
    """With the model's names there, its whole context and tools, whatever llama-servers could not do."""
    async with watched() as it:
        it.beside.follow(ollama_wish)
        await it.until(lambda: it.lanes() == {"ngram-simple": Health.READY})
        assert it.beside.backend is not None
        lane = it.beside.backend.lanes()[0].lane
        assert (lane.target, lane.models) == ("m:latest", frozenset({"m", "m:latest"}))
        assert (lane.dialects, lane.ctx, lane.tools, lane.media) == (frozenset(), 0, True, False)
        assert it.beside.address(lane).startswith("http://127.0.0.1:")
        assert it.beside.trouble == ""


async def test_further_ollamas_finish_what_they_answer(
    ollama_wish: Wish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are offered to nobody meanwhile, and stopped once no request of ours is in flight."""
    monkeypatch.setattr(module, "IDLE_POLL_S", 0.01)
    async with watched() as it:
        it.beside.follow(ollama_wish)
        await it.until(lambda: it.lanes() == {"ngram-simple": Health.READY})
        running = it.beside.backend
        assert running is not None
        lane = running.lanes()[0].lane
        exchange = running.open(UpstreamRequest("GET", "/bodies", ()), lane, RecordingSink())
        it.beside.follow(None)
        await it.until(lambda: it.beside.backend is None)
        assert running.lanes()[0].health is Health.READY
        exchange.abort()
        await it.until(lambda: running.lanes()[0].health is Health.STOPPED)


async def test_without_ollamas_program_llama_servers_have_to_do(
    ollama_wish: Wish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or cannot, and that is why there are none."""
    monkeypatch.setattr(module, "find_ollama", lambda listener: None)
    async with watched() as it:
        it.beside.follow(ollama_wish)
        await it.beside.planned()
        assert (it.beside.plan, it.beside.trouble) == (None, "old")
