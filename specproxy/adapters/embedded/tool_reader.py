"""Reading tool calls out of text while it streams by."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from enum import Enum, auto

from specproxy.adapters.embedded.output import Delta, Kind
from specproxy.adapters.embedded.reasoning import held_back

__all__ = ["CallReader", "HermesReader", "Llama3Reader"]

BEGIN, END, PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
SPACE = " \t\r\n"


class Broken(Exception):
    """The text is no tool call."""


class _At(Enum):
    OPEN = auto()  # before {
    KEY = auto()  # before a key or }
    COLON = auto()
    VALUE = auto()  # before or inside of a value
    COMMA = auto()  # before , or }
    DONE = auto()


class CallReader:
    """Reads one call, a JSON object with a name and arguments, piece by piece.

    `feed` gives ``(name, arguments)`` pieces: first the name with no arguments, as soon as it is known, then
    the JSON text of the arguments as it comes. `rest` is what follows the object.
    """

    def __init__(self) -> None:
        self.rest = ""
        self.raw = ""  # everything read so far
        self.used = 0  # characters of the last piece that were read
        self.name: str | None = None
        self._at = _At.OPEN
        self._key = ""
        self._token = ""  # the text of a key, or of a value that is not being passed on
        self._depth = 0
        self._quoted = self._escaped = False
        self._early = ""  # arguments that came before the name
        self._sent = False

    @property
    def done(self) -> bool:
        """Whether the object is complete."""
        return self._at is _At.DONE

    def feed(self, text: str) -> Iterator[tuple[str | None, str]]:
        """Take in text.

        Raises:
            Broken: this is no call; `raw` has all that was read.
        """
        out = ""
        for i, char in enumerate(text):
            if self.done:
                self.rest += text[i:]
                break
            self.raw += char
            self.used = i + 1
            before = self.name
            out += self._step(char)
            if self.name is not None and before is None:
                yield self.name, ""
                out, self._early = self._early + out, ""
        if out:
            if self.name is None:
                self._early += out
            else:
                yield None, out
        if self.done and self.name is None:
            raise Broken

    def _step(self, char: str) -> str:
        """One character; gives text of the arguments."""
        if self._at is _At.VALUE:
            return self._value(char)
        if self._quoted:  # inside of a key
            self._string(char)
            if not self._quoted:
                self._key, self._token, self._at = json.loads(self._token), "", _At.COLON
            return ""
        if char in SPACE:
            return ""
        self._punctuation(char)
        return ""

    def _punctuation(self, char: str) -> None:
        if self._at is _At.OPEN and char == "{":
            self._at = _At.KEY
        elif self._at is _At.KEY and char == '"':
            self._string(char)
        elif self._at is _At.COLON and char == ":":
            self._at = _At.VALUE
        elif self._at is _At.COMMA and char == ",":
            self._at = _At.KEY
        elif self._at in (_At.COMMA, _At.KEY) and char == "}":
            self._at = _At.DONE
        else:
            raise Broken

    def _string(self, char: str) -> None:
        self._token += char
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._quoted = not self._quoted

    def _value(self, char: str) -> str:
        if not self._token and char in SPACE:
            return ""
        if not self._quoted and not self._depth and char in ",}" + SPACE and self._token:
            self._end_value()
            if char not in SPACE:
                self._punctuation(char)
            return ""
        self._string(char)
        if not self._quoted and char in "[{":
            self._depth += 1
        elif not self._quoted and char in "]}":
            self._depth -= 1
        if self._depth < 0:
            raise Broken
        return char if self._key in ("arguments", "parameters") else ""

    def _end_value(self) -> None:
        if self._key == "name":
            try:
                name = json.loads(self._token)
            except ValueError:
                raise Broken from None
            if not isinstance(name, str):
                raise Broken
            self.name = name
        self._token, self._at = "", _At.COMMA


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class HermesReader:
    """Text and ``<tool_call>`` objects, in any order. What is no correct call comes out as the text it was."""

    def __init__(self) -> None:
        self._rest = ""
        self._call: CallReader | None = None
        self._calls = 0
        self._content = False
        self._after = False  # a call has just been read, and its closing tag is to be skipped
        self._lead = False  # white space after a call is to be skipped

    def feed(self, text: str) -> Iterator[Delta]:
        self._rest += text
        while self._rest:
            before = len(self._rest), self._call, self._after
            if self._call is not None:
                yield from self._in_call(self._call)
            elif self._after:
                self._skip_end()
            else:
                yield from self._in_text()
            if before == (len(self._rest), self._call, self._after):
                return

    def finish(self) -> Iterator[Delta]:
        rest, self._rest = self._rest, ""
        if self._call is not None and self._call.name is None:
            rest = BEGIN + self._call.raw + rest
        if rest.strip() and not self._after:
            yield Delta(Kind.CONTENT, rest)

    def _in_text(self) -> Iterator[Delta]:
        if self._lead:
            self._rest = self._rest.lstrip()
            self._lead = not self._rest
        before, found, after = self._rest.partition(BEGIN)
        if found:
            self._call, self._rest = CallReader(), after
        else:
            keep = held_back(before, BEGIN)
            self._rest = before[len(before) - keep :]
            before = before[: len(before) - keep]
        # white space next to a call is not content
        settled = before.rstrip() if found else before
        if not self._content and not settled.strip():
            if not found:
                self._rest = before + self._rest
            return
        if not found:
            kept = settled.rstrip()
            self._rest = settled[len(kept) :] + self._rest
            settled = kept
        if settled:
            self._content = True
            yield Delta(Kind.CONTENT, settled)

    def _in_call(self, call: CallReader) -> Iterator[Delta]:
        text, self._rest = self._rest, ""
        try:
            for name, arguments in call.feed(text):
                yield self._delta(name, arguments)
        except Broken:
            self._call = None
            if call.name is None:
                self._content = True
                yield Delta(Kind.CONTENT, BEGIN + call.raw)
            else:
                self._calls += 1  # too late to take it back: it ends as it is
            self._rest = text[call.used :]
            return
        if call.done:
            self._calls += 1
            self._rest, self._call, self._after, self._lead = call.rest, None, True, True

    def _delta(self, name: str | None, arguments: str) -> Delta:
        if name is not None:
            return Delta(Kind.CALL, call=self._calls, name=name, id=_call_id())
        return Delta(Kind.ARGUMENTS, arguments, self._calls)

    def _skip_end(self) -> None:
        text = self._rest.lstrip()
        if text.startswith(END):
            self._rest, self._after = text[len(END) :], False
        elif text and not END.startswith(text):
            self._rest, self._after = text, False
        else:
            self._rest = text


class Llama3Reader:
    """A reply that is a call from its first character on, or text."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._seen = ""
        self._call: CallReader | None = None
        self._text = False

    def feed(self, text: str) -> Iterator[Delta]:
        if self._text:
            yield Delta(Kind.CONTENT, text)
            return
        self._seen += text
        if self._call is None:
            start = self._seen.lstrip()
            if start.startswith(PYTHON_TAG):
                start = start[len(PYTHON_TAG) :].lstrip()
            elif PYTHON_TAG.startswith(start):
                return
            if not start:
                return
            if not start.startswith("{"):
                yield from self._give_up()
                return
            self._call, text = CallReader(), start
        yield from self._read(self._call, text)

    def _read(self, call: CallReader, text: str) -> Iterator[Delta]:
        try:
            for name, arguments in call.feed(text):
                if name is not None:
                    if name not in self._names:
                        raise Broken
                    yield Delta(Kind.CALL, name=name, id=_call_id())
                else:
                    yield Delta(Kind.ARGUMENTS, arguments)
        except Broken:
            if call.name not in self._names:
                yield from self._give_up()

    def _give_up(self) -> Iterator[Delta]:
        self._text = True
        yield Delta(Kind.CONTENT, self._seen)

    def finish(self) -> Iterator[Delta]:
        if not self._text and self._seen.strip() and (self._call is None or self._call.name is None):
            yield from self._give_up()
