"""Work that nobody waits for, done some milliseconds later and together: one timer, however many requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

__all__ = ["Later"]

log = logging.getLogger(__name__)

PAUSE_S = 0.005


class Later:
    """Calls what it is given about `PAUSE_S` later. One that fails is logged, and holds up no other."""

    def __init__(self) -> None:
        self._work: list[Callable[[], None]] = []

    def add(self, work: Callable[[], None]) -> None:
        """Call `work` later, in the order of adding."""
        if not self._work:
            asyncio.get_running_loop().call_later(PAUSE_S, self._run)
        self._work.append(work)

    def _run(self) -> None:
        work, self._work = self._work, []
        for each in work:
            try:
                each()
            except Exception:
                log.exception("what was left for later failed")
