"""Ties and faults: what the first difference from plain's text is."""

from __future__ import annotations

import math

import pytest

from specproxy.strategies.verify import (
    Fork,
    Judgement,
    LaneReport,
    Position,
    Verdict,
    calibrated,
    first_difference,
    judge,
    rejudged,
)

PLAIN = b"the cat sat"


def positions(gap: float, other: bytes = b" dog") -> tuple[Position, ...]:
    """Plain's tokens; at the second one `other` is `gap` nats less likely."""
    return (
        Position(b"the", -0.1, ((b"the", -0.1), (b"a", -9.0))),
        Position(b" cat", -0.7, ((b" cat", -0.7), (other, -0.7 - gap), (b" x", -9.0))),
        Position(b" sat", -0.2, ((b" sat", -0.2), (b"", -0.2 - gap), (b" ran", -7.0))),
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "at"), [(b"abc", b"abc", None), (b"abc", b"abd", 2), (b"abc", b"ab", 2), (b"", b"x", 0)]
)
def test_the_first_difference(ours: bytes, theirs: bytes, at: int | None) -> None:
    """Its byte; the shorter length where one text goes on; None where they are equal."""
    assert first_difference(ours, theirs) == at


def test_equal_texts_have_no_fork() -> None:
    """Nothing to judge, and no log-probabilities needed."""
    assert judge(0, PLAIN, PLAIN, ()) is None


@pytest.mark.parametrize(
    ("gap", "judgement"), [(0.0, Judgement.TIE), (0.5, Judgement.TIE), (0.51, Judgement.FAULT)]
)
def test_the_gap_decides(gap: float, judgement: Judgement) -> None:
    """Up to the threshold, both were as good as equally likely."""
    fork = judge(3, PLAIN, b"the dog sat", positions(gap), tie_gap=0.5 + 1e-9)
    assert fork is not None
    assert (fork.prompt, fork.byte, fork.token, fork.judgement) == (3, 4, 1, judgement)
    assert fork.gap == pytest.approx(gap)


def test_the_gap_is_to_the_token_that_was_said() -> None:
    """A rival that is tied with plain's token excuses nobody who said a third one."""
    fork = judge(0, PLAIN, b"the xylophone", positions(0.1))
    assert fork is not None
    assert fork.judgement is Judgement.FAULT
    assert fork.gap == pytest.approx(8.3)


def test_a_fork_inside_a_token_belongs_to_that_token() -> None:
    """' cat' and ' car' first differ in their last byte; the choice was made at their first."""
    fork = judge(0, PLAIN, b"the car", positions(0.2, b" car"))
    assert fork is not None
    assert (fork.byte, fork.token, fork.judgement) == (6, 1, Judgement.TIE)


def test_what_is_not_among_the_likeliest_is_a_fault() -> None:
    """Then the gap is known to be larger than that of the last one that was told."""
    fork = judge(0, PLAIN, b"the zebra", positions(0.1))
    assert fork is not None
    assert (fork.judgement, fork.at_least) == (Judgement.FAULT, True)
    assert fork.gap == pytest.approx(8.3)


def test_a_flat_top_tells_nothing_of_what_is_not_in_it() -> None:
    """All that was told are tied, and what was said is not among them: not known."""
    flat = (Position(b"the", -2.0, ((b"the", -2.0), (b"a", -2.1))),)
    fork = judge(0, b"the", b"one", flat)
    assert fork is not None
    assert fork.judgement is Judgement.UNKNOWN


def test_stopping_early_is_judged_by_the_second_best() -> None:
    """Which token ended the text is not told, so the runner-up counts."""
    early = b"the cat"
    tied, wrong = judge(0, PLAIN, early, positions(0.1)), judge(0, PLAIN, early, positions(4.0))
    assert tied is not None
    assert wrong is not None
    assert (tied.judgement, wrong.judgement) == (Judgement.TIE, Judgement.FAULT)


def test_going_on_is_judged_by_plains_stop_token() -> None:
    """Plain stopped; its stop token's position says how sure it was. Without that position it is unknown."""
    stop = Position(b"", -0.3, ((b"", -0.3), (b" sat", -0.5)))
    fork = judge(0, b"the cat", PLAIN, (*positions(0.1)[:2], stop))
    assert fork is not None
    assert (fork.judgement, fork.gap) == (Judgement.TIE, pytest.approx(0.2))
    fork = judge(0, b"the cat", PLAIN, positions(0.1)[:2])
    assert fork is not None
    assert fork.judgement is Judgement.UNKNOWN


def test_leading_tokens_that_are_not_in_the_text_are_skipped() -> None:
    """Servers strip white space and control tokens from a chat's text."""
    lead = (Position(b"<|start|>", -0.1), Position(b"\n", -0.1))
    fork = judge(0, PLAIN, b"the dog", (*lead, *positions(0.2)))
    assert fork is not None
    assert (fork.token, fork.judgement) == (3, Judgement.TIE)


def test_plain_may_say_something_else_behind_the_fork() -> None:
    """It is not quite steady itself; what counts is that it came to the fork on the same way."""
    ran = Position(b" ran", -0.3, ((b" ran", -0.3), (b" sat", -0.4)))
    fork = judge(0, PLAIN, b"the dog sat", (*positions(0.2)[:2], ran))
    assert fork is not None
    assert (fork.token, fork.judgement) == (1, Judgement.TIE)


@pytest.mark.parametrize(
    "told",
    [
        (),
        (Position(b"another text", -0.1, ((b"a", -1.0),)),),
        (Position(b"the", -0.1), Position(b" cat", -0.1)),
        (Position(b"the", 0.0), Position(b" cat", -math.inf, ((b" dog", -1.0),))),
    ],
)
def test_without_usable_log_probabilities_it_is_unknown(told: tuple[Position, ...]) -> None:
    """Never a tie by default, never a fault without evidence."""
    fork = judge(0, PLAIN, b"the dog", told)
    assert fork is not None
    assert (fork.judgement, fork.gap) == (Judgement.UNKNOWN, None)
    assert fork.why


def fork(judgement: Judgement) -> Fork:
    return Fork(0, 0, 0, judgement)


@pytest.mark.parametrize(
    ("report", "verdict"),
    [
        (LaneReport("a", "ngram", texts=2), Verdict.SAME),
        (LaneReport("a", "ngram", texts=2, forks=(fork(Judgement.TIE),)), Verdict.TIES),
        (LaneReport("a", "ngram", 2, forks=(fork(Judgement.TIE), fork(Judgement.UNKNOWN))), Verdict.UNKNOWN),
        (LaneReport("a", "ngram", 2, forks=(fork(Judgement.UNKNOWN), fork(Judgement.FAULT))), Verdict.FAULT),
        (LaneReport("a", "ngram", failures=("no",)), Verdict.NOT_RUN),
        (LaneReport("a", "ngram", texts=1, failures=("no",)), Verdict.UNKNOWN),
        (LaneReport("a", "ngram", 1, failures=("no",), forks=(fork(Judgement.FAULT),)), Verdict.FAULT),
    ],
)
def test_the_worst_counts(report: LaneReport, verdict: Verdict) -> None:
    """One fault outweighs all; what could not be judged is never called good."""
    assert report.verdict is verdict


@pytest.mark.parametrize(
    ("noise", "tie_gap"), [(None, 0.5), (0.0, 0.5), (0.3, 0.5), (0.4, 0.6), (0.9, 1.0), (1.1, 0.5), (6.0, 0.5)]
)
def test_plains_noise_widens_the_gap_a_little(noise: float | None, tie_gap: float) -> None:
    """By half again, to twice the gap at most; beyond that plain itself is at fault."""
    assert calibrated(0.5, noise) == pytest.approx(tie_gap)


@pytest.mark.parametrize(
    ("gap", "at_least", "tie_gap", "judgement"),
    [
        (0.7, False, 1.0, Judgement.TIE),
        (0.7, False, 0.6, Judgement.FAULT),
        (0.7, True, 1.0, Judgement.UNKNOWN),
        (0.7, True, 0.6, Judgement.FAULT),
        (None, False, 1.0, Judgement.UNKNOWN),
    ],
)
def test_judging_again(gap: float | None, at_least: bool, tie_gap: float, judgement: Judgement) -> None:
    """By another gap; what was not told stays unknown."""
    fork = Fork(0, 1, 1, Judgement.UNKNOWN, gap, at_least)
    assert rejudged(fork, tie_gap).judgement is judgement
