"""What an Ollama model is besides its weights: TEMPLATE, SYSTEM, MESSAGE and PARAMETER of its Modelfile.

Somebody who runs the weights in Ollama's place has to honour all of it, or to say what cannot be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specproxy.adapters.go_syntax import GoTemplateError
from specproxy.adapters.go_template import GoTemplate
from specproxy.adapters.ollama_store import read_layers
from specproxy.errors import ConfigError

__all__ = ["PROBES", "Message", "ModelSetup", "Render", "read_setup", "settle"]

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]

NO_TEMPLATE = "{{ .Prompt }}"
"""What Ollama uses where neither the Modelfile nor the weights' file has a template."""

SAMPLING: Mapping[str, type[int] | type[float]] = {
    "temperature": float, "top_k": int, "top_p": float, "min_p": float, "typical_p": float, "seed": int,
    "repeat_last_n": int, "repeat_penalty": float, "presence_penalty": float, "frequency_penalty": float,
    "num_predict": int,
}  # fmt: skip
OF_NO_EFFECT = frozenset(
    {"num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "num_keep", "draft_num_predict"}
)
"""Parameters of how a model is loaded, not of what it says."""

MORE = re.compile("tool|think|reason")
"""What a template has that can do more than write down a conversation."""

PROBES: tuple[tuple[Message, ...], ...] = (
    ({"role": "user", "content": "First question?"},),
    ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Line one\nline two"}),
    (
        {"role": "user", "content": "First question?"},
        {"role": "assistant", "content": "An answer."},
        {"role": "user", "content": "And the next?"},
    ),
    (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "First question?"},
        {"role": "assistant", "content": "An answer."},
        {"role": "user", "content": "And the next?"},
    ),
)
"""Conversations by which templates are compared."""


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """A model of Ollama's. `template` is Go's; None means the one in the file. `ctx` is in tokens.

    `parameters` are sampling defaults by Ollama's names, `stop` among them. `builtin` names a renderer or a
    parser that is part of Ollama itself.
    """

    model: Path
    name: str = ""
    template: str | None = None
    system: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    parameters: tuple[tuple[str, Any], ...] = ()
    ctx: int | None = None
    builtin: str = ""

    def begin(self, messages: Sequence[Message]) -> list[Message]:
        """A conversation with what the model puts before it: its system message, unless there is one, and its
        history."""
        if not messages:
            return []
        told = [{"role": "system", "content": self.system}] if self.system else []
        if messages[0].get("role") == "system":
            told = []
        history = [{"role": role, "content": content} for role, content in self.messages]
        return [*told, *history, *messages]

    def save(self, path: Path) -> None:
        """Write it to a file, for another process."""
        kept = {name: getattr(self, name) for name in ("name", "template", "system", "messages", "parameters")}
        path.write_text(json.dumps({"model": str(self.model), **kept}), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> ModelSetup:
        """Read what `save` has written.

        Raises:
            ConfigError: it cannot be read.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            messages, parameters = (tuple(map(tuple, data[key])) for key in ("messages", "parameters"))
            return cls(
                Path(data["model"]), data["name"], data["template"], data["system"], messages, parameters
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"the model's set-up {path} cannot be read: {error}") from error


def read_setup(name: str, folders: Sequence[Path]) -> ModelSetup:
    """Read a model by its name in Ollama, from Ollama's own folder.

    Raises:
        ConfigError: there is no such model, or it sets what cannot be honoured.
    """
    model, layers, config = read_layers(name, folders)
    parameters, ctx = _parameters(name, layers.get("params", "{}"))
    builtin = [f"{key.upper()} {config[key]}" for key in ("renderer", "parser") if config.get(key)]
    return ModelSetup(
        model,
        name,
        layers.get("template", layers.get("prompt")),
        layers.get("system", ""),
        _messages(name, layers.get("messages", "[]")),
        parameters,
        ctx,
        " and ".join(builtin),
    )


def _parameters(name: str, text: str) -> tuple[tuple[tuple[str, Any], ...], int | None]:
    given = _json(name, "PARAMETER", text, dict)
    kept: list[tuple[str, Any]] = []
    for key, value in given.items():
        if key == "stop":
            kept.append((key, [str(item) for item in (value if isinstance(value, list) else [value])]))
        elif key in SAMPLING:
            try:
                kept.append((key, SAMPLING[key](value)))
            except (TypeError, ValueError):
                raise _refusal(name, f"its PARAMETER {key} {value} is no number") from None
        elif key not in OF_NO_EFFECT:
            raise _refusal(name, f"its PARAMETER {key} {value} has no counterpart here")
    ctx = given.get("num_ctx")
    return tuple(kept), ctx if isinstance(ctx, int) and ctx > 0 else None


def _messages(name: str, text: str) -> tuple[tuple[str, str], ...]:
    given = _json(name, "MESSAGE", text, list)
    if any(not isinstance(m, dict) or set(m) - {"role", "content"} for m in given):
        raise _refusal(name, "a MESSAGE of it holds more than text")
    return tuple((str(m.get("role", "")), str(m.get("content", ""))) for m in given)


def _json(name: str, command: str, text: str, kind: type[Any]) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, kind):
        raise _refusal(name, f"its {command} cannot be read")
    return value


def settle(
    setup: ModelSetup,
    own: Render | None,
    shown: Sequence[str] | None = None,
    *,
    own_source: str = "",
    bos: str = "",
) -> ModelSetup:
    """Find out which template makes the prompts that Ollama makes: Go's, or the one in the file.

    Args:
        setup: the model as it was read.
        own: renders by the template in the file; None where that has none.
        shown: what a running Ollama makes of `PROBES`; None where none could be asked.
        own_source: the template in the file.
        bos: what may stand before a prompt and makes no difference, since there is always one.

    Returns:
        The set-up with the template to use.

    Raises:
        ConfigError: none does, or it cannot be told.
    """
    candidates: list[tuple[ModelSetup, list[str]]] = []
    trouble = ""
    ours = replace(setup, template=None)
    if own is not None:
        candidates.append((ours, [own(setup.begin(probe)).removeprefix(bos) for probe in PROBES]))
    source = setup.template if setup.template is not None or own is not None else NO_TEMPLATE
    if source is not None:
        try:
            template = GoTemplate(source)
            if "think" in template.names or "thinking" in template.names:
                raise GoTemplateError("it deals with thoughts")
            made = [template.render(setup.begin(probe)).removeprefix(bos) for probe in PROBES]
            candidates.append((replace(setup, template=source), made))
        except GoTemplateError as error:
            trouble = f"its TEMPLATE cannot be used here: {error}"
    if shown is not None:
        for settled, made in candidates:
            if made == [text.removeprefix(bos) for text in shown]:
                return settled
        why = trouble or "the prompts that Ollama makes are others than those that are made here"
        raise _refusal(setup.name, why)
    return _choose(setup, candidates, trouble, more_able=bool(MORE.search(own_source)))


def _choose(
    setup: ModelSetup, candidates: list[tuple[ModelSetup, list[str]]], trouble: str, *, more_able: bool
) -> ModelSetup:
    """Without an Ollama to ask: what both templates agree on, or the Modelfile's, which Ollama uses unless the
    one in the file is able to do more."""
    if setup.builtin:
        raise _refusal(setup.name, f"its template is a part of Ollama ({setup.builtin})")
    if trouble:
        raise _refusal(setup.name, trouble)
    if len(candidates) == 1 or candidates[0][1] == candidates[1][1]:
        return candidates[0][0]
    if not more_able:
        return candidates[1][0]
    raise _refusal(
        setup.name,
        "its TEMPLATE makes other prompts than the template in its file, and which one Ollama uses depends on "
        "what they can do; start Ollama, so that it can be asked",
    )


def _refusal(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"model: {name} cannot be run in Ollama's place: {why}",
        hint="stay with Ollama: start --upstream, with --manage for further lanes",
    )
