"""From the text that a model writes to the parts that a reply is made of."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from specproxy.adapters.embedded.reasoning import ReasoningSplitter
from specproxy.adapters.embedded.types import Finished, TokenEvent, TokenLogprob

__all__ = [
    "Answer",
    "Delta",
    "Item",
    "Kind",
    "OutputParser",
    "Part",
    "ShortCut",
    "ToolCall",
    "ToolReader",
    "collect",
    "parts",
]


# What follows is made for every token, and is not frozen since that takes several times as long.


@dataclass(slots=True)
class Item:
    """One event of sequence `index`."""

    index: int
    event: TokenEvent | Finished


class Kind(Enum):
    """What a delta adds to."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"  # a tool call begins: `name` and `id` are set
    ARGUMENTS = "arguments"  # more JSON text of the current call's arguments


class Delta(NamedTuple):
    """One addition to a reply. `call` is the index of the tool call that it belongs to."""

    kind: Kind
    text: str = ""
    call: int = 0
    name: str = ""
    id: str = ""


class ToolReader(Protocol):
    """Reads tool calls out of the answer's text."""

    def feed(self, text: str) -> Iterable[Delta]:
        """Take in text; gives deltas of content and of calls as far as they are settled."""
        ...

    def finish(self) -> Iterable[Delta]:
        """The reply is over: what was held back comes out."""
        ...


class OutputParser:
    """One reply's text → deltas. Without reasoning tags and tools, text is content as it comes."""

    def __init__(self, reasoning: ReasoningSplitter | None = None, tools: ToolReader | None = None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def feed(self, text: str) -> list[Delta]:
        """Take in text that the model wrote."""
        if self._reasoning is None:
            return list(self._content(text))
        return list(self._split(self._reasoning.feed(text)))

    def finish(self) -> list[Delta]:
        """The model has ended."""
        deltas = list(self._split(self._reasoning.finish())) if self._reasoning else []
        if self._tools:
            deltas += self._tools.finish()
        return deltas

    def _split(self, pieces: Iterable[tuple[str, str]]) -> Iterator[Delta]:
        for kind, text in pieces:
            if kind == "reasoning":
                yield Delta(Kind.REASONING, text)
            else:
                yield from self._content(text)

    def _content(self, text: str) -> Iterable[Delta]:
        if self._tools:
            return self._tools.feed(text)
        return (Delta(Kind.CONTENT, text),) if text else ()


@dataclass(slots=True)
class Part:
    """What one engine event means for reply `index`; `finished` is set in the last one."""

    index: int
    deltas: Sequence[Delta]
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finished: Finished | None = None


@dataclass(slots=True)
class ShortCut:
    """The outlet of a lone reply (see `types.Outlet`), and what its events mean there."""

    send: Callable[[TokenEvent], bool] | None = None
    part: Callable[[TokenEvent], Part] | None = None


async def parts(
    items: AsyncGenerator[Item, None], n: int, parser: Callable[[], OutputParser], short_cut: ShortCut
) -> AsyncGenerator[Part, None]:
    """Parse the texts of `n` replies as they stream. Closing it closes `items`."""
    parsers = [parser() for _ in range(n)]

    def part(event: TokenEvent, index: int = 0) -> Part:
        return Part(index, parsers[index].feed(event.text), event.tokens, event.logprobs)

    if n == 1:
        short_cut.part = part
    async with aclosing(items):
        async for item in items:
            if isinstance(item.event, TokenEvent):
                yield part(item.event, item.index)
            else:
                yield Part(item.index, parsers[item.index].finish(), finished=item.event)


@dataclass(slots=True)
class ToolCall:
    """A tool call as the model made it; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """One whole reply."""

    index: int
    finished: Finished
    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, part: Part) -> None:
        """Take in one part."""
        self.tokens += part.tokens
        self.logprobs += part.logprobs
        for delta in part.deltas:
            if delta.kind is Kind.CONTENT:
                self.content += delta.text
            elif delta.kind is Kind.REASONING:
                self.reasoning += delta.text
            elif delta.kind is Kind.CALL:
                self.calls.append(ToolCall(delta.id, delta.name))
            else:
                self.calls[delta.call].arguments += delta.text
        if part.finished is not None:
            self.finished = part.finished


async def collect(stream: AsyncGenerator[Part, None], n: int) -> list[Answer]:
    """Read all parts to the end. Cancelling it closes the stream."""
    answers = [Answer(i, Finished("cancelled")) for i in range(n)]
    async with aclosing(stream):
        async for part in stream:
            answers[part.index].add(part)
    return answers
