"""Whether a llama-server on the same blob says what Ollama would: same sampling, and the same prompt.

A model of Ollama is more than its weights: a template, a system message, parameters. Ollama shows the prompt
that it makes of a chat without running the model (``_debug_render_only``), and so does llama-server
(``/apply-template``), so that the two can be compared instead of believed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specproxy.adapters.ask import post_json
from specproxy.adapters.base import ServedModel
from specproxy.adapters.endpoint import Endpoint
from specproxy.adapters.http import HttpTransport
from specproxy.adapters.twin import TIMEOUT_S, Chat, Overrides, Twin, compare
from specproxy.errors import BackendError

__all__ = ["compare_prompts", "overrides", "refusal", "take_leave"]

FIRST_VERSION = (0, 33)  # whose defaults these are; others were not looked at
DEFAULTS: dict[str, int | float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 40, "min_p": 0.0}
"""Of ``/v1/chat/completions``: where llama-server's own differ, or may be set otherwise. The first two stand
whatever the model's parameters are."""
NUMBERS: dict[str, type[int] | type[float]] = {
    "top_k": int, "min_p": float, "typical_p": float, "repeat_last_n": int, "repeat_penalty": float,
    "presence_penalty": float, "frequency_penalty": float, "seed": int,
}  # fmt: skip
OF_NO_EFFECT = frozenset(
    {"temperature", "top_p", "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap"}
    | {"num_keep", "draft_num_predict"}
)
"""Parameters that the route overrules, or that concern how the model is loaded."""


def refusal(model: ServedModel, version: str) -> str:
    """Why lanes on a model's blob would not say what Ollama says, as far as can be told beforehand; or ''."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < FIRST_VERSION:
        return f"the sampling defaults of Ollama {version} are not known here, only those from 0.33 on"
    if model.adapted:
        return f"{model.name} has an ADAPTER"
    if "thinking" in model.capabilities:
        return f"{model.name} thinks, and llama-server gives the reasoning in another field than Ollama"
    given: dict[str, list[str]] = {}
    for name, value in model.parameters:
        given.setdefault(name, []).append(value)
    for name, values in given.items():
        if name not in OF_NO_EFFECT and name != "stop" and _number(name, values) is None:
            return f"its PARAMETER {name} {values[-1]} has no counterpart"
    return ""


def overrides(model: ServedModel) -> Overrides:
    """Request fields that give llama-server the defaults that this model has in Ollama's OpenAI chat route."""
    fields: dict[str, str | int | float | bool | tuple[str, ...]] = dict(DEFAULTS)
    for name, value in model.parameters:
        if name in NUMBERS and (number := _number(name, [value])) is not None:
            fields[name] = number
    if stops := tuple(value for name, value in model.parameters if name == "stop"):
        fields["stop"] = stops
    return tuple(fields.items())


def _number(name: str, values: list[str]) -> int | float | None:
    try:
        return NUMBERS[name](values[-1]) if name in NUMBERS else None
    except ValueError:
        return None


async def compare_prompts(ollama_url: str, model: ServedModel, lane_url: str) -> Twin:
    """Have both make prompts of a few chats, and see whether they are the same.

    Raises:
        BackendError: one of them does not answer.
    """
    ollama, lane = (HttpTransport(Endpoint.parse(url, strip_origin=True)) for url in (ollama_url, lane_url))

    async def shown(chat: Chat) -> str | None:
        return await _rendered(ollama, model.name, chat)

    try:
        twin = await compare(shown, lane, tools="tools" in model.capabilities)
    finally:
        await ollama.aclose()
        await lane.aclose()
    return replace(twin, overrides=overrides(model))


async def _rendered(ollama: HttpTransport, name: str, chat: Chat) -> str | None:
    """The prompt that Ollama makes of a chat, without an answer to it; None if it does not show that.

    Raises:
        BackendError: it does not answer.
    """
    ask = {"model": name, "stream": False, "_debug_render_only": True, **chat}
    # a limit, for an Ollama that does not know the field and answers
    body = {**ask, "options": {"num_predict": 1}}
    _, reply = await post_json(ollama.open, "/api/chat", body, timeout_s=TIMEOUT_S)
    info = reply.get("_debug_info") if isinstance(reply, dict) else None
    text = info.get("rendered_template") if isinstance(info, dict) else None
    return text if isinstance(text, str) else None


async def take_leave(url: str, name: str, chats: Sequence[Sequence[Mapping[str, Any]]]) -> list[str] | None:
    """Have Ollama show the prompts that it makes of chats, and then put the model out of memory.

    Returns:
        The prompts; None where there is no Ollama, it has no such model, or does not show them.
    """
    ollama = HttpTransport(Endpoint.parse(url, strip_origin=True))
    try:
        status, _ = await post_json(ollama.open, "/api/show", {"model": name})
        if status != 200:
            return None
        found = [await _rendered(ollama, name, {"messages": list(chat)}) for chat in chats]
        await post_json(ollama.open, "/api/generate", {"model": name, "keep_alive": 0}, timeout_s=TIMEOUT_S)
        texts = [text for text in found if text is not None]
        return texts if len(texts) == len(found) else None
    except BackendError:
        return None
    finally:
        await ollama.aclose()
