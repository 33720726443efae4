"""Routing without sockets: which lanes a request may use, and the one Observation that comes of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from specproxy.adapters.fake import FakeBackend
from specproxy.errors import LaneUnavailable, RequestError, UpstreamClosed
from specproxy.proxy.router import Router
from specproxy.proxy.tap import ReplyFacts
from specproxy.records import (
    Control,
    Decision,
    Dialect,
    Health,
    Lane,
    Observation,
    Outcome,
    OutputForm,
    RequestFacts,
    TimingSource,
    Turn,
)
from specproxy.strategies.rules import alone
from tests.support.proxy import ScriptedPolicy, lane

FACTS = RequestFacts(Dialect.OPENAI_CHAT, model="m", turns=(Turn("user", "hello there"),))


class Setup:
    """A router over backends, and what its listeners heard."""

    def __init__(self, *backends: FakeBackend, wanted: str = "plain", **options: Any) -> None:
        self.policy = ScriptedPolicy(wanted)
        given: dict[str, Any] = {"rng": np.random.default_rng(1), "wall": lambda: 1000.0} | options
        self.router = Router(backends, self.policy, **given)
        self.seen: list[Observation] = []
        self.decisions: list[Decision | None] = []
        self.router.on_observation(lambda seen, _: self.seen.append(seen))
        self.router.on_observation(lambda _, decision: self.decisions.append(decision))


def backend(name: str, *lanes: Lane) -> FakeBackend:
    return FakeBackend(name, lanes or [lane(name), lane(name, "ngram"), lane(name, "mtp")])


# --- in a hurry ----------------------------------------------------------------------------------


def test_in_a_hurry_the_only_lane_is_settled_later() -> None:
    """The policy hears of the request afterwards, as it was when it came, and once; so does the memory."""
    setup = Setup(backend("a", lane("a")), alone=alone)
    ticket = setup.router.route(FACTS, pin=None, now=0.0, hurry=True)
    setup.router.route(FACTS, pin=None, now=0.0, hurry=True)
    assert (ticket.decision.rule, ticket.repeat, setup.policy.situations) == ("only", False, [])
    setup.router.settle(ticket)
    setup.router.settle(ticket)
    assert [(s.in_flight, s.request_id) for s in setup.policy.situations] == [(1, ticket.id)]
    assert ticket.unsettled is None
    assert (ticket.decision.rule, ticket.prompt_tokens) == ("scripted", 2)


def test_a_request_is_settled_when_it_ends_at_the_latest() -> None:
    """So that its Observation has all, and the next one knows it for a repetition."""
    setup = Setup(backend("a", lane("a")), alone=alone)
    for _ in range(2):
        ticket = setup.router.route(FACTS, pin=None, now=0.0, hurry=True)
        setup.router.finish(ticket, Outcome.COMPLETE, now=1.0)
    assert [seen.repeat for seen in setup.seen] == [False, True]
    assert [decision is not None and decision.rule for decision in setup.decisions] == ["scripted"] * 2


@pytest.mark.parametrize(
    ("strategies", "pin", "options"),
    [
        (("plain", "ngram"), None, {"alone": alone}),
        (("plain",), "plain", {"alone": alone}),
        (("plain",), None, {}),
    ],
    ids=["a choice", "a pin", "a policy that wants to be asked"],
)
def test_what_the_policy_has_to_say_something_about_is_not_hurried(
    strategies: tuple[str, ...], pin: str | None, options: dict[str, Any]
) -> None:
    """It is asked before anything is sent."""
    setup = Setup(backend("a", *(lane("a", name) for name in strategies)), **options)
    ticket = setup.router.route(FACTS, pin=pin, now=0.0, hurry=True)
    assert (ticket.unsettled, len(setup.policy.situations)) == (None, 1)


# --- which lanes ---------------------------------------------------------------------------------


def test_lanes_of_the_models_target_only() -> None:
    """A request sees the lanes that name its model, not those of other targets."""
    small = lane("a", target="small", models=frozenset({"small", "s"}))
    large = [lane("b", s, target="large", models=frozenset({"large"})) for s in ("plain", "ngram")]
    setup = Setup(backend("a", small), backend("b", *large))
    for model, expected in (("large", ["b/plain", "b/ngram"]), ("s", ["a/plain"])):
        setup.router.route(dataclasses.replace(FACTS, model=model), pin=None, now=0.0)
        assert [s.lane.id for s in setup.policy.situations[-1].lanes] == expected


def test_lanes_that_name_a_model_come_before_those_that_take_any() -> None:
    """A server that takes any name does not get what another one names."""
    setup = Setup(backend("any", lane("any", target="t")), backend("b", lane("b", models=frozenset({"m"}))))
    assert setup.router.route(FACTS, pin=None, now=0.0).lane.id == "b/plain"
    other = setup.router.route(dataclasses.replace(FACTS, model="x"), pin=None, now=0.0)
    assert other.lane.id == "any/plain"


def test_a_request_without_a_model_goes_to_the_first_target() -> None:
    """llama-server does not need a name."""
    setup = Setup(backend("a", lane("a", models=frozenset({"m"}))), backend("b"))
    assert setup.router.route(dataclasses.replace(FACTS, model=None), pin=None, now=0.0).lane.id == "a/plain"


def test_a_model_that_nobody_names_goes_to_the_default_lane() -> None:
    """The upstream's own error is the truth; it is observed, and teaches nothing."""
    setup = Setup(backend("a", lane("a", models=frozenset({"m"}))))
    ticket = setup.router.route(dataclasses.replace(FACTS, model="gone"), pin=None, now=0.0)
    assert (ticket.lane.id, ticket.decision.rule) == ("a/plain", "unknown_model")
    setup.router.finish(ticket, Outcome.ERROR, now=1.0, status=404)
    assert [seen.rule for seen in setup.seen] == ["unknown_model"]
    assert setup.policy.learned == []


def test_a_lane_is_offered_for_its_dialects_only() -> None:
    """A lane that speaks OpenAI's API is none for a request in Ollama's."""
    apart = lane("b", "ngram", dialects=frozenset({Dialect.OPENAI_CHAT}))
    setup = Setup(backend("a", lane("a")), backend("b", apart))
    both = ["a/plain", "b/ngram"]
    for dialect, expected in ((Dialect.OPENAI_CHAT, both), (Dialect.OLLAMA_CHAT, ["a/plain"])):
        setup.router.route(dataclasses.replace(FACTS, dialect=dialect), pin=None, now=0.0)
        assert [s.lane.id for s in setup.policy.situations[-1].lanes] == expected


@pytest.mark.parametrize("wish", [{"output": OutputForm.JSON_OBJECT}, {"thought_limit": True}])
def test_a_lane_that_cannot_bind_text_is_the_last_resort(wish: dict[str, Any]) -> None:
    """Where another lane can, it gets what is bound; where none can, the server may say so itself."""
    asked = dataclasses.replace(FACTS, **wish)
    loose = lane("a", "mtp", bound=False)
    both = Setup(backend("a", lane("a"), loose)).router
    assert [s.lane.strategy.name for s in both.candidates(asked)] == ["plain"]
    assert len(both.candidates(FACTS)) == 2
    assert [s.lane for s in Setup(backend("a", loose)).router.candidates(asked)] == [loose]


@pytest.mark.parametrize(
    ("kept", "asked"), [("tools", {"tools": 1}), ("media", {"images": 1}), ("media", {"audio": 1})]
)
def test_a_lane_may_be_kept_from_tools_and_media(kept: str, asked: dict[str, int]) -> None:
    """Where its prompts with tools differ from the server's, or it cannot see."""
    setup = Setup(backend("a", lane("a")), backend("b", lane("b", "ngram", **{kept: False})))
    for fields, expected in (({}, ["a/plain", "b/ngram"]), (asked, ["a/plain"])):
        setup.router.route(dataclasses.replace(FACTS, **fields), pin=None, now=0.0)  # type: ignore[arg-type]  # counts
        assert [s.lane.id for s in setup.policy.situations[-1].lanes] == expected


@pytest.mark.parametrize(
    ("chars", "answer", "offered"),
    [(2000, 1000, True), (2002, 1000, False), (2000, 1001, False), (100, None, False)],
)
def test_a_lane_with_a_shorter_context_is_offered_what_surely_fits(
    chars: int, answer: int | None, offered: bool
) -> None:
    """Two characters count as a token, and an answer without a limit as a long one."""
    short = lane("b", "ngram", ctx=2000)
    setup = Setup(backend("a", lane("a")), backend("b", short))
    facts = dataclasses.replace(FACTS, turns=(Turn("user", "x" * chars),), max_tokens=answer)
    setup.router.route(facts, pin=None, now=0.0)
    assert ("b/ngram" in [s.lane.id for s in setup.policy.situations[-1].lanes]) is offered


def test_only_ready_lanes_are_offered() -> None:
    """The policy does not see lanes that cannot take the request."""
    fake = backend("a")
    fake.mark("a/ngram", Health.UNHEALTHY)
    fake.mark("a/mtp", Health.QUARANTINED)
    setup = Setup(fake)
    setup.router.route(FACTS, pin=None, now=0.0)
    assert [s.lane.id for s in setup.policy.situations[0].lanes] == ["a/plain"]


@pytest.mark.parametrize("health", [Health.UNHEALTHY, Health.STARTING])
def test_without_a_ready_lane_plain_is_tried(health: Health) -> None:
    """Health may lag behind the server; the connection tells."""
    fake = backend("a", lane("a", "ngram"), lane("a"))
    for status in fake.lanes():
        fake.mark(status.lane.id, health)
    ticket = Setup(fake).router.route(FACTS, pin=None, now=0.0)
    assert (ticket.lane.id, ticket.decision.rule) == ("a/plain", "unready")


@pytest.mark.parametrize("health", [Health.QUARANTINED, Health.DROPPED, Health.STOPPED])
def test_some_lanes_are_never_tried(health: Health) -> None:
    """A quarantined, dropped or stopped lane takes nothing; the refusal is observed once."""
    fake = backend("a", lane("a"))
    fake.mark("a/plain", health)
    setup = Setup(fake)
    with pytest.raises(LaneUnavailable, match=str(health)):
        setup.router.route(FACTS, pin=None, now=0.0)
    assert [(seen.outcome, seen.lane, seen.status) for seen in setup.seen] == [(Outcome.UNREACHABLE, "", 503)]
    assert setup.router.load.in_flight == 0


# --- the default lane ----------------------------------------------------------------------------


def test_the_default_is_plain_on_the_primary_backend() -> None:
    """Unless another backend is named, the first one."""
    a, b = backend("a", lane("a", "ngram"), lane("a")), backend("b")
    assert Setup(a, b).router.default()[1].id == "a/plain"
    assert Setup(a, b, primary="b").router.default()[1].id == "b/plain"
    a.mark("a/plain", Health.UNHEALTHY)
    assert Setup(a, b).router.default()[1].id == "a/ngram"


def test_a_backend_without_lanes_still_takes_what_is_not_routed() -> None:
    """An Ollama without models can be asked to pull one."""
    fake = FakeBackend("a", [])
    found, default = Setup(fake).router.default()
    assert found is fake
    assert default.strategy.is_plain


def test_without_backends_there_is_no_default() -> None:
    """Nothing is configured, and that is what it says."""
    with pytest.raises(LaneUnavailable, match="upstream"):
        Setup().router.default()


# --- pins and policies ---------------------------------------------------------------------------


def test_a_pin_reaches_the_policy() -> None:
    """The situation carries it, with what else a decision may depend on."""
    setup = Setup(backend("a"))
    ticket = setup.router.route(dataclasses.replace(FACTS, max_tokens=9), pin="mtp", now=0.0)
    assert ticket.lane.id == "a/mtp"
    situation = setup.policy.situations[0]
    assert (situation.pin, situation.at, situation.max_tokens, situation.in_flight) == ("mtp", 1000.0, 9, 1)
    assert situation.prompt_tokens == FACTS.prompt_tokens_estimate
    assert situation.request_id == ticket.id


def test_an_unknown_pin_is_the_clients_fault() -> None:
    """400 with the names that exist; observed once, and nothing stays in flight."""
    setup = Setup(backend("a"))
    with pytest.raises(RequestError, match="plain, ngram, mtp") as raised:
        setup.router.route(FACTS, pin="eagle", now=0.0)
    assert raised.value.status == 400
    assert [(seen.outcome, seen.rule, seen.status) for seen in setup.seen] == [(Outcome.ERROR, "pin", 400)]
    assert setup.router.load.in_flight == 0


def test_a_pinned_lane_that_is_away_is_worth_asking_for_again() -> None:
    """503 rather than 400 while the lane exists and is not ready."""
    fake = backend("a")
    fake.mark("a/mtp", Health.UNHEALTHY)
    with pytest.raises(LaneUnavailable, match="no lane has mtp"):
        Setup(fake).router.route(FACTS, pin="mtp", now=0.0)


def test_a_policy_without_a_lane_is_not_the_clients_fault() -> None:
    """Without a pin it is 503."""
    setup = Setup(backend("a"), wanted="eagle")
    with pytest.raises(LaneUnavailable):
        setup.router.route(FACTS, pin=None, now=0.0)


def test_a_policy_that_fails_costs_no_request(caplog: pytest.LogCaptureFixture) -> None:
    """A bug in a decision is logged, and plain answers."""
    setup = Setup(backend("a", lane("a", "ngram"), lane("a")))
    setup.policy.error = ZeroDivisionError("bug")
    ticket = setup.router.route(FACTS, pin=None, now=0.0)
    assert (ticket.lane.id, ticket.decision.rule) == ("a/plain", "policy_failed")
    assert "the policy failed" in caplog.text


# --- in flight -----------------------------------------------------------------------------------


def test_requests_in_flight_are_counted_by_lane_and_machine() -> None:
    """Lanes say what is on them; the situation counts the whole machine."""
    setup = Setup(backend("a"), backend("b", lane("b", target="other", models=frozenset({"b"}))))
    tickets = [
        setup.router.route(FACTS, pin="plain", now=0.0),
        setup.router.route(FACTS, pin="mtp", now=0.0),
        setup.router.route(dataclasses.replace(FACTS, model="b"), pin=None, now=0.0),
        setup.router.route(FACTS, pin="mtp", now=0.0),
    ]
    counts = {s.lane.id: s.in_flight for s in setup.router.lanes()}
    assert counts == {"a/plain": 1, "a/ngram": 0, "a/mtp": 2, "b/plain": 1}
    assert [s.in_flight for s in setup.policy.situations] == [1, 2, 3, 4]
    for ticket in tickets:
        setup.router.finish(ticket, Outcome.COMPLETE, now=1.0)
    assert {s.in_flight for s in setup.router.lanes()} == {0}


def test_lanes_on_other_hosts_are_no_load_of_this_machine() -> None:
    """Each request sees what is in flight where its lanes run, and its Observation what was beside it there."""
    setup = Setup(backend("a", lane("a")), backend("b", lane("b", target="big", models=frozenset({"big"}))))
    setup.router.set_backends(setup.router.backends, {"b": "gpu"})
    far = dataclasses.replace(FACTS, model="big")
    tickets = [setup.router.route(facts, pin=None, now=0.0) for facts in (far, far, FACTS)]
    seen = [(s.in_flight, dict(s.elsewhere)) for s in setup.policy.situations]
    assert seen == [(1, {"b/plain": 1}), (1, {"b/plain": 2}), (1, {})]
    assert {s.lane.id: s.in_flight for s in setup.router.lanes()} == {"a/plain": 1, "b/plain": 2}
    ended = [setup.router.finish(ticket, Outcome.COMPLETE, now=1.0) for ticket in tickets]
    assert [each.concurrency for each in ended] == [2.0, 2.0, 1.0]


def test_a_request_that_falls_back_to_another_host_is_its_load() -> None:
    """It has left the host on which it failed."""
    setup = Setup(backend("a", lane("a")), backend("b", lane("b", "mtp")), wanted="mtp")
    setup.router.set_backends(setup.router.backends, {"b": "gpu"})
    ticket = setup.router.route(FACTS, pin=None, now=0.0)
    assert (setup.router.load.around(()).here, ticket.stay.host) == (0, "gpu")
    assert setup.router.fall_back(ticket, "refused", now=1.0)
    assert (setup.router.load.around(()).here, ticket.stay.host) == (1, "")
    setup.router.finish(ticket, Outcome.COMPLETE, now=2.0)
    assert setup.router.load.in_flight == 0


def test_a_preview_counts_the_request_that_it_is_about() -> None:
    """So that it says what a request would meet, beside those that are under way."""
    setup = Setup(backend("a"))
    setup.router.route(FACTS, pin=None, now=0.0)
    setup.router.preview(FACTS)
    setup.router.route(FACTS, pin=None, now=0.0)
    assert [s.in_flight for s in setup.policy.situations] == [1, 2, 2]


def test_concurrency_is_a_mean_over_time() -> None:
    """A neighbour on another lane for half of the time makes 1.5."""
    setup = Setup(backend("a"))
    first = setup.router.route(FACTS, pin="plain", now=0.0)
    second = setup.router.route(FACTS, pin="mtp", now=1.0)
    assert setup.router.finish(first, Outcome.COMPLETE, now=2.0).concurrency == 1.5
    assert setup.router.finish(second, Outcome.COMPLETE, now=2.0).concurrency == 2.0


# --- observations --------------------------------------------------------------------------------


def test_an_observation_says_what_happened() -> None:
    """Every field from the decision, the reply or the clock."""
    setup = Setup(backend("a"), wanted="ngram")
    ticket = setup.router.route(dataclasses.replace(FACTS, stream=True), pin=None, now=10.0)
    reply = ReplyFacts(
        prompt_tokens=7,
        cached_tokens=2,
        output_tokens=20,
        prefill_s=0.1,
        decode_s=0.5,
        draft_tokens=30,
        accepted_tokens=12,
        load_s=0.2,
        ttft_at=10.4,
        source=TimingSource.SERVER,
        complete=True,
        weight=0.9,
    )
    seen = setup.router.finish(ticket, Outcome.COMPLETE, now=11.0, status=200, reply=reply)
    assert dataclasses.replace(seen, ttft_s=round(seen.ttft_s or 0, 6)) == Observation(
        request_id=ticket.id,
        at=1000.0,
        workload=ticket.workload,
        lane="a/ngram",
        strategy="ngram",
        fingerprint="fp-a",
        target="m",
        outcome=Outcome.COMPLETE,
        rule="scripted",
        status=200,
        streamed=True,
        source=TimingSource.SERVER,
        ttft_s=0.4,
        total_s=1.0,
        prompt_tokens=7,
        cached_tokens=2,
        output_tokens=20,
        prefill_s=0.1,
        decode_s=0.5,
        draft_tokens=30,
        accepted_tokens=12,
        load_s=0.2,
        concurrency=1.0,
        repeat=False,
        propensity=0.5,
        weight=0.9,
    )
    assert setup.seen == setup.policy.learned == [seen]
    assert setup.decisions == [ticket.decision]


def test_request_ids_differ() -> None:
    """Within a run and between runs."""
    ids = set()
    for seed in range(3):
        setup = Setup(backend("a"), rng=np.random.default_rng(seed))
        ids |= {setup.router.route(FACTS, pin=None, now=0.0).id for _ in range(3)}
    assert len(ids) == 9


def test_repeated_prompts_are_marked() -> None:
    """The second request with the same prompt for the same model is a repeat; a preview does not count."""
    setup = Setup(backend("a"))
    assert not setup.router.preview(FACTS).repeat
    first = setup.router.route(FACTS, pin=None, now=0.0)
    assert setup.router.preview(FACTS).repeat
    second = setup.router.route(FACTS, pin=None, now=0.0)
    assert [s.repeat for s in setup.policy.situations] == [False, False, True, True]
    assert not setup.router.finish(first, Outcome.COMPLETE, now=1.0).repeat
    assert setup.router.finish(second, Outcome.COMPLETE, now=1.0).repeat


def test_a_preview_leaves_no_trace() -> None:
    """Explaining counts nothing, and the policy is not told of a request."""
    setup = Setup(backend("a"), wanted="mtp")
    decision = setup.router.preview(FACTS, pin="ngram")
    assert decision.lane.id == "a/ngram"
    assert setup.policy.situations[0].request_id == ""
    assert setup.router.load.in_flight == 0
    assert setup.seen == []


def test_a_listener_that_fails_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """Its failure is logged."""
    setup = Setup(backend("a"))
    later: list[Observation] = []

    def broken(seen: Observation, decision: Decision | None) -> None:
        raise RuntimeError("bug")

    setup.router.on_observation(broken)
    setup.router.on_observation(lambda seen, _: later.append(seen))
    setup.router.finish(setup.router.route(FACTS, pin=None, now=0.0), Outcome.COMPLETE, now=1.0)
    assert len(later) == 1
    assert "a listener failed" in caplog.text


def test_a_ticket_is_finished_once() -> None:
    """Exactly one Observation a request is a promise, so a second one is a bug."""
    setup = Setup(backend("a"))
    ticket = setup.router.route(FACTS, pin=None, now=0.0)
    setup.router.finish(ticket, Outcome.COMPLETE, now=1.0)
    with pytest.raises(AssertionError):
        setup.router.finish(ticket, Outcome.COMPLETE, now=1.0)


def test_tickets_hold_no_prompt() -> None:
    """Nothing that outlives the decision can show what was asked."""
    setup = Setup(backend("a"))
    ticket = setup.router.route(FACTS, pin=None, now=0.0)
    assert "hello there" not in repr(ticket)
    held = [getattr(ticket, name) for name in type(ticket).__slots__]
    assert not any(isinstance(value, RequestFacts) for value in held)


# --- falling back --------------------------------------------------------------------------------


def test_a_failed_lane_falls_back_to_plain_once() -> None:
    """The observation is plain's; the failed lane is free again."""
    setup = Setup(backend("a"), wanted="mtp")
    ticket = setup.router.route(FACTS, pin=None, now=0.0)
    assert ticket.plain is not None
    assert setup.router.fall_back(ticket, "refused", now=0.0)
    assert (ticket.lane.id, ticket.decision.rule) == ("a/plain", "fallback")
    assert "a/mtp failed (refused)" in ticket.decision.reason
    assert {s.lane.id: s.in_flight for s in setup.router.lanes()} == {"a/plain": 1, "a/ngram": 0, "a/mtp": 0}
    assert not setup.router.fall_back(ticket, "again", now=0.0)
    seen = setup.router.finish(ticket, Outcome.COMPLETE, now=1.0)
    assert (seen.lane, seen.strategy, seen.rule) == ("a/plain", "plain", "fallback")
    assert {s.in_flight for s in setup.router.lanes()} == {0}


def test_plain_has_nothing_to_fall_back_to() -> None:
    """A request on plain is not sent to plain again; nor to a plain lane that is not ready."""
    setup = Setup(backend("a"))
    assert setup.router.route(FACTS, pin=None, now=0.0).plain is None
    fake = backend("b", lane("b"), lane("b", "mtp"))
    fake.mark("b/plain", Health.UNHEALTHY)
    assert Setup(fake, wanted="mtp").router.route(FACTS, pin=None, now=0.0).plain is None


def test_lane_errors_are_told() -> None:
    """Whoever watches over health hears of failures at once."""
    setup = Setup(backend("a"))
    heard: list[tuple[str, str]] = []
    setup.router.on_lane_error(lambda lane, error: heard.append((lane.id, error.message)))
    setup.router.lane_failed(lane("a"), UpstreamClosed("gone"))
    assert heard == [("a/plain", "gone")]


# --- tokens per event ----------------------------------------------------------------------------


def test_tokens_per_event_are_learned_from_counted_streams() -> None:
    """Streams with usage teach what an event stands for on this lane; others, and short ones, do not."""
    setup = Setup(backend("a"))
    here = lane("a")
    assert setup.router.tokens_per_event(here) == 1.0

    def stream(source: TimingSource, tokens: int, events: int, outcome: Outcome = Outcome.COMPLETE) -> None:
        ticket = setup.router.route(FACTS, pin=None, now=0.0)
        reply = ReplyFacts(output_tokens=tokens, source=source, complete=True)
        setup.router.finish(ticket, outcome, now=1.0, reply=reply, events=events)

    stream(TimingSource.ESTIMATE, 900, 9)
    stream(TimingSource.USAGE, 400, 4)
    stream(TimingSource.USAGE, 900, 9, Outcome.CLIENT_GONE)
    assert setup.router.tokens_per_event(here) == 1.0
    for _ in range(200):
        stream(TimingSource.SERVER, 30, 10)
    assert setup.router.tokens_per_event(here) == pytest.approx(3.0, rel=0.01)
    assert setup.router.tokens_per_event(lane("a", "mtp")) == 1.0


def test_a_lane_has_a_backend() -> None:
    """Tickets carry the backend that opens the exchange."""
    a, b = backend("a"), backend("b", lane("b", "ngram", control=Control.RELOAD))
    setup = Setup(a, b)
    setup.router.set_backends([b])
    assert setup.router.backends == (b,)
    assert setup.router.route(FACTS, pin="ngram", now=0.0).backend is b


# --- prompt caches -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "cached"),
    [(Outcome.COMPLETE, True), (Outcome.CLIENT_GONE, True), (Outcome.UNREACHABLE, False)],
)
def test_the_policy_is_told_where_a_conversation_ran(outcome: Outcome, cached: bool) -> None:
    """The next request of a conversation finds its beginning on the lane that answered before."""
    setup = Setup(backend("a"), wanted="ngram")
    turns = (Turn("user", "a long question " * 40),)
    ticket = setup.router.route(dataclasses.replace(FACTS, turns=turns), pin=None, now=0.0)
    assert setup.policy.situations[-1].prefix_hits == {}
    setup.router.finish(ticket, outcome, now=1.0)
    more = dataclasses.replace(FACTS, turns=(*turns, Turn("assistant", "yes"), Turn("user", "and?")))
    setup.router.preview(more)
    hits = setup.policy.situations[-1].prefix_hits
    assert (list(hits) == ["a/ngram"]) is cached


@pytest.mark.parametrize(
    ("output", "thought", "weight"),
    [
        (OutputForm.FREE, True, 1.0),
        (OutputForm.JSON_OBJECT, False, 1.0),
        (OutputForm.JSON_OBJECT, True, 0.0),
        (OutputForm.JSON_SCHEMA, True, 0.0),
    ],
)
def test_an_answer_that_was_decoded_twice_teaches_nothing(
    output: OutputForm, thought: bool, weight: float
) -> None:
    """Ollama lets a model think, and decodes again in the form that was asked for: its figures are of that."""
    setup = Setup(backend("a"))
    ticket = setup.router.route(dataclasses.replace(FACTS, output=output), pin=None, now=0.0)
    reply = ReplyFacts(output_tokens=9, decode_s=1.0, weight=1.0, complete=True, thought=thought)
    assert setup.router.finish(ticket, Outcome.COMPLETE, now=2.0, reply=reply).weight == weight
