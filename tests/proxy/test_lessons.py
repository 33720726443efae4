"""Lessons of replays as texts: they come back as they went, and damage is refused."""

from __future__ import annotations

import json

import pytest

from specproxy.proxy.lessons import Lesson
from specproxy.strategies.drafters.ngram_simple import NgramSimpleDrafter
from specproxy.strategies.learner import Learner
from specproxy.strategies.replay import replay
from tests.proxy.samples import NGRAM, PLAIN, observation

RESULT = replay([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 1, 2, 3, 9, 1, 2, 3, 4], NgramSimpleDrafter(3, 8), 8)
LESSON = Lesson(NGRAM, RESULT, "tokens")


def test_a_lesson_comes_back_as_it_went() -> None:
    """The counts, the source, and of the lane what learning looks at."""
    back = Lesson.from_text(LESSON.to_text())
    assert (back.result, back.source) == (RESULT, "tokens")
    lane = back.lane
    assert (lane.id, lane.target, lane.fingerprint, lane.strategy) == (
        NGRAM.id,
        NGRAM.target,
        NGRAM.fingerprint,
        NGRAM.strategy,
    )


def test_it_teaches_what_the_original_teaches() -> None:
    """To the last bit, on a request that ran elsewhere and on one of that very lane."""
    for lane in (PLAIN, NGRAM):
        learners = Learner(), Learner()
        for learner, lesson in zip(learners, (LESSON, Lesson.from_text(LESSON.to_text())), strict=True):
            seen = observation(lane)
            learner.learn_one(seen)
            learner.learn_replay(lesson.lane, seen, lesson.result, lesson.source)
        assert learners[0].dump() == learners[1].dump()
        untaught = Learner()
        untaught.learn_one(observation(lane))
        assert learners[0].dump() != untaught.dump()


@pytest.mark.parametrize(
    "changes",
    [{"lane": ["n", "t", "f", 3, None]}, {"lane": None}, {"source": 1}, {"steps": -1}, {"steps": True},
     {"steps": 1e3}, {"widths": [1, "x"]}, {"by_match": [[1]]}, {"by_match": 4}, {"more": 5}],
)  # fmt: skip
def test_damage_is_refused(changes: dict[str, object]) -> None:
    """A value of another kind, a count that is none, and what this version does not know."""
    with pytest.raises(ValueError, match=r".+"):
        Lesson.from_text(json.dumps(json.loads(LESSON.to_text()) | changes))


@pytest.mark.parametrize("text", ["", "[]", "1", "{", "[" * 100_000])
def test_what_is_no_lesson_is_refused(text: str) -> None:
    """Whatever a store gives back."""
    with pytest.raises(ValueError, match=r".+"):
        Lesson.from_text(text)
