"""Trials of the request field: one for each server and model, remembered, and what lanes come of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from specproxy.adapters.http import HttpTransport
from specproxy.adapters.request_field import Finding
from specproxy.config import Settings
from specproxy.proxy.service import Service
from specproxy.proxy.trials import Trials
from tests.support.client import RawClient
from tests.support.fakes import Fake, fake_llama_server

URL = "http://127.0.0.1:1"


class Attempts:
    """Gives findings one after another, when told to go on."""

    def __init__(self, *findings: Finding) -> None:
        self.left = list(findings)
        self.begun = 0
        self.go = asyncio.Event()

    async def __call__(self, transport: HttpTransport) -> Finding:
        self.begun += 1
        await self.go.wait()
        return self.left.pop(0)


async def test_a_finding_is_kept_for_the_next_run(tmp_path: Path) -> None:
    """By fingerprint; while a trial runs there is no second one."""
    file, done = tmp_path / "state" / "fields.json", asyncio.Event()
    attempts = Attempts(Finding.HONOURED)
    trials = Trials(file, attempts)
    trials.consider(URL, "fp", done.set)
    trials.consider(URL, "fp", done.set)
    assert trials.verdict("fp") is None
    attempts.go.set()
    await done.wait()
    assert attempts.begun == 1
    assert file.stat().st_mode & 0o077 == 0
    again = Trials(file, attempts)
    assert (again.verdict("fp"), again.verdict("other")) == (Finding.HONOURED, None)
    again.consider(URL, "fp", done.set)
    await trials.aclose()
    await again.aclose()
    assert attempts.begun == 1


async def test_a_busy_server_is_tried_later() -> None:
    """Nothing has come of it, so nobody is told."""
    done = asyncio.Event()
    attempts = Attempts(Finding.BUSY, Finding.UNCLEAR)
    attempts.go.set()
    trials = Trials(None, attempts)
    trials.consider(URL, "fp", done.set)
    while len(attempts.left) == 2:  # noqa: ASYNC110 - nobody is told of a busy server
        await asyncio.sleep(0)
    while trials._running:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0)
    assert not done.is_set()
    trials.consider(URL, "fp", done.set)
    await done.wait()
    assert trials.verdict("fp") is Finding.UNCLEAR
    await trials.aclose()


@pytest.mark.parametrize("content", ["{", "[]", '{"fp": 7}', '{"fp": "odd"}', '{"fp": ["honoured"]}'])
def test_a_damaged_file_is_no_memory(tmp_path: Path, content: str) -> None:
    (tmp_path / "fields.json").write_text(content)
    assert Trials(tmp_path / "fields.json").verdict("fp") is None


# --- in a whole proxy ------------------------------------------------------------------------------


async def lanes_of(service: Service, count: int) -> dict[str, str]:
    while len(service.lanes()) < count:  # noqa: ASYNC110 - the other side is a real socket
        await asyncio.sleep(0.01)
    return {status.lane.id: status.lane.strategy.name for status in service.lanes()}


async def complete(service: Service, pin: str) -> None:
    body = json.dumps({"prompt": "x"}).encode()
    lines = ("Host: 127.0.0.1", f"X-Specproxy-Strategy: {pin}", f"Content-Length: {len(body)}", "", "")
    head = "\r\n".join(("POST /completion HTTP/1.1", *lines))
    async with await RawClient.connect(int(service.url.rpartition(":")[2])) as client:
        assert (await client.ask(head.encode() + body)).status == 200


def settings(tmp_path: Path, server: Fake, **changes: object) -> Settings:
    return Settings.model_validate(
        {"port": 0, "state_dir": tmp_path, "grace": 0.0, "upstream": server.url} | changes
    )


async def test_a_field_that_is_proven_gives_two_lanes_on_one_server(tmp_path: Path) -> None:
    """Plain by the field, and what the server does by itself; rung 1 says so."""
    async with fake_llama_server(speculative=True, honours=True) as server:
        service = Service(settings(tmp_path, server))
        await service.start()
        assert await lanes_of(service, 2) == {"upstream": "server", "upstream-plain": "plain"}
        rung = service.status()["rung"]
        assert (rung["number"], "speculative.n_max in a request" in rung["why"]) == (1, True)
        await complete(service, "plain")
        await complete(service, "server")
        assert server.bodies[-2:] == [{"speculative.n_max": 0, "prompt": "x"}, {"prompt": "x"}]
        await service.aclose()


async def test_the_trial_can_be_turned_off(tmp_path: Path) -> None:
    """The user's server decodes nothing for us."""
    async with fake_llama_server(speculative=True, honours=True) as server:
        service = Service(settings(tmp_path, server, probe_fields=False))
        await service.start()
        assert "turned off (probe_fields)" in service.status()["rung"]["why"]
        await service.aclose()
        assert "POST /completion" not in server.asked
