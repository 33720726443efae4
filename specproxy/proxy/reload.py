"""Taking changed settings in while running: on SIGHUP, and when the configuration file changes.

What can change at once does; what cannot is named, and waits for a restart. Settings that cannot be used change
nothing. Requests in flight are never touched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import structlog
from pydantic import BaseModel

from specproxy.config import Settings, key_paths
from specproxy.errors import ConfigError

__all__ = ["LIVE", "Changes", "Reloader", "compare"]

LIVE = frozenset(
    {
        "token",
        "origins",
        "grace",
        "profile",
        "learner.allowance_requests",
        "learner.allowance_share",
        "limits.body",
        "limits.inspect",
        "limits.requests",
        "limits.queue",
        "limits.connections",
        "limits.head",
        "limits.headers",
        "capture.requests",
        "capture.size",
        "log.level",
    }
)
"""Settings that change without a restart."""

LOOK_S = 1.0

log = structlog.get_logger("specproxy")


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs from the settings in force: `settings` are those with all that can change at once."""

    settings: Settings
    applied: tuple[str, ...]
    waiting: tuple[str, ...]


def compare(now: Settings, wanted: Settings) -> Changes:
    """What of `wanted` can be had at once, and what waits for a restart.

    Raises:
        ConfigError: the part that could change at once does not go with what stays, such as no token where
            other machines can call.
    """
    differing = [path for path in key_paths() if _get(now, path) != _get(wanted, path)]
    applied = tuple(path for path in differing if path in LIVE)
    mixed = reduce(lambda settings, path: _put(settings, path, _get(wanted, path)), applied, now)
    if problems := mixed.problems():
        raise ConfigError("\n".join(problems), hint="restart specproxy for these changes")
    return Changes(mixed, applied, tuple(path for path in differing if path not in LIVE))


def _get(model: BaseModel, path: str) -> Any:
    head, _, rest = path.partition(".")
    value = getattr(model, head)
    return _get(value, rest) if rest else value


def _put(settings: Settings, path: str, value: Any) -> Settings:
    head, _, rest = path.partition(".")
    if rest:
        value = getattr(settings, head).model_copy(update={rest: value})
    changed: Mapping[str, Any] = {head: value}
    return settings.model_copy(update=changed)


class Reloader:
    """Reads settings again with `read` and hands them to `take`, which returns what came of it.

    `path` is the file that is watched; `read` may raise ConfigError, and so may `take`.
    """

    def __init__(self, path: Path, read: Callable[[], Settings], take: Callable[[Settings], Changes]) -> None:
        self._path = path
        self._read = read
        self._take = take
        self._known = self._signature()
        self._was_there = self._known is not None
        self._wake = asyncio.Event()

    def now(self) -> None:
        """Read again at once, as on SIGHUP."""
        self._wake.set()

    async def run(self) -> None:
        """Watch until cancelled. A changed file is read once it has stayed the same for `LOOK_S` seconds."""
        before = self._known
        while True:
            asked = await self._asked()
            seen = await asyncio.to_thread(self._signature)
            if asked or (seen != self._known and seen == before):
                await self._reload(gone=seen is None and self._was_there)
                self._known, self._was_there = seen, self._was_there or seen is not None
            before = seen

    async def _asked(self) -> bool:
        try:
            async with asyncio.timeout(LOOK_S):
                await self._wake.wait()
        except TimeoutError:
            return False
        self._wake.clear()
        return True

    async def _reload(self, *, gone: bool) -> None:
        try:
            if gone:
                raise ConfigError(f"{self._path} is gone")
            changes = self._take(await asyncio.to_thread(self._read))
        except ConfigError as error:
            log.error("configuration not taken, the old one stays", error=str(error))
            return
        log.info("configuration read again", changed=list(changes.applied))
        if changes.waiting:
            log.warning("some settings need a restart", settings=list(changes.waiting))

    def _signature(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
