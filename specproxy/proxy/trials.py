"""Trials of the request field that may switch drafting: one for each server build and model, remembered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import structlog

from specproxy.adapters.endpoint import Endpoint
from specproxy.adapters.http import HttpTransport
from specproxy.adapters.request_field import Finding, try_field
from specproxy.adapters.tasks import Tasks

__all__ = ["Trials", "read_findings"]

log = structlog.get_logger("specproxy")


class Trials:
    """What is known about the field, by the fingerprint of a server's lane.

    Args:
        file: where results are kept; None keeps them in memory only.
        attempt: tries the field at a server if that is idle.
    """

    def __init__(
        self,
        file: Path | None = None,
        attempt: Callable[[HttpTransport], Awaitable[Finding]] = try_field,
    ) -> None:
        self._file, self._attempt = file, attempt
        self._known: dict[str, Finding] = _read(file)
        self._running: set[str] = set()
        self._tasks = Tasks()

    def verdict(self, fingerprint: str) -> Finding | None:
        """What came of the trial; None as long as there was none."""
        return self._known.get(fingerprint)

    def consider(self, url: str, fingerprint: str, done: Callable[[], None]) -> None:
        """Try the field at a server unless that is known or under way; returns at once.

        `done` is called when something has come of it. A server that was busy may be considered again.
        """
        if fingerprint not in self._known and fingerprint not in self._running:
            self._running.add(fingerprint)
            self._tasks.spawn(self._try(url, fingerprint, done), name=f"try a request field at {url}")

    async def aclose(self) -> None:
        """Give up what is under way; idempotent."""
        await self._tasks.aclose()

    async def _try(self, url: str, fingerprint: str, done: Callable[[], None]) -> None:
        transport = HttpTransport(Endpoint.parse(url))
        try:
            result = await self._attempt(transport)
        finally:
            self._running.discard(fingerprint)
            await transport.aclose()
        if result is not Finding.BUSY:
            self._known[fingerprint] = result
            log.info("request field tried", url=url, finding=str(result))
            await asyncio.to_thread(self._save)
            done()

    def _save(self) -> None:
        if self._file is None:
            return
        fresh = self._file.with_suffix(".new")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fresh.touch(mode=0o600)
            fresh.write_text(json.dumps(self._known))
            fresh.replace(self._file)
        except OSError as error:
            log.warning("a trial's result could not be kept", error=str(error))


def _read(file: Path | None) -> dict[str, Finding]:
    """Results of earlier runs; a file that is missing or damaged holds none."""
    try:
        return read_findings(json.loads(file.read_text())) if file is not None else {}
    except (OSError, ValueError, RecursionError):
        return {}


def read_findings(data: Any) -> dict[str, Finding]:
    """Results by fingerprint out of what the file holds; what is none is left out."""
    known = {str(finding): finding for finding in Finding}
    found = data.items() if isinstance(data, dict) else ()
    return {key: known[value] for key, value in found if isinstance(value, str) and value in known}
