"""The loss account: its budget, what is in flight, and what is held in doubt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.records import TempBucket, Workload
from specproxy.strategies.gate import Ledger
from specproxy.strategies.learner import Learner, LearnerSettings
from tests.strategies.world import lane, observe

CODE = Workload("code", TempBucket.COOL)


def test_the_budget_is_an_allowance_and_a_share() -> None:
    """One request's worth of plain time, and two percent of all that has run."""
    ledger = Ledger()
    assert ledger.room(3.0, 1.0, 0.02) == pytest.approx(3.0 + 0.06)
    for _ in range(10):
        ledger.finish(0.0, 3.0, credit=5.0)
    assert ledger.room(3.0, 1.0, 0.02) == pytest.approx(3.0 + 0.02 * 33.0)


def test_losses_in_flight_count_until_they_report() -> None:
    """Twenty requests at once can't each spend the same room."""
    ledger = Ledger()
    ledger.start(2.0, 3.0)
    assert ledger.room(3.0, 1.0, 0.0) == pytest.approx(1.0)
    ledger.drop(2.0, 3.0)
    assert ledger.room(3.0, 1.0, 0.0) == pytest.approx(3.0)


def test_gains_are_good_for_a_few_requests_only() -> None:
    """A lane that was good for a thousand requests may not lose for hundreds."""
    ledger = Ledger()
    for _ in range(1000):
        ledger.finish(-1.0, 3.0, credit=5.0)
    assert ledger.loss == pytest.approx(-15.0)


def test_a_stall_is_booked_at_plains_time() -> None:
    """The rest is dropped once the lane's next request is in line, and booked if it isn't."""
    ledger = Ledger()
    assert ledger.sift("mtp", 300.0, 3.0, outlier=True) == 3.0
    assert ledger.sift("mtp", 0.2, 3.0, outlier=False) == 0.2
    assert ledger.sift("mtp", 300.0, 3.0, outlier=True) == 3.0
    assert ledger.sift("mtp", 200.0, 3.0, outlier=True) == 497.0
    assert not ledger.held


def test_lanes_are_in_doubt_by_themselves() -> None:
    """A stall on one lane says nothing about another."""
    ledger = Ledger()
    ledger.sift("mtp", 300.0, 3.0, outlier=True)
    assert ledger.sift("draft", 300.0, 3.0, outlier=True) == 3.0


@given(st.lists(st.tuples(st.floats(-3.0, 300.0), st.booleans()), max_size=60))
def test_only_single_outliers_escape(losses: list[tuple[float, bool]]) -> None:
    """Whatever comes, what was not booked is held, or belonged to an outlier between requests in line."""
    ledger = Ledger()
    booked = dropped = 0.0
    for loss, outlier in losses:
        held = ledger.held.get("a", 0.0)
        booked += ledger.sift("a", loss, 3.0, outlier=outlier)
        if not outlier or loss <= 3.0:
            dropped += held
    assert booked + dropped + ledger.held.get("a", 0.0) == pytest.approx(sum(loss for loss, _ in losses))


def test_state_survives() -> None:
    """What is held is part of it; what is in flight is not."""
    ledger = Ledger()
    ledger.finish(1.0, 3.0, credit=5.0)
    ledger.sift("mtp", 300.0, 3.0, outlier=True)
    ledger.start(2.0, 3.0)
    again = Ledger.restored(ledger.dump())
    assert (again.loss, again.plain_s, again.requests, again.held) == (1.0, 3.0, 1.0, {"mtp": 297.0})
    assert again.pending_loss == 0.0


def test_accounts_say_what_is_lost_and_what_may_be() -> None:
    """Of every workload, by the learner's settings; nothing before a request has ended."""
    learner, code = Learner(LearnerSettings(allowance_requests=2.0, allowance_share=0.1)), CODE
    assert learner.accounts() == []
    for name, tpt in (("plain", 0.02), ("plain", 0.02), ("mtp", 0.03)):
        learner.learn_one(observe(lane(name), code, tpt=tpt))
    [account] = learner.accounts()
    assert (account.target, account.workload) == ("t", "code/cool")
    assert account.plain_s == pytest.approx(3 * 2.98, rel=0.1)
    assert 0.0 < account.lost_s < 0.02 * 149
    assert account.allowed_s == pytest.approx(2.0 * 2.98 + 0.1 * 4 * 2.98, rel=0.1)
    assert Ledger().allowed(1.0, 0.02) == 0.0
