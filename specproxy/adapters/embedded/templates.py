"""Chat templates from GGUF files: Jinja2, sandboxed, with the helpers that Hugging Face templates expect."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specproxy.adapters.go_syntax import GoTemplateError
from specproxy.adapters.go_template import GoTemplate
from specproxy.errors import RequestError

__all__ = ["CHATML", "ChatTemplate", "GoChatTemplate"]

CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


class _Generation(Extension):
    """``{% generation %}`` marks what a model is trained on; for rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - declared by the base class, which wants a set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: object, indent: int | None = None, separators: Any = None, **_: object) -> str:
    # unlike Jinja's own filter: no HTML escapes, no ASCII escapes, keys in their order
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)  # local time, as templates expect


class ChatTemplate:
    """A compiled chat template.

    `source` None stands for a file without one: ChatML is used, and `fallback` is true. `bos` and `eos` are the
    texts of the special tokens. A template that does not compile makes `render` refuse every conversation;
    plain completions still work.
    """

    def __init__(self, source: str | None, bos: str = "", eos: str = "") -> None:
        self.fallback = source is None
        self.source = CHATML if source is None else source
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._broken = ""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(self.source)
        except jinja2.TemplateError as error:
            self._broken = str(error)
        except RecursionError:
            self._broken = "it is nested too deeply"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation. `extra` are further variables (``chat_template_kwargs``).

        Raises:
            RequestError: the template refuses the messages, or cannot be used at all.
        """
        if self._broken:
            raise RequestError(f"the model's chat template cannot be used: {self._broken}")
        try:
            return self._template.render(
                **{**self._tokens, **(extra or {})},
                messages=messages,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
            )
        # a template is foreign code: besides its own errors it raises what Python does with wrong operands
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as error:
            raise RequestError(f"the chat template refused the messages: {error}") from error


class GoChatTemplate:
    """The TEMPLATE of a model of Ollama's, where `ChatTemplate` would stand: for text alone, without tools.

    Raises:
        GoTemplateError: it uses what is not known here.
    """

    fallback = False

    def __init__(self, source: str) -> None:
        self.source = source
        self._template = GoTemplate(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,  # noqa: ARG002 - refused before
        add_generation_prompt: bool = True,  # noqa: ARG002 - where the answer begins is the template's own
        extra: Mapping[str, Any] | None = None,  # noqa: ARG002 - such templates have no variables
    ) -> str:
        """The prompt of a conversation.

        Raises:
            RequestError: the template cannot do with these messages.
        """
        try:
            return self._template.render(messages)
        except GoTemplateError as error:
            raise RequestError(f"the model's template refused the messages: {error}") from error
