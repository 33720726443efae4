"""A llama-server that is named in the configuration: as it was started, which its slots have to bear out."""

from __future__ import annotations

from typing import ClassVar

from specproxy.adapters.base import ProbeResult
from specproxy.adapters.llama_server import speculates
from specproxy.adapters.openai_compat import OPENAI
from specproxy.adapters.vllm import VllmBackend
from specproxy.records import Dialect, Health

__all__ = ["LlamaServerBackend"]


class LlamaServerBackend(VllmBackend):
    """One lane, whose slots have to say the same as the configuration.

    Acceptance is in replies, and in its counters if it was started with ``--metrics``.
    """

    kind: ClassVar[str] = "llama-server"
    dialects: ClassVar[frozenset[Dialect]] = OPENAI | {
        Dialect.ANTHROPIC,
        Dialect.LLAMACPP,
        Dialect.LLAMACPP_INFILL,
    }
    lists_all: ClassVar[bool] = False  # it answers for one model, whatever name a request gives

    async def check(self) -> ProbeResult:
        found = await super().check()
        [status] = self.lanes()
        if status.health is not Health.READY:
            return found
        drafts, claimed = await speculates(self.transport), not self.spec.strategy.is_plain
        if drafts is not None and drafts is not claimed:
            note = "it drafts, and is configured as plain" if drafts else "it does not draft: is one missing?"
            self.mark(status.lane.id, Health.UNHEALTHY, note)
        return found
