"""The syntax of Go's text/template, as far as `go_template` knows it: source in, nodes out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Action",
    "Argument",
    "Branch",
    "Function",
    "GoTemplateError",
    "Jump",
    "Literal",
    "Node",
    "Parser",
    "Path",
    "Pipe",
    "pieces",
]

ACTION = re.compile(r"(\s*)\{\{-(?=\s)|\{\{")
END = re.compile(r"\s-\}\}\s*|\}\}")
TOKEN = re.compile(
    r"""\s*(?:
    (?P<string>"(?:[^"\\\n]|\\.)*") | (?P<raw>`[^`]*`) | (?P<number>-?\d+(?:\.\d+)?)
    | (?P<variable>\$\w*) | (?P<name>[A-Za-z_]\w*) | (?P<field>\.[A-Za-z_]\w*) | (?P<dot>\.)
    | (?P<sign>:=|=|\||\(|\)|,)
    )""",
    re.VERBOSE,
)
WORDS: Mapping[str, Any] = {"true": True, "false": False, "nil": None}


class GoTemplateError(Exception):
    """A template that is wrong, or uses what is not known here."""


# --- what a template is made of ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Path:
    """A value and fields of it: ``.A.B``, ``$x.A``, ``(pipe).A``. `start` None is dot."""

    start: str | Pipe | None
    fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant."""

    value: Any


@dataclass(frozen=True, slots=True)
class Function:
    """A function's name."""

    name: str


Argument = Path | Literal | Function


@dataclass(frozen=True, slots=True)
class Pipe:
    """Commands, each given the result of the one before it, and the variables that get the result."""

    commands: tuple[tuple[Argument, ...], ...]
    variables: tuple[str, ...] = ()
    declares: bool = True


@dataclass(slots=True)
class Action:
    """``{{ pipe }}``."""

    pipe: Pipe


@dataclass(slots=True)
class Branch:
    """``if``, ``with`` or ``range``."""

    kind: str
    pipe: Pipe
    body: list[Node]
    otherwise: list[Node] | None = None


@dataclass(slots=True)
class Jump:
    """``break`` or ``continue``."""

    kind: str


Node = str | Action | Branch | Jump


# --- parsing -------------------------------------------------------------------------------------


def pieces(source: str) -> Iterator[tuple[bool, str]]:
    """Text and actions in turn, as (is an action, content); spaces are trimmed where the source says so."""
    at = 0
    while found := ACTION.search(source, at):
        text = source[at : found.start()]
        yield False, text if found[0] == "{{" else text.rstrip(" \t\r\n")
        inside = found.end()
        if source[inside:].lstrip().startswith("/*"):
            closed = source.find("*/", inside)
            end = END.match(source, closed + 2) if closed >= 0 else None
        else:
            end = _end_of_action(source, inside)
        if end is None:
            raise GoTemplateError("an action is not closed")
        content = source[inside : end.start()]
        if not content.lstrip().startswith("/*"):
            yield True, content
        at = end.end() if end[0] != "}}" else end.start() + 2
    yield False, source[at:]


def _end_of_action(source: str, at: int) -> re.Match[str] | None:
    """Where an action ends; braces in its strings do not count."""
    while at < len(source):
        if end := END.match(source, at):
            return end
        token = re.compile(r'"(?:[^"\\\n]|\\.)*"|`[^`]*`', re.DOTALL).match(source, at)
        at = token.end() if token else at + 1
    return None


@dataclass(slots=True)
class Parser:
    """Reads nodes up to the ``end`` or ``else`` that belongs to them."""

    pieces: Iterator[tuple[bool, str]]
    names: set[str] = field(default_factory=set)  # of fields and variables, in lower case
    ranges: int = 0  # that we are in

    def nodes(self, *, inner: bool) -> tuple[list[Node], str]:
        """A list of nodes, and the action that ended it (nothing at the end of the source)."""
        found: list[Node] = []
        for is_action, content in self.pieces:
            if not is_action:
                if content:
                    found.append(content)
                continue
            word = content.split(maxsplit=1)[0] if content.strip() else ""
            if word in ("end", "else"):
                if not inner:
                    raise GoTemplateError(f"unexpected {word}")
                return found, content.strip()
            found.append(self.node(word, content.strip()))
        if inner:
            raise GoTemplateError("an if, with or range has no end")
        return found, ""

    def node(self, word: str, content: str) -> Node:
        """One action or branch."""
        if word in ("break", "continue") and content == word:
            if not self.ranges:
                raise GoTemplateError(f"{word} stands outside of a range")
            return Jump(word)
        if word in ("if", "with", "range"):
            return self.branch(word, content[len(word) :])
        if word in ("define", "template", "block"):
            raise GoTemplateError(f"{word} is not known here")
        return Action(self.pipe(content))

    def branch(self, kind: str, content: str) -> Branch:
        """From behind ``if`` to its end."""
        made = Branch(kind, self.pipe(content), [])
        self.ranges += kind == "range"
        made.body, ended = self.nodes(inner=True)
        self.ranges -= kind == "range"
        if ended.startswith("else"):
            rest = ended[4:].strip()
            if not rest:
                made.otherwise, ended = self.nodes(inner=True)
                if ended != "end":
                    raise GoTemplateError("an else follows an else")
            elif rest.split(maxsplit=1)[0] == "if" and kind == "if":
                made.otherwise = [self.branch("if", rest[2:])]
            else:
                raise GoTemplateError(f"{ended} is not known here")
        return made

    def pipe(self, content: str) -> Pipe:
        """A whole pipeline."""
        tokens = _Tokens(content)
        pipe = self.pipeline(tokens)
        if tokens.peek() != ("", ""):
            raise GoTemplateError(f"unexpected {tokens.peek()[1]} in {content.strip()}")
        return pipe

    def pipeline(self, tokens: _Tokens) -> Pipe:
        """Up to the end, or a closing bracket."""
        variables: list[str] = []
        declares = True
        start = tokens.at
        while tokens.peek()[0] == "variable":
            variables.append(tokens.take()[1])
            sign = tokens.peek()[1]
            if sign == ",":
                tokens.take()
                continue
            if sign in (":=", "="):
                declares = tokens.take()[1] == ":="
                break
            variables, tokens.at = [], start
            break
        commands = [self.command(tokens)]
        while tokens.peek()[1] == "|":
            tokens.take()
            commands.append(self.command(tokens))
        return Pipe(tuple(commands), tuple(variables), declares)

    def command(self, tokens: _Tokens) -> tuple[Argument, ...]:
        """Arguments up to a bar or a closing bracket."""
        found: list[Argument] = []
        while (peeked := tokens.peek()) != ("", "") and peeked[1] not in ("|", ")"):
            found.append(self.argument(tokens))
        if not found:
            raise GoTemplateError("a command is empty")
        return tuple(found)

    def argument(self, tokens: _Tokens) -> Argument:
        """One operand with its fields."""
        kind, text = tokens.take()
        if kind == "string":
            return Literal(_unquote(text))
        if kind == "raw":
            return Literal(text[1:-1])
        if kind == "number":
            return Literal(_number(text))
        if kind == "name":
            return Literal(WORDS[text]) if text in WORDS else Function(text)
        if kind == "field":
            return self.path(None, tokens, text[1:])
        if kind == "dot":
            return Path(None)
        if kind == "variable":
            self.names.add(text.lower())
            return self.path(text, tokens)
        if text == "(":
            known = set(self.names)
            inner = self.pipeline(tokens)
            if tokens.take()[1] != ")":
                raise GoTemplateError("a bracket is not closed")
            path = self.path(inner, tokens)
            if path.fields:
                self.names = known  # Ollama does not look into these
            return path
        raise GoTemplateError(f"unexpected {text}")

    def path(self, start: str | Pipe | None, tokens: _Tokens, *names: str) -> Path:
        """Fields that follow at once."""
        fields = list(names)
        while tokens.peek()[0] == "field" and tokens.adjacent():
            fields.append(tokens.take()[1][1:])
        self.names |= {name.lower() for name in fields}
        return Path(start, tuple(fields))


class _Tokens:
    """Tokens of one action."""

    def __init__(self, content: str) -> None:
        self.found: list[tuple[str, str, bool]] = []
        self.at = 0
        at, content = 0, content.strip()
        while at < len(content):
            match = TOKEN.match(content, at)
            if match is None or match.lastgroup is None:
                raise GoTemplateError(f"{content[at:].strip()[:20]!r} is not known here")
            spaced = content[at : at + 1].isspace()
            self.found.append((match.lastgroup, match[match.lastgroup], not spaced))
            at = match.end()

    def peek(self) -> tuple[str, str]:
        """Kind and text of the next one; empty at the end."""
        return self.found[self.at][:2] if self.at < len(self.found) else ("", "")

    def adjacent(self) -> bool:
        """Whether the next one follows without a space."""
        return self.found[self.at][2]

    def take(self) -> tuple[str, str]:
        """The next one, which must be there."""
        if self.at >= len(self.found):
            raise GoTemplateError("an action ends too soon")
        self.at += 1
        return self.found[self.at - 1][:2]


def _number(text: str) -> int | float:
    try:
        return float(text) if "." in text else int(text)
    except ValueError as error:  # more digits than Python reads
        raise GoTemplateError(f"the number {text[:20]}… is not known here") from error


def _unquote(text: str) -> str:
    try:
        value = json.loads(text)
        str(value).encode()  # half of a surrogate pair is no text
    except ValueError as error:
        raise GoTemplateError(f"the string {text} is not known here") from error
    return str(value)
