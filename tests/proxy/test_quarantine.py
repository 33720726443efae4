"""Lanes out of service: for whom, how long, and what is said."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from specproxy.adapters.fake import FakeBackend
from specproxy.errors import RequestError
from specproxy.proxy.quarantine import MOST, Quarantine
from specproxy.proxy.service import Service
from specproxy.records import Health
from tests.proxy.samples import NGRAM, PLAIN, lane_status
from tests.proxy.test_router import FACTS, Setup, backend
from tests.proxy.test_service import ask, running, settings, status_of
from tests.support.client import RawClient, post
from tests.support.ports import free_port
from tests.support.proxy import lane, running_proxy

WHY = "prompt 3, token 12: 4.9 nats"


def held() -> Quarantine:
    quarantine = Quarantine(lambda: 500.0)
    quarantine.put(NGRAM, WHY)
    return quarantine


@pytest.mark.parametrize("health", list(Health))
def test_a_lane_that_might_be_tried_is_masked(health: Health) -> None:
    """With reason and time; one that is gone stays gone."""
    seen = held().seen(lane_status(NGRAM, health=health, note="as it was"))
    if health in (Health.READY, Health.STARTING, Health.UNHEALTHY):
        assert (seen.health, seen.note, seen.since) == (Health.QUARANTINED, WHY, 500.0)
    else:
        assert (seen.health, seen.note) == (health, "as it was")
    assert held().seen(lane_status(PLAIN)).health is Health.READY


def test_another_fingerprint_is_another_lane() -> None:
    """Once it is rebuilt it may serve; what was at fault stays at fault if it comes back."""
    quarantine = held()
    assert quarantine.seen(lane_status(dataclasses.replace(NGRAM, fingerprint="new"))).health is Health.READY
    assert quarantine.seen(lane_status(NGRAM)).health is Health.QUARANTINED


def test_lifting() -> None:
    """Once; a lane that serves cannot be lifted."""
    quarantine = held()
    assert (quarantine.lift(PLAIN), quarantine.lift(NGRAM), quarantine.lift(NGRAM)) == (False, True, False)
    assert quarantine.seen(lane_status(NGRAM)).health is Health.READY


def test_it_survives_being_stored_and_is_bounded() -> None:
    """As JSON; the oldest sentences go first."""
    quarantine, other = held(), Quarantine()
    for n in range(MOST):
        quarantine.put(dataclasses.replace(NGRAM, fingerprint=str(n)), WHY)
    other.load(json.loads(json.dumps(quarantine.dump())))
    assert other.dump() == quarantine.dump()
    assert len(other.dump()["sentences"]) == MOST
    assert other.of(NGRAM) is None


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"format": 1},
        {"format": 1, "sentences": [{"lane": "x"}]},
        {"format": 1, "sentences": [{"lane": [], "fingerprint": "f", "at": 1, "reason": "r"}]},
        {"format": 1, "sentences": [{"lane": "x", "fingerprint": "f", "at": "1", "reason": "r"}]},
        {"format": 1, "sentences": [{"lane": "x", "fingerprint": "f", "at": 1, "reason": "\ud800"}]},
        {"format": 1, "sentences": [7]},
    ],
)
def test_damaged_state_is_refused(state: dict[str, Any]) -> None:
    """With an error that can be told from a fault of ours."""
    with pytest.raises(ValueError, match="quarantine"):
        Quarantine().load(state)


def test_what_is_no_sentence_of_ours_is_left_out() -> None:
    """In a table that other proxies write to as well."""
    quarantine, other = held(), Quarantine()
    good = quarantine.entries()
    other.replace(
        {
            **good,
            "x": "{",
            "y": "7",
            "z": '{"lane": {}, "fingerprint": "f", "at": 1, "reason": "r"}',
            "w": '{"lane": "l", "fingerprint": "f", "at": null, "reason": "r"}',
        }
    )
    assert other.entries() == good


# --- routing -----------------------------------------------------------------------------------------


def routed(wanted: str = "ngram") -> Setup:
    quarantine = Quarantine()
    quarantine.put(lane("a", "ngram"), WHY)
    return Setup(backend("a"), wanted=wanted, quarantine=quarantine)


def test_nothing_is_sent_there() -> None:
    """The policy does not even see it, and falling back does not end there."""
    setup = routed("plain")
    setup.router.route(FACTS, pin=None, now=0.0)
    assert [s.lane.strategy.name for s in setup.policy.situations[-1].lanes] == ["plain", "mtp"]


@pytest.mark.parametrize("pin", ["ngram", "a/ngram", " NGRAM "])
def test_who_pins_it_is_told_why_not(pin: str) -> None:
    """By strategy or id; the reason, and what to do."""
    setup = routed()
    for try_it in (
        lambda: setup.router.route(FACTS, pin=pin, now=0.0),
        lambda: setup.router.preview(FACTS, pin=pin),
    ):
        setup.policy.error = None
        with pytest.raises(RequestError, match="a/ngram is in quarantine: prompt 3") as caught:
            try_it()
        assert (caught.value.status, caught.value.code) == (400, "lane_quarantined")
        assert "specproxy quarantine lift a/ngram" in caught.value.hint


def test_verify_may_pin_it() -> None:
    """Or a clean run could never lift it."""
    setup = routed("plain")
    among = setup.router.candidates(FACTS, held_too=True)
    assert setup.router.route(FACTS, pin="ngram", now=0.0, among=among).lane.id == "a/ngram"


# --- the whole proxy -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status", "lanes"),
    [
        ((b"X-Specproxy-Strategy: ngram", b"X-Specproxy-Verify: 1"), 200, ["a/ngram"]),
        ((b"X-Specproxy-Strategy: ngram",), 400, []),
        ((b"X-Specproxy-Verify: 1",), 503, []),  # the policy wants it, and does not see it
    ],
)
async def test_only_verify_reaches_it(headers: tuple[bytes, ...], status: int, lanes: list[str]) -> None:
    """With a pin; without one its header is of no use."""
    fake = FakeBackend("a", [lane("a"), lane("a", "ngram")])
    async with running_proxy(fake) as proxy:
        proxy.policy.wanted = "ngram"
        proxy.router._quarantine.put(lane("a", "ngram"), WHY)
        async with await RawClient.connect(proxy.port) as client:
            reply = await client.ask(post("/v1/chat/completions", b'{"messages": []}', *headers))
    assert (reply.status, [exchange.lane.id for exchange in fake.exchanges]) == (status, lanes)


def lanes_of(service: Service, fingerprint: str = "fp") -> None:
    """Give the service a plain and an n-gram lane."""
    service.router.set_backends(
        [FakeBackend("a", [lane("a", fingerprint=fingerprint), lane("a", "ngram", fingerprint=fingerprint)])]
    )


async def tell(service: Service, name: str, **body: Any) -> tuple[int, dict[str, Any]]:
    reply = await ask(service, "POST", f"/specproxy/api/{name}", body)
    return reply.status, json.loads(reply.content)


async def health(service: Service) -> dict[str, str]:
    return {row["id"]: row["health"] for row in (await status_of(service))["lanes"]}


async def test_it_is_shown_kept_over_a_restart_and_lifted(tmp_path: Path) -> None:
    """In status, events, log and metrics; a new fingerprint is free of it."""
    given = settings(tmp_path, f"http://127.0.0.1:{free_port()}")
    with capture_logs() as logs:
        async with running(given) as service:
            lanes_of(service)
            assert await tell(service, "quarantine", lane="a/ngram", reason=WHY, fingerprint="fp") == (
                200,
                {"lane": "a/ngram", "health": "quarantined", "note": WHY},
            )
            metrics = (await ask(service, "GET", "/specproxy/metrics")).content.decode()
            assert 'specproxy_lane_quarantined{lane="a/ngram",model="m",strategy="ngram"} 1.0' in metrics
            assert 'specproxy_lane_up{lane="a/ngram",model="m",strategy="ngram"} 0.0' in metrics
    assert any(line["event"] == "lane quarantined" and line["note"] == WHY for line in logs)
    async with running(given) as service:
        lanes_of(service)
        assert await health(service) == {"a/plain": "ready", "a/ngram": "quarantined"}
        lanes_of(service, "other")
        assert await health(service) == {"a/plain": "ready", "a/ngram": "ready"}
        lanes_of(service)
        assert (await tell(service, "lift", lane="a/ngram"))[0] == 200
        assert await health(service) == {"a/plain": "ready", "a/ngram": "ready"}
        events = [(e["kind"], e["subject"]) for e in (await status_of(service))["events"]]
        assert ("lane_quarantined", "a/ngram") in events
        assert ("quarantine_lifted", "a/ngram") in events
    async with running(given) as service:
        lanes_of(service)
        assert await health(service) == {"a/plain": "ready", "a/ngram": "ready"}


@pytest.mark.parametrize(
    ("name", "body", "status", "says"),
    [
        ("quarantine", {"lane": "b", "reason": "x"}, 404, "lanes: a/plain, a/ngram"),
        ("quarantine", {"lane": "a/ngram", "reason": "x", "fingerprint": "old"}, 409, "not what it was"),
        ("quarantine", {"lane": "a/plain", "reason": "x"}, 409, "only plain one"),
        ("quarantine", {"lane": "a/ngram"}, 400, "reason is missing"),
        ("quarantine", {"lane": 3}, 400, "no JSON object of texts"),
        ("lift", {"lane": "a/ngram"}, 409, "not in quarantine"),
        ("lift", {"lane": "b"}, 404, "no lane b"),
    ],
)
async def test_what_cannot_be_done_is_refused(
    tmp_path: Path, name: str, body: dict[str, Any], status: int, says: str
) -> None:
    """And changes nothing."""
    async with running(settings(tmp_path, f"http://127.0.0.1:{free_port()}")) as service:
        lanes_of(service)
        found, data = await tell(service, name, **body)
        assert (found, says in data["error"]["message"]) == (status, True)
        assert await health(service) == {"a/plain": "ready", "a/ngram": "ready"}


async def test_a_token_is_needed_where_one_is_set(tmp_path: Path) -> None:
    """As for all of our routes; nor may a foreign page do it."""
    async with running(settings(tmp_path, f"http://127.0.0.1:{free_port()}", token="s3cret")) as service:
        lanes_of(service)
        assert (await tell(service, "quarantine", lane="a/ngram", reason="x"))[0] == 401
    async with running(settings(tmp_path, f"http://127.0.0.1:{free_port()}")) as service:
        lanes_of(service)
        body = {"lane": "a/ngram", "reason": "x"}
        reply = await ask(service, "POST", "/specproxy/api/quarantine", body, Origin="https://evil.example")
        assert reply.status == 403
        assert await health(service) == {"a/plain": "ready", "a/ngram": "ready"}
