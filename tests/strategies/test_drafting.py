"""What drafting on one kind of text tells about others, before they were tried."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from specproxy.records import LaneStatus, Situation, Strategy, TempBucket, Workload
from specproxy.strategies.cost import LaneFacts, drafted_tokens, log_prior
from specproxy.strategies.drafting import DraftPriors
from specproxy.strategies.learner import Learner, LearnerSettings
from specproxy.strategies.posterior import Belief
from tests.strategies.world import observe, ready

MTP, NGRAM = Strategy(("mtp",), 3), Strategy(("ngram",), 8)
CODE, POEM = ("code", "cool"), ("creative", "hot")
STORY = Workload("creative", TempBucket.HOT)
RECORD = Workload("json_schema", TempBucket.GREEDY)


def test_without_measurements_the_rules_of_thumb_stand() -> None:
    """The prior is the cost model's, drawn halfway to none."""
    priors = DraftPriors({})
    for strategy in (MTP, NGRAM, Strategy()):
        for cell in (CODE, POEM):
            assert priors.prior("lane", strategy, cell) == log_prior(strategy, None, *cell)


def test_measured_steps_speak_for_other_texts() -> None:
    """Steps of 2.5 plain ones pay on code and lose on poems, as the expected tokens of a step say."""
    priors = DraftPriors({})
    assert priors.learn_step("lane", Belief(math.log(2.5), 0.0025), 0.25)
    for cell in (CODE, POEM):
        tokens = drafted_tokens(MTP, None, *cell)
        assert tokens is not None
        assert priors.prior("lane", MTP, cell) == pytest.approx(math.log(2.5 / tokens), abs=0.1)
    assert priors.prior("lane", MTP, CODE) < 0.1 < 0.4 < priors.prior("lane", MTP, POEM)
    assert priors.prior("lane", NGRAM, CODE) == log_prior(NGRAM, None, *CODE), "its steps depend on the text"
    assert priors.prior("other", MTP, POEM) == log_prior(MTP, None, *POEM)


def test_what_is_hardly_measured_says_little() -> None:
    """As long as a step is as uncertain as before, the rules of thumb stand; small news changes nothing."""
    priors = DraftPriors({})
    assert not priors.learn_step("lane", Belief(1.0, 0.25), 0.25)
    assert priors.learn_step("lane", Belief(1.0, 0.05), 0.25)
    assert not priors.learn_step("lane", Belief(1.01, 0.05), 0.25)


def test_a_text_that_is_hard_to_guess_is_so_for_all_drafters() -> None:
    """Acceptance of one lane on a kind moves the prior of another there, and nowhere else."""
    priors = DraftPriors({})
    priors.learn_step("mtp", Belief(0.9, 0.001), 0.25)
    before = {cell: priors.prior("mtp", MTP, cell) for cell in (CODE, POEM)}
    assert priors.learn_text("draft", Strategy(("draft",), 3), CODE, 0.2, 120)
    assert priors.prior("mtp", MTP, CODE) > before[CODE] + 0.15
    assert priors.prior("mtp", MTP, POEM) == before[POEM]
    assert not priors.learn_text("ngram", NGRAM, CODE, 0.9, 120), "what n-grams find is another matter"


def test_what_plain_takes_is_part_of_the_rules() -> None:
    """On a fast target guesses weigh more; a tenth more or less is no news, and n-grams don't care."""
    priors = DraftPriors({})
    slow = [priors.prior("lane", strategy, CODE) for strategy in (MTP, NGRAM)]
    assert priors.learn_plain(math.log(1 / 200))
    fast = [priors.prior("lane", strategy, CODE) for strategy in (MTP, NGRAM)]
    assert fast == [pytest.approx(log_prior(MTP, None, *CODE, 1 / 200)), slow[1]]
    assert fast[0] > slow[0] + 0.05
    assert not priors.learn_plain(math.log(1.1 / 200))
    assert priors.learn_plain(math.log(1 / 30))
    assert slow[0] < priors.prior("lane", MTP, CODE) < slow[0] + 0.02


def test_plains_measured_speed_reaches_the_priors() -> None:
    """With the first request on plain; what follows from it is known again after a restart."""
    lanes = ready("plain", "mtp:3")
    for tpt, more in ((1 / 200, 0.08), (1 / 2000, 0.50), (1 / 20, 0.01)):
        learner = Learner()
        situation = Situation(Workload("code", TempBucket.COOL), lanes, at=9.0)
        before = learner.decide(situation, 0.5)[0].candidates[1].prior
        learner.learn_one(observe(lanes[0].lane, RECORD, tpt=tpt))
        after = learner.decide(situation, 0.5)[0].candidates[1].prior
        assert before is not None
        assert after is not None
        assert math.log(after / before) == pytest.approx(more, abs=0.01)
        again = Learner()
        again.load(json.loads(json.dumps(learner.dump())))
        assert again.decide(situation, 0.5)[0].candidates[1].prior == pytest.approx(after)


def test_another_build_starts_from_the_rules_again() -> None:
    """Forgetting a lane drops its steps, not what is known of texts."""
    priors = DraftPriors({"lane": LaneFacts()})
    priors.learn_step("lane", Belief(1.2, 0.001), 0.25)
    priors.forget("lane")
    assert priors.prior("lane", MTP, CODE) == log_prior(MTP, None, *CODE)


def test_state() -> None:
    """State survives JSON."""
    priors, other = DraftPriors({}), DraftPriors({})
    priors.learn_step("lane", Belief(1.2, 0.01), 0.25)
    priors.learn_text("lane", MTP, CODE, 0.3, 100)
    priors.learn_plain(math.log(1 / 150))
    other.restore(json.loads(json.dumps(priors.dump())))
    assert [other.prior("lane", MTP, c) for c in (CODE, POEM)] == [
        priors.prior("lane", MTP, c) for c in (CODE, POEM)
    ]
    assert other.plain_s == pytest.approx(1 / 150)


def taught(lanes: tuple[LaneStatus, ...], mtp: int = 0) -> Learner:
    """A learner that has seen plain on poems, and so many JSON requests on MTP, 80% accepted at 2.6 a step."""
    learner = Learner()
    for i in range(3):
        learner.learn_one(observe(lanes[0].lane, STORY, at=float(i)))
        learner.learn_one(observe(lanes[0].lane, RECORD, at=float(i)))
    for i in range(mtp):
        more = {"draft_tokens": 130, "accepted_tokens": 105}
        learner.learn_one(observe(lanes[1].lane, RECORD, tpt=0.02 * 2.6 * 44 / 149, at=3.0 + i, **more))
    return learner


def test_a_lane_shows_first_where_it_should_win() -> None:
    """A lane that never ran is not tried on the first ten poems, but on JSON."""
    lanes = ready("plain", "mtp:3")
    learner = taught(lanes)
    poem, record = (learner.decide(Situation(w, lanes, at=9.0), 0.5)[0] for w in (STORY, RECORD))
    [note] = [c.note for c in poem.candidates if c.strategy == "mtp"]
    assert note == "to be tried first where it is expected to be faster"
    assert next(c.allowed for c in record.candidates if c.strategy == "mtp")
    for i in range(10):
        learner.learn_one(observe(lanes[0].lane, STORY, at=10.0 + i))
    later = learner.decide(Situation(STORY, lanes, at=30.0), 0.5)[0]
    assert next(c.allowed for c in later.candidates if c.strategy == "mtp")


def test_timed_steps_keep_a_lane_from_where_they_must_lose() -> None:
    """After two requests on JSON it is known that poems at temperature 1 would take far longer."""
    lanes = ready("plain", "mtp:3")
    before, after = (taught(lanes, n).decide(Situation(STORY, lanes, at=9.0), 0.5)[0] for n in (0, 2))
    ratios = [next(c.ratio for c in d.candidates if c.strategy == "mtp") for d in (before, after)]
    assert ratios[0] < 1.4
    assert ratios[1] > 1.5
    assert next(c.note for c in after.candidates if c.strategy == "mtp") == "held back by the gate"


def test_a_target_with_one_kind_of_traffic_finds_out_all_the_same() -> None:
    """Where drafting wins against expectation, and there is nothing else to show on, it is found to win."""
    rng, learner = np.random.default_rng(3), Learner(LearnerSettings())
    lanes = ready("plain", "mtp:3")
    chosen = []
    for i in range(60):
        decision = learner.choose(Situation(STORY, lanes, at=10.0 * i, request_id=str(i)), rng)
        ratio = 0.6 if decision.lane.strategy.drafters else 1.0
        chosen.append(decision.lane.id)
        learner.learn_one(observe(decision, STORY, tpt=0.02 * ratio, at=10.0 * i + 5.0, request_id=str(i)))
    assert chosen[-20:].count("mtp:3") >= 18
