"""Changed settings while running: what changes at once, what waits, and what changes nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from specproxy.config import Settings, key_paths, load
from specproxy.errors import ConfigError, RequestError
from specproxy.proxy import reload
from specproxy.proxy.reload import LIVE, Reloader, compare
from specproxy.proxy.service import Service
from tests.support.relay import settled


def test_what_changes_at_once_and_what_waits() -> None:
    """Told apart; what waits keeps its value."""
    wanted = Settings.model_validate({"port": 1, "grace": 3, "learner": {"allowance_share": 0.5}})
    changes = compare(Settings(), wanted)
    assert (set(changes.applied), changes.waiting) == ({"grace", "learner.allowance_share"}, ("port",))
    assert (changes.settings.grace, changes.settings.port) == (3, Settings().port)
    assert changes.settings.learner.allowance_share == 0.5
    assert changes.settings.learner.allowance_requests == 1.0


def test_live_settings_exist() -> None:
    """Every name in the list is one of a setting."""
    assert set(key_paths()) >= LIVE


def test_a_token_cannot_vanish_where_others_can_call() -> None:
    """The address waits for a restart, so the token that it needs must stay."""
    now = Settings.model_validate({"host": "0.0.0.0", "token": "s"})
    with pytest.raises(ConfigError, match="needs a token"):
        compare(now, Settings())


async def test_a_service_takes_changes_in(tmp_path: Path) -> None:
    """Token, limits and what may be spent, in force from the next request on."""
    service = Service(
        Settings(state_dir=tmp_path, port=0, upstream=("http://127.0.0.1:9",), probe_fields=False)
    )
    await service.start()
    try:
        wanted = service.settings.model_copy(
            update={"token": load(None, {"token": "new"}, {}).token, "threads": 3}
        )
        changes = service.take(wanted)
        assert (changes.applied, changes.waiting) == (("token",), ("threads",))
        with pytest.raises(RequestError):
            service._guard.check({"Host": "localhost"})
        assert service.status()["restart_needed"] == ["threads"]
        limits = service.settings.limits.model_copy(update={"requests": 7, "connections": 5})
        learner = service.settings.learner.model_copy(update={"allowance_share": 0.25})
        service.take(service.settings.model_copy(update={"limits": limits, "learner": learner}))
        assert service._server is not None
        assert service._server.limits.connections == 5
        assert service._server.handlers._forwarder.limits.requests == 7
        assert service.policy.settings.allowance_share == 0.25
        assert service.status()["restart_needed"] == []
    finally:
        await service.aclose()


@asynccontextmanager
async def reloading(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Reloader, list[Settings]]]:
    """A reloader on `path` that looks often, and the settings that it has handed on."""
    monkeypatch.setattr(reload, "LOOK_S", 0.01)
    taken: list[Settings] = []

    def take(wanted: Settings) -> reload.Changes:
        taken.append(wanted)
        return compare(Settings(), wanted)

    reloader = Reloader(path, lambda: load(path, environ={}), take)
    task = asyncio.create_task(reloader.run())
    try:
        yield reloader, taken
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def test_a_changed_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it has come to rest; also where an editor puts another file in its place."""
    path = tmp_path / "c.yaml"
    path.write_text("grace: 1\n")
    async with reloading(path, monkeypatch) as (_, taken):
        path.write_text("grace: 2\n")
        await settled(lambda: [one.grace for one in taken] == [2])
        other = tmp_path / "new"
        other.write_text("grace: 4\n")
        os.replace(other, path)
        await settled(lambda: [one.grace for one in taken] == [2, 4])


async def test_sighup_reads_a_file_that_has_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an environment or a clock that is too coarse would hide."""
    path = tmp_path / "c.yaml"
    path.write_text("grace: 1\n")
    async with reloading(path, monkeypatch) as (reloader, taken):
        reloader.now()
        await settled(lambda: len(taken) == 1)


@pytest.mark.parametrize("text", ["prot: 1\n", "port: [\n", None])
async def test_what_cannot_be_used_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    """A slip, broken YAML, or a file that is gone: said once in the log; mended, it is taken."""
    path = tmp_path / "c.yaml"
    path.write_text("grace: 1\n")
    structlog.reset_defaults()
    with capture_logs() as logs:
        async with reloading(path, monkeypatch) as (_, taken):
            if text is None:
                path.unlink()
            else:
                path.write_text(text)
            await settled(lambda: bool(logs))
            assert (len(logs), logs[0]["log_level"], taken) == (1, "error", [])
            assert str(path) in logs[0]["error"]
            path.write_text("grace: 5\n")
            await settled(lambda: [one.grace for one in taken] == [5])
