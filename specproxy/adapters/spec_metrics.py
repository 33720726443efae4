"""How many drafts a server has made and how many were accepted, by its own Prometheus metrics."""

from __future__ import annotations

from dataclasses import dataclass

from specproxy.adapters.base import UpstreamRequest
from specproxy.adapters.http import HttpTransport, fetch
from specproxy.errors import BackendError

__all__ = ["Counters", "read_metrics"]

DRAFTED = ("vllm:spec_decode_num_draft_tokens_total", "llamacpp:spec_decode_num_draft_tokens_total")
ACCEPTED = ("vllm:spec_decode_num_accepted_tokens_total", "llamacpp:spec_decode_num_accepted_tokens_total")
RATE = "sglang:spec_accept_rate"
ANSWER_S, LIMIT = 5.0, 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals since the server started, and its own rate (0 to 1) where it has only that."""

    drafted: float = 0.0
    accepted: float = 0.0
    rate: float | None = None

    def since(self, before: Counters) -> str:
        """The share accepted since an earlier look, as a clause; empty where nothing was drafted, or the server
        was restarted."""
        drafted, accepted = self.drafted - before.drafted, self.accepted - before.accepted
        if drafted <= 0 or not 0 <= accepted <= drafted:
            return ""
        return f"{accepted / drafted:.0%} of {drafted:.0f} drafted tokens accepted lately, by its own counters"

    def gauge(self) -> str:
        """The server's own rate, as a clause."""
        return "" if not self.rate else f"{self.rate:.0%} of drafted tokens accepted, by its own gauge"


async def read_metrics(transport: HttpTransport, model: str) -> Counters | None:
    """Ask a server for its metrics. Samples that name another model do not count; None where there are none."""
    request = UpstreamRequest("GET", "/metrics", ((b"Accept", b"text/plain"),), replayable=True)
    try:
        reply = await fetch(transport.open, request, timeout_s=ANSWER_S, limit=LIMIT)
    except BackendError:
        return None
    if reply.head.status != 200:
        return None
    return _read(reply.body.decode("utf-8", "replace"), model)


def _read(text: str, model: str) -> Counters | None:
    from prometheus_client.parser import text_string_to_metric_families  # not needed to start

    drafted = accepted = 0.0
    rates: list[float] = []
    try:
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    except ValueError:
        return None  # it is something else
    for sample in samples:
        if sample.labels.get("model_name", model) != model:
            continue
        drafted += sample.value if sample.name in DRAFTED else 0.0
        accepted += sample.value if sample.name in ACCEPTED else 0.0
        if sample.name == RATE:
            rates.append(sample.value)
    return Counters(drafted, accepted, sum(rates) / len(rates) if rates else None)
