"""Of lanes that are interchangeable one is left: the least loaded, by weight, cache and turn."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from specproxy.records import Control, Health, Lane, LaneStatus, Strategy
from specproxy.strategies.balance import without_equals


def status(name: str, fingerprint: str = "f", *, load: int = 0, **fields: Any) -> LaneStatus:
    lane = Lane(name, "b", "m", Strategy.parse(fields.pop("strategy", "plain")), Control.INSTANCE, fingerprint)
    lane = Lane(**{name: getattr(lane, name) for name in lane.__slots__} | fields)
    return LaneStatus(lane, Health.READY, in_flight=load)


def left(
    *lanes: LaneStatus, hits: dict[str, int] | None = None, turns: dict[str, int] | None = None
) -> list[str]:
    return [s.lane.id for s in without_equals(lanes, hits or {}, turns or {})]


def test_lanes_that_differ_all_stay() -> None:
    """Other fingerprints, and other strategies on one server by request."""
    assert left(status("a", "1"), status("b", "2"), status("c", "1", strategy="draft")) == ["a", "b", "c"]


def test_load_decides_then_cache_then_turn() -> None:
    """In this order; a weight of two bears twice the load."""
    assert left(status("a", load=1), status("b")) == ["b"]
    assert left(status("a", load=2, weight=2.0), status("b", load=1)) == ["a"]
    assert left(status("a"), status("b"), hits={"b": 64}) == ["b"]
    assert left(status("a", load=1), status("b"), hits={"a": 64}) == ["b"]
    assert left(status("a"), status("b"), turns={"a": 2, "b": 1}) == ["b"]


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 3)), min_size=1, max_size=8))
def test_exactly_one_of_each_set_is_left(given_lanes: list[tuple[str, int]]) -> None:
    """In the order in which they came."""
    lanes = [status(str(i), fp, load=load) for i, (fp, load) in enumerate(given_lanes)]
    kept = without_equals(tuple(lanes), {}, {})
    assert sorted(s.lane.fingerprint for s in kept) == sorted({fp for fp, _ in given_lanes})
    assert [int(s.lane.id) for s in kept] == sorted(int(s.lane.id) for s in kept)
    for s in kept:
        assert s.in_flight == min(load for fp, load in given_lanes if fp == s.lane.fingerprint)
