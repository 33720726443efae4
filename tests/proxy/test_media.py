"""Requests with real pictures and sounds: unbroken, on a lane that is safe, and what they gain at most."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from specproxy.adapters.fake import FakeBackend, respond
from specproxy.proxy.forward import Limits
from specproxy.proxy.media import MediaShare
from specproxy.records import Outcome, TempBucket, Workload
from specproxy.strategies.learner import Learner
from tests.proxy.samples import observation
from tests.support.client import RawClient, post
from tests.support.media import PNG, png, requests
from tests.support.proxy import lane, running_proxy

REPLY = {
    "choices": [{"index": 0, "message": {"content": "a ramp"}, "finish_reason": "stop"}],
    "timings": {"prompt_n": 300, "prompt_ms": 900.0, "predicted_n": 3, "predicted_ms": 100.0},
}


@pytest.mark.parametrize("name", requests())
@pytest.mark.parametrize("side", [64, 2100], ids=["small", "4 MB"])
async def test_a_picture_goes_to_plain_byte_for_byte(name: str, side: int) -> None:
    """With a learner that has other lanes to choose from; large bodies are no exception."""
    noise = random.Random(side).randbytes(side) if side > 64 else b""
    path, asked = requests(png(side, noise))[name]
    body = json.dumps(asked).encode()
    fake = FakeBackend(
        "f", [lane("f", "ngram"), lane("f"), lane("f", "mtp")], respond(json.dumps(REPLY).encode())
    )
    async with running_proxy(fake, policy=Learner()) as proxy:  # type: ignore[arg-type]  # any Policy will do
        for _ in range(3):
            client = await RawClient.connect(proxy.port)
            assert (await client.ask(post(path, body))).status == 200
            client.close()
    assert [exchange.lane.strategy.name for exchange in fake.exchanges] == ["plain"] * 3
    assert all(exchange.request.body == body for exchange in fake.exchanges)
    media = "audio" if "sound" in name else "images"
    assert all(media in seen.workload.flags and seen.rule == "hazard" for seen in proxy.seen)


async def test_a_picture_too_large_to_look_at_is_passed_on_whole() -> None:
    """Unread, in pieces, to the plain lane."""
    path, asked = requests(png(2100, random.Random(1).randbytes(2100)))["chat"]
    body = json.dumps(asked).encode()

    async def script(exchange: object) -> None:
        got.append(await exchange.body())  # type: ignore[attr-defined]  # a FakeExchange
        await respond(b"{}")(exchange)  # type: ignore[arg-type]  # as above

    got: list[bytes] = []
    fake = FakeBackend("f", [lane("f", "ngram"), lane("f")], script)
    limits = dataclasses.replace(Limits(), inspect=1024 * 1024)
    async with running_proxy(fake, limits=limits) as proxy, await RawClient.connect(proxy.port) as client:
        assert (await client.ask(post(path, body))).status == 200
    assert [seen.rule for seen in proxy.seen] == ["unread"]
    assert (fake.exchanges[0].lane.id, got) == ("f/plain", [body])


async def test_a_lane_that_reads_no_media_is_never_asked() -> None:
    """Not even where it is the only plain one of the model."""
    path, asked = requests()["chat"]
    able = FakeBackend("a", [lane("a", "draft")], respond(json.dumps(REPLY).encode()))
    blind = FakeBackend("b", [lane("b", media=False)])
    async with running_proxy(able, blind) as proxy, await RawClient.connect(proxy.port) as client:
        proxy.policy.wanted = "draft"
        assert (await client.ask(post(path, json.dumps(asked).encode()))).status == 200
    assert (len(able.exchanges), blind.exchanges) == (1, [])


def test_the_picture_is_one() -> None:
    """A test on rubbish would show nothing."""
    assert PNG.startswith(b"\x89PNG\r\n\x1a\n")
    assert PNG.endswith(b"IEND\xaeB`\x82")


# --- what the prompt's share caps ------------------------------------------------------------------

SEEING = Workload("prose", TempBucket.WARM, frozenset({"images"}))
HEARING = Workload("prose", TempBucket.WARM, frozenset({"audio"}))


def test_the_share_of_the_prompt_caps_the_gain() -> None:
    """If three quarters are prompt, decoding in no time at all makes it a third faster."""
    share = MediaShare()
    for total, prompt in ((4.0, 3.5), (4.0, 2.5)):
        share(observation(workload=SEEING, total_s=total, prefill_s=prompt))
    share(observation(workload=HEARING, total_s=2.0, prefill_s=None, ttft_s=0.5))
    assert share.json() == [
        {"target": "m.gguf", "media": "audio", "requests": 1, "prefill_share": 0.25, "most_gain": 4.0},
        {
            "target": "m.gguf",
            "media": "images",
            "requests": 2,
            "prefill_share": 0.75,
            "most_gain": pytest.approx(4 / 3),
        },
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"workload": Workload("prose", TempBucket.WARM)},
        {"outcome": Outcome.ERROR},
        {"prefill_s": None, "ttft_s": None},
        {"load_s": 1.0},
        {"total_s": 0.0},
    ],
)
def test_what_tells_nothing_about_it(changes: dict[str, object]) -> None:
    """Requests without media, that failed, were not timed, or loaded a model."""
    share = MediaShare()
    share(observation(**{"workload": SEEING} | changes))
    assert share.json() == []
