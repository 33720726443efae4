"""The stream of changes: what is sent, when, to how many, and to those that read slowly."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from specproxy.errors import RequestError
from specproxy.proxy.admin import Admin
from specproxy.proxy.guard import Guard
from specproxy.proxy.live import QUIET_S, Live
from tests.proxy.test_admin import FakeView
from tests.support.client import RawClient
from tests.support.proxy import running_proxy


class Scene:
    """What there is to see, a clock that only sleeping moves, and how often it was looked at."""

    def __init__(self, **sections: Any) -> None:
        self.sections = sections
        self.now = 100.0
        self.looks = 0
        self.naps: list[float] = []

    def live(self, **options: Any) -> Live:
        return Live(self.look, clock=lambda: self.now, sleep=self.sleep, **options)

    def look(self) -> dict[str, Any]:
        self.looks += 1
        return dict(self.sections) | {"uptime_s": self.now}

    async def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds


async def told(stream: Any) -> dict[str, Any]:
    """The next event's data."""
    piece = await anext(stream)
    while not piece.startswith(b"data: "):
        piece = await anext(stream)
    assert piece.endswith(b"}\n\n")
    assert piece.count(b"\n") == 2
    found: dict[str, Any] = json.loads(piece[6:])
    return found


async def test_all_at_first_then_what_has_changed() -> None:
    """Sections that stay are not sent again; a tick is waited for in between."""
    scene = Scene(lanes=[1], kinds=[2])
    stream = scene.live().open()
    assert await told(stream) == {"lanes": [1], "kinds": [2], "uptime_s": 100.0}
    scene.sections["kinds"] = [3]
    assert await told(stream) == {"kinds": [3], "uptime_s": 101.0}
    assert scene.naps == [1.0]


async def test_a_sign_of_life_where_nothing_changes() -> None:
    """The page must be able to tell a quiet proxy from a dead one."""
    scene = Scene(lanes=[1])
    stream = scene.live().open()
    await told(stream)
    assert await told(stream) == {"uptime_s": 100.0 + QUIET_S}
    assert len(scene.naps) == QUIET_S


async def test_one_picture_serves_all_pages_of_a_tick() -> None:
    """However many watch; nobody watching costs nothing."""
    scene = Scene(lanes=[1])
    live = scene.live()
    assert scene.looks == 0
    streams = [live.open() for _ in range(5)]
    assert [await told(stream) for stream in streams] == [{"lanes": [1], "uptime_s": 100.0}] * 5
    assert (scene.looks, live.watching) == (1, 5)


async def test_who_reads_slowly_is_sent_the_latest_once() -> None:
    """Ticks that were missed do not pile up."""
    scene = Scene(lanes=[0])
    live = scene.live()
    slow, fast = live.open(), live.open()
    await told(slow)
    await told(fast)
    for n in range(1, 50):
        scene.sections["lanes"] = [n]
        assert (await told(fast))["lanes"] == [n]
    assert (await told(slow))["lanes"] == [49]


async def test_too_many_are_refused_until_one_leaves() -> None:
    """503, and a place is free again when a stream is closed."""
    live = Scene().live(most=2)
    streams = [live.open() for _ in range(2)]
    for stream in streams:
        await anext(stream)
    with pytest.raises(RequestError, match="2 pages are watching already") as caught:
        live.open()
    assert caught.value.status == 503
    await streams[0].aclose()
    await anext(live.open())


# --- over the wire ----------------------------------------------------------------------------------

ASK = b"GET /specproxy/api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


async def test_a_client_that_leaves_frees_its_place() -> None:
    """Watched until it closes; requests in flight are not counted up by it."""
    admin = Admin(FakeView(), Guard())
    async with running_proxy("http://127.0.0.1:9", admin=admin) as proxy:
        async with await RawClient.connect(proxy.port) as client:
            await client.send(ASK)
            assert b"Content-Type: text/event-stream" in await client.until(b"}\n\n")
            assert (admin._live.watching, proxy.handlers.active) == (1, 0)
        while admin._live.watching:  # noqa: ASYNC110 (the other side is a real socket, not an event of ours)
            await asyncio.sleep(0.01)
        assert proxy.handlers.active == 0


async def test_an_open_page_does_not_hold_up_shutdown() -> None:
    """It is cut, since it would never end."""
    admin = Admin(FakeView(), Guard())
    async with running_proxy("http://127.0.0.1:9", admin=admin) as proxy:
        client = await RawClient.connect(proxy.port)
        await client.send(ASK)
        await client.until(b"}\n\n")
        async with asyncio.timeout(5):
            await proxy.server.stop(60.0)
        assert await client.rest() == b"\r\n"
        client.close()
