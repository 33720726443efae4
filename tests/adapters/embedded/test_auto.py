"""`auto` on simulated text: known costs and chances give the known best choice, and regret stays small."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from specproxy.adapters.embedded.auto import AutoController
from specproxy.adapters.embedded.controller import (
    PLAIN,
    Controller,
    FixedController,
    Plan,
    StepOutcome,
    StepView,
)
from specproxy.adapters.embedded.costs import CURVE, GUESS, StepCosts
from specproxy.adapters.embedded.regimes import FALL, LEVELS
from specproxy.records import EnginePriors

PLAIN_S = 0.02
LIMITS = {"ngram": 8, "mtp": 3, "draft": 3}
Chances = dict[str, float]


def seconds(width: int, steepness: float = 1.0) -> float:
    """What the simulated machine takes for a decode."""
    for (w0, c0), (w1, c1) in pairwise(CURVE):
        if width <= w1:
            return PLAIN_S * (1 + steepness * (c0 + (c1 - c0) * (width - w0) / (w1 - w0) - 1))
    raise ValueError(width)


@dataclass
class Text:
    """Tokens and who guesses them: `chances` by drafter, drawn for each token beforehand."""

    right: list[dict[str, bool]] = field(default_factory=list)
    matches: list[int] = field(default_factory=list)

    def add(self, count: int, chances: Chances, *, match: int = 0, seed: int = 0) -> Text:
        """More text of one kind, over which n-grams match `match` tokens."""
        rng = random.Random(f"{seed} {len(self.right)}")
        self.right += [{name: rng.random() < p for name, p in chances.items()} for _ in range(count)]
        self.matches += [match] * count
        return self


@dataclass
class Run:
    """How a controller got through a text."""

    seconds: float
    steps: Counter[Plan]

    @property
    def drafters(self) -> Counter[str]:
        """Steps by drafter."""
        counts: Counter[str] = Counter()
        for plan, n in self.steps.items():
            counts[plan.drafter] += n
        return counts


def run(
    text: Text,
    controller: Controller,
    *,
    ready: Sequence[str] = ("ngram", "mtp"),
    limits: dict[str, int] | None = None,
    steepness: float = 1.0,
) -> Run:
    """Decode the text as the engine would."""
    at, spent, steps = 0, 0.0, Counter[Plan]()
    while at < len(text.right):
        room = len(text.right) - at - 1
        match = text.matches[at] if "ngram" in ready else 0
        plan = PLAIN
        if room and (match or not controller.rests(1)):
            plan = controller.plan(StepView(tuple(ready), match, limits or LIMITS, room, at))
        hits = 0
        while hits < plan.length and text.right[at + hits].get(plan.drafter):
            hits += 1
        new = hits + 1
        agreed = 0
        while match and agreed < min(new, LIMITS["ngram"]) and text.right[at + agreed].get("ngram"):
            agreed += 1
        drafting = plan.length * PLAIN_S * GUESS.get(plan.drafter, 0.0)
        took = seconds(1 + plan.length, steepness) + drafting
        copied = min(LIMITS["ngram"], new) if match else 0
        if isinstance(controller, AutoController):
            controller.costs.decoded(1 + plan.length, took - drafting)
            controller.costs.guessed(plan.drafter, plan.length if drafting else 0, drafting)
        outcome = StepOutcome(plan, match, plan.length, hits, took, drafting, copied, agreed)
        controller.learn(outcome._replace(proposed=plan.length))
        steps[plan] += 1
        spent += took
        at += new
    return Run(spent, steps)


def auto(costs: StepCosts | None = None, priors: EnginePriors | None = None) -> AutoController:
    return AutoController(costs or StepCosts(), 3, priors)


def best_fixed(text: Text, steepness: float = 1.0) -> float:
    """The fastest of all fixed strategies and lengths, in hindsight."""
    spent = [run(text, FixedController(), ready=(), steepness=steepness).seconds]
    for name in ("ngram", "mtp"):
        for length in range(1, LIMITS[name] + 1):
            fixed = FixedController()
            spent.append(run(text, fixed, ready=(name,), limits={name: length}, steepness=steepness).seconds)
    return min(spent)


KINDS: dict[str, Callable[[int], Text]] = {
    "json": lambda seed: Text().add(600, {"mtp": 0.95}, seed=seed),
    "code": lambda seed: Text().add(600, {"mtp": 0.65}, seed=seed),
    "prose": lambda seed: Text().add(600, {"mtp": 0.4}, seed=seed),
    "creative": lambda seed: Text().add(600, {"mtp": 0.15}, seed=seed),
    "edit": lambda seed: Text().add(600, {"mtp": 0.6, "ngram": 0.97}, match=12, seed=seed),
    "misleading": lambda seed: Text().add(600, {"mtp": 0.3, "ngram": 0.15}, match=4, seed=seed),
}


@pytest.mark.parametrize("kind", KINDS)
def test_close_to_the_best_fixed_choice_on_every_kind(kind: str) -> None:
    """Over ten requests of one kind, on a machine whose costs are learnt on the way."""
    costs = StepCosts()
    texts = [KINDS[kind](seed) for seed in range(10)]
    spent = sum(run(text, auto(costs)).seconds for text in texts)
    assert sum(best_fixed(text) for text in texts) / spent >= 0.96


def test_better_than_any_fixed_choice_on_mixed_text() -> None:
    """A kind every hundred tokens: copies, good guesses, bad guesses."""

    def mixed(seed: int) -> Text:
        text = Text()
        for _ in range(3):
            text.add(120, {"mtp": 0.2}, seed=seed)
            text.add(120, {"mtp": 0.95}, seed=seed)
            text.add(120, {"mtp": 0.5, "ngram": 0.97}, match=12, seed=seed)
        return text

    costs = StepCosts()
    texts = [mixed(seed) for seed in range(8)]
    spent = sum(run(text, auto(costs)).seconds for text in texts)
    assert sum(best_fixed(text) for text in texts) / spent >= 1.05


def measured(steepness: float = 1.0) -> StepCosts:
    """As after a profile."""
    costs = StepCosts()
    for width in (1, 2, 3, 4, 5, 6, 8, 12, 16):
        for _ in range(10):
            costs.decoded(width, seconds(width, steepness))
    for name, guess in GUESS.items():
        for _ in range(10):
            costs.guessed(name, 1, guess * PLAIN_S)
    return costs


def sure_of(level: int, steepness: float = 1.0) -> AutoController:
    """A controller that is certain of the head's chance: a level's, falling a little by position."""
    given = tuple((LEVELS[level] * FALL**i * 1e6, 1e6) for i in range(3))
    weights = tuple(1e6 * (i == level) for i in range(len(LEVELS)))
    priors = EnginePriors("r", "w", acceptance={"mtp": given}, levels={"mtp": weights})
    controller = AutoController(measured(steepness), 3, priors)
    for _ in range(60):  # the priors' own doubt is outvoted
        controller._guesses["mtp"]._targets[level] += 1e6
        controller._guesses["mtp"].step(1000)
    return controller


def tokens_of(length: int, level: int) -> float:
    """By the textbook: what a step with a draft of this length is expected to give."""
    tokens, right = 1.0, 1.0
    for position in range(length):
        right *= LEVELS[level] * FALL**position
        tokens += right
    return tokens


def rate(length: int, level: int, steepness: float, others: tuple[int, float] = (0, 0.0)) -> float:
    """Expected tokens a second of a batch in which others feed some tokens and are to get some."""
    took = seconds(1 + others[0] + length, steepness) + length * GUESS["mtp"] * PLAIN_S
    return (others[1] + tokens_of(length, level)) / took


@pytest.mark.parametrize("steepness", [0.6, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("level", range(len(LEVELS)))
def test_known_costs_and_chances_give_the_known_best_choice(level: int, steepness: float) -> None:
    """The best of all lengths, nothing where none pays."""
    plan = sure_of(level, steepness).plan(StepView(("mtp",), 0, {"mtp": 6}, 50, 0))
    best = max(rate(length, level, steepness) for length in range(7))
    assert rate(plan.length, level, steepness) >= best / 1.02
    assert plan.expected == pytest.approx(tokens_of(plan.length, level), rel=0.03)


@pytest.mark.parametrize("others", [(3, 3.0), (6, 2.5), (9, 9.0), (9, 3.0)])
@pytest.mark.parametrize("level", range(3, len(LEVELS)))
def test_the_best_choice_is_the_best_for_the_batch_as_a_whole(level: int, others: tuple[int, float]) -> None:
    """Where others get much of every second guesses are dear; where theirs are in vain they are cheap."""
    width, tokens = others
    view = StepView(("mtp",), 0, {"mtp": 6}, 50, 0, streams=4, others_width=width, others_tokens=tokens)
    plan = sure_of(level).plan(view)
    best = max(rate(length, level, 1.0, others) for length in range(6))
    assert rate(plan.length, level, 1.0, others) >= best / 1.01


def taught(kind: Callable[[int], Text], costs: StepCosts, requests: int) -> tuple[float, float]:
    """Seconds of auto and of the best fixed choice, on requests whose predecessors taught what they showed."""
    levels: dict[str, list[float]] = {}
    spent = best = 0.0
    for seed in range(2 * requests):
        known = {name: tuple(seen) for name, seen in levels.items()}
        controller = auto(costs, EnginePriors("r", "w", levels=known))
        took = run(kind(seed), controller).seconds
        for name, seen in controller.levels().items():
            before = levels.get(name, [0.0] * len(seen))
            levels[name] = [0.9 * a + b for a, b in zip(before, seen, strict=True)]
        if seed >= requests:
            spent += took
            best += best_fixed(kind(seed))
    return spent, best


@pytest.mark.parametrize("kind", KINDS)
def test_what_earlier_requests_taught_leaves_little_regret(kind: str) -> None:
    spent, best = taught(KINDS[kind], measured(), 4)
    assert best / spent >= 0.97


def test_stretches_of_forty_tokens_are_followed() -> None:
    """Prose, JSON, prose, an edit: faster than any choice for the whole request."""

    def mixed(seed: int) -> Text:
        text = Text()
        for _ in range(2):
            text.add(40, {"mtp": 0.3}, seed=seed).add(40, {"mtp": 0.95}, seed=seed)
            text.add(40, {"mtp": 0.3}, seed=seed)
            text.add(40, {"mtp": 0.6, "ngram": 0.97}, match=12, seed=seed)
        return text

    spent, best = taught(mixed, measured(), 4)
    assert best / spent >= 1.05


def test_a_chain_goes_on_behind_what_is_free() -> None:
    """A good head goes on behind forced tokens in the same step, unless its guesses are dear."""
    given = tuple((97.0, 100.0) for _ in range(3))
    plans = []
    for guess in (0.01, 1.0):
        costs = measured()
        for _ in range(200):
            costs.guessed("mtp", 1, guess * PLAIN_S)
        controller = AutoController(costs, 3, EnginePriors("r", "w", acceptance={"mtp": given}))
        for _ in range(20):  # which have been spelt as expected
            controller.learn(StepOutcome(PLAIN, 0, 0, 0, PLAIN_S, forced=3, shown=3, followed=3))
        plans.append(controller.plan(StepView(("mtp",), 0, LIMITS, 50, 0, forced=3)))
    assert [plan.label for plan in plans] == ["forced:3>mtp:3", "forced:3"]
    assert [plan.expected for plan in plans] == [pytest.approx(6.4, abs=0.1), pytest.approx(4, abs=0.05)]


def test_behind_what_may_be_wrong_a_chain_is_worth_less() -> None:
    """Of four forced tokens two come otherwise each time: a good head that begins by itself gets further."""
    given = tuple((97.0, 100.0) for _ in range(3))
    costs = measured()
    for _ in range(200):
        costs.guessed("mtp", 1, 0.01 * PLAIN_S)
    controller = AutoController(costs, 3, EnginePriors("r", "w", acceptance={"mtp": given}))
    for _ in range(30):
        controller.learn(StepOutcome(PLAIN, 0, 0, 0, PLAIN_S, forced=4, shown=4, followed=2))
        controller.learn(StepOutcome(PLAIN, 0, 0, 0, PLAIN_S))
    assert controller.plan(StepView(("mtp",), 0, LIMITS, 50, 0, forced=4)).label == "mtp:3"


def test_chains_and_drafts_stay_within_the_room() -> None:
    """Lead and drafter together; at the very end of a text the last token comes of itself."""
    given = tuple((97.0, 100.0) for _ in range(3))
    for room in range(1, 7):
        costs = measured()
        for _ in range(200):
            costs.guessed("mtp", 1, 0.01 * PLAIN_S)
        controller = AutoController(costs, 3, EnginePriors("r", "w", acceptance={"mtp": given}))
        for _ in range(20):
            controller.learn(StepOutcome(PLAIN, 0, 0, 0, PLAIN_S, forced=3, shown=3, followed=3))
        plan = controller.plan(StepView(("mtp",), 0, LIMITS, room, 0, forced=3))
        assert 1 <= plan.total <= room
        assert (plan.lead_length > 0) == (room > 3)


def test_a_drafter_that_lags_behind_has_to_be_worth_catching_up_with() -> None:
    """A draft model that has a thousand tokens to go through is not asked for a small gain."""
    priors = EnginePriors(
        "r", "w", acceptance={"draft": ((50.0, 100.0),)}, levels={"draft": (0, 0, 0, 40.0, 0, 0, 0, 0)}
    )
    plans = [
        AutoController(measured(), 3, priors).plan(StepView(("draft",), 0, LIMITS, 50, 0, late={"draft": late}))
        for late in (1, 1000)
    ]
    assert plans[0].drafter == "draft"
    assert plans[1] == PLAIN


def test_why_nothing_is_drafted_is_said() -> None:
    controller = AutoController(measured(5.0), 3)
    run(Text().add(200, {"mtp": 0.3}), controller, steepness=5.0)
    said = controller.explain()
    assert "ngram finds nothing to copy" in said
    assert "mtp would give 0." in said
    good = auto()
    run(Text().add(200, {"mtp": 1.0}), good)
    assert "mtp" not in good.explain()


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.8])
def test_hardly_slower_than_plain_where_drafting_never_pays(chance: float) -> None:
    """As on a fast model of many experts: each further token costs as much as the first."""
    costs = StepCosts()
    texts = [Text().add(500, {"mtp": chance}, seed=seed) for seed in range(8)]
    spent = sum(run(text, auto(costs), steepness=5.0).seconds for text in texts)
    plain = sum(run(text, FixedController(), ready=(), steepness=5.0).seconds for text in texts)
    assert plain / spent >= 0.98


def test_a_plain_step_that_was_thought_over_is_not_thought_over_at_once() -> None:
    """Planning costs a share of a fast model's step; a copy that turns up is looked at all the same."""
    controller = AutoController(measured(5.0), 3)
    view = StepView(("ngram",), 0, LIMITS, 50, 9)
    asked = 0
    for _ in range(40):
        assert not controller.rests(2), "others beside it may change what pays"
        if not controller.rests(1):
            asked += 1
            assert controller.plan(view) == PLAIN
        controller.learn(StepOutcome(PLAIN, 0, 0, 0, PLAIN_S))
    assert 1 < asked <= 10
    for _ in range(2):
        assert controller.plan(view._replace(match_length=16)).drafter == "ngram"


def test_a_trial_counts_what_the_drafter_has_to_catch_up_with() -> None:
    """A drafter that lags behind has to go through the text for a single guess; the longer, the rarer."""
    tried = []
    for late in (1, 200):
        controller = AutoController(measured(5.0), 3)
        plans = []
        for step in range(200):
            plans.append(controller.plan(StepView(("mtp",), 0, LIMITS, 50, step, late={"mtp": late})))
            done = plans[-1].length
            controller.learn(StepOutcome(plans[-1], 0, done, 0, PLAIN_S, proposed=done))
        tried.append(sum(plan.length > 0 for plan in plans))
    assert 0 < tried[0] <= 8
    assert tried[1] == 0, "all of what it has to go through counts, not what is spread over later guesses"


@pytest.mark.parametrize(
    ("guess", "steepness", "chance", "kept"), [(0.12, 1.0, 0.5, True), (0.12, 5.0, 0.4, False)]
)
def test_a_head_is_kept_in_step_where_it_may_gain_more_than_that_takes(
    guess: float, steepness: float, chance: float, kept: bool
) -> None:
    """On a fast model of many experts keeping up takes some percent of every step, for nothing."""
    priors = EnginePriors("r", "w", acceptance={"mtp": ((100 * chance, 100.0),)})
    controller = AutoController(measured(steepness), 3, priors)
    assert controller.keeps("mtp")  # nothing is known of the text
    view = StepView(("mtp",), 0, LIMITS, 50, 9, late={"mtp": 200})
    for _ in range(9):
        plan = controller.plan(view)
        controller.learn(StepOutcome(plan, 0, plan.length, 0, PLAIN_S, proposed=plan.length))
    controller.costs.guessed("mtp", 1, guess * PLAIN_S * (1 + 0.2 * 199), late=200)
    controller.plan(view)
    assert controller.keeps("mtp") is kept


def test_what_is_unknown_of_a_workload_is_tried_as_a_request_begins() -> None:
    """While little has to be caught up with; short requests that are well served would never find out else."""
    levels = {"draft": (0, 0, 0, 0, 0, 99, 0, 0)}
    priors = EnginePriors("r", "w", acceptance={"draft": ((80.0, 100.0),)}, levels=levels)
    tried = []
    for known in (0.0, 50.0):  # guesses of the other, as good as expected
        given = dict(priors.acceptance) | ({"mtp": ((0.65 * known, known),)} if known else {})
        controller = AutoController(measured(), 3, replace(priors, acceptance=given))
        plans = []
        for step in range(5):
            plan = controller.plan(StepView(("mtp", "draft"), 0, LIMITS, 50, step))
            plans.append(plan.drafter)
            hits = plan.length if plan.drafter == "draft" else 0
            controller.learn(StepOutcome(plan, 0, plan.length, hits, PLAIN_S, proposed=plan.length))
        tried.append(plans.count("mtp"))
    assert tried == [1, 0]


def test_a_head_that_is_not_worth_keeping_is_not_thought_over_at_every_token() -> None:
    """It is asked for after every step, and the answer takes as long as a plan; later it may be another one."""
    priors = EnginePriors("r", "w", acceptance={"mtp": ((40.0, 100.0),)})
    controller = AutoController(measured(5.0), 3, priors)
    view = StepView(("mtp",), 0, LIMITS, 50, 0, late={"mtp": 200})
    looked = []
    options = controller._options
    controller._options = lambda view: looked.append(view) or options(view)  # type: ignore[func-returns-value,method-assign]  # listens in
    kept = []
    for position in range(100):
        controller._view = view._replace(position=position)
        kept.append(controller.keeps("mtp"))
    assert not any(kept)
    assert 2 <= len(looked) <= 4


def test_a_trial_that_went_well_is_repeated_at_once() -> None:
    """Good guesses are found within some steps; bad ones cost few."""
    found = []
    for truth in (0, 1):
        controller = AutoController(measured(2.5), 3, EnginePriors("r", "w", {"mtp": ((0.3, 1.0),)}))
        used = 0
        for step in range(300):
            plan = controller.plan(StepView(("mtp",), 0, LIMITS, 50, step))
            hits = truth * plan.length
            used += plan.length > 0
            controller.learn(StepOutcome(plan, 0, plan.length, hits, PLAIN_S, proposed=plan.length))
        found.append(used)
    assert found[0] <= 12
    assert found[1] >= 150


@pytest.mark.parametrize(("belief", "truth"), [(0.95, 0.1), (0.1, 0.95)])
def test_wrong_priors_are_overcome_within_two_hundred_tokens(belief: float, truth: float) -> None:
    """Whatever the learner was sure of, what comes after the first two hundred tokens goes as without it."""
    priors = EnginePriors("r", "w", acceptance={"mtp": tuple((1000 * belief, 1000.0) for _ in range(3))})
    misled = auto(priors=priors)
    run(Text().add(200, {"mtp": truth}), misled)
    later = Text().add(300, {"mtp": truth}, seed=9)
    assert best_fixed(later) / run(later, misled).seconds >= 0.95


def test_short_requests_save_up_for_a_trial() -> None:
    """Where the learner was unlucky a drafter is tried again, though no request is long enough by itself."""
    levels = (0, 5.0, 5.0, 0, 0, 0, 0, 0)
    tried = []
    for steps in (0.0, 2000.0):
        unlucky = {"mtp": ((3.0, 10.0),)}
        priors = EnginePriors("r", "w", unlucky, levels={"mtp": levels}, steps=steps, last_used={"mtp": 10.0})
        controller = AutoController(measured(2.5), 3, priors)
        plans = []
        for step in range(20):
            plans.append(controller.plan(StepView(("mtp",), 0, LIMITS, 50, step)))
            length = plans[-1].length
            controller.learn(StepOutcome(plans[-1], 0, length, 0, PLAIN_S, proposed=length))
        tried.append(sum(plan.length > 0 for plan in plans))
    assert tried == [0, 1]


def test_good_priors_save_finding_out() -> None:
    """On short text whose drafts are useless."""
    priors = EnginePriors("r", "w", acceptance={"mtp": tuple((5.0, 50.0) for _ in range(3))})
    text = Text().add(60, {"mtp": 0.1})
    assert run(text, auto(priors=priors)).seconds < run(text, auto()).seconds


def test_a_staircase_makes_no_thrash() -> None:
    """Where two plans are equally good, one is kept: without hysteresis the length changes 27 times."""
    controller = auto(measured())
    text = Text().add(1500, {"mtp": 0.55})
    plans: list[Plan] = []
    plan = controller.plan

    def noting(view: StepView) -> Plan:
        plans.append(plan(view))
        return plans[-1]

    controller.plan = noting  # type: ignore[method-assign]  # listens in
    run(text, controller)
    assert sum(a != b for a, b in pairwise(plans)) <= 9


def test_trials_become_rare_while_they_fail() -> None:
    """And a drafter that has become good is found again."""
    controller = auto()
    bad = run(Text().add(1000, {"mtp": 0.05}), controller)
    assert bad.drafters["mtp"] < 60
    good = run(Text().add(600, {"mtp": 1.0}), controller)
    assert good.drafters["mtp"] > 0.4 * good.steps.total()


def test_copies_are_learnt_without_using_them() -> None:
    """A plain step shows whether the copy's first token was right."""
    controller = auto()
    controller.costs.decoded(1, PLAIN_S)
    for _ in range(30):
        controller.learn(StepOutcome(PLAIN, 12, 0, 0, PLAIN_S, copied=1, agreed=0))
    view = StepView(("ngram",), 12, LIMITS, 50, 30)
    assert controller.plan(view) == PLAIN
    for _ in range(60):
        controller.learn(StepOutcome(PLAIN, 12, 0, 0, PLAIN_S, copied=1, agreed=1))
    assert controller.plan(view).drafter == "ngram"


def test_a_copy_is_followed_as_far_as_matches_of_its_length_were_right() -> None:
    """Every right token makes the match longer; where longer ones are accidents, the draft ends before them."""
    controller = auto(measured())
    for _ in range(20):
        controller.learn(StepOutcome(Plan("ngram", 8), 3, 8, 8, PLAIN_S, copied=8, agreed=8, proposed=8))
    view = StepView(("ngram",), 3, LIMITS, 50, 90)
    assert controller.plan(view).length == LIMITS["ngram"]
    for _ in range(40):
        controller.learn(StepOutcome(PLAIN, 6, 0, 0, PLAIN_S, copied=1, agreed=0))
    assert controller.plan(view).length < 5


def test_forced_tokens_are_doubted_within_a_word_that_was_spelt_otherwise() -> None:
    """Behind ``t`` in place of ``tracking`` the rest of the word may be cut anywhere; a new key is believed."""
    controller = AutoController(measured(3.0), 3)
    view = StepView((), 0, {}, 50, 10, forced=4)
    for _ in range(6):
        controller.learn(StepOutcome(PLAIN, 0, 0, 0, PLAIN_S, forced=4, shown=1, followed=0))
        broken = controller.plan(view)
        controller.learn(StepOutcome(PLAIN, 0, 0, 0, PLAIN_S, forced=3, shown=1, followed=0))
        controller.learn(StepOutcome(PLAIN, 0, 0, 0, PLAIN_S))
        for _ in range(4):
            controller.learn(StepOutcome(PLAIN, 0, 0, 0, PLAIN_S, forced=4, shown=4, followed=4))
    assert broken == PLAIN
    assert controller.plan(view).drafter == "forced"


def test_the_end_of_a_text_is_no_reason_to_stop() -> None:
    """The last token leaves no room for a draft, and nothing is planned."""
    controller = auto(measured())
    run(Text().add(200, {"mtp": 1.0}), controller)
    assert controller._last.drafter == "mtp"
    controller.learn(StepOutcome(PLAIN, 0, 0, 0, PLAIN_S))
    assert controller.explain() == ""


def test_a_million_steps_leave_the_controller_sound() -> None:
    """Counts stay bounded and chances true, whatever is learnt for ever; a change is followed afterwards."""
    controller = auto(measured())
    rng = random.Random(3)
    for i in range(4000):  # of 250 steps each, as far as forgetting goes
        for regimes in controller._guesses.values():
            regimes.step(249)
        controller._copies.fade(0.995**249)
        hits = 2 if rng.random() < 0.81 else int(rng.random() < 0.47)
        plan = Plan("mtp", 2)
        controller.learn(StepOutcome(plan, 0, 2, hits, PLAIN_S, proposed=2, copied=1, agreed=i % 2))
    right = controller._guesses["mtp"].rights(2)
    assert right[0] == pytest.approx(0.9, abs=0.08)
    assert right[1] == pytest.approx(0.81, abs=0.1)
    assert sum(controller._guesses["mtp"]._targets) < 500
    assert controller.plan(StepView(("mtp",), 0, LIMITS, 50, 0)).drafter == "mtp"
    for _ in range(40):
        controller.learn(StepOutcome(Plan("mtp", 2), 0, 2, 0, PLAIN_S, proposed=2))
    assert controller.plan(StepView(("mtp",), 0, LIMITS, 50, 0)) == PLAIN


def test_planning_has_no_side_effects_and_keeps_limits() -> None:
    """Asking twice gives the same; nothing longer than limits and room; nobody who is not ready."""
    controller = auto()
    for room in (0, 1, 2, 50):
        for ready in ((), ("mtp",), ("ngram",), ("ngram", "mtp", "draft")):
            view = StepView(ready, 0, LIMITS, room, 3)
            plan = controller.plan(view)
            assert controller.plan(view) == plan
            assert plan.length <= room
            assert plan == PLAIN or (plan.drafter in ready and plan.drafter != "ngram")


def test_many_streams_make_drafts_shorter() -> None:
    """The batch is wide already, and each guess makes all wait."""
    lengths = []
    for streams in (1, 8):
        controller = auto()
        run(Text().add(200, {"mtp": 0.62}), controller)
        lengths.append(controller.plan(StepView(("mtp",), 0, LIMITS, 50, 200, streams=streams)).length)
    assert lengths[1] <= lengths[0]
