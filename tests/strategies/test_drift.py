"""Drift: what is told after a change, and how rarely something is told without one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.strategies.drift import Cusum, DriftEvent, DriftMonitor, Signal, normal_score

Row = tuple[str, str, Signal, float, float, float]


def traffic(
    seed: int,
    requests: int,
    *,
    shift_at: int | None = None,
    shift: float = 0.0,
    tails: str = "t",
    swing: float = 0.0,
) -> Iterator[tuple[int, Row]]:
    """Three lanes and nine kinds, two signals a request; lane 0 shifts. `swing` is the machine's slow noise."""
    rng = np.random.default_rng(seed)
    acceptance, level = rng.uniform(0.3, 0.85, (3, 9)), rng.normal(-0.2, 0.3, (3, 9))
    slow = 0.0
    for i in range(requests):
        lane, kind = int(rng.integers(3)), int(rng.integers(9))
        tokens = max(8, int(rng.lognormal(4.5, 0.7)))
        drafted = max(1, int(tokens * 0.8))
        lost = shift if shift_at is not None and i >= shift_at and lane == 0 else 0.0
        chance = np.clip(rng.normal(acceptance[lane, kind] * (1.0 - lost), 0.1), 0.02, 0.98)
        noise = rng.standard_t(4) / math.sqrt(2.0) if tails == "t" else rng.normal()
        slow = 0.9 * slow + math.sqrt(1.0 - 0.9**2) * rng.normal() * swing
        y = level[lane, kind] - math.log(1.0 - lost) + noise * math.sqrt(0.1**2 + 0.7**2 / tokens) + slow
        accepted = float(rng.binomial(drafted, chance)) / drafted
        yield i, (f"lane-{lane}", f"kind-{kind}", "acceptance", accepted, float(drafted), float(i))
        yield i, (f"lane-{lane}", f"kind-{kind}", "time", float(y), float(tokens), float(i))


def events(
    rows: Iterator[tuple[int, Row]], monitor: DriftMonitor | None = None
) -> list[tuple[int, DriftEvent]]:
    monitor = monitor or DriftMonitor()
    found = [(i, monitor.learn_one(*row)) for i, row in rows]
    return [(i, event) for i, event in found if event is not None]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("tails", "swing"), [("normal", 0.0), ("t", 0.0), ("normal", 0.06)])
def test_few_false_alarms(tails: str, swing: float) -> None:
    """At most 0.05 in 2000 requests: at that rate 50 runs give 2.5, and hardly ever more than 6."""
    alarms = sum(len(events(traffic(seed, 2000, tails=tails, swing=swing))) for seed in range(50))
    assert alarms <= 6


def test_shift_is_noticed_soon() -> None:
    """A shift of 35% on a lane with a third of the traffic: within 60 requests, and for that lane."""
    for seed in range(20):
        found = events(traffic(seed, 700, shift_at=600, shift=0.35))
        after = [(i, event) for i, event in found if i >= 600]
        assert after, seed
        i, event = after[0]
        assert i < 660
        assert event.arm == "lane-0"
        assert event.worse


def test_event_tells_before_and_after() -> None:
    """The means on both sides of the change, when it began, and the sentence."""
    monitor = DriftMonitor()
    rng = np.random.default_rng(5)
    event = None
    for i in range(400):
        mean = 0.74 if i < 300 else 0.31
        value = float(rng.normal(mean, 0.05))
        event = monitor.learn_one("a", "code", "acceptance", value, 100.0, float(i), label="draft")
        if event:
            break
    assert event is not None
    assert (event.kind, event.signal, event.worse) == ("code", "acceptance", True)
    assert event.before == pytest.approx(0.74, abs=0.03)
    assert event.after == pytest.approx(0.31, abs=0.05)
    assert event.since == pytest.approx(300, abs=2)
    assert event.sentence.startswith("acceptance of draft on code fell from 0.7")
    assert "after 300 steady ones" in event.sentence or "after 29" in event.sentence


def test_time_is_told_relative_to_plain() -> None:
    """A slower lane is an event on time, in units of plain's."""
    monitor = DriftMonitor()
    found = [
        monitor.learn_one(
            "a", "prose", "time", math.log(0.6 if i < 50 else 0.9) + 0.01 * (i % 3), 200.0, float(i)
        )
        for i in range(100)
    ]
    event = next(e for e in found if e)
    assert event.worse
    assert event.before == pytest.approx(0.6, abs=0.03)
    assert event.after == pytest.approx(0.9, abs=0.05)
    assert "rose from 0.6" in event.sentence


def test_improvement_is_noticed_too() -> None:
    """A lane that became better is an event, and not a bad one."""
    monitor = DriftMonitor()
    found = [
        monitor.learn_one("a", "code", "acceptance", (0.4 if i < 50 else 0.8) + 0.01 * (i % 5), 100.0, float(i))
        for i in range(100)
    ]
    event = next(e for e in found if e)
    assert not event.worse
    assert event.after > event.before


def test_one_event_for_one_change() -> None:
    """After an event the new state is the normal one."""
    for seed in range(10):
        found = [e for i, e in events(traffic(seed, 1500, shift_at=500, shift=0.5)) if i >= 500]
        assert 1 <= len(found) <= 4  # one for the lane, and kinds whose share of it was noticed apart


def test_state_goes_on_where_it_was() -> None:
    """Dumped, sent through JSON and loaded, it gives the same events as without interruption."""
    rows = list(traffic(3, 800, shift_at=500, shift=0.35))
    whole = events(iter(rows))
    first, second = DriftMonitor(), DriftMonitor()
    found = events(iter(rows[:1020]), first)
    second.load(json.loads(json.dumps(first.dump())))
    found += events(iter(rows[1020:]), second)
    assert found == whole
    assert whole


def test_forget_drops_one_arm() -> None:
    """After forgetting, an arm begins with a burn-in again; others are untouched."""
    monitor = DriftMonitor()
    for i in range(50):
        for arm in ("a", "b"):
            monitor.learn_one(arm, "code", "acceptance", 0.7 + 0.01 * (i % 5), 100.0, float(i))
    monitor.forget("a")
    alarms = dict.fromkeys(("a", "b"), 0)
    for i in range(50, 90):
        for arm in alarms:
            alarms[arm] += monitor.learn_one(arm, "code", "acceptance", 0.3, 100.0, float(i)) is not None
    assert alarms == {"a": 0, "b": 1}


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"format": "other"},
        {"format": "specproxy-drift", "version": 99, "series": [], "whole": []},
        {"format": "specproxy-drift", "version": 1, "series": [["a", "time", "k", {}]], "whole": []},
        {"format": "specproxy-drift", "version": 1, "series": [], "whole": [["a", "colour", [0, 0, 0, 0]]]},
    ],
)
def test_bad_state_is_refused(state: dict[str, object]) -> None:
    """Foreign, newer or damaged state is a ValueError, and nothing is taken over."""
    monitor = DriftMonitor()
    with pytest.raises(ValueError, match=r"state|signal"):
        monitor.load(state)
    assert not monitor.dump()["series"]


@given(st.lists(st.floats(-50, 50), max_size=60))
def test_cusum_is_symmetric(values: list[float]) -> None:
    """Mirrored values give mirrored sums and alarms."""
    one, two = Cusum(), Cusum()
    for value in values:
        assert one.update(value) == -two.update(-value) or (one.up > one.threshold and one.down > one.threshold)
        assert (one.up, one.down) == (two.down, two.up)


def test_one_wild_value_is_no_alarm() -> None:
    """A single request, however far off, does not pass the threshold."""
    assert Cusum().update(1e9) == 0


@pytest.mark.parametrize(("t", "freedom", "z"), [(2.228, 10, 1.96), (-2.776, 4, -1.96), (3.169, 10, 2.576)])
def test_normal_score(t: float, freedom: float, z: float) -> None:
    """Quantiles of t become those of the normal distribution."""
    assert normal_score(t, freedom) == pytest.approx(z, abs=0.02)
