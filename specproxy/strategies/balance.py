"""Least-loaded choice among equals: of lanes that are interchangeable only one is left to choose from."""

from __future__ import annotations

from collections.abc import Mapping

from specproxy.records import LaneStatus

__all__ = ["without_equals"]


def without_equals(
    lanes: tuple[LaneStatus, ...], hits: Mapping[str, int], turns: Mapping[str, int]
) -> tuple[LaneStatus, ...]:
    """Lanes in their order, of each set of equals the one with the least load for its weight.

    Between equal loads the longer cached prompt decides (`hits`, in tokens by lane id), then whose last turn is
    the longest ago (`turns`, a running number by lane id).
    """
    if len({status.lane.fingerprint for status in lanes}) == len(lanes):
        return lanes  # as nearly always
    sets: dict[tuple[str, tuple[str, ...]], list[LaneStatus]] = {}
    for status in lanes:
        sets.setdefault((status.lane.fingerprint, status.lane.strategy.drafters), []).append(status)

    def rank(status: LaneStatus) -> tuple[float, int, int]:
        lane = status.lane
        return (status.in_flight + 1) / lane.weight, -hits.get(lane.id, 0), turns.get(lane.id, 0)

    chosen = {min(equals, key=rank).lane.id for equals in sets.values()}
    return tuple(status for status in lanes if status.lane.id in chosen)
