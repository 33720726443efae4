"""Managed lanes over stub processes: the contract, and what becomes of lanes that fail or pretend."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator

import psutil
import pytest

from specproxy.adapters import llama_server
from specproxy.adapters.base import Backend, UpstreamRequest
from specproxy.adapters.llama_server import LanePlan, ManagedLlamaServer
from specproxy.adapters.supervise import Backoff, ChildSpec
from specproxy.errors import ConfigError, UpstreamConnectError
from specproxy.records import Control, Health, Lane, Strategy
from specproxy.strategies.learner import Learner
from tests.adapters.contract import BackendContract
from tests.support.client import RawClient, post
from tests.support.proxy import running_proxy
from tests.support.sink import RecordingSink

QUICK = Backoff(first_s=0.01)


def plan(name: str, *args: str) -> LanePlan:
    """A lane on a stub with these arguments; `name` is its id and strategy."""
    lane = Lane(name, "managed", "m", Strategy.parse(name), Control.INSTANCE, f"print-{name}")
    return LanePlan(lane, ChildSpec(f"lane {name}", (sys.executable, "-m", "tests.support.stub_server", *args)))


class Watch:
    """Waits for changes of a backend's lanes."""

    def __init__(self, *plans: LanePlan) -> None:
        self._news = asyncio.Event()
        self.backend = ManagedLlamaServer("managed", plans, backoff=QUICK, on_change=self._news.set)

    async def until(self, lane: str, health: Health) -> str:
        """Wait until a lane has this health; returns its note."""
        while True:
            status = next(s for s in self.backend.lanes() if s.lane.id == lane)
            if status.health is health:
                return status.note
            self._news.clear()
            await self._news.wait()

    def health(self) -> dict[str, Health]:
        return {status.lane.id: status.health for status in self.backend.lanes()}


class TestContract(BackendContract):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[Backend]:
        backend = ManagedLlamaServer("managed", [plan("plain")])
        await backend.start()
        await backend.settled()
        yield backend
        await backend.aclose()


async def test_start_waits_for_plain_alone() -> None:
    watch = Watch(plan("plain", "--loading", "2"), plan("ngram", "--drafts", "--loading", "1000"))
    await watch.backend.start()
    assert watch.health() == {"plain": Health.READY, "ngram": Health.STARTING}
    assert watch.backend.address("plain").startswith("http://127.0.0.1:")
    assert watch.backend.address("ngram") == ""
    await watch.backend.aclose()
    assert watch.health() == {"plain": Health.STOPPED, "ngram": Health.STOPPED}


async def test_a_lane_that_does_not_draft_is_dropped() -> None:
    watch = Watch(plan("plain"), plan("draft"))
    await watch.backend.start()
    note = await watch.until("draft", Health.DROPPED)
    assert "claims draft but does not draft" in note
    assert watch.backend.pid("draft") is None
    assert watch.health()["plain"] is Health.READY
    await watch.backend.aclose()
    assert watch.health()["draft"] is Health.DROPPED


async def test_a_plain_lane_that_drafts_is_no_baseline() -> None:
    watch = Watch(plan("plain", "--drafts"))
    with pytest.raises(ConfigError, match="plain lane speculates"):
        await watch.backend.start()
    assert watch.health() == {"plain": Health.DROPPED}


async def test_without_slots_a_lane_is_taken_at_its_word() -> None:
    watch = Watch(plan("plain", "--no-slots"), plan("mtp", "--no-slots"))
    await watch.backend.start()
    await watch.until("mtp", Health.READY)
    await watch.backend.aclose()


async def test_a_model_that_does_not_load_leaves_nothing_running() -> None:
    before = {child.pid for child in psutil.Process().children()}
    watch = Watch(plan("plain", "--fail"), plan("ngram", "--drafts"))
    with pytest.raises(ConfigError, match="unknown architecture"):
        await watch.backend.start()
    assert {child.pid for child in psutil.Process().children()} <= before


async def test_a_further_lane_that_does_not_load_is_dropped_alone() -> None:
    watch = Watch(plan("plain"), plan("draft", "--fail"), plan("ngram", "--drafts"))
    await watch.backend.start()
    await watch.until("ngram", Health.READY)
    assert "unknown architecture" in await watch.until("draft", Health.DROPPED)
    await watch.backend.aclose()


async def test_a_killed_lane_comes_back_elsewhere_under_its_name() -> None:
    watch = Watch(plan("plain"))
    await watch.backend.start()
    lane = watch.backend.lanes()[0].lane
    pid, address = watch.backend.pid("plain"), watch.backend.address("plain")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert "killed by SIGKILL" in await watch.until("plain", Health.UNHEALTHY)
    await watch.until("plain", Health.READY)
    assert watch.backend.lanes()[0].lane == lane
    assert watch.backend.address("plain") != address
    sink = RecordingSink()
    watch.backend.open(UpstreamRequest("GET", "/whole", ()), lane, sink)
    assert await sink.over() == "end"
    await watch.backend.aclose()


async def test_a_lane_that_dies_under_a_request_fails_it() -> None:
    watch = Watch(plan("plain"))
    await watch.backend.start()
    sink = RecordingSink()
    watch.backend.open(UpstreamRequest("GET", "/wait", ()), watch.backend.lanes()[0].lane, sink)
    pid = watch.backend.pid("plain")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert await sink.over() == "fail"
    await watch.backend.aclose()


async def test_a_crash_loop_ends_in_dropped() -> None:
    watch = Watch(plan("plain"), plan("ngram", "--drafts", "--exit-after", "0"))
    await watch.backend.start()
    await watch.until("ngram", Health.READY)
    lane = watch.backend.lanes()[1].lane
    while watch.health()["ngram"] is not Health.DROPPED:
        watch.backend.open(UpstreamRequest("GET", "/whole", ()), lane, sink := RecordingSink())
        assert await sink.over() == "fail"
        await asyncio.sleep(0.005)
    assert "given up after 5 failures" in watch.backend.lanes()[1].note
    await watch.backend.aclose()


async def test_a_lane_that_is_down_refuses_before_anything_is_sent() -> None:
    watch = Watch(plan("plain"), plan("ngram", "--drafts", "--loading", "1000"))
    await watch.backend.start()
    sink = RecordingSink()
    exchange = watch.backend.open(UpstreamRequest("GET", "/whole", ()), watch.backend.lanes()[1].lane, sink)
    assert sink.calls == []
    assert await sink.over() == "fail"
    assert isinstance(sink.value("fail"), UpstreamConnectError)  # a retry elsewhere is safe
    exchange.abort()
    silenced = RecordingSink()
    watch.backend.open(UpstreamRequest("GET", "/whole", ()), watch.backend.lanes()[1].lane, silenced).abort()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert silenced.calls == []
    await watch.backend.aclose()


async def test_servers_that_start_at_once_do_not_race_for_ports() -> None:
    """Each child takes a port that is free and says which; none is chosen before it could be taken away."""
    watches = [Watch(plan("plain"), plan("ngram", "--drafts")) for _ in range(3)]
    await asyncio.gather(*(watch.backend.start() for watch in watches))
    for watch in watches:
        await watch.until("ngram", Health.READY)
    urls = {watch.backend.address(lane) for watch in watches for lane in ("plain", "ngram")}
    assert len(urls) == 6
    for watch in watches:
        assert (await asked(watch, "/whole", "plain")).body == b"whole"
        await watch.backend.aclose()


async def test_a_cancelled_start_leaves_nothing_running() -> None:
    watch = Watch(plan("plain", "--loading", "1000"))
    starting = asyncio.ensure_future(watch.backend.start())
    while watch.backend.pid("plain") is None:  # noqa: ASYNC110 - a start is no change of health
        await asyncio.sleep(0.005)
    pid = watch.backend.pid("plain")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert pid is not None
    assert not psutil.pid_exists(pid)


async def test_probe_asks_plain() -> None:
    watch = Watch(plan("plain"))
    assert not (await watch.backend.probe()).reachable
    await watch.backend.start()
    found = await watch.backend.probe()
    assert (found.kind, found.version, found.models) == ("llama-server", "b1-stub", ("stub",))
    await watch.backend.aclose()


def test_the_first_lane_is_plain() -> None:
    with pytest.raises(ValueError, match="plain"):
        ManagedLlamaServer("managed", [plan("ngram")])


# --- lanes that fail while their process runs ----------------------------------------------------


async def asked(watch: Watch, target: str, lane_id: str = "ngram") -> RecordingSink:
    """One request to a lane."""
    sink = RecordingSink()
    lane = next(s.lane for s in watch.backend.lanes() if s.lane.id == lane_id)
    sink.exchange = watch.backend.open(UpstreamRequest("GET", target, ()), lane, sink)
    await sink.over()
    return sink


@pytest.fixture
async def two(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watch]:
    """Plain and n-gram, both ready, and probes at short intervals."""
    monkeypatch.setattr(llama_server, "PROBE_FIRST_S", 0.01)
    watch = Watch(plan("plain"), plan("ngram", "--drafts"))
    await watch.backend.start()
    await watch.until("ngram", Health.READY)
    yield watch
    await watch.backend.aclose()


@pytest.mark.parametrize("target", ["/close", "/break", "/error"])
async def test_a_lane_that_fails_again_and_again_is_out_of_service_until_it_makes_a_token(
    two: Watch, target: str
) -> None:
    """Its process is the same one all the time."""
    pid = two.backend.pid("ngram")
    for _ in range(3):
        assert two.health()["ngram"] is Health.READY
        await asked(two, target)
    assert "3 requests in a row failed" in await two.until("ngram", Health.QUARANTINED)
    await two.until("ngram", Health.READY)
    assert two.backend.pid("ngram") == pid


async def test_failures_that_are_not_in_a_row_are_no_reason(two: Watch) -> None:
    """Nor are requests that were given up here."""
    for target in ("/close", "/close", "/whole", "/close", "/close"):
        await asked(two, target)
    lane = next(s.lane for s in two.backend.lanes() if s.lane.id == "ngram")
    two.backend.open(UpstreamRequest("GET", "/wait", ()), lane, RecordingSink()).abort()
    await asyncio.sleep(0)
    assert two.health()["ngram"] is Health.READY


async def test_plain_stays_in_service_where_it_is_needed(two: Watch) -> None:
    for _ in range(4):
        await asked(two, "/close", "plain")
    await asyncio.sleep(0)
    assert two.health()["plain"] is Health.READY


async def test_nothing_goes_to_a_quarantined_lane_and_a_probe_brings_it_back(
    two: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the whole proxy: its clients hear from plain as if nothing were wrong, and then from it again."""
    well = asyncio.Event()

    async def ask_little(lane: Lane, transport: object) -> int:
        return 200 if well.is_set() else 503

    monkeypatch.setattr(two.backend, "ask_little", ask_little)
    async with running_proxy(two.backend, policy=Learner()) as proxy:  # type: ignore[arg-type]  # any Policy will do
        taken: list[str] = []
        proxy.router.on_observation(lambda seen, _: taken.append(seen.lane))

        async def ask(*headers: bytes) -> int:
            async with await RawClient.connect(proxy.port) as client:
                return (await client.ask(post("/v1/chat/completions", b'{"messages":[]}', *headers))).status

        pin = b"X-Specproxy-Strategy: ngram"
        assert await ask(pin) == 200
        for _ in range(3):
            await asked(two, "/error")
        await two.until("ngram", Health.QUARANTINED)
        for _ in range(6):
            assert await ask() == 200
        assert await ask(pin) == 400, "it is named with the reason"
        assert taken == ["ngram", *["plain"] * 6, ""]
        well.set()
        await two.until("ngram", Health.READY)
        assert await ask(pin) == 200
        assert taken[-1] == "ngram"


async def test_a_lane_that_does_not_heal_stays_out_of_service(
    two: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked again and again, at growing intervals, and takes no request meanwhile."""
    answers = iter([503, None, 200])
    probes: list[str] = []

    async def ask_little(lane: Lane, transport: object) -> int:
        probes.append(lane.id)
        assert two.health()["ngram"] is Health.QUARANTINED
        if (status := next(answers)) is None:
            raise UpstreamConnectError("nobody there")
        return status

    monkeypatch.setattr(two.backend, "ask_little", ask_little)
    for _ in range(3):
        await asked(two, "/close")
    await two.until("ngram", Health.QUARANTINED)
    await two.until("ngram", Health.READY)
    assert probes == ["ngram"] * 3
