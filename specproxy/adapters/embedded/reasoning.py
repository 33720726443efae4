"""Tell reasoning from the answer while text streams by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["ReasoningSplitter", "Tags", "held_back", "tags_of"]


@dataclass(frozen=True, slots=True)
class Tags:
    """What opens and closes a model's reasoning."""

    open: str
    close: str


# Tags by which templates mark reasoning; the first whose closing tag occurs in a template is the model's.
KNOWN_TAGS = (
    Tags("<think>", "</think>"),
    Tags("[THINK]", "[/THINK]"),
    Tags("<seed:think>", "</seed:think>"),
    Tags("<thinking>", "</thinking>"),
    Tags("<|START_THINKING|>", "<|END_THINKING|>"),
)


def tags_of(template: str | None) -> Tags | None:
    """The reasoning tags that a chat template knows, or None for a model that doesn't reason."""
    if template is None:
        return None
    return next((tags for tags in KNOWN_TAGS if tags.close in template), None)


def held_back(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` may begin with (shorter than `mark`)."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


class ReasoningSplitter:
    """Splits a reply into reasoning and answer, piece by piece.

    Reasoning is what stands between the tags at the very start of the reply. `opened` says that the prompt
    already ends with the opening tag. White space around reasoning and before the answer is dropped, as the
    servers do; a reply that ends inside of reasoning is all reasoning.
    """

    def __init__(self, tags: Tags, *, opened: bool = False) -> None:
        self._tags = tags
        self._state = "reasoning" if opened else "start"
        self._rest = ""
        self._strip = opened

    def feed(self, text: str) -> Iterator[tuple[str, str]]:
        """Take in text; yields ``("reasoning" | "content", text)`` as far as it is settled."""
        self._rest += text
        if self._state == "start":
            self._open()
        if self._state == "reasoning":
            yield from self._reason()
        if self._state == "after":
            self._rest = self._rest.lstrip()
            if self._rest:
                self._state = "content"
        if self._state == "content" and self._rest:
            rest, self._rest = self._rest, ""
            yield "content", rest

    def finish(self) -> Iterator[tuple[str, str]]:
        """The reply is over: what was held back comes out."""
        rest, self._rest = self._rest, ""
        if self._state == "reasoning":
            rest = rest.rstrip()
        if rest and self._state != "after":
            yield ("reasoning" if self._state == "reasoning" else "content"), rest

    def _open(self) -> None:
        start = self._rest.lstrip()
        if start.startswith(self._tags.open):
            self._state, self._strip = "reasoning", True
            self._rest = start[len(self._tags.open) :]
        elif start and not self._tags.open.startswith(start):
            self._state = "content"

    def _reason(self) -> Iterator[tuple[str, str]]:
        if self._strip:
            self._rest = self._rest.lstrip()
            self._strip = not self._rest
        before, found, after = self._rest.partition(self._tags.close)
        if found:
            self._state, self._rest = "after", after
            if before.rstrip():
                yield "reasoning", before.rstrip()
            return
        # white space at the end may turn out to stand before the closing tag
        keep = held_back(before, self._tags.close)
        settled = before[: len(before) - keep].rstrip()
        self._rest = before[len(settled) :]
        if settled:
            yield "reasoning", settled
