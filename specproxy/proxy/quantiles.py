"""Quantiles of durations in bounded memory: counts in buckets that grow by 5%.

A quantile is the middle of its bucket, so it is off by 2.5% at most, whatever the distribution. Counts add up
exactly. (After Masson, Rim and Lee 2019, DDSketch, without its collapsing: durations are bounded instead.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["MOST_BUCKETS", "bucket_of", "is_bucket", "quantile"]

_GROWTH = math.log(1.05)
_SHORTEST, _LONGEST = 1e-3, 1e5  # seconds; what is beyond counts as these
_FIRST, _LAST = math.ceil(math.log(_SHORTEST) / _GROWTH), math.ceil(math.log(_LONGEST) / _GROWTH)
_MIDDLE = 2 / (math.exp(_GROWTH) + 1)  # of a bucket, relative to its upper end: equally far from both ends

MOST_BUCKETS = _LAST - _FIRST + 1
"""How many buckets there can be."""


def bucket_of(seconds: float) -> int:
    """The bucket that a duration falls into."""
    return math.ceil(math.log(min(max(seconds, _SHORTEST), _LONGEST)) / _GROWTH)


def is_bucket(number: int) -> bool:
    """Whether a duration can fall into a bucket of this number."""
    return _FIRST <= number <= _LAST


def quantile(counts: Mapping[int, int], share: float) -> float | None:
    """The duration (seconds) below which this share of all lies; None without any."""
    total = sum(counts.values())
    if not total:
        return None
    wanted, seen = max(1, math.ceil(share * total)), 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= wanted:
            return math.exp(bucket * _GROWTH) * _MIDDLE
    raise AssertionError("the counts add up to the total")
