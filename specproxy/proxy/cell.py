"""Running sums over the requests of one workload on one lane.

Only sums and counts in fixed buckets are kept, so a cell has the same size after a million requests, cells add
up exactly, and what is stored restores to what was.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from specproxy.proxy.quantiles import bucket_of, quantile
from specproxy.records import Observation, Outcome

__all__ = ["E2E_BOUNDS", "TPT_BOUNDS", "TTFT_BOUNDS", "Z95", "Cell", "merged"]

Z95 = 1.96
_MOST_LOG = 100.0  # ln(seconds a token), far above any

TTFT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
TPT_BOUNDS = (0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5)  # seconds a token
E2E_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0)  # seconds


@dataclass(slots=True)
class Cell:
    """Sums over the requests of one workload on one lane.

    `n` counts all requests, `complete` those that ended well; every other figure is of complete ones. The
    `log_*` sums are of ln(time per token), each request weighted by `Observation.weight`. `timed_s` is the
    whole time of those requests whose decoding is in `decode_s`, and `total_counts` holds whole times in the
    buckets of `quantiles`. Squares of drafted and accepted tokens tell how far acceptance differs from request
    to request.
    """

    n: int = 0
    complete: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    drafted: int = 0
    accepted: int = 0
    drafting: int = 0
    drafted2: int = 0
    accepted2: int = 0
    drafted_accepted: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    decode_tokens: int = 0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    prefill_n: int = 0
    ttft_s: float = 0.0
    ttft_n: int = 0
    total_s: float = 0.0
    timed_s: float = 0.0
    log_weight: float = 0.0
    log_weight2: float = 0.0
    log_sum: float = 0.0
    log_sum2: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)
    ttft_counts: list[int] = field(default_factory=lambda: [0] * (len(TTFT_BOUNDS) + 1))
    tpt_counts: list[int] = field(default_factory=lambda: [0] * (len(TPT_BOUNDS) + 1))
    tpt_s: float = 0.0
    e2e_counts: list[int] = field(default_factory=lambda: [0] * (len(E2E_BOUNDS) + 1))
    total_counts: dict[int, int] = field(default_factory=dict)

    def add(self, seen: Observation) -> None:
        """Count one observation."""
        self.n += 1
        self.first_at = min(self.first_at or seen.at, seen.at)
        self.last_at = max(self.last_at, seen.at)
        self.outcomes[str(seen.outcome)] = self.outcomes.get(str(seen.outcome), 0) + 1
        if seen.outcome is not Outcome.COMPLETE:
            return
        self.complete += 1
        self._add_total(seen.total_s)
        self._add_drafts(seen.draft_tokens, seen.accepted_tokens)
        self.output_tokens += seen.output_tokens
        self.prompt_tokens += seen.prompt_tokens
        self.cached_tokens += seen.cached_tokens
        if seen.prefill_s is not None:
            self.prefill_s += seen.prefill_s
            self.prefill_n += 1
        if seen.ttft_s is not None:
            self.ttft_s += seen.ttft_s
            self.ttft_n += 1
            self.ttft_counts[bisect_left(TTFT_BOUNDS, seen.ttft_s)] += 1
        self._add_speed(seen)

    def _add_total(self, seconds: float) -> None:
        self.total_s += seconds
        self.e2e_counts[bisect_left(E2E_BOUNDS, seconds)] += 1
        bucket = bucket_of(seconds)
        self.total_counts[bucket] = self.total_counts.get(bucket, 0) + 1

    def _add_drafts(self, drafted: int, accepted: int) -> None:
        self.drafting += drafted > 0
        self.drafted += drafted
        self.accepted += accepted
        self.drafted2 += drafted * drafted
        self.accepted2 += accepted * accepted
        self.drafted_accepted += drafted * accepted

    def _add_speed(self, seen: Observation) -> None:
        per_token = seen.time_per_token
        if per_token is None or seen.decode_s is None or seen.load_s > 0:
            return
        self.decode_tokens += seen.output_tokens - 1
        self.decode_s += seen.decode_s
        self.timed_s += seen.total_s
        self.tpt_counts[bisect_left(TPT_BOUNDS, per_token)] += 1
        self.tpt_s += per_token
        log = math.log(per_token)
        self.log_weight += seen.weight
        self.log_weight2 += seen.weight**2
        self.log_sum += seen.weight * log
        self.log_sum2 += seen.weight * log * log

    def merge(self, other: Cell) -> None:
        """Add another cell's sums to this one."""
        self.first_at = min(filter(None, (self.first_at, other.first_at)), default=0.0)
        self.last_at = max(self.last_at, other.last_at)
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for outcome, count in other.outcomes.items():
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + count
        for bucket, count in other.total_counts.items():
            self.total_counts[bucket] = self.total_counts.get(bucket, 0) + count
        for name in ("ttft_counts", "tpt_counts", "e2e_counts"):
            both = zip(getattr(self, name), getattr(other, name), strict=True)
            setattr(self, name, [a + b for a, b in both])

    @property
    def is_possible(self) -> bool:
        """Whether requests can add up to this: what is divided by is there, and logarithms are of times."""
        if self.drafting > self.drafted:
            return False
        if self.log_weight == 0:
            return True
        means = abs(self.log_sum) / self.log_weight, math.sqrt(self.log_sum2 / self.log_weight)
        return self.samples > 0.5 and max(means) <= _MOST_LOG

    @property
    def acceptance(self) -> float | None:
        """Accepted / drafted tokens over all requests."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def acceptance_interval(self) -> tuple[float, float] | None:
        """95% interval of `acceptance`, with requests (not tokens) as what is independent; None below two."""
        if self.drafting < 2:
            return None
        share = self.accepted / self.drafted
        spread = self.accepted2 - 2 * share * self.drafted_accepted + share * share * self.drafted2
        variance = max(0.0, spread) * self.drafting / (self.drafting - 1) / self.drafted**2
        half = Z95 * math.sqrt(variance)
        return max(0.0, share - half), min(1.0, share + half)

    def total_quantile(self, share: float) -> float | None:
        """The time from request to end (seconds) that this share of complete requests kept within."""
        return quantile(self.total_counts, share)

    @property
    def tok_s(self) -> float | None:
        """Decoded tokens a second of decoding."""
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else None

    @property
    def mean_log(self) -> float | None:
        """Weighted mean of ln(time per token)."""
        return self.log_sum / self.log_weight if self.log_weight > 0 else None

    @property
    def tpt_interval(self) -> tuple[float, float] | None:
        """95% interval of the geometric mean of time per token (seconds); None below two samples."""
        mean, variance = self.mean_log, self.log_variance
        if mean is None or variance is None:
            return None
        half = Z95 * math.sqrt(variance)
        return math.exp(mean - half), math.exp(mean + half)

    @property
    def samples(self) -> float:
        """Effective number of requests behind `mean_log` (Kish)."""
        return self.log_weight**2 / self.log_weight2 if self.log_weight2 > 0 else 0.0

    @property
    def log_variance(self) -> float | None:
        """Variance of `mean_log`, or None below two samples."""
        mean, n = self.mean_log, self.samples
        if mean is None or n < 2:
            return None
        spread = max(0.0, self.log_sum2 / self.log_weight - mean**2) * n / (n - 1)
        return spread / n


_SUMS = (
    "n", "complete", "drafted", "accepted", "output_tokens", "prompt_tokens", "cached_tokens", "decode_tokens",
    "decode_s", "prefill_s", "prefill_n", "ttft_s", "ttft_n", "total_s", "log_weight", "log_weight2", "log_sum",
    "log_sum2", "tpt_s", "timed_s", "drafting", "drafted2", "accepted2", "drafted_accepted",
)  # fmt: skip


def merged(cells: Sequence[Cell]) -> Cell:
    """The sum of cells; a single one is given back as it is, so treat the result as read-only."""
    if len(cells) == 1:
        return cells[0]
    whole = Cell()
    for cell in cells:
        whole.merge(cell)
    return whole
