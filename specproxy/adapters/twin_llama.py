"""Whether lanes on the weights of somebody else's llama-server would say what that server says.

It may have been started with another template, with adapters, or with sampling defaults of its own. Defaults
can be given to a lane with each request; the rest rules lanes out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specproxy.adapters.ask import get_json
from specproxy.adapters.endpoint import Endpoint
from specproxy.adapters.http import HttpTransport
from specproxy.adapters.twin import TIMEOUT_S, Chat, Overrides, Twin, compare, made_by

__all__ = ["compare_servers"]

DEFAULTS = (
    "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "top_n_sigma",
    "typical_p", "xtc_probability", "xtc_threshold", "repeat_last_n", "repeat_penalty",
    "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base", "dry_allowed_length",
    "dry_penalty_last_n", "mirostat", "mirostat_tau", "mirostat_eta", "adaptive_target",
    "adaptive_decay", "min_keep", "n_keep", "ignore_eos", "samplers",
)  # fmt: skip
"""Sampling defaults that a request can set by the names in which ``/props`` tells them."""


async def compare_servers(url: str, lane_url: str) -> Twin:
    """Compare a server with a lane on the same file: adapters, template, prompts, sampling defaults.

    Raises:
        BackendError: one of them does not answer.
    """
    server, lane = (HttpTransport(Endpoint.parse(u, strip_origin=True)) for u in (url, lane_url))

    async def shown(chat: Chat) -> str | None:
        return await made_by(server, chat)

    try:
        theirs, ours = await _props(server), await _props(lane)
        status, adapters = await get_json(server.open, "/lora-adapters", timeout_s=TIMEOUT_S)
        if status == 200 and adapters:
            return Twin("it has LoRA adapters loaded")
        if theirs.get("chat_template") != ours.get("chat_template"):
            return Twin("it was started with another chat template (give the same one by --llama-args)")
        defaults = _params(theirs), _params(ours)
        if defaults[0].get("n_predict") != defaults[1].get("n_predict"):
            return Twin("it was started with a limit on the length of answers")
        twin = await compare(shown, lane, tools=True)
    finally:
        await server.aclose()
        await lane.aclose()
    return replace(twin, overrides=_differences(*defaults))


async def _props(server: HttpTransport) -> dict[str, Any]:
    _, props = await get_json(server.open, "/props", timeout_s=TIMEOUT_S)
    return props if isinstance(props, dict) else {}


def _params(props: dict[str, Any]) -> dict[str, Any]:
    settings = props.get("default_generation_settings")
    params = settings.get("params") if isinstance(settings, dict) else None
    return params if isinstance(params, dict) else {}


def _differences(theirs: dict[str, Any], ours: dict[str, Any]) -> Overrides:
    """The server's defaults where a lane has others."""
    found = []
    for name in DEFAULTS:
        value = theirs.get(name)
        if value is not None and value != ours.get(name):
            found.append((name, tuple(map(str, value)) if isinstance(value, list) else value))
    return tuple(found)
