"""Teaches n-gram lanes of llama-servers and Ollamas from requests that ran on other lanes, by their text.

These servers don't say which tokens they made. So the prompt and the reply of a finished request are held, cut
into tokens, replayed through the drafter that the n-gram lane runs, and forgotten. A llama-server cuts them
itself (``/apply-template``, ``/tokenize``: its HTTP threads do that without a slot); for an Ollama, the
vocabulary in the model's file does, of the messages without the template around them. Where there is neither,
the text is cut into pieces instead (`strategies.approx`). On requests that ran on the n-gram lane itself the
replay is compared with what the server counted, by source, so that it is known, and shown, how far it is right.

Replay is a bonus, never a load: what is held is bounded, and while requests are in flight the work takes a
fiftieth of the time at most.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog

from specproxy.adapters.ask import post_json
from specproxy.adapters.base import Backend, CutsTexts, DraftsNgrams, NgramDrafts
from specproxy.errors import BackendError
from specproxy.proxy.dialects import read_facts
from specproxy.proxy.dialects.replies import parse_object
from specproxy.proxy.replayer import ReplayAccount, TakesReplays
from specproxy.proxy.reply_text import reply_text
from specproxy.proxy.router import Router
from specproxy.proxy.ticket import Ticket
from specproxy.records import Dialect, Lane, Observation, Outcome
from specproxy.strategies.approx import pieces
from specproxy.strategies.drafters.ngram_simple import NgramSimpleDrafter
from specproxy.strategies.replay import replay

__all__ = ["Heard", "TextReplayer"]

WAITING = 64  # requests that may wait for their replay
MOST_HELD = 16 * 1024 * 1024  # bytes of all of them together
MOST_PROMPT = 256 * 1024  # bytes of one request's body
MOST_REPLY = 1024 * 1024  # bytes of one reply, events and all
SHARE = 0.02  # of the time that may go into replay while requests are in flight
PAUSE_S = 0.05  # between looks at whether it is its turn
MOST_OFF = 0.1  # a reply whose tokens differ by more from what was counted is not what was generated
END = -1  # stands for the token that ends an answer, which has no text

_PROMPTS = frozenset({Dialect.OPENAI_COMPLETIONS, Dialect.LLAMACPP})
_Ids = list[int]
_Cut = tuple[str, _Ids, _Ids]  # where it comes from, and the ids of prompt and output

log = structlog.get_logger("specproxy")


@dataclass(frozen=True, slots=True)
class Heard:
    """A finished request with its text, which is gone once it has been replayed."""

    seen: Observation
    dialect: Dialect
    request: bytes = field(repr=False)
    reply: tuple[bytes, ...] = field(repr=False)

    @property
    def size(self) -> int:
        """Bytes of text."""
        return len(self.request) + sum(len(part) for part in self.reply)


class TextReplayer:
    """Takes finished requests from the forwarder; `run` does the work.

    Args:
        router: knows the lanes and what is in flight.
        policy: what is taught.
        account: where it is counted.
        clock: any monotonic clock, in seconds.
        pause: waits for so many seconds.
    """

    def __init__(
        self,
        router: Router,
        policy: TakesReplays,
        account: ReplayAccount,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._router = router
        self._policy = policy
        self._account = account
        self._clock = clock
        self._pause = pause
        self._waiting: deque[Heard] = deque()
        self._held = 0
        self._news = asyncio.Event()
        self._rest_until = 0.0
        self._without_tokens: set[str] = set()  # lanes whose server does not cut text into tokens

    def hold(self, ticket: Ticket, body: bytes) -> int:
        """Bytes of the reply to hold for a request that starts; 0 where nobody could learn by it."""
        if not ticket.known or ticket.repeat or len(body) > MOST_PROMPT or len(self._waiting) >= WAITING:
            return 0
        return MOST_REPLY if self._pupils(ticket.lane.target) else 0

    def offer(self, heard: Heard) -> None:
        """Take in a request that has ended; never blocks."""
        seen = heard.seen
        if seen.outcome is not Outcome.COMPLETE or seen.repeat or seen.output_tokens < 2:
            return
        if len(self._waiting) >= WAITING or self._held + heard.size > MOST_HELD:
            self._leave_out(seen, "too much is waiting")
            return
        self._waiting.append(heard)
        self._held += heard.size
        self._news.set()

    async def run(self) -> None:
        """Replay one request after another, until cancelled."""
        while True:
            await self._news.wait()
            await self._turn()
            begun = self._clock()
            heard = self._waiting.popleft()
            self._held -= heard.size
            try:
                await self._replay(heard)
            finally:
                del heard  # holds the text
                if not self._waiting:
                    self._news.clear()
            now = self._clock()
            self._rest_until = now + (now - begun) / SHARE

    def _leave_out(self, seen: Observation, why: str) -> None:
        self._account.left_out += 1
        log.debug("not replayed", id=seen.request_id, why=why)

    async def _turn(self) -> None:
        """Wait until nothing is in flight, or the rest after earlier work is over."""
        while self._router.load.in_flight and self._clock() < self._rest_until:
            await self._pause(PAUSE_S)

    # --- one request -----------------------------------------------------------------------------

    def _pupils(self, target: str) -> list[tuple[Backend, list[tuple[Lane, NgramDrafts]]]]:
        """The lanes of a target that can be taught by text, with how they draft, by backend."""
        found: list[tuple[Backend, list[tuple[Lane, NgramDrafts]]]] = []
        for backend in self._router.backends:
            if isinstance(backend, DraftsNgrams):
                lanes = [status.lane for status in backend.lanes() if status.lane.target == target]
                told = [(lane, drafts) for lane in lanes if (drafts := backend.ngrams(lane)) is not None]
                if told:
                    found.append((backend, told))
        return found

    async def _replay(self, heard: Heard) -> None:
        seen = heard.seen
        text = await asyncio.to_thread(reply_text, b"".join(heard.reply))
        pupils = self._pupils(seen.target) if text else []
        if not pupils:
            self._leave_out(seen, "there is no text, or no lane to teach")
            return
        facts = await asyncio.to_thread(read_facts, heard.dialect, heard.request)
        said = "\n".join(turn.text for turn in facts.turns) if facts is not None else ""
        limit = facts.max_tokens if facts is not None else None  # no server drafts beyond
        for backend, lanes in pupils:
            lane, drafts = lanes[0]
            try:
                source, prompt, output = await self._cut(backend, lane, drafts.vocabulary, heard, said, text)
            except BackendError as error:
                self._leave_out(seen, str(error))
                continue
            exact = source != "pieces"
            if len(output) < 2 or (exact and not _plausible(output, seen.output_tokens)):
                why = f"its text has {len(output)} tokens, but {seen.output_tokens} were counted"
                self._leave_out(seen, why)
                continue
            if exact and len(output) == seen.output_tokens - 1:
                output = [*output, END]
            for lane, drafts in lanes:
                drafter = NgramSimpleDrafter(drafts.size, drafts.longest)
                result = await asyncio.to_thread(
                    replay, prompt, output, drafter, drafts.longest, max_tokens=limit if exact else None
                )
                self._account.note(lane, seen, result)
                self._policy.learn_replay(lane, seen, result, source)

    async def _cut(
        self, backend: Backend, lane: Lane, vocabulary: CutsTexts | None, heard: Heard, said: str, text: str
    ) -> _Cut:
        """Prompt and output as tokens, or as pieces where nobody cuts them; `said` is what is in the prompt,
        without a template around it.

        Raises:
            BackendError: who cuts them did not answer, or not to this request.
        """
        if vocabulary is not None and vocabulary.usable:
            prompt, output = await vocabulary.cut(said, text)
            return "vocabulary", prompt, output
        if vocabulary is None and lane.id not in self._without_tokens:
            ids = await self._tokens(backend, lane, heard, text)
            if ids is not None:
                return "tokens", *ids
        prompt, output = await asyncio.to_thread(pieces, said, text)
        return "pieces", prompt, output

    async def _tokens(self, backend: Backend, lane: Lane, heard: Heard, text: str) -> tuple[_Ids, _Ids] | None:
        """Token ids of prompt and output; None where the server has no route for that.

        Raises:
            BackendError: it did not answer, or not to this request.
        """
        ask = partial(self._ask, backend, lane)
        body = parse_object(heard.request) or {}
        prompt = body.get("prompt") if heard.dialect in _PROMPTS else None
        if prompt is None:
            status, reply = await ask("/apply-template", _chat(heard, body))
            if status == 404:
                self._without_tokens.add(lane.id)
                return None
            prompt = reply.get("prompt") if isinstance(reply, dict) else None
        if isinstance(prompt, str):
            _, reply = await ask("/tokenize", {"content": prompt, "add_special": True, "parse_special": True})
            prompt = reply.get("tokens") if isinstance(reply, dict) else None
        status, reply = await ask("/tokenize", {"content": text, "add_special": False, "parse_special": True})
        if status == 404:
            self._without_tokens.add(lane.id)
            return None
        return _ids(prompt, lane), _ids(reply.get("tokens") if isinstance(reply, dict) else None, lane)

    async def _ask(self, backend: Backend, lane: Lane, path: str, body: object) -> tuple[int, object]:
        return await post_json(lambda request, sink: backend.open(request, lane, sink), path, body)


def _chat(heard: Heard, body: dict[str, object]) -> dict[str, object]:
    """What to ask a template for: a chat request as it came, or the turns of another dialect's."""
    if heard.dialect is Dialect.OPENAI_CHAT:
        return {name: value for name, value in body.items() if name not in ("stream", "model")}
    facts = read_facts(heard.dialect, heard.request)
    turns = facts.turns if facts is not None else ()
    return {"messages": [{"role": turn.role, "content": turn.text} for turn in turns]}


def _plausible(output: Sequence[int], counted: int) -> bool:
    """Whether these can be the tokens that were generated; the last one often has no text."""
    return abs(len(output) - counted) <= max(1.0, MOST_OFF * counted)


def _ids(value: object, lane: Lane) -> _Ids:
    if not isinstance(value, list) or not all(type(v) is int for v in value):
        raise BackendError(f"{lane.id} does not say what the tokens of a text are")
    return value
