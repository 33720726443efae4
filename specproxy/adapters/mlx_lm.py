"""mlx_lm.server: the request field ``draft_model`` chooses a draft model, and loads both models anew for it.

The server keeps one pair of models: a request with another draft, model or adapter replaces it, and where one
cannot be loaded none is left. ``num_draft_tokens`` changes nothing in memory. Requests without a draft are
decoded together, those with one after each other. Replies say nothing about drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import orjson

from specproxy.adapters.ask import get_json
from specproxy.adapters.base import Exchange, ProbeResult, ResponseHead, Sink, UpstreamRequest
from specproxy.adapters.one_draft import OneDraft
from specproxy.adapters.openai_compat import ANSWER_S, Verdict
from specproxy.errors import BackendError
from specproxy.records import Control, Dialect, Health, Lane, Strategy

__all__ = ["MlxBackend"]


class MlxBackend(OneDraft):
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
                    suffix=self.suffix(draft),
                    load_s=load_s,
                )
            )
        return lanes

    def open(self, request: UpstreamRequest, lane: Lane, sink: Sink) -> Exchange:
        asked = _asked(request)
        if asked is None:
            return self.transport.open(request, sink)
        loaded = self._loaded_by(asked)
        if loaded == lane:
            self.brought_in(lane)
        exchange = self.transport.open(request, _Loading(sink, lambda: self.hold(None)))
        self.hold(loaded)
        return exchange

    def _loaded_by(self, asked: Mapping[str, Any]) -> Lane | None:
        """The lane whose models are in memory after a request, by what it names; None if they are no lane's."""
        model, draft = asked.get("model"), asked.get("draft_model")
        for lane in (status.lane for status in self.lanes()):
            same = dict(lane.overrides).get("draft_model") == draft and asked.get("adapters") is None
            if same and (model is None or model in lane.models):
                return lane
        return None

    async def _look(self) -> tuple[ProbeResult, Verdict]:
        """Its list of models is one of the Hugging Face cache, and breaks off where there is none.

        So ``/health`` tells how it is, which older ones lack.
        """
        found, verdict = await super()._look()
        if found.detail.get("status") in (401, 403):  # whoever stands in front of it
            return found, verdict
        with suppress(BackendError):
            status, body = await get_json(self.transport.open, "/health", timeout_s=ANSWER_S)
            if status == 200 and isinstance(body, dict) and body.get("status") == "ok":
                return replace(found, reachable=True), Verdict(Health.READY)
            if status == 503 and verdict.health is Health.READY:
                verdict = Verdict(Health.UNHEALTHY, "it says that it cannot generate")
        return found, verdict


def _asked(request: UpstreamRequest) -> dict[str, Any] | None:
    """The fields of a request that loads models; None where it is none."""
    if request.method != "POST" or not request.target.partition("?")[0].endswith("/completions"):
        return None
    try:
        fields = orjson.loads(request.body or b"")
    except orjson.JSONDecodeError:
        return None
    return fields if isinstance(fields, dict) else None


class _Loading:
    """A `Sink` that sees whether the server could load what a request needs."""

    def __init__(self, sink: Sink, failed: Callable[[], None]) -> None:
        self.data, self.end, self.fail = sink.data, sink.end, sink.fail
        self._sink, self._failed = sink, failed

    def head(self, head: ResponseHead) -> None:
        if head.status == 404 or head.status >= 500:
            self._failed()
        self._sink.head(head)
