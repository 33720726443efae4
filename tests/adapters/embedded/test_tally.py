"""Counts of a request's steps: who drafted, what came of it, and why nothing is drafted any more."""

from __future__ import annotations

from specproxy.adapters.embedded.controller import PLAIN, FixedController, Plan, StepOutcome
from specproxy.adapters.embedded.tally import LONGEST_MATCH, Tally
from specproxy.adapters.embedded.types import GenerateRequest
from specproxy.records import DrafterReport, EngineReport, Strategy


class Giver(FixedController):
    """A controller that has something to tell."""

    def levels(self) -> dict[str, tuple[float, ...]]:
        return {"mtp": (1.0, 2.0)}

    def explain(self) -> str:
        return "mtp would give 0.90 of plain's speed"


def told(tally: Tally, *, shortest: int = 3) -> EngineReport:
    """The report on a request of three tokens."""
    request = GenerateRequest("r7", (1, 2), strategy=Strategy.parse("auto"))
    return tally.report(request, Giver(), [5, 6, 7], shortest)


def by_name(report: EngineReport) -> dict[str, DrafterReport]:
    return {drafter.drafter: drafter for drafter in report.drafters}


def test_steps_are_counted_by_plan_and_width() -> None:
    """Only those that a sequence had to itself have a time."""
    tally = Tally()
    for accepted, seconds in ((3, 0.2), (1, 0.4), (0, None)):
        tally.add(StepOutcome(Plan("mtp", 3), 0, 3, accepted, seconds, proposed=3))
    tally.add(StepOutcome(PLAIN, 0, 0, 0, 0.1))
    tally.add_plain(0.3)
    report = told(tally)
    assert report.steps == 5
    assert dict(report.plans) == {"mtp:3": 3, "plain": 2}
    assert report.widths == {4: (2, 0.2 + 0.4), 1: (2, 0.1 + 0.3)}
    assert (tally.drafted, tally.accepted) == (9, 4)
    assert (report.request_id, report.strategy) == ("r7", "auto")
    assert (report.prompt_ids, report.output_ids) == ((1, 2), (5, 6, 7))


def test_positions_are_judged_up_to_the_first_wrong_guess() -> None:
    """What comes behind it was not tried; what the grammar cut off counts as wrong, and not as drafted."""
    tally = Tally()
    tally.add(StepOutcome(Plan("mtp", 3), 0, 3, 1, 0.1, 0.02, proposed=3))
    tally.add(StepOutcome(Plan("mtp", 3), 0, 1, 1, 0.1, 0.03, proposed=3))
    mtp = by_name(told(tally))["mtp"]
    assert mtp.by_position == ((2, 2), (0, 2))
    assert (mtp.steps, mtp.drafted, mtp.accepted) == (2, 4, 2)
    assert mtp.draft_s == 0.02 + 0.03
    assert mtp.levels == (1.0, 2.0)


def test_a_chains_parts_are_counted_apart() -> None:
    """The head is judged only where all that it went on from was right."""
    plan = Plan("mtp", 2, "ngram", 4)
    tally = Tally()
    tally.add(StepOutcome(plan, 5, 6, 5, 0.1, 0.02, proposed=6))
    tally.add(StepOutcome(plan, 5, 6, 2, 0.1, 0.02, proposed=6))
    drafters = by_name(told(tally))
    assert (drafters["ngram"].drafted, drafters["ngram"].accepted) == (8, 6)
    assert drafters["ngram"].by_position == ((2, 2), (2, 2), (1, 2), (1, 1))
    assert drafters["ngram"].draft_s == 0.0
    assert (drafters["mtp"].drafted, drafters["mtp"].accepted) == (4, 1)
    assert drafters["mtp"].by_position == ((1, 1), (0, 1))
    assert dict(told(tally).plans) == {"ngram:4>mtp:2": 2}


def test_copies_count_by_the_length_of_their_match_used_or_not() -> None:
    """Every right token makes the match longer; counts begin at the shortest match."""
    tally = Tally()
    tally.add(StepOutcome(PLAIN, 4, 0, 0, 0.1, copied=1, agreed=0))
    tally.add(StepOutcome(Plan("ngram", 8), 3, 8, 2, 0.1, copied=3, agreed=2, proposed=8))
    long = LONGEST_MATCH + 2
    tally.add(StepOutcome(PLAIN, long, 0, 0, 0.1, copied=2, agreed=2))
    ngram = by_name(told(tally))["ngram"]
    assert ngram.by_match[:3] == ((1, 1), (1, 2), (0, 1))
    assert ngram.by_match[long - 3 :] == ((2, 2),), "longer matches are not told apart"
    assert ngram.by_position == ((1, 1), (1, 1), (0, 1))


def test_both_reasons_to_stop_are_told() -> None:
    """A drafter that cannot go on, and what the others would give."""
    tally = Tally()
    assert told(tally).stopped_drafting == "mtp would give 0.90 of plain's speed"
    tally.stopped = "draft: no room"
    assert told(tally).stopped_drafting == "draft: no room; mtp would give 0.90 of plain's speed"
