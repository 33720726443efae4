"""The embedded engine without its thread: requests in, steps done by hand, events out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("CI") != "true":
    pytest.importorskip("llama_cpp")  # in CI the marker makes it a failure

from specproxy.adapters.embedded.batch import Batch
from specproxy.adapters.embedded.llama import Context, ContextParams, Model, ModelParams
from specproxy.adapters.embedded.options import EngineOptions
from specproxy.adapters.embedded.runtime import Runtime
from specproxy.adapters.embedded.scheduler import Event, Scheduler
from specproxy.adapters.embedded.sequence import Sink
from specproxy.adapters.embedded.types import Finished, GenerateRequest, Sampling, TokenEvent
from specproxy.adapters.embedded.vocabulary import Vocabulary
from specproxy.errors import SpecproxyError
from specproxy.records import Strategy

__all__ = ["GREEDY", "ByHand", "Reader", "reference", "request"]

GREEDY = Sampling(temperature=0)


@dataclass(eq=False)
class Reader:
    """Collects what one request gives."""

    full: bool = False
    events: list[Event] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(event.text for event in self.events if isinstance(event, TokenEvent))

    @property
    def ids(self) -> list[int]:
        """All tokens so far."""
        return [token for event in self.events if isinstance(event, TokenEvent) for token in event.tokens]

    @property
    def end(self) -> Finished:
        """The last event, if it went well."""
        last = self.events[-1]
        if isinstance(last, SpecproxyError):
            raise last
        assert isinstance(last, Finished)
        return last

    @property
    def ended(self) -> bool:
        """Whether the last event has come."""
        return bool(self.events) and not isinstance(self.events[-1], TokenEvent)


def request(
    prompt: Sequence[int],
    strategy: str = "plain",
    *,
    tokens: int | None = 60,
    sampling: Sampling = GREEDY,
    **more: Any,
) -> GenerateRequest:
    """A request, greedy unless told otherwise."""
    return GenerateRequest(
        "test", tuple(prompt), sampling, max_tokens=tokens, strategy=Strategy.parse(strategy), **more
    )


class ByHand:
    """A loaded model and its scheduler, on the calling thread."""

    def __init__(self, model: Path, draft: Path | None = None, **options: Any) -> None:
        settings: dict[str, Any] = {"context": 512, "threads": 1} | options
        self.vocabulary = Vocabulary(model)
        self.runtime = Runtime(EngineOptions(model=model, draft=draft, **settings), self.vocabulary)
        self.scheduler = Scheduler(self.runtime, self.vocabulary, self._emit)

    def _emit(self, sink: Sink, event: Event) -> None:
        assert isinstance(sink, Reader)
        sink.events.append(event)

    def submit(self, request: GenerateRequest) -> Reader:
        """Hand in a request."""
        reader = Reader()
        self.scheduler.submit(request, reader)
        return reader

    def run(self, *requests: GenerateRequest) -> list[Reader]:
        """Hand in requests and step until all have ended."""
        readers = [self.submit(request) for request in requests]
        self.finish()
        return readers

    def finish(self) -> None:
        """Step until nothing is left."""
        while not self.scheduler.idle:
            assert self.scheduler.step(), "requests are left, but none goes on"

    def forget(self) -> None:
        """Empty all caches."""
        self.scheduler.reset()

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        return self.vocabulary.tokenize(text)

    def close(self) -> None:
        """Free everything."""
        self.runtime.close()
        self.vocabulary.close()


def reference(model: Path, prompt: Sequence[int], count: int) -> list[int]:
    """What the model says greedily if every token is computed from scratch, one context for each."""
    loaded = Model(model, ModelParams())
    context = Context(loaded, ContextParams(cells=512, sequences=1, outputs=1, threads=1, threads_batch=1))
    batch = Batch(512)
    tokens = list(prompt)
    for _ in range(count):
        context.clear()
        batch.clear()
        batch.add(tokens, 0, 0, outputs=1)
        context.decode(batch)
        tokens.append(int(context.logits(1)[0].argmax()))
    context.close()
    loaded.close()
    return tokens[len(prompt) :]
