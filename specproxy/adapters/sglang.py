"""SGLang: no control by request; acceptance from gauges, and from replies if the user wants them to have it."""

from __future__ import annotations

from typing import ClassVar

from specproxy.adapters.openai_compat import OpenAiBackend
from specproxy.adapters.spec_metrics import read_metrics
from specproxy.records import Control, Lane

__all__ = ["SglangBackend"]


class SglangBackend(OpenAiBackend):
    """One lane. Its metrics are there if it was started with ``--enable-metrics``.

    With `report_drafts` requests ask for ``sglext.spec_tokens_details``, which clients then see too.
    """

    kind: ClassVar[str] = "sglang"
    lists_all: ClassVar[bool] = True

    def make_lanes(self) -> list[Lane]:
        fields = (("return_spec_tokens_details", True),) if self.spec.report_drafts else ()
        return [self.lane(self.spec.strategy, Control.INSTANCE, fields)]

    async def acceptance(self) -> str:
        now = await read_metrics(self.transport, self.spec.model or self.spec.target)
        return now.gauge() if now is not None else ""
