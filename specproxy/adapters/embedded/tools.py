"""Tools: what the request offers, how models call them, and the grammars that make them do so.

Two formats are spoken: Hermes and Qwen (``<tool_call>{"name": …, "arguments": …}</tool_call>``) and Llama 3
(``{"name": …, "parameters": …}``, optionally after ``<|python_tag|>``). Others are recognised and refused by
name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specproxy.adapters.embedded.body import FieldError, Fields
from specproxy.adapters.embedded.forms import schema_rule
from specproxy.adapters.embedded.grammar.gbnf import Grammar, any_without, literal, sequence
from specproxy.adapters.embedded.tool_reader import HermesReader, Llama3Reader

__all__ = ["HERMES", "LLAMA3", "NO_TOOLS", "Tool", "ToolFormat", "Toolbox", "detect_format", "openai_tools"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: Any
    description: str = ""

    def as_openai(self) -> dict[str, Any]:
        """The form that chat templates expect."""
        function: dict[str, Any] = {"name": self.name, "parameters": self.parameters}
        if self.description:
            function["description"] = self.description
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one request. `mode` is auto or required; with `only`, that tool must be called."""

    tools: tuple[Tool, ...] = ()
    mode: str = "auto"
    only: str | None = None
    parallel: bool = True

    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        return tuple(tool for tool in self.tools if self.only in (None, tool.name))


NO_TOOLS = Toolbox()


def openai_tools(body: Fields) -> Toolbox:
    """`tools`, `tool_choice` and `parallel_tool_calls` of an OpenAI request.

    Raises:
        FieldError: they are malformed, or the choice is none of the tools.
    """
    tools = []
    for given in body.objects("tools"):
        kind = given.text("type") or "function"
        if kind != "function":
            raise given.wrong("type", f"{kind!r} is not supported: only tools of type 'function' are")
        function = given.object("function") or given  # /v1/responses has it flat
        name = function.text("name")
        if not name:
            raise function.wrong("name", "is required")
        parameters = function.get("parameters")
        tools.append(
            Tool(
                name,
                {"type": "object"} if parameters is None else parameters,
                function.text("description") or "",
            )
        )
    mode, only = _choice(body)
    if mode == "none" or not tools:
        if only or mode == "required":
            raise body.wrong("tool_choice", "asks for a call, but there are no 'tools'")
        return NO_TOOLS
    if only is not None and all(tool.name != only for tool in tools):
        raise body.wrong("tool_choice", f"names {only!r}, which is not among the 'tools'")
    return Toolbox(tuple(tools), mode, only, body.flag("parallel_tool_calls", default=True) and only is None)


def _choice(body: Fields) -> tuple[str, str | None]:
    value = body.get("tool_choice")
    if value is None or isinstance(value, str):
        return body.choice("tool_choice", ("none", "auto", "required")) or "auto", None
    choice = body.object("tool_choice")
    assert choice is not None
    name = (choice.object("function") or choice).text("name")
    if choice.text("type") != "function" or not name:
        raise body.wrong("tool_choice", "must be none, auto, required, or name a function")
    return "required", name


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls: `begin` and `end` stand around each, `arguments` is the arguments' key."""

    name: str
    begin: str
    end: str
    arguments: str
    special: tuple[str, ...]  # texts that may be control tokens and that the reader must see

    def reader(self, toolbox: Toolbox) -> HermesReader | Llama3Reader:
        """A new reader of one reply."""
        if self is HERMES:
            return HermesReader()
        return Llama3Reader(frozenset(tool.name for tool in toolbox.tools))

    def calls(self, grammar: Grammar, toolbox: Toolbox) -> str:
        """A rule for one call, or several where they may be parallel.

        Raises:
            FieldError: a tool's schema is not supported.
        """
        options = []
        for i, tool in enumerate(toolbox.callable()):
            arguments = schema_rule(grammar, tool.parameters, f"tools[{i}].function.parameters")
            name = literal(json.dumps(tool.name, ensure_ascii=False))
            options.append(
                sequence(
                    [
                        '"{\\x22name\\x22:"',
                        '" "?',
                        name,
                        f'", \\x22{self.arguments}\\x22:"',
                        '" "?',
                        arguments,
                        '"}"',
                    ]
                )
            )
        call = grammar.rule("call", " | ".join(options))
        framed = grammar.rule("framed-call", sequence([literal(self.begin), call, literal(self.end)]))
        # Llama 3 has no frame that would tell a second call from text
        return f'{framed} ("\\n" {framed})*' if toolbox.parallel and self.end else framed


HERMES = ToolFormat("Hermes", "<tool_call>\n", "\n</tool_call>", "arguments", ("<tool_call>", "</tool_call>"))
LLAMA3 = ToolFormat("Llama 3", "", "", "parameters", ("<|python_tag|>",))

# What gives a format away in a template. Order matters: some others also use <tool_call>.
FOREIGN = {
    "<function=": "Qwen3-Coder XML",
    "<arg_key>": "GLM",
    "[TOOL_CALLS]": "Mistral",
    "<｜tool▁calls▁begin｜>": "DeepSeek",
    "<|tool_calls_section_begin|>": "Kimi",
    "<|START_ACTION|>": "Command R",
    "<|channel|>": "gpt-oss (Harmony)",
    "<|tool_call|>": "Granite or Phi-4",
    "<TOOLCALL>": "Nemotron",
    ">>>all": "Functionary",
    "functools[": "Phi or FireFunction",
    "<tool_calls>": "MiniMax or Seed",
    "<start_function_call>": "FunctionGemma",
}


def detect_format(template: str | None) -> ToolFormat | str:
    """The tool format of a chat template, or why there is none that can be used (a whole sentence)."""
    if template is None:
        return HERMES  # ChatML models learn it
    for mark, name in FOREIGN.items():
        if mark in template:
            return f"this model writes tool calls in the format of {name}, which is not supported"
    if "<tool_call>" in template:
        return HERMES
    if "<|python_tag|>" in template or ('"parameters"' in template and "<|start_header_id|>" in template):
        return LLAMA3
    if "tools" in template:
        return "this model's chat template has tools in a format that is not known here"
    if "<|im_start|>" in template:
        return HERMES  # a ChatML template without tools: they are described in the system message
    return "this model's chat template has no tools"


def describe(toolbox: Toolbox) -> str:
    """The system prompt that offers tools to a ChatML model whose template doesn't."""
    listed = "\n".join(json.dumps(tool.as_openai(), ensure_ascii=False) for tool in toolbox.tools)
    return (
        "You can call functions. These are their signatures, one JSON object a line:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, answer with its name and arguments as JSON within tags:\n"
        '<tool_call>\n{"name": "…", "arguments": {…}}\n</tool_call>'
    )


def with_described_tools(messages: Sequence[Mapping[str, Any]], toolbox: Toolbox) -> list[dict[str, Any]]:
    """Messages for a ChatML template without tools: offers, calls and results as plain text."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            plain.append(
                {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
            )
            continue
        text = message["content"]
        for call in message.get("tool_calls", ()):
            body = json.dumps(call["function"], ensure_ascii=False)
            text += f"{HERMES.begin}{body}{HERMES.end}\n"
        plain.append({"role": message["role"], "content": text})
    if not toolbox.tools:
        return plain
    if plain and plain[0]["role"] == "system":
        plain[0]["content"] += "\n\n" + describe(toolbox)
        return plain
    return [{"role": "system", "content": describe(toolbox)}, *plain]


def usable_format(found: ToolFormat | str) -> ToolFormat:
    """The format, if there is one.

    Raises:
        FieldError: the model's format is not supported.
    """
    if isinstance(found, str):
        raise FieldError("tools", f"'tools' cannot be used: {found}")
    return found


def text_or_calls(grammar: Grammar, toolbox: Toolbox, tool_format: ToolFormat) -> str:
    """A rule for free text in which whatever is begun as a call is a correct one (Hermes)."""
    mark = tool_format.special[0]
    calls = tool_format.calls(grammar, toolbox)
    return grammar.rule("reply", f"{any_without(grammar, mark)} ({calls})?")
