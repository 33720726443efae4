"""From a conversation to what the engine needs: prompt tokens, grammar, and how to read the reply."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from specproxy.adapters.embedded.body import FieldError
from specproxy.adapters.embedded.forms import FREE, Form, schema_rule
from specproxy.adapters.embedded.grammar.gbnf import Grammar, any_until, literal, sequence
from specproxy.adapters.embedded.output import OutputParser
from specproxy.adapters.embedded.reasoning import ReasoningSplitter, Tags, tags_of
from specproxy.adapters.embedded.templates import ChatTemplate, GoChatTemplate
from specproxy.adapters.embedded.tools import (
    HERMES,
    NO_TOOLS,
    Toolbox,
    ToolFormat,
    detect_format,
    text_or_calls,
    usable_format,
    with_described_tools,
)
from specproxy.adapters.embedded.types import ModelCard
from specproxy.adapters.ollama_setup import ModelSetup

__all__ = ["ChatFormat", "Conversation", "Prepared", "Vocabulary", "normal_message"]


log = logging.getLogger(__name__)


class Vocabulary(Protocol):
    """The part of the engine that turns text into tokens and back."""

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]: ...

    def detokenize(self, tokens: list[int]) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat request, whatever its dialect. Messages are in OpenAI's form, see `normal_message`.

    `form` constrains the answer, and `tools` may be called in its place. `thinking` None leaves it to the
    template whether to reason. `split` tells reasoning from the answer; without it the text stays as the model
    wrote it. `prefill` lets the reply go on from a last message of the assistant.
    """

    messages: Sequence[Mapping[str, Any]] = field(repr=False)
    form: Form = FREE
    tools: Toolbox = NO_TOOLS
    thinking: bool | None = None
    split: bool = True
    prefill: bool = True
    generation_prompt: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What `ChatFormat.prepare` makes of a conversation."""

    text: str = field(repr=False)
    prompt: tuple[int, ...] = field(repr=False)
    grammar: str | None
    parser: Callable[[], OutputParser]
    render_tokens: frozenset[int] = frozenset()


class ChatFormat:
    """How the loaded model wants conversations. Cheap to keep, and safe to use from any thread."""

    def __init__(self, card: ModelCard, vocabulary: Vocabulary, setup: ModelSetup | None = None) -> None:
        def text_of(token: int) -> str:
            return vocabulary.detokenize([token]).decode("utf-8", "replace") if token >= 0 else ""

        self._vocabulary = vocabulary
        self._bos = card.bos
        self.bos_text = text_of(card.bos)
        self.eos_text = text_of(card.eos)
        self._setup = setup
        self.template: ChatTemplate | GoChatTemplate = (
            GoChatTemplate(setup.template)
            if setup is not None and setup.template is not None
            else ChatTemplate(card.chat_template, self.bos_text, self.eos_text)
        )
        if self.template.fallback:
            log.warning("%s has no chat template: conversations are written as ChatML", card.name)
        self.tags: Tags | None = tags_of(card.chat_template)
        self._adds_bos = vocabulary.tokenize("a")[:1] == [card.bos]
        self._tool_format = detect_format(card.chat_template)
        self._knows_tools = "tools" in (card.chat_template or "")
        if isinstance(self.template, GoChatTemplate):
            self.tags, self._knows_tools = None, False
            self._tool_format = "the model's template in Ollama is used for text alone"

    @property
    def has_tools(self) -> bool:
        """Whether the model can be given tools."""
        return isinstance(self._tool_format, ToolFormat)

    def tokens(self, text: str) -> list[int]:
        """Token ids of a prompt: special tokens are read; one BOS leads where the model wants one."""
        ids = self._vocabulary.tokenize(text, add_special=False)
        return [self._bos, *ids] if self._adds_bos and ids[:1] != [self._bos] else ids

    def render(self, conversation: Conversation) -> str:
        """The prompt as text.

        Raises:
            RequestError: the template refuses the messages.
        """
        messages = list(conversation.messages)
        if self._setup is not None:
            messages = self._setup.begin(messages)
        begun = ""
        in_template = isinstance(self.template, GoChatTemplate)
        if conversation.prefill and messages and _is_begun(messages[-1]) and not in_template:
            begun = messages.pop()["content"]
        tools = None
        if self._knows_tools:
            tools = [tool.as_openai() for tool in conversation.tools.tools]
        elif self._tool_format is HERMES:
            messages = list(with_described_tools(messages, conversation.tools))
        variables = dict(conversation.variables)
        if conversation.thinking is not None:
            variables["enable_thinking"] = conversation.thinking
        prompt = self.template.render(
            messages,
            tools=tools,
            add_generation_prompt=conversation.generation_prompt or bool(begun),
            extra=variables,
        )
        return prompt + begun

    def prepare(self, conversation: Conversation) -> Prepared:
        """Render, tokenise, and settle how the reply is constrained and how it is to be read.

        Raises:
            RequestError: the template refuses the messages, a schema is not supported, or the model has no
                tools.
        """
        tool_format = usable_format(self._tool_format) if conversation.tools.tools else None
        text = self.render(conversation)
        opened = self.tags is not None and text.rstrip().endswith(self.tags.open)
        special = tool_format.special if tool_format else ()
        if self.tags is not None:
            special += (self.tags.open, self.tags.close)
        return Prepared(
            text,
            tuple(self.tokens(text)),
            self._grammar(conversation, tool_format, opened),
            self._parser(conversation, tool_format, opened),
            self._control_tokens(special),
        )

    def _control_tokens(self, texts: Sequence[str]) -> frozenset[int]:
        """Those of the texts that are one token each."""
        ids = (self._vocabulary.tokenize(text, add_special=False) for text in texts)
        return frozenset(found[0] for found in ids if len(found) == 1)

    def _grammar(self, conversation: Conversation, tool_format: ToolFormat | None, opened: bool) -> str | None:
        form, toolbox = conversation.form, conversation.tools
        if form.gbnf is not None:
            if tool_format:
                raise FieldError("grammar", "'grammar' cannot be used together with 'tools'")
            return form.gbnf
        grammar = Grammar()
        answer = None if form.free else schema_rule(grammar, form.schema, form.field)
        if tool_format:
            answer = _with_calls(grammar, answer, toolbox, tool_format)
        if answer is None:
            return None
        return grammar.text(grammar.rule("reply", sequence([self._reasoning(grammar, opened), answer])))

    def _reasoning(self, grammar: Grammar, opened: bool) -> str:
        """What may stand before a constrained answer: the reasoning, from where the prompt leaves it."""
        if self.tags is None:
            return ""
        until = f"{any_until(grammar, self.tags.close)} [ \\n]{{0,4}}"
        return until if opened else f"({literal(self.tags.open)} {until})?"

    def _parser(
        self, conversation: Conversation, tool_format: ToolFormat | None, opened: bool
    ) -> Callable[[], OutputParser]:
        tags = self.tags if conversation.split else None

        def parser() -> OutputParser:
            return OutputParser(
                ReasoningSplitter(tags, opened=opened) if tags else None,
                tool_format.reader(conversation.tools) if tool_format else None,
            )

        return parser


def _with_calls(grammar: Grammar, answer: str | None, toolbox: Toolbox, tool_format: ToolFormat) -> str | None:
    """The rule for an answer where tools may or must be called; None where text is free."""
    if toolbox.mode == "required":
        return tool_format.calls(grammar, toolbox)
    if answer is not None:
        return grammar.rule("answer-or-calls", f"{answer} | {tool_format.calls(grammar, toolbox)}")
    # Llama 3 marks its calls by nothing but their form, so that free text cannot be told apart by a grammar
    return text_or_calls(grammar, toolbox, tool_format) if tool_format is HERMES else None


def _is_begun(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls") and bool(message.get("content"))


def normal_message(raw: object, where: str) -> dict[str, Any]:
    """Bring a message of the OpenAI API into the form that templates expect.

    Text parts are joined by line breaks, arguments of tool calls become objects, and ``developer`` is
    ``system``.

    Raises:
        FieldError: it is no message, or holds what the engine cannot read (images, audio, files).
    """
    if not isinstance(raw, dict):
        raise FieldError(where, f"'{where}' must be an object")
    role = raw.get("role")
    if not isinstance(role, str):
        raise FieldError(f"{where}.role", f"'{where}.role' must be a string")
    message = dict(raw)
    message["role"] = "system" if role == "developer" else role
    message["content"] = _content(raw.get("content"), f"{where}.content")
    if raw.get("tool_calls"):
        message["tool_calls"] = _calls(raw["tool_calls"], f"{where}.tool_calls")
    else:
        message.pop("tool_calls", None)
    return message


def _content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise FieldError(where, f"'{where}' must be a string or an array of parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else part
        if kind not in (None, "text", "input_text", "output_text", "refusal"):
            raise FieldError(
                f"{where}[{i}]", f"'{where}[{i}]' is of type {kind!r}, but this model only reads text"
            )
        if not isinstance(text, str):
            raise FieldError(f"{where}[{i}]", f"'{where}[{i}]' must be a text part")
        texts.append(text)
    return "\n".join(texts)


def _calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise FieldError(where, f"'{where}' must be an array")
    normal = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise FieldError(f"{where}[{i}].function", f"'{where}[{i}].function' must be an object with a name")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                raise FieldError(
                    f"{where}[{i}].function.arguments", f"'{where}[{i}].function.arguments' is not valid JSON"
                ) from None
        normal.append(
            {
                "id": call.get("id"),
                "type": "function",
                "function": {"name": function["name"], "arguments": arguments},
            }
        )
    return normal
