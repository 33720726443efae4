"""Prometheus metrics, computed from the board when they are scraped.

Nothing is counted twice: a metric is a view of the same cells that status shows. Labels take their values from
the configuration and from fixed lists (model = target, workload = kind), never from a request, so the number
of series is bounded. Behind the prefix, names are those of vLLM and llama.cpp where these have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from specproxy.proxy.board import Board, BoardRow, saved_s
from specproxy.proxy.cell import E2E_BOUNDS, TPT_BOUNDS, TTFT_BOUNDS, Cell, merged
from specproxy.records import Health, LaneStatus

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["CONTENT_TYPE", "render"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model", "workload", "strategy", "lane")

Labels = tuple[str, ...]

COUNTERS: tuple[tuple[str, str, Callable[[Cell], float]], ...] = (
    ("specproxy_prompt_tokens", "Prompt tokens of complete requests.", lambda c: c.prompt_tokens),
    ("specproxy_prompt_tokens_cached", "Prompt tokens taken from a prefix cache.", lambda c: c.cached_tokens),
    ("specproxy_generation_tokens", "Tokens generated.", lambda c: c.output_tokens),
    ("specproxy_spec_decode_num_draft_tokens", "Tokens drafted, as reported by the lane.", lambda c: c.drafted),
    ("specproxy_spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", lambda c: c.accepted),
    ("specproxy_prompt_seconds", "Time spent on prompts.", lambda c: c.prefill_s),
    ("specproxy_tokens_predicted_seconds", "Time spent on decoding.", lambda c: c.decode_s),
)


def render(board: Board, lanes: Sequence[LaneStatus]) -> bytes:
    """The exposition text (Prometheus text format 0.0.4)."""
    from prometheus_client import CollectorRegistry, generate_latest  # not needed to start

    registry = CollectorRegistry()
    registry.register(_Collector(board, lanes))
    return generate_latest(registry)


class _Collector:
    def __init__(self, board: Board, lanes: Sequence[LaneStatus]) -> None:
        self._board = board
        self._lanes = lanes

    def collect(self) -> Iterable[Metric]:
        """All metric families."""
        cells = self._cells()
        yield from _requests(cells)
        yield from _counters(cells)
        yield from _histograms(cells)
        yield _saved(self._board.rows(by_kind=True))
        yield from _gauges(self._lanes)

    def _cells(self) -> dict[Labels, Cell]:
        """Cells by label values: temperatures and fingerprints of a kind add up."""
        parts: dict[Labels, list[Cell]] = {}
        for (target, workload, lane, strategy, _), cell in self._board.cells.items():
            labels = (target, workload.partition("/")[0], strategy, lane)
            parts.setdefault(labels, []).append(cell)
        return {labels: merged(cells) for labels, cells in parts.items()}


def _requests(cells: dict[Labels, Cell]) -> Iterable[Metric]:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(
        "specproxy_requests", "Requests by how they ended.", labels=[*LABELS, "outcome"]
    )
    for labels, cell in cells.items():
        for outcome, count in cell.outcomes.items():
            family.add_metric([*labels, outcome], count)
    yield family


def _counters(cells: dict[Labels, Cell]) -> Iterable[Metric]:
    from prometheus_client.core import CounterMetricFamily

    for name, text, value in COUNTERS:
        family = CounterMetricFamily(name, text, labels=LABELS)
        for labels, cell in cells.items():
            family.add_metric(labels, value(cell))
        yield family


def _histograms(cells: dict[Labels, Cell]) -> Iterable[Metric]:
    from prometheus_client.core import HistogramMetricFamily

    e2e = HistogramMetricFamily(
        "specproxy_e2e_request_latency_seconds", "Time from request to end.", labels=LABELS
    )
    ttft = HistogramMetricFamily("specproxy_time_to_first_token_seconds", "Time to first token.", labels=LABELS)
    tpt = HistogramMetricFamily(
        "specproxy_request_time_per_output_token_seconds", "Decode time per token.", labels=LABELS
    )
    for labels, cell in cells.items():
        e2e.add_metric(labels, _buckets(E2E_BOUNDS, cell.e2e_counts), cell.total_s)
        ttft.add_metric(labels, _buckets(TTFT_BOUNDS, cell.ttft_counts), cell.ttft_s)
        tpt.add_metric(labels, _buckets(TPT_BOUNDS, cell.tpt_counts), cell.tpt_s)
    yield e2e
    yield ttft
    yield tpt


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    names = [*map(str, bounds), "+Inf"]
    return list(zip(names, accumulate(counts), strict=True))


def _saved(rows: Iterable[BoardRow]) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    text = "Decode seconds saved against plain, by estimate; below 0 they were lost."
    family = GaugeMetricFamily("specproxy_saved_seconds", text, labels=LABELS)
    for row in rows:
        if row.ratio is not None:
            family.add_metric([row.target, row.workload, row.strategy, row.lane], saved_s([row]))
    return family


def _gauges(lanes: Sequence[LaneStatus]) -> Iterable[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    labels = ("model", "strategy", "lane")
    up = GaugeMetricFamily("specproxy_lane_up", "1 where a lane takes requests.", labels=labels)
    busy = GaugeMetricFamily("specproxy_num_requests_running", "Requests in flight on a lane.", labels=labels)
    memory = GaugeMetricFamily("specproxy_lane_memory_bytes", "Memory that a lane costs.", labels=labels)
    held = GaugeMetricFamily("specproxy_lane_quarantined", "1 where verify found a fault.", labels=labels)
    for status in lanes:
        values = (status.lane.target, status.lane.strategy.name, status.lane.id)
        up.add_metric(values, status.health is Health.READY)
        busy.add_metric(values, status.in_flight)
        memory.add_metric(values, status.lane.memory_bytes)
        held.add_metric(values, status.health is Health.QUARANTINED)
    yield from (up, busy, memory, held)
