"""mlx_vlm.server as a deployment: what is loaded when, who waits for it, and what goes where."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from specproxy.adapters.base import LoadsLanes, UpstreamRequest
from specproxy.adapters.mlx_vlm import MlxVlmBackend
from specproxy.adapters.openai_compat import Deployed
from specproxy.errors import BackendError, LaneUnavailable, UpstreamClosed
from specproxy.proxy.dialects.replies import Figures
from specproxy.proxy.media import MediaShare
from specproxy.records import Control, Dialect, Health, Outcome
from tests.support.client import RawClient, post
from tests.support.deployments import CHAT, ask, deployment, proxied
from tests.support.fake_mlx_vlm import BUDGET, STRUCTURED, FakeMlxVlm
from tests.support.media import requests as with_media
from tests.support.proxy import Proxy
from tests.support.sink import RecordingSink

EAGLE, FLASH = "org/m-eagle3", "org/m-DFlash"
DRAFTED = b"X-Specproxy-Strategy: eagle3"
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}}


def backend_of(proxy: Proxy) -> MlxVlmBackend:
    [backend] = proxy.router.backends
    assert isinstance(backend, MlxVlmBackend)
    return backend


def resident(backend: MlxVlmBackend) -> list[bool]:
    return [status.resident for status in backend.lanes()]


@pytest.fixture
async def server() -> AsyncIterator[FakeMlxVlm]:
    async with FakeMlxVlm(EAGLE, FLASH) as server:
        yield server


@pytest.fixture
async def backend(server: FakeMlxVlm) -> AsyncIterator[MlxVlmBackend]:
    backend = MlxVlmBackend(Deployed("d", server.url, "m", drafts=(EAGLE, FLASH)))
    await backend.start()
    await backend.check()
    yield backend
    await backend.aclose()


def chat(backend: MlxVlmBackend, lane: int, **fields: Any) -> RecordingSink:
    """A chat on a lane, by its number."""
    body = json.dumps(CHAT | fields).encode()
    request = UpstreamRequest("POST", "/v1/chat/completions", (), body, len(body))
    sink = RecordingSink()
    sink.exchange = backend.open(request, backend.lanes()[lane].lane, sink)
    return sink


async def until(told: Any) -> None:
    """Until something is so; what makes it so is on a socket."""
    async with asyncio.timeout(10):
        while not told():  # noqa: ASYNC110 - told by no event
            await asyncio.sleep(0)


# --- lanes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "strategy"),
    [
        ("z-lab/Qwen3.5-9B-DFlash", "dflash"),
        ("org/m-EAGLE3", "eagle3"),
        ("org/m-dspark-4bit", "dspark"),
        ("org/gemma-4-it-assistant", "mtp"),
        ("org/m-MTP", "mtp"),
        ("m", "mtp"),
        ("org/small", "draft"),
    ],
)
def test_a_drafter_is_known_by_its_name(draft: str, strategy: str) -> None:
    """Its lane is called what it is, and priced so at first."""
    first, second = MlxVlmBackend(Deployed("d", "http://a", "m", drafts=(draft,))).lanes()
    assert (first.lane.strategy.name, second.lane.strategy.name) == ("plain", strategy)
    assert {first.lane.control, second.lane.control} == {Control.RELOAD}


def test_two_drafters_of_a_kind_are_told_apart() -> None:
    """By statistics of their own, although no field differs."""
    lanes = MlxVlmBackend(Deployed("d", "http://a", "m", drafts=("a/eagle", "a/eagle-2"))).lanes()
    assert len({status.lane.fingerprint for status in lanes}) == 3


async def test_without_drafters_it_is_one_lane_as_it_was_started(server: FakeMlxVlm) -> None:
    """Its settings are left alone, and no load is reckoned with."""
    async with proxied(deployment(server, kind="mlx-vlm", strategy="eagle3")) as proxy:
        [lane] = [status.lane for status in proxy.router.lanes()]
        assert (lane.control, lane.strategy.name, lane.load_s) == (Control.INSTANCE, "eagle3", 0.0)
        assert Dialect.OPENAI_COMPLETIONS not in lane.dialects
        assert (await ask(proxy, DRAFTED)).status == 200
    assert not [asked for asked in server.asked if "settings" in asked]


# --- what is in memory ---------------------------------------------------------------------------


async def test_a_drafter_is_set_and_loaded_before_the_request(server: FakeMlxVlm) -> None:
    """Each change costs a load; nothing is added to requests, and drafts are read from the reply."""
    async with proxied(deployment(server, kind="mlx-vlm", drafts=[EAGLE], load_s=7)) as proxy:
        assert resident(backend_of(proxy)) == [True, False]
        for header in (DRAFTED, DRAFTED, b"X-Specproxy-Strategy: plain"):
            assert (await ask(proxy, header)).status == 200
        assert resident(backend_of(proxy)) == [True, False]
        assert [(s.draft_tokens, s.accepted_tokens, s.load_s > 0) for s in proxy.seen] == [
            (6, 4, True),
            (6, 4, False),
            (0, 0, True),
        ]
    assert server.loads == [EAGLE, ""]
    assert server.chats == [(EAGLE, CHAT), (EAGLE, CHAT), ("", CHAT)]


async def test_the_pace_is_that_of_the_tokens_behind_the_first(server: FakeMlxVlm) -> None:
    """Four milliseconds a token; the server's own total has the first token in it too."""
    async with proxied(deployment(server, kind="mlx-vlm", drafts=[EAGLE])) as proxy:
        await ask(proxy)
        assert proxy.seen[0].time_per_token == pytest.approx(0.004)


def test_drafts_of_other_requests_are_not_counted() -> None:
    """As a real server told them of a reply of 6 tokens that had waited for one of 250."""
    figures = Figures()
    timings = {"predicted_n": 6, "predicted_ms": 116.8, "peak_memory": 0.08, "draft_n": 109}
    figures.read({"timings": timings | {"draft_rounds": 109, "draft_n_accepted": 109}})
    assert (figures.output_tokens, figures.draft_tokens, figures.accepted_tokens) == (6, 0, 0)


async def test_a_stream_with_usage_tells_drafts(server: FakeMlxVlm) -> None:
    """Its last event has them; the others have a pace alone."""
    async with proxied(deployment(server, kind="mlx-vlm", drafts=[EAGLE])) as proxy:
        reply = await ask(proxy, DRAFTED, stream=True, stream_options={"include_usage": True})
        assert reply.content.endswith(b"data: [DONE]\n\n")
        assert (await ask(proxy, DRAFTED, stream=True)).status == 200
        told, silent = proxy.seen
    assert (told.output_tokens, told.draft_tokens, told.accepted_tokens) == (8, 6, 4)
    assert (silent.output_tokens, silent.draft_tokens) == (8, 0)


async def test_idle_loads(backend: MlxVlmBackend, server: FakeMlxVlm) -> None:
    """A lane can be had in advance; asking for one that is there costs nothing."""
    assert isinstance(backend, LoadsLanes)
    for _ in range(2):
        await backend.load(backend.lanes()[1].lane)
    assert (resident(backend), server.loads, server.chats) == ([False, True, False], [EAGLE], [])


async def test_a_change_waits_for_answers_and_others_wait_behind_it(
    backend: MlxVlmBackend, server: FakeMlxVlm
) -> None:
    """The server would answer nobody meanwhile; and nobody is overtaken."""
    server.open.clear()
    first = chat(backend, 0)
    await until(lambda: server.chats)
    changed = chat(backend, 1)
    await asyncio.sleep(0)  # until it waits
    behind = chat(backend, 0)
    asked = len(server.asked)
    assert (await backend.check()).silent
    assert len(server.asked) == asked
    assert (server.setting, len(server.chats)) == (None, 1)
    server.open.set()
    assert [await sink.over() for sink in (first, changed, behind)] == ["end"] * 3
    assert [drafter for drafter, _ in server.chats] == ["", EAGLE, ""]
    assert server.loads == [EAGLE, ""]


async def test_who_gives_up_while_waiting_changes_nothing(backend: MlxVlmBackend, server: FakeMlxVlm) -> None:
    """Its turn passes to the next."""
    server.open.clear()
    first = chat(backend, 0)
    await until(lambda: server.chats)
    given_up, next_one = chat(backend, 1), chat(backend, 2)
    assert given_up.exchange is not None
    given_up.exchange.abort()
    server.open.set()
    assert [await sink.over() for sink in (first, next_one)] == ["end"] * 2
    assert given_up.calls == []
    assert server.loads == [FLASH]


async def test_closing_fails_who_waits(backend: MlxVlmBackend, server: FakeMlxVlm) -> None:
    """At once, with what they asked for not begun."""
    server.loading.clear()
    waiting = chat(backend, 1)
    await until(lambda: server.loaded is None)
    await backend.aclose()
    assert await waiting.over() == "fail"
    assert isinstance(waiting.value("fail"), UpstreamClosed)
    server.loading.set()


async def test_what_loads_nothing_waits_for_nobody(backend: MlxVlmBackend, server: FakeMlxVlm) -> None:
    """A list of models is no reason to change lanes."""
    await backend.load(backend.lanes()[1].lane)
    sink = RecordingSink()
    sink.exchange = backend.open(UpstreamRequest("GET", "/v1/models", ()), backend.lanes()[0].lane, sink)
    assert await sink.over() == "end"
    assert (resident(backend), server.loads) == ([False, True, False], [EAGLE])


async def test_what_others_change_is_seen(backend: MlxVlmBackend, server: FakeMlxVlm) -> None:
    """The server tells its settings and its model; one that neither lane names counts as how it was started."""
    for setting, loaded, expected in (
        (FLASH, "m", [False, False, True]),
        ("org/another", "m", [True, False, False]),
        (FLASH, "another", [False, False, False]),
        (None, "m", [True, False, False]),
    ):
        server.setting, server.loaded = setting, (loaded, setting or "")
        await backend.check()
        assert resident(backend) == expected


async def test_a_server_that_drafts_from_the_start_comes_back_to_it() -> None:
    """Taking the setting away restores what it was started with: that is the first lane, however it decodes."""
    async with FakeMlxVlm(EAGLE, FLASH, started_with=EAGLE) as server:
        one = deployment(server, kind="mlx-vlm", strategy="eagle3", drafts=[FLASH])
        async with proxied(one) as proxy:
            for header in (b"X-Specproxy-Strategy: dflash", DRAFTED):
                await ask(proxy, header)
    assert server.loads == [FLASH, EAGLE]


# --- what goes wrong -----------------------------------------------------------------------------


async def test_a_drafter_that_cannot_be_loaded_is_left_alone(server: FakeMlxVlm) -> None:
    """Plain answers, the setting is taken back, and until the server was away nobody tries again."""
    server.drafters = ()
    async with proxied(deployment(server, kind="mlx-vlm", drafts=[EAGLE])) as proxy:
        backend = backend_of(proxy)
        sink = chat(backend, 1)
        assert await sink.over() == "fail"
        assert isinstance(sink.value("fail"), LaneUnavailable)
        assert (server.setting, server.loaded) == (None, None)
        first, second = backend.lanes()
        assert (first.health, second.health) == (Health.READY, Health.UNHEALTHY)
        assert "could not be loaded: Repo id must be" in second.note
        await backend.check()
        assert backend.lanes()[1].health is Health.UNHEALTHY
        assert (await ask(proxy)).status == 200
        assert server.loads == [""]
        await server.__aexit__()
        await backend.check()
        await server.__aenter__()
        await backend.check()
        assert {status.health for status in backend.lanes()} == {Health.READY}


async def test_a_request_whose_drafter_cannot_be_loaded_is_answered_by_plain(server: FakeMlxVlm) -> None:
    """The client notices nothing but the time."""
    server.drafters = ()
    async with proxied(deployment(server, kind="mlx-vlm", drafts=[EAGLE])) as proxy:
        assert (await ask(proxy, DRAFTED)).status == 200
        [seen] = proxy.seen
    assert (seen.rule, seen.outcome) == ("fallback", Outcome.COMPLETE)
    assert server.chats == [("", CHAT)]


async def test_a_model_that_cannot_be_loaded_is_the_servers_to_tell(server: FakeMlxVlm) -> None:
    """Its own error reaches the client."""
    async with proxied(deployment(server, kind="mlx-vlm", model="gone", drafts=[EAGLE])) as proxy:
        reply = await ask(proxy)
    assert reply.status == 500
    assert b"An unexpected error occurred" in reply.content


async def test_an_older_server_has_no_settings() -> None:
    """Its lane as it was started works on; the others say what is missing."""
    async with FakeMlxVlm(EAGLE, settable=False) as server:
        one = deployment(server, kind="mlx-vlm", drafts=[EAGLE])
        async with proxied(one) as proxy:
            first, second = backend_of(proxy).lanes()
            assert (first.health, second.health) == (Health.READY, Health.UNHEALTHY)
            assert "--draft-model" in second.note
            assert (await ask(proxy)).status == 200
            server.loaded = None
            await backend_of(proxy).check()
            assert (await ask(proxy)).status == 200
    assert not [asked for asked in server.asked if asked.startswith("PATCH")]


async def test_the_key_goes_with_every_question() -> None:
    """Settings are under it too."""
    async with FakeMlxVlm(EAGLE, key="secret") as server:
        one = deployment(server, kind="mlx-vlm", drafts=[EAGLE], key_env="KEY")
        async with proxied(one, KEY="secret") as proxy:
            assert (await ask(proxy, DRAFTED)).status == 200
        assert server.loads == [EAGLE]
        async with proxied(one, KEY="wrong") as proxy:
            assert {"it refuses the key (status 401)"} == {s.note for s in backend_of(proxy).lanes()}


async def test_a_server_that_ends_while_lanes_change_is_told(
    backend: MlxVlmBackend, server: FakeMlxVlm
) -> None:
    """To whom waits for it, and to nobody as a hang."""
    server.loading.clear()
    waiting = chat(backend, 1)
    await until(lambda: server.loaded is None)
    await server.__aexit__()
    assert await waiting.over() == "fail"
    assert isinstance(waiting.value("fail"), BackendError)
    assert not (await backend.check()).reachable
    await server.__aenter__()


# --- what goes where -----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wish", [FORM, {"response_format": {"type": "json_object"}}, {"thinking_budget": 5}])
async def test_bound_text_goes_to_plain(server: FakeMlxVlm, wish: dict[str, Any], stream: bool) -> None:
    """With a drafter the server would refuse, in a stream only after its head."""
    async with proxied(deployment(server, kind="mlx-vlm", drafts=[EAGLE])) as proxy:
        await backend_of(proxy).load(backend_of(proxy).lanes()[1].lane)
        reply = await ask(proxy, stream=stream, **wish)
        assert (reply.status, b"error" in reply.content) == (200, False)
        assert [seen.outcome for seen in proxy.seen] == [Outcome.COMPLETE]
    assert [drafter for drafter, _ in server.chats] == [""]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("wish", "refusal"), [(FORM, STRUCTURED), ({"thinking_budget": 5}, BUDGET)])
async def test_where_nothing_is_plain_the_server_refuses_itself(
    wish: dict[str, Any], refusal: str, stream: bool
) -> None:
    """Under the model's right name, or it would let go of the model; nothing is learned from it."""
    async with FakeMlxVlm(EAGLE, started_with=EAGLE, model="m-real") as server:
        one = deployment(server, kind="mlx-vlm", model="m-real", strategy="eagle3")
        async with proxied(one) as proxy:
            reply = await ask(proxy, DRAFTED, stream=stream, **wish)
            assert (reply.status, refusal.encode() in reply.content) == (200 if stream else 500, True)
            assert [seen.outcome for seen in proxy.seen] == [Outcome.ERROR]
    assert server.loaded == ("m-real", EAGLE)


@pytest.mark.parametrize("route", ["chat", "chat with sound", "responses", "messages"])
async def test_pictures_go_to_plain(server: FakeMlxVlm, route: str) -> None:
    """Real PNG data, in every dialect that the server speaks, unchanged."""
    path, body = with_media()[route]
    async with proxied(deployment(server, kind="mlx-vlm", drafts=[EAGLE])) as proxy:
        await backend_of(proxy).load(backend_of(proxy).lanes()[1].lane)
        client = await RawClient.connect(proxy.port)
        await client.ask(post(path, json.dumps(body | {"model": "m"}).encode()))
        client.close()
        [seen] = proxy.seen
        assert seen.strategy == "plain"
    if path == "/v1/chat/completions":
        assert server.chats == [("", body | {"model": "m"})]


async def test_a_pictures_share_is_told(server: FakeMlxVlm) -> None:
    """What comes before the first token, which for a picture is more than the prompt's own time."""
    share = MediaShare()
    path, body = next(entry for entry in with_media().values() if entry[0] == "/v1/chat/completions")
    async with proxied(deployment(server, kind="mlx-vlm")) as proxy:
        proxy.router.on_observation(share)
        client = await RawClient.connect(proxy.port)
        await client.ask(post(path, json.dumps(body | {"model": "m", "stream": True}).encode()))
        client.close()
    [row] = share.json()
    assert (row["target"], row["requests"]) == ("m", 1)
    assert 0 < row["prefill_share"] <= 1
