"""vLLM: no control by request; acceptance from its Prometheus counters.

Started with ``--per-request-spec-decode-metrics summary`` or ``--enable-per-request-metrics``, it puts counts
or times into the replies too, which are read wherever they are.
"""

from __future__ import annotations

from typing import ClassVar

from specproxy.adapters.openai_compat import OPENAI, Deployed, OpenAiBackend
from specproxy.adapters.spec_metrics import Counters, read_metrics
from specproxy.records import Dialect

__all__ = ["VllmBackend"]


class VllmBackend(OpenAiBackend):
    """One lane, with the share of drafts that were accepted between two looks."""

    kind: ClassVar[str] = "vllm"
    dialects: ClassVar[frozenset[Dialect]] = OPENAI | {Dialect.ANTHROPIC}
    lists_all: ClassVar[bool] = True

    def __init__(self, spec: Deployed) -> None:
        super().__init__(spec)
        self._before: Counters | None = None
        self._note = ""

    async def acceptance(self) -> str:
        now = await read_metrics(self.transport, self.spec.model or self.spec.target)
        if now is not None and self._before is not None:
            self._note = now.since(self._before) or self._note
        self._before = now or self._before
        return self._note
