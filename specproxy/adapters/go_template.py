"""Go's text/template as far as chat templates of Ollama's models use it; what is not known is refused.

Text, actions, ``if``, ``with``, ``range``, variables, pipelines, and the functions in `FUNCTIONS`. Definitions
of further templates, method calls and formats are not there. The meaning follows the documentation of the
package and what Ollama's own does with it, which tests compare.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from specproxy.adapters.go_syntax import (
    Action,
    Argument,
    Branch,
    Function,
    GoTemplateError,
    Jump,
    Literal,
    Node,
    Parser,
    Path,
    Pipe,
    pieces,
)

__all__ = ["GoTemplate", "GoTemplateError"]

# --- running -------------------------------------------------------------------------------------


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        raise GoTemplateError("values of different types are compared")
    return bool(one == other)


def _less(one: Any, other: Any) -> bool:
    if type(one) is not type(other) or not isinstance(one, int | float | str) or isinstance(one, bool):
        raise GoTemplateError("values are compared that have no order")
    return bool(one < other)


def _length(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, Sequence | Mapping):
        return len(value)
    raise GoTemplateError("something without a length is measured")


def _index(value: Any, *at: Any) -> Any:
    for key in at:
        try:
            value = value[key]
        except (TypeError, LookupError) as error:
            raise GoTemplateError("an index is out of range") from error
    return value


def _slice(value: Any, *at: int) -> Any:
    if isinstance(value, str) or not isinstance(value, Sequence) or len(at) > 2:
        raise GoTemplateError("something other than a list is cut")
    first, last = (*at, len(value))[:2] if at else (0, len(value))
    if not 0 <= first <= last <= len(value):
        raise GoTemplateError("a slice is out of range")
    return value[first:last]


def _print_format(form: str, *values: Any) -> str:
    left = list(values)

    def one(found: re.Match[str]) -> str:
        if found[0] == "%%":
            return "%"
        if found[0] not in ("%s", "%d", "%v") or not left:
            raise GoTemplateError(f"printf with {found[0]} is not known here")
        value = left.pop(0)
        if isinstance(value, bool) or not isinstance(value, int if found[0] == "%d" else str | int):
            raise GoTemplateError(f"printf is given another value than {found[0]} is for")
        return str(value)

    text = re.sub(r"%.?", one, form)
    if left:
        raise GoTemplateError("printf is given too many values")
    return text


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "not": lambda value: not value,
    "eq": lambda one, *others: any(_same(one, other) for other in others),
    "ne": lambda one, other: not _same(one, other),
    "lt": _less,
    "le": lambda one, other: not _less(other, one),
    "gt": lambda one, other: _less(other, one),
    "ge": lambda one, other: not _less(one, other),
    "len": _length,
    "index": _index,
    "slice": _slice,
    "printf": _print_format,
}
"""Besides ``and`` and ``or``, which do not look at what follows once they know."""


class _Break(Exception):
    """Out of the innermost range."""


class _Continue(Exception):
    """On with it."""


class _Run:
    """One execution: the data, the variables, and what was written."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.out: list[str] = []
        self.scopes: list[dict[str, Any]] = [{"$": data}]

    def nodes(self, nodes: Sequence[Node], dot: Any) -> None:
        """Write a list of nodes."""
        self.scopes.append({})
        try:
            for node in nodes:
                self.node(node, dot)
        finally:
            self.scopes.pop()

    def node(self, node: Node, dot: Any) -> None:
        if isinstance(node, str):
            self.out.append(node)
        elif isinstance(node, Jump):
            raise _Break if node.kind == "break" else _Continue
        elif isinstance(node, Action):
            value = self.pipe(node.pipe, dot)
            if not node.pipe.variables:
                self.out.append(_printed(value))
        else:
            self.branch(node, dot)

    def branch(self, node: Branch, dot: Any) -> None:
        self.scopes.append({})  # for variables of the pipe
        try:
            if node.kind == "range":
                self.range(node, dot)
                return
            value = self.pipe(node.pipe, dot)
            if value:
                self.nodes(node.body, value if node.kind == "with" else dot)
            elif node.otherwise is not None:
                self.nodes(node.otherwise, dot)
        finally:
            self.scopes.pop()

    def range(self, node: Branch, dot: Any) -> None:
        value = self.pipe(Pipe(node.pipe.commands), dot)
        if value is not None and (isinstance(value, str) or not isinstance(value, Sequence)):
            raise GoTemplateError("a range goes over something other than a list")
        if not value and node.otherwise is not None:
            self.nodes(node.otherwise, dot)
        for number, item in enumerate(value or ()):
            for name, given in zip(node.pipe.variables[::-1], (item, number), strict=False):
                self.scopes[-1][name] = given
            try:
                self.nodes(node.body, item)
            except _Continue:
                continue
            except _Break:
                break

    def pipe(self, pipe: Pipe, dot: Any) -> Any:
        given: tuple[Any, ...] = ()
        for command in pipe.commands:
            given = (self.command(command, dot, given),)
        for name in pipe.variables:
            self.assign(name, given[0], declares=pipe.declares)
        return given[0]

    def assign(self, name: str, value: Any, *, declares: bool) -> None:
        if declares:
            self.scopes[-1][name] = value
            return
        for scope in reversed(self.scopes):
            if name in scope:
                scope[name] = value
                return
        raise GoTemplateError(f"the variable {name} is not declared")

    def command(self, command: tuple[Argument, ...], dot: Any, given: tuple[Any, ...]) -> Any:
        first, rest = command[0], command[1:]
        if not isinstance(first, Function):
            if rest or given:
                raise GoTemplateError("something that is no function is called")
            return self.value(first, dot)
        if first.name in ("and", "or"):
            return self.short(first.name, rest, dot, given)
        function = FUNCTIONS.get(first.name)
        if function is None:
            raise GoTemplateError(f"the function {first.name} is not known here")
        try:
            return function(*(self.value(argument, dot) for argument in rest), *given)
        except TypeError as error:
            raise GoTemplateError(f"{first.name} is called with wrong arguments") from error

    def short(self, name: str, rest: tuple[Argument, ...], dot: Any, given: tuple[Any, ...]) -> Any:
        """``and`` and ``or``: the first value that settles it, or the last."""
        value: Any = None
        for argument in (*rest, *map(Literal, given)):
            value = self.value(argument, dot)
            if bool(value) is (name == "or"):
                break
        return value

    def value(self, argument: Argument, dot: Any) -> Any:
        if isinstance(argument, Literal):
            return argument.value
        if isinstance(argument, Function):
            return self.command((argument,), dot, ())
        start = argument.start
        if start is None:
            value = dot
        elif isinstance(start, Pipe):
            value = self.pipe(start, dot)
        else:
            value = self.variable(start)
        for name in argument.fields:
            value = self.field(value, name)
        return value

    def variable(self, name: str) -> Any:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        raise GoTemplateError(f"the variable {name} is not declared")

    def field(self, value: Any, name: str) -> Any:
        """Of the data, what is missing is nothing; of anything else it is a mistake."""
        if isinstance(value, Mapping) and (name in value or value is self.scopes[0]["$"]):
            return value.get(name)
        raise GoTemplateError(f"there is no field {name}")


def _printed(value: Any) -> str:
    if value is None:
        return "<no value>"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int):
        return str(value)
    raise GoTemplateError("a list or an object is written as text")


# --- templates of Ollama -------------------------------------------------------------------------


class GoTemplate:
    """A chat template of an Ollama model.

    Raises:
        GoTemplateError: it is wrong, or uses what is not known here.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        parser = Parser(pieces(source))
        try:
            self._nodes, _ = parser.nodes(inner=False)
        except RecursionError:
            raise GoTemplateError("it is nested too deeply") from None
        self.names = frozenset(parser.names)
        """Fields and variables that it looks at, in lower case."""
        if not self.names & {"messages", "response"}:
            self._nodes.append(Action(Pipe(((Path(None, ("Response",)),),))))
        unknown = {name for name in _functions(self._nodes) if name not in (*FUNCTIONS, "and", "or")}
        if unknown:
            raise GoTemplateError(f"the function {min(unknown)} is not known here")

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt of a conversation, whose messages have a ``role`` and a ``content``.

        Raises:
            GoTemplateError: it does with them what is not known here.
        """
        collated = _collate(messages)
        if "messages" in self.names:
            systems = [str(m["content"]) for m in messages if m["role"] == "system"]
            return self._execute(self._nodes, System="\n\n".join(systems), Messages=collated, Response="")
        return self._by_turns(collated)

    def _execute(self, nodes: Sequence[Node], **data: Any) -> str:
        run = _Run({"Think": False, "ThinkLevel": "", "IsThinkSet": False, **data})
        try:
            run.nodes(nodes, run.scopes[0]["$"])
        except RecursionError:
            raise GoTemplateError("it is nested too deeply") from None
        return "".join(run.out)

    def _by_turns(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """For templates of one turn: written once for each, and the last time up to where the answer begins."""
        turn = {"System": "", "Prompt": "", "Response": ""}
        out = ""
        for message in messages:
            role = message["Role"]
            full = {"system": turn["Prompt"] or turn["Response"], "user": turn["Response"]}.get(role)
            if full:
                out += self._execute(self._nodes, **turn)
                turn = dict.fromkeys(turn, "")
            name = {"system": "System", "user": "Prompt", "assistant": "Response"}.get(role)
            if name is not None:
                turn[name] = message["Content"]
        cut: list[bool] = []
        return out + self._execute(_up_to_response(self._nodes, cut), **turn)


def _collate(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates see them; those of one role in a row are one."""
    found: list[dict[str, Any]] = []
    for message in messages:
        role, content = str(message["role"]), str(message["content"])
        if found and found[-1]["Role"] == role != "tool":
            found[-1]["Content"] += "\n\n" + content
        else:
            empty = {"Thinking": "", "Images": (), "ToolCalls": (), "ToolName": "", "ToolCallID": ""}
            found.append({"Role": role, "Content": content, **empty})
    return found


def _up_to_response(nodes: Sequence[Node], cut: list[bool]) -> list[Node]:
    """Nodes without what follows the place of the answer; conditions are not looked at."""
    found: list[Node] = []
    for node in nodes:
        if cut:
            break
        if isinstance(node, Branch):
            body = _up_to_response(node.body, cut)
            if cut and node.otherwise is not None:
                raise GoTemplateError("the answer stands in one of two branches")
            otherwise = None if node.otherwise is None else _up_to_response(node.otherwise, cut)
            node = Branch(node.kind, node.pipe, body, otherwise)
        elif isinstance(node, Action) and any(
            isinstance(a, Path) and "Response" in a.fields for command in node.pipe.commands for a in command
        ):
            cut.append(True)
        found.append(node)
    return found


def _functions(nodes: Sequence[Node]) -> Iterator[str]:
    """Names of all functions that are called anywhere."""
    for node in nodes:
        if isinstance(node, Action | Branch):
            yield from _called(node.pipe)
        if isinstance(node, Branch):
            yield from _functions((*node.body, *(node.otherwise or ())))


def _called(pipe: Pipe) -> Iterator[str]:
    for command in pipe.commands:
        for argument in command:
            if isinstance(argument, Function):
                yield argument.name
            elif isinstance(argument, Path) and isinstance(argument.start, Pipe):
                yield from _called(argument.start)
