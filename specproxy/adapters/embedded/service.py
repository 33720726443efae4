"""One engine behind its HTTP routes: who is served now, how to run a request, and what is kept after it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

from aiohttp import web

from specproxy.adapters.embedded.body import FieldError, Fields
from specproxy.adapters.embedded.chat import ChatFormat
from specproxy.adapters.embedded.output import Item, OutputParser, Part, ShortCut, parts
from specproxy.adapters.embedded.side_channel import (
    PRIORS_HEADER,
    REQUEST_ID_HEADER,
    STRATEGY_HEADER,
    decode_priors,
)
from specproxy.adapters.embedded.types import Engine, Finished, GenerateRequest, ModelCard, Sampling, TokenEvent
from specproxy.adapters.ollama_setup import ModelSetup
from specproxy.adapters.tasks import Tasks
from specproxy.errors import RequestError
from specproxy.records import EnginePriors, EngineReport, Strategy

__all__ = ["Call", "Counters", "NotReady", "Service", "Work", "threaded"]

T = TypeVar("T")
CONTEXT_EXCEEDED = "exceed_context_size_error"
REPORTS_KEPT = 256
SCHEMAS = (b"schema", b'"format"', b'"tools"')  # a pattern of a few characters may take 200 ms to be compiled
THREAD_BYTES = 2048  # of a request; some vocabularies take 100 ms to cut 12 kB into tokens


class NotReady(RequestError):
    """The model is still loading."""

    def __init__(self) -> None:
        super().__init__("Loading model", status=503, code="unavailable_error")


@dataclass(frozen=True, slots=True)
class Call:
    """What the headers of a request say: its id, the strategy to decode with, and the learner's priors.

    `short_cut` is for its text, if it is streamed.
    """

    request_id: str
    strategy: Strategy
    priors: EnginePriors | None = None
    short_cut: ShortCut = field(default_factory=ShortCut, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Work:
    """What to generate for one request: `n` sequences from one prompt."""

    prompt: tuple[int, ...] = field(repr=False)
    sampling: Sampling
    max_tokens: int | None = None
    n: int = 1
    render_tokens: frozenset[int] = frozenset()
    want_embedding: bool = False


@dataclass(slots=True)
class Counters:
    """Totals since the start, named as llama-server's metrics are."""

    prompt_tokens: int = 0
    prompt_ms: float = 0.0
    predicted_tokens: int = 0
    predicted_ms: float = 0.0
    drafted: int = 0
    accepted: int = 0


async def threaded(data: bytes, function: Callable[[], T]) -> T:
    """Run `function`, in a thread if the request's body suggests that it may hold up the event loop."""
    light = len(data) < THREAD_BYTES and not any(mark in data for mark in SCHEMAS)
    return function() if light else await asyncio.to_thread(function)


class Service:
    """The engine, the names that it answers to, and the state that routes share."""

    def __init__(
        self, engine: Engine, names: Sequence[str] = (), slots: int = 4, setup: ModelSetup | None = None
    ) -> None:
        self.engine = engine
        self.setup = setup
        self.slots = slots
        self.counters = Counters()
        self.started_at = time.time()
        self.active: dict[str, Call] = {}
        self._names = tuple(names)
        self._reports: OrderedDict[str, EngineReport] = OrderedDict()
        self._ready = False
        self._chat: ChatFormat | None = None

    @property
    def ready(self) -> bool:
        """Whether the model has been loaded."""
        return self._ready

    @property
    def card(self) -> ModelCard:
        """What is loaded.

        Raises:
            NotReady: nothing yet.
        """
        if not self._ready:
            raise NotReady
        return self.engine.card

    @property
    def chat(self) -> ChatFormat:
        """How the model wants conversations.

        Raises:
            NotReady: nothing is loaded yet.
        """
        card = self.card
        if self._chat is None:
            self._chat = ChatFormat(card, self.engine, self.setup)
        return self._chat

    def with_defaults(self, body: Fields) -> Fields:
        """A request of OpenAI's or Anthropic's form with the sampling defaults that the model has in Ollama.

        There temperature and top_p are 1 on these routes, whatever the model's parameters are.
        """
        if self.setup is None:
            return body
        own = {"n_predict" if name == "num_predict" else name: v for name, v in self.setup.parameters}
        given = {name: value for name, value in body.data.items() if value is not None}
        return Fields({**own, "temperature": 1.0, "top_p": 1.0, **given})

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model, the one to show first."""
        return self._names or (self.card.name,)

    async def start(self) -> None:
        """Load the model; see `Engine.start` for the errors."""
        await self.engine.start()
        self._ready = True

    async def aclose(self) -> None:
        """Stop the engine."""
        self._ready = False
        await self.engine.aclose()

    def call(self, request: web.Request) -> Call:
        """Read our own headers.

        Raises:
            NotReady: the model is loading.
            FieldError: a header cannot be read, or names a strategy that the model cannot run.
        """
        text = request.headers.get(STRATEGY_HEADER)
        priors = request.headers.get(PRIORS_HEADER)
        try:
            parsed = decode_priors(priors.encode()) if priors else None
        except ValueError as error:
            raise FieldError(PRIORS_HEADER, f"header {PRIORS_HEADER}: {error}") from None
        return Call(
            request_id=request.headers.get(REQUEST_ID_HEADER) or uuid.uuid4().hex,
            strategy=self._strategy(text) if text else self._default(),
            priors=parsed,
        )

    def _default(self) -> Strategy:
        return next((s for s in self.card.strategies if s.is_auto), Strategy())

    def _strategy(self, text: str) -> Strategy:
        try:
            strategy = Strategy.parse(text)
        except ValueError as error:
            raise FieldError(STRATEGY_HEADER, f"header {STRATEGY_HEADER}: {error}") from None
        if all(strategy.name != offered.name for offered in self.card.strategies):
            why = self.card.refused.get(strategy.name, "this engine does not have it")
            raise FieldError(STRATEGY_HEADER, f"strategy {strategy.name!r} cannot run here: {why}")
        return strategy

    def parts(
        self, call: Call, work: Work, parser: Callable[[], OutputParser] = OutputParser
    ) -> AsyncGenerator[Part, None]:
        """What `run` gives, parsed. Closing it cancels the request."""
        return parts(self.run(call, work), work.n, parser, call.short_cut)

    async def run(self, call: Call, work: Work) -> AsyncGenerator[Item, None]:
        """Generate all sequences of a request, their events as they come; closing it cancels them.

        Raises:
            RequestError: from the engine, before the first item where it comes from the request.
        """
        requests = self._requests(call, work)
        self.active[call.request_id] = call
        try:
            # each layer of iterators costs as much as all else that is done for a token: a lone stream has few
            streams = [self._events(request) for request in requests]
            async with aclosing(streams[0] if work.n == 1 else _interleave(streams)) as items:
                async for each in items:
                    item = each if isinstance(each, Item) else Item(0, each)
                    if isinstance(item.event, Finished):
                        self._settle(call, item.index, item.event)
                    yield item
        except RequestError as error:
            if error.code != CONTEXT_EXCEEDED:
                raise
            # llama-server names the numbers, and some clients trim their history by them
            sizes = {"n_prompt_tokens": len(work.prompt), "n_ctx": self.card.context}
            raise FieldError("", error.message, code=error.code, extra=sizes) from error
        finally:
            self.active.pop(call.request_id, None)

    def _requests(self, call: Call, work: Work) -> list[GenerateRequest]:
        requests = []
        for i in range(work.n):
            seed = work.sampling.seed
            sampling = (
                replace(work.sampling, seed=(seed + i) % 2**32) if seed is not None and i else work.sampling
            )
            requests.append(
                GenerateRequest(
                    request_id=f"{call.request_id}#{i}" if i else call.request_id,
                    prompt=work.prompt,
                    sampling=sampling,
                    max_tokens=work.max_tokens,
                    strategy=call.strategy,
                    priors=call.priors,
                    want_embedding=work.want_embedding,
                    render_tokens=work.render_tokens,
                    outlet=call.short_cut if work.n == 1 else None,
                )
            )
        return requests

    def _events(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent | Finished, None]:
        # the protocol promises that the iterator can be closed, which is what makes it a generator
        return cast("AsyncGenerator[TokenEvent | Finished, None]", self.engine.generate(request))

    def _settle(self, call: Call, index: int, end: Finished) -> None:
        totals = self.counters
        totals.prompt_tokens += end.prompt_n
        totals.prompt_ms += end.prompt_ms
        totals.predicted_tokens += end.predicted_n
        totals.predicted_ms += end.predicted_ms
        totals.drafted += end.draft_n
        totals.accepted += end.draft_n_accepted
        if end.report is not None and index == 0:
            self._reports[call.request_id] = end.report
            while len(self._reports) > REPORTS_KEPT:
                self._reports.popitem(last=False)

    def take_report(self, request_id: str) -> EngineReport | None:
        """The report of a request that has ended, once. A request for several sequences reports its first."""
        return self._reports.pop(request_id, None)


async def _interleave(
    streams: Sequence[AsyncGenerator[TokenEvent | Finished, None]],
) -> AsyncGenerator[Item, None]:
    """Events of several streams in order of arrival. The first error ends all."""
    # one place a stream: a slow reader holds every stream back
    queue: asyncio.Queue[Item | Exception | None] = asyncio.Queue(len(streams))

    async def pump(index: int, stream: AsyncGenerator[TokenEvent | Finished, None]) -> None:
        try:
            async with aclosing(stream):
                async for event in stream:
                    await queue.put(Item(index, event))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)  # raised again by the reader

    tasks = Tasks()
    for i, stream in enumerate(streams):
        tasks.spawn(pump(i, stream), name=f"sequence {i}")
    try:
        left = len(streams)
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        await tasks.aclose()
