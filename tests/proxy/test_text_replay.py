"""Replay by text: what is held, what is asked of the server, what is taught, and that nothing stays."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from specproxy.adapters.base import CutsTexts, NgramDrafts
from specproxy.adapters.fake import FakeBackend, FakeExchange, respond
from specproxy.errors import BackendError, UpstreamClosed
from specproxy.proxy.dialects import read_facts
from specproxy.proxy.replayer import ReplayAccount
from specproxy.proxy.reply_text import reply_text
from specproxy.proxy.router import Router
from specproxy.proxy.tap import Tap
from specproxy.proxy.text_replay import MOST_HELD, MOST_PROMPT, MOST_REPLY, SHARE, WAITING, Heard, TextReplayer
from specproxy.proxy.ticket import Ticket
from specproxy.records import Dialect, Lane, Observation, Outcome, Strategy
from specproxy.strategies.replay import ReplayResult
from tests.proxy.samples import NGRAM, PLAIN, observation
from tests.support.proxy import ScriptedPolicy
from tests.support.relay import settled

TEXT = "one two three four five six seven eight nine ten one two three four five six"


def chat(text: str = TEXT) -> bytes:
    return orjson.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": text}]})


def said(text: str) -> tuple[bytes, ...]:
    """A streamed reply, a word an event."""
    words = [w + " " for w in text.split()]
    events = [b"data: " + orjson.dumps({"choices": [{"delta": {"content": w}}]}) + b"\n\n" for w in words]
    return (*events, b"data: [DONE]\n\n")


class Pupil(ScriptedPolicy):
    """A policy that writes down what replay teaches."""

    def __init__(self) -> None:
        super().__init__()
        self.taught: list[tuple[str, str, ReplayResult, str]] = []
        self.news = asyncio.Event()

    def learn_replay(
        self, lane: Lane, observation: Observation, result: ReplayResult, source: str = "ids"
    ) -> None:
        self.taught.append((lane.id, observation.request_id, result, source))
        self.news.set()


class Clock:
    """Time that passes only while somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits = 0
        self.on_wait: Callable[[], None] = lambda: None

    def __call__(self) -> float:
        return self.now

    async def pause(self, seconds: float) -> None:
        self.waits += 1
        self.now += seconds
        self.on_wait()
        await asyncio.sleep(0)


class Words:
    """A vocabulary of words."""

    def __init__(self, *, usable: bool = True, failures: int = 0) -> None:
        self.usable, self.failures = usable, failures
        self.asked: list[tuple[str, ...]] = []

    async def cut(self, *texts: str) -> list[list[int]]:
        self.asked.append(texts)
        if self.failures:
            self.failures -= 1
            raise BackendError("the process has ended")
        return [[sum(word.encode()) for word in text.split()] for text in texts]


class Managed(FakeBackend):
    """Llama-servers of ours, or Ollamas where there is a `vocabulary`."""

    vocabulary: CutsTexts | None = None
    size = 3

    def ngrams(self, lane: Lane) -> NgramDrafts | None:
        if lane.strategy.drafters != ("ngram",):
            return None
        return NgramDrafts(self.size, lane.strategy.n_max or 8, self.vocabulary)


class School:
    """A replayer on a llama-server (fake) with some lanes, whose tokens are words."""

    def __init__(
        self,
        *lanes: Lane,
        missing: tuple[str, ...] = (),
        make: type[FakeBackend] = Managed,
        vocabulary: Words | None = None,
    ) -> None:
        self.backend = make("managed", lanes or (PLAIN, NGRAM), self._answer)
        if isinstance(self.backend, Managed):
            self.backend.vocabulary = vocabulary
        self.missing = missing
        self.broken = 0
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.pupil, self.account, self.clock = Pupil(), ReplayAccount(), Clock()
        self.router = Router([self.backend], self.pupil, rng=np.random.default_rng(1))
        self.replayer = TextReplayer(
            self.router, self.pupil, self.account, clock=self.clock, pause=self.clock.pause
        )

    async def _answer(self, exchange: FakeExchange) -> None:
        path, body = exchange.request.target, json.loads(exchange.request.body or b"{}")
        self.asked.append((exchange.lane.id, path, body))
        if self.broken:
            self.broken -= 1
            raise UpstreamClosed("gone")
        if path in self.missing:
            await respond(b"{}", status=404)(exchange)
        elif path == "/apply-template":
            await respond(orjson.dumps({"prompt": body["messages"][0]["content"]}))(exchange)
        else:
            ids = [sum(word.encode()) for word in body["content"].split()]
            await respond(orjson.dumps({"tokens": ids}))(exchange)

    def ticket(self, body: bytes) -> Ticket:
        facts = read_facts(Dialect.OPENAI_CHAT, body)
        assert facts is not None
        return self.router.route(facts, pin=None, now=0.0)

    def hear(self, text: str = TEXT, counted: int | None = None, **changes: Any) -> None:
        """A request on plain, or as `changes` say, has ended with this text."""
        tokens = len(text.split()) if counted is None else counted
        seen = observation(changes.pop("lane", PLAIN), output_tokens=tokens, **changes)
        self.replayer.offer(Heard(seen, Dialect.OPENAI_CHAT, chat(), said(text)))

    async def lesson(self, requests: int = 1) -> None:
        """Let the replayer work until so many requests are done with."""
        task = asyncio.ensure_future(self.replayer.run())
        await settled(lambda: self.account.replayed + self.account.left_out >= requests)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self.backend.aclose()


async def test_a_request_on_plain_teaches_the_ngram_lane() -> None:
    """Prompt and reply are cut into tokens by the n-gram lane's own server, and replayed."""
    school = School()
    school.hear()
    await school.lesson()
    assert [(lane, path) for lane, path, _ in school.asked] == [
        ("ngram", "/apply-template"), ("ngram", "/tokenize"), ("ngram", "/tokenize"),
    ]  # fmt: skip
    assert "stream" not in school.asked[0][2]
    [(lane, request, result, source)] = school.pupil.taught
    assert (lane, request, source, result.tokens) == ("ngram", "r1", "tokens", 15)
    assert result.accepted >= 8


async def test_a_token_without_text_ends_the_answer() -> None:
    """Where the server counted one token more than the text has, the end token is put in its place."""
    school = School()
    school.hear(counted=17)
    await school.lesson()
    assert school.pupil.taught[0][2].tokens == 16


async def test_without_a_tokenizer_pieces_stand_for_tokens() -> None:
    """A server without these routes is asked once; what it misses is said."""
    for missing in ("/apply-template", "/tokenize"):
        school = School(missing=(missing,))
        school.hear()
        school.hear()
        await school.lesson(2)
        assert [source for *_, source in school.pupil.taught] == ["pieces", "pieces"]
        assert [path for _, path, _ in school.asked].count(missing) <= 2
        asked = len(school.asked)
        assert asked == (1 if missing == "/apply-template" else 3)


async def test_the_vocabulary_of_a_file_stands_in_for_routes() -> None:
    """Of an Ollama nothing is asked; messages and answer are cut by its model's file."""
    school = School(vocabulary=(words := Words()))
    school.hear(counted=17)
    await school.lesson()
    assert (school.asked, words.asked) == ([], [(TEXT, TEXT + " ")])
    [(lane, _, result, source)] = school.pupil.taught
    assert (lane, source, result.tokens) == ("ngram", "vocabulary", 16)
    assert result.accepted >= 8


async def test_a_vocabulary_that_is_of_no_use_is_not_asked() -> None:
    """Pieces stand for tokens then; one that fails this time costs this request its replay."""
    school = School(vocabulary=(words := Words(usable=False)))
    school.hear()
    await school.lesson()
    assert (school.asked, words.asked) == ([], [])
    assert [source for *_, source in school.pupil.taught] == ["pieces"]
    school = School(vocabulary=Words(failures=1))
    school.hear(request_id="lost")
    school.hear(request_id="next")
    await school.lesson(2)
    assert [(request, source) for _, request, _, source in school.pupil.taught] == [("next", "vocabulary")]
    assert school.account.left_out == 1


async def test_each_lane_is_taught_what_it_would_have_drafted() -> None:
    """Lanes of one server with other lengths are taught from one cut, and lengths are the lane's own."""
    short = replace(NGRAM, id="short", strategy=Strategy(("ngram",), 4), fingerprint="short")
    school = School(PLAIN, NGRAM, short)
    school.hear()
    await school.lesson(2)
    assert len(school.asked) == 3
    by_lane = {lane: result for lane, _, result, _ in school.pupil.taught}
    assert set(by_lane) == {"ngram", "short"}
    assert len(by_lane["short"].widths) == 5 < len(by_lane["ngram"].widths)
    school = School()
    assert isinstance(school.backend, Managed)
    school.backend.size = 12
    school.hear()
    await school.lesson()
    assert school.pupil.taught[0][2].accepted == 0, "no twelve words stand twice before the end"


async def test_no_server_drafts_beyond_the_limit_of_an_answer() -> None:
    """So replay does not, where tokens are tokens."""
    drafted = {}
    for limit in (None, 15, 16):
        school = School()
        body = orjson.loads(chat()) | ({} if limit is None else {"max_tokens": limit})
        seen = observation(PLAIN, output_tokens=15)
        school.replayer.offer(
            Heard(seen, Dialect.OPENAI_CHAT, orjson.dumps(body), said(TEXT.rpartition(" ")[0]))
        )
        await school.lesson()
        drafted[limit] = school.pupil.taught[0][2].drafted
    assert drafted[15] < drafted[16] <= drafted[None]


async def test_other_tokens_than_were_counted_teach_nothing() -> None:
    """A text that was put together by the server (a tool call, cut thoughts) is not what the model said."""
    school = School()
    school.hear(counted=40)
    await school.lesson()
    assert (school.pupil.taught, school.account.left_out) == ([], 1)


async def test_a_server_that_fails_is_passed_over() -> None:
    """The next request is replayed all the same."""
    school = School()
    school.broken = 1
    school.hear(request_id="lost")
    school.hear(request_id="next")
    await school.lesson(2)
    assert [request for _, request, *_ in school.pupil.taught] == ["next"]
    assert school.account.json() == {"replayed": 1, "left_out": 1, "compared": 0, "error": None}


async def test_replays_are_held_against_what_was_counted() -> None:
    """Of requests on the lane itself: an error of the tokens a step, 0 where the server counted the same."""
    school = School()
    school.hear()
    await school.lesson()
    accepted = school.pupil.taught[0][2].accepted
    for off in (0, 2):
        school = School()
        school.hear(lane=NGRAM, draft_tokens=12, accepted_tokens=accepted - off)
        await school.lesson()
        assert school.account.compared == 1
        assert (school.account.off > 0.1) == (off > 0)


def test_what_is_held_and_what_is_not() -> None:
    """Only where a lane can learn by it, from new prompts of moderate size."""
    body = chat()
    assert School().replayer.hold(School().ticket(body), body) == MOST_REPLY
    plain_only, engine, draft = (
        School(PLAIN),
        School(make=FakeBackend),
        replace(NGRAM, strategy=Strategy(("mtp",))),
    )
    for school in (plain_only, engine, School(PLAIN, draft), School(PLAIN, replace(NGRAM, target="other"))):
        assert school.replayer.hold(school.ticket(body), body) == 0
    school = School()
    assert school.replayer.hold(school.ticket(body), body + b" " * MOST_PROMPT) == 0
    assert school.replayer.hold(school.ticket(body), body) == 0, "the same prompt again"


@pytest.mark.parametrize("changes", [{"outcome": Outcome.CLIENT_GONE}, {"repeat": True}, {"output_tokens": 1}])
async def test_what_teaches_nothing_does_not_wait(changes: dict[str, Any]) -> None:
    """Aborted requests, repeated prompts and single tokens are not even asked for."""
    school = School()
    school.replayer.offer(Heard(observation(PLAIN, **changes), Dialect.OPENAI_CHAT, chat(), said(TEXT)))
    school.hear(request_id="good")
    await school.lesson()
    assert [request for _, request, *_ in school.pupil.taught] == ["good"]
    assert school.account.left_out == 0


async def test_what_waits_is_bounded() -> None:
    """In number and in bytes; what is too much is left out."""
    school = School()
    for _ in range(WAITING + 3):
        school.hear()
    assert school.account.left_out == 3
    assert school.replayer.hold(school.ticket(chat()), chat()) == 0
    school = School()
    half = (b"x" * (MOST_HELD // 2),)
    for _ in range(3):
        school.replayer.offer(Heard(observation(PLAIN), Dialect.OPENAI_CHAT, b"{}", half))
    assert school.account.left_out == 2


async def test_replay_rests_while_requests_are_in_flight() -> None:
    """Work that took a second is followed by fifty seconds of rest; an idle machine needs none."""
    school = School()
    school.ticket(chat("somebody is waiting"))
    script = school.backend.script

    async def slow(exchange: FakeExchange) -> None:
        school.clock.now += 1.0 / 3.0
        await script(exchange)

    school.backend.script = slow
    school.hear()
    school.hear()
    await school.lesson(2)
    assert school.clock.now == pytest.approx(2.0 + 1.0 / SHARE, abs=0.2)
    school = School()
    school.backend.script = script
    school.hear()
    school.hear()
    await school.lesson(2)
    assert school.clock.waits == 0


async def test_no_text_stays() -> None:
    """Once it is replayed, nobody holds a request's body or its reply."""
    school = School()
    body, reply = chat("a prompt that nobody else has " + TEXT), b"".join(said(TEXT))
    before = sys.getrefcount(body), sys.getrefcount(reply)
    school.replayer.offer(Heard(observation(PLAIN, output_tokens=16), Dialect.OPENAI_CHAT, body, (reply,)))
    assert (sys.getrefcount(body), sys.getrefcount(reply)) != before
    task = asyncio.ensure_future(school.replayer.run())
    await school.pupil.news.wait()
    await settled(lambda: (sys.getrefcount(body), sys.getrefcount(reply)) == before)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await school.backend.aclose()


def test_the_tap_holds_what_it_may() -> None:
    """The body as it came up to a limit; beyond it nothing, so that memory stays bounded."""
    for limit, kept in ((0, b""), (8, b""), (9, b"abcdefgh")):
        tap = Tap(Dialect.OPENAI_CHAT, hold=limit)
        tap.head(200, ((b"Content-Type", b"text/event-stream"),), 0.0)
        tap.feed((b"abc", b"d"), 0.1)
        tap.feed((b"efgh",), 0.2)
        assert b"".join(tap.held) == kept


REPLIES: dict[str, list[dict[str, Any]]] = {
    "chat": [{"choices": [{"message": {"content": "ab"}}]}],
    "chat stream": [{"choices": [{"delta": {"content": t}}]} for t in ("a", "b")],
    "thoughts": [
        {"choices": [{"delta": {"reasoning_content": "a"}}]},
        {"choices": [{"delta": {"content": "b"}}]},
    ],
    "completion": [{"choices": [{"text": "ab"}]}],
    "llama.cpp": [{"content": "a", "stop": False}, {"content": "b", "stop": True}],
    "ollama chat": [{"message": {"content": "a"}, "done": False}, {"message": {"content": "b"}, "done": True}],
    "ollama generate": [{"response": "a", "done": False}, {"response": "b", "done": True}],
    "responses": [{"output": [{"content": [{"type": "output_text", "text": "ab"}]}]}],
    "responses stream": [
        {"type": "response.output_text.delta", "delta": "a"},
        {"type": "response.output_text.delta", "delta": "b"},
        {"type": "response.completed", "response": {"output": [{"content": [{"text": "ab"}]}]}},
    ],
    "anthropic": [{"type": "message", "content": [{"type": "text", "text": "ab"}]}],
    "anthropic stream": [
        {"type": "message_start", "message": {"content": []}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "b"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
    ],
}


@pytest.mark.parametrize("shape", list(REPLIES))
def test_the_text_of_a_reply(shape: str) -> None:
    """Every dialect's reply, in one piece, as events or as lines, gives the text in order."""
    bodies = [orjson.dumps(event) for event in REPLIES[shape]]
    if len(bodies) == 1:
        assert reply_text(bodies[0]) == "ab"
    else:
        assert reply_text(b"\n".join(bodies)) == "ab"
        assert reply_text(b"".join(b"event: x\ndata: " + body + b"\n\n" for body in bodies)) == "ab"


def test_a_tool_call_is_text_too() -> None:
    """About as models write it: the name, then the arguments as they streamed."""
    calls = [{"name": "look"}, {"arguments": '{"a":'}, {"arguments": " 1}"}]
    events = [{"choices": [{"delta": {"tool_calls": [{"function": call}]}}]} for call in calls]
    text = reply_text(b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events))
    assert text == '{"name": "look", "arguments": {"a": 1}'


def test_junk_has_no_text() -> None:
    """What is no reply, or of other types than expected, gives nothing and does not raise."""
    for junk in (b"", b"data: [DONE]", b"\xff\x00", b"[1]", b'{"choices": 3}', b'{"content": 7}'):
        assert reply_text(junk) == ""


async def test_a_server_that_cuts_nothing_keeps_no_other_from_learning() -> None:
    """Each teaches by itself."""
    school = School()
    mute = Managed("mute", (replace(NGRAM, id="mute"),))
    mute.vocabulary = Words(failures=1)
    school.router.set_backends([mute, school.backend])
    school.hear()
    await school.lesson(2)
    assert [lane for lane, *_ in school.pupil.taught] == [NGRAM.id]
    assert (school.account.replayed, school.account.left_out) == (1, 1)
    await mute.aclose()
