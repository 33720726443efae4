"""Quantiles in bounded memory."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.proxy.quantiles import MOST_BUCKETS, bucket_of, quantile

durations = st.lists(st.floats(1e-3, 1e5), min_size=1, max_size=60)


def counted(values: list[float]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for value in values:
        counts[bucket_of(value)] = counts.get(bucket_of(value), 0) + 1
    return counts


@given(durations, st.floats(0.01, 1.0))
def test_off_by_a_fortieth_at_most(values: list[float], share: float) -> None:
    """Against the sorted list, at the nearest rank."""
    truth = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    assert quantile(counted(values), share) == pytest.approx(truth, rel=0.0251)


def test_nothing_has_no_quantile() -> None:
    """None, not zero."""
    assert quantile({}, 0.5) is None


def test_memory_is_bounded() -> None:
    """However short, long or many they are."""
    buckets = {bucket_of(10 ** (n / 50)) for n in range(-600, 600)} | {bucket_of(0.0), bucket_of(math.inf)}
    assert len(buckets) <= MOST_BUCKETS < 400
