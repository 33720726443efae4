"""What reports teach about a workload comes back as priors, fades, and outlives a restart."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specproxy.records import DrafterReport, EngineReport
from specproxy.strategies.engine_book import MOST_PAGES, EngineBook


def report(
    accepted: int, tried: int, *, plans: tuple[tuple[str, int], ...] = (), stopped: str = ""
) -> EngineReport:
    """A request on which the head was right so often, and copies at the shortest match."""
    drafters = (
        DrafterReport("mtp", tried, tried, accepted, by_position=((accepted, tried), (1, 2))),
        DrafterReport("ngram", 0, 0, 0, by_match=((accepted, tried),)),
    )
    return EngineReport("r", "auto", tried, drafters, plans=plans, stopped_drafting=stopped)


def test_what_was_seen_comes_back_as_priors() -> None:
    book = EngineBook()
    book.learn("f", "json/zero", report(9, 10))
    priors = book.priors("f", "json/zero", "r2")
    assert (priors.request_id, priors.workload) == ("r2", "json/zero")
    assert priors.acceptance == {"mtp": ((9, 10), (1, 2))}
    assert priors.match_acceptance == ((9, 10),)


def test_workloads_and_set_ups_are_kept_apart() -> None:
    """But for the temperature, where nothing nearer is known."""
    book = EngineBook()
    book.learn("f", "json/zero", report(9, 10))
    assert book.priors("f", "prose/zero", "r").acceptance == {}
    assert book.priors("other", "json/zero", "r").acceptance == {}
    assert book.priors("f", "json/high", "r").acceptance["mtp"][0] == (9, 10)


def guesses(accepted: int, tried: int, levels: tuple[float, ...] = (), strategy: str = "auto") -> EngineReport:
    """A request of ten steps on which the head was right so often."""
    drafter = DrafterReport("mtp", tried, tried, accepted, by_position=((accepted, tried),), levels=levels)
    return EngineReport("r", strategy, 10, (drafter,))


def test_steps_since_a_drafter_was_used_go_on_from_request_to_request() -> None:
    """Those of fixed strategies are not the engine's own time; a new workload begins at none."""
    book = EngineBook()
    book.learn("f", "w/zero", guesses(1, 2))
    book.learn("f", "w/zero", EngineReport("r", "auto", 30))
    book.learn("f", "w/zero", EngineReport("r", "plain", 500))
    priors = book.priors("f", "w/zero", "r")
    assert (priors.steps, priors.last_used) == (40, {"mtp": 10})
    for other in ("w/high", "new/zero"):
        assert (book.priors("f", other, "r").steps, book.priors("f", other, "r").last_used) == (0, {})


def test_levels_fade_and_are_told() -> None:
    book = EngineBook()
    for _ in range(2):
        book.learn("f", "w", guesses(1, 2, (2.0, 1.0)))
    assert book.priors("f", "w", "r").levels == {"mtp": pytest.approx((3.8, 1.9))}


def test_a_set_ups_kind_is_not_anothers() -> None:
    """Nor the oldest of several temperatures."""
    book = EngineBook()
    book.learn("f", "json/zero", guesses(9, 10))
    book.learn("f", "json/cool", guesses(5, 10))
    book.learn("other", "json/warm", guesses(1, 10))
    assert book.priors("f", "json/high", "r").acceptance["mtp"] == ((5, 10),)


def test_the_past_fades() -> None:
    """After twenty requests of another sort the first ones hardly count."""
    book = EngineBook()
    for _ in range(20):
        book.learn("f", "w", report(10, 10))
    for _ in range(20):
        book.learn("f", "w", report(1, 10))
    accepted, tried = book.priors("f", "w", "r").acceptance["mtp"][0]
    assert accepted / tried < 0.25
    assert tried < 101


def test_plans_and_the_reason_to_stop_are_told() -> None:
    book = EngineBook()
    book.learn("f", "w", report(1, 2, plans=(("mtp:3", 5), ("plain", 2)), stopped="mtp is wrong"))
    book.learn("f", "w", report(1, 2, plans=(("plain", 4),)))
    page = book.pages("f")["w"]
    assert page.plans == pytest.approx({"mtp:3": 4.5, "plain": 5.8})
    assert page.stopped == ""
    assert page.requests == pytest.approx(1.9)


def test_what_was_not_seen_for_long_is_dropped() -> None:
    book = EngineBook()
    for i in range(MOST_PAGES + 1):
        book.learn("f", f"w{i}", report(1, 1))
        book.learn("f", "w0", report(1, 1))
    assert len(book.pages("f")) == MOST_PAGES
    assert "w0" in book.pages("f")
    assert "w1" not in book.pages("f")


def test_the_book_outlives_a_restart() -> None:
    book, again = EngineBook(), EngineBook()
    book.learn("f", "json/zero", report(9, 10, plans=(("mtp:2", 3),), stopped="why"))
    book.learn("f", "json/zero", guesses(1, 2, (2.0, 1.0)))
    again.restore(json.loads(json.dumps(book.to_json())))
    assert again.to_json() == book.to_json()
    assert again.priors("f", "json/zero", "r") == book.priors("f", "json/zero", "r")


@pytest.mark.parametrize(
    "data",
    [
        3,
        [1],
        [{"fingerprint": "f"}],
        [{"fingerprint": "f", "workload": "w", "requests": 1, "positions": {"mtp": [[2, 1]]}, "matches": [],
          "plans": {}, "stopped": ""}],
    ],
)  # fmt: skip
def test_a_damaged_book_is_refused_and_nothing_lost(data: Any) -> None:
    book = EngineBook()
    book.learn("f", "w", report(1, 1))
    with pytest.raises(ValueError, match=r"."):
        book.restore(data)
    assert book.pages("f")
