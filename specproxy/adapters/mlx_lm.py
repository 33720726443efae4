"""mlx_lm.server: the request field ``draft_model`` chooses a draft model, and loads both models anew for it.

The server keeps one pair of models: a request with another draft replaces it. ``num_draft_tokens`` does not.
Replies say nothing about drafts.
"""

from __future__ import annotations

from typing import ClassVar

from specproxy.adapters.base import Exchange, Sink, UpstreamRequest
from specproxy.adapters.openai_compat import OpenAiBackend
from specproxy.records import Control, Dialect, Lane, Strategy

__all__ = ["MlxBackend"]


class MlxBackend(OpenAiBackend):
    """Plain, and a lane for each draft model, one of them in memory at a time.

    Plain is what the server was started with, so it is to be started without a draft model. Which pair is in
    memory is known from the requests that went through here; others may change it.
    """

    kind: ClassVar[str] = "mlx"
    dialects: ClassVar[frozenset[Dialect]] = frozenset({Dialect.OPENAI_CHAT, Dialect.OPENAI_COMPLETIONS})

    def make_lanes(self) -> list[Lane]:
        length, load_s = self.spec.draft_tokens, self.spec.load_s
        lanes = [self.lane(self.spec.strategy, Control.RELOAD, load_s=load_s)]
        for draft in self.spec.drafts:
            more = (("num_draft_tokens", length),) if length is not None else ()
            lanes.append(
                self.lane(
                    Strategy(("draft",), length),
                    Control.RELOAD,
                    (("draft_model", draft), *more),
                    suffix=f"+{draft.rpartition('/')[2]}",
                    load_s=load_s,
                )
            )
        return lanes

    async def start(self) -> None:
        """It has been started without a draft."""
        first, *others = self.lanes()
        self.mark(first.lane.id, first.health, first.note)
        for status in others:
            self.mark(status.lane.id, status.health, status.note, resident=False)

    def open(self, request: UpstreamRequest, lane: Lane, sink: Sink) -> Exchange:
        exchange = super().open(request, lane, sink)
        for status in self.lanes():
            self.mark(status.lane.id, status.health, status.note, resident=status.lane.id == lane.id)
        return exchange
