"""What a server offers to control drafting by, and what is known to go wrong in its version. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from specproxy.adapters.base import ProbeResult

__all__ = ["control", "hazards"]

LAST_WITH_FIELD = 9108  # build of llama.cpp that last honoured speculative.n_max in a request
FIRST_OLLAMA = (0, 33)  # whose behaviour is known here

CONTROLS = {
    "ollama": "none by request; a reload (draft_num_predict), or further lanes beside it",
    "lmstudio": "the request field draft_model: name draft models under deployments",
    "mlx": "the request field draft_model, which reloads: name draft models under deployments",
    "mlx-vlm": "the setting draft_model, which reloads: name drafters under deployments",
    "vllm": "none by request; several servers, each started in another way, under deployments",
    "sglang": "none by request; several servers, each started in another way, under deployments",
    "llama-swap": "the model's name: models of it that decode one file in several ways, under deployments",
    "openai": "none is known; several servers, each started in another way, under deployments",
}


def control(found: ProbeResult) -> str:
    """How a server's drafting can be controlled, as a clause; empty for a server that is not known."""
    if found.kind == "llama-router":
        return "the model's name: sections of its preset file that decode one model in several ways are lanes"
    if found.kind != "llama-server":
        return CONTROLS.get(found.kind, "")
    build = _build(found.version)
    if build is not None and build <= LAST_WITH_FIELD:
        return "the request field speculative.n_max, which this build honours; it is tried at the first start"
    if build is not None:
        return "none by request since b9109; further lanes beside it, a router with presets, or several servers"
    return "not known for this build: a request field is tried at the first start"


def hazards(found: ProbeResult) -> tuple[str, ...]:
    """What is known to go wrong there, one sentence each."""
    if not found.reachable:
        return ()
    if found.kind == "ollama":
        return tuple(_ollama(found))
    return tuple(_llama(found)) if found.kind in ("llama-server", "llama-router") else ()


def _llama(found: ProbeResult) -> Iterator[str]:
    drafting = any(model.drafting for model in found.served)
    if _build(found.version) is None:
        yield "Its build is not told, so that what it can do has to be tried."
    if drafting:
        yield "While it drafts, log-probabilities are wrong: requests that want them need a plain lane."
        yield "While it drafts, images and drafts do not go together: they need a plain lane."
    for model in found.served:
        if model.draft and model.drafting is False:
            why = "--spec-type is missing, or it does not fit"
            yield f"{model.name} has a draft model that it never uses: {why}."
        names = model.strategy.drafters if model.strategy is not None else ()
        if "ngram-map-k" in names:
            yield f"{model.name} uses ngram-map-k, which ends the whole server when the context shifts."
        if "ngram-cache" in names:
            yield f"{model.name} uses ngram-cache, which keeps stale state."
    if found.kind == "llama-router":
        yield "Asking for /props or /slots of a model loads it, and may displace another: add autoload=false."
        most = found.detail.get("models_max")
        if isinstance(most, int) and 0 < most < len(found.served):
            yield f"It keeps {most} of {len(found.served)} models in memory, the least recently used one goes."


def _ollama(found: ProbeResult) -> Iterator[str]:
    version = re.match(r"(\d+)\.(\d+)", found.version)
    if version is None or (int(version[1]), int(version[2])) < FIRST_OLLAMA:
        yield f"The behaviour of Ollama {found.version} is not known here, only that from 0.33 on."
    if any(model.mtp_layers and not model.drafting for model in found.served):
        yield "MTP layers lie idle unless draft_num_predict is set, which reloads the model when it changes."
    if any(model.draft and model.loaded for model in found.served):
        yield "The memory that it reports for a model with a DRAFT leaves the draft out."


def _build(version: str) -> int | None:
    """The build number of llama.cpp; None where it was built without one."""
    match = re.match(r"b(\d+)", version)
    return int(match[1]) if match and int(match[1]) else None
