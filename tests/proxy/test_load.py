"""Requests in flight, and their mean over a request's time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.proxy.load import Load
from specproxy.records import Health, Lane, LaneStatus
from tests.support.proxy import lane

HERE, FAR, ALSO_FAR = lane("here"), lane("far"), lane("far2")
HOSTS = {"far": "gpu", "far2": "gpu"}


def test_one_alone() -> None:
    """A request by itself sees a concurrency of 1."""
    load = Load()
    stay = load.enter(10.0)
    assert load.in_flight == 1
    assert load.leave(stay, 12.0) == 1.0
    assert load.in_flight == 0


def test_a_neighbour_counts_for_its_time() -> None:
    """Two for half of the time is 1.5."""
    load = Load()
    first = load.enter(0.0)
    second = load.enter(1.0)
    assert load.leave(first, 2.0) == 1.5
    assert load.leave(second, 3.0) == 1.5


def test_no_time_at_all() -> None:
    """A request that takes no time has the concurrency of its moment."""
    load = Load()
    load.enter(5.0)
    assert load.leave(load.enter(5.0), 5.0) == 2.0


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.01, 50)), min_size=1, max_size=12))
def test_it_is_the_time_weighted_mean(spans: list[tuple[float, float]]) -> None:
    """Whatever overlaps: the mean equals the overlaps with all others, added up, over one's own time."""
    events = sorted(
        [(start, 1, i) for i, (start, _) in enumerate(spans)]
        + [(start + length, 0, i) for i, (start, length) in enumerate(spans)]
    )
    load, stays, means = Load(), {}, {}
    for at, begins, i in events:
        if begins:
            stays[i] = load.enter(at)
        else:
            means[i] = load.leave(stays[i], at)
    for i, (start, length) in enumerate(spans):
        overlap = sum(max(0.0, min(start + length, a + n) - max(start, a)) for a, n in spans)
        assert means[i] == pytest.approx(max(1.0, overlap / length), rel=1e-6)


# --- several hosts -------------------------------------------------------------------------------


def around(load: Load, *lanes: Lane) -> tuple[int, dict[str, int]]:
    """What a request sees that may go to these lanes, itself included."""
    here, elsewhere = load.around([LaneStatus(each, Health.READY) for each in lanes], coming=1)
    return here, dict(elsewhere)


def test_hosts_are_counted_apart() -> None:
    """Two servers on one other host share it, and are none of this machine's load."""
    load = Load(hosts=HOSTS)
    stays = [load.enter(0.0, each) for each in (HERE, FAR, ALSO_FAR)]
    assert load.in_flight == 3
    assert around(load, HERE) == (2, {})
    assert around(load, HERE, FAR, ALSO_FAR) == (2, {"far/plain": 3, "far2/plain": 3})
    assert [load.leave(stay, 1.0) for stay in stays] == [1.0, 2.0, 2.0]
    assert around(load, FAR) == (1, {"far/plain": 1})


def test_one_that_moves_leaves_its_host() -> None:
    """Its mean is that of the host where it ended, since it came there; on the same host it goes on."""
    load = Load(hosts=HOSTS)
    load.enter(0.0, HERE)
    stay = load.enter(0.0, FAR)
    assert load.move(stay, 1.0, ALSO_FAR) is stay
    moved = load.move(stay, 2.0, HERE)
    assert around(load, HERE, FAR) == (3, {"far/plain": 1})
    assert load.leave(moved, 4.0) == 2.0
    assert load.in_flight == 1


def test_idle_is_idle_everywhere() -> None:
    """Who waits for another host may need this machine in a moment."""
    load = Load(hosts=HOSTS)
    stay = load.enter(1.0, FAR)
    assert load.idle_s(5.0) == 0.0
    load.leave(stay, 6.0)
    assert load.idle_s(9.0) == 3.0
