"""What Ollama says about its models, read into `ServedModel`. No I/O: replies come in as parsed JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from specproxy.adapters.base import ServedModel

__all__ = ["read_models", "read_show"]

COMMAND = re.compile(
    r"^(FROM|DRAFT|ADAPTER|TEMPLATE|SYSTEM|LICENSE|RENDERER|PARSER|REQUIRES|MESSAGE \w+|PARAMETER \w+) "
    r'(?:"""(.*?)"""|"([^"]*)"|([^\n]*))$',
    re.MULTILINE | re.DOTALL,
)
"""A command of a Modelfile as ``/api/show`` writes it. A value is in quotes if it has several lines or spaces
around it, and in three if it has quotes too; read as a whole, so that no command is read out of a text."""


def read_models(tags: Any, loaded: Any) -> tuple[ServedModel, ...]:
    """Models from the replies of ``/api/tags`` and ``/api/ps``; loaded ones first, as ordered in the latter."""
    resident = {_name(entry): _number(entry.get("context_length")) for entry in _entries(loaded)}
    models = [_model(entry, resident) for entry in _entries(tags)]
    order = list(resident)
    return tuple(sorted(models, key=lambda m: order.index(m.name) if m.name in resident else len(order)))


def _model(entry: Mapping[str, Any], resident: Mapping[str, int | None]) -> ServedModel:
    name = _name(entry)
    capabilities = _texts(entry.get("capabilities"))
    return ServedModel(
        name,
        digest=str(entry.get("digest", "")),
        loaded=name in resident,
        ctx=resident.get(name),
        capabilities=capabilities,
        unrouted=_unrouted(entry, name, capabilities),
    )


def _unrouted(entry: Mapping[str, Any], name: str, capabilities: frozenset[str]) -> str:
    kind = _object(entry.get("details")).get("format")
    if entry.get("remote_host") or entry.get("remote_model") or name.endswith((":cloud", "-cloud")):
        return "it runs in the cloud"
    if kind == "safetensors":
        return "it runs on MLX, which chooses its draft length itself"
    return _no_text(capabilities)


def _no_text(capabilities: frozenset[str]) -> str:
    return "it generates no text" if capabilities and "completion" not in capabilities else ""


def read_show(model: ServedModel, show: Any) -> ServedModel:
    """A model with what the reply of ``/api/show`` adds: files, drafter, layers, experts, parameters.

    Drafts are made with a DRAFT file unless ``draft_num_predict`` is 0, and with MTP layers only if it is set.
    """
    if not isinstance(show, dict):
        return model
    lines = _modelfile(show.get("modelfile"))
    info = _object(show.get("model_info"))
    architecture = str(info.get("general.architecture", ""))
    parameters = tuple((word.split()[1], text) for word, text in lines if word.startswith("PARAMETER "))
    draft = next((text for word, text in lines if word == "DRAFT"), "")
    mtp_layers = _number(info.get(f"{architecture}.nextn_predict_layers")) or 0
    wanted = dict(parameters).get("draft_num_predict")
    capabilities = _texts(show.get("capabilities"))
    return replace(
        model,
        path=next((text for word, text in lines if word == "FROM"), ""),
        draft=draft,
        drafting=bool(draft or (mtp_layers and wanted)) and wanted != "0",
        weights=_number(info.get("general.parameter_count")) or 0,
        experts=_number(info.get(f"{architecture}.expert_count")) or 0,
        experts_used=_number(info.get(f"{architecture}.expert_used_count")) or 0,
        mtp_layers=mtp_layers,
        capabilities=capabilities or model.capabilities,
        adapted=any(word == "ADAPTER" for word, _ in lines),
        parameters=parameters,
        unrouted=model.unrouted or _no_text(capabilities),
    )


def _modelfile(text: Any) -> list[tuple[str, str]]:
    """Its commands with their values; of a parameter the name belongs to the command."""
    found = COMMAND.finditer(text) if isinstance(text, str) else ()
    return [(match[1], match[2] or match[3] or match[4] or "") for match in found]


def _entries(reply: Any) -> Iterable[Mapping[str, Any]]:
    models = reply.get("models") if isinstance(reply, dict) else None
    return [m for m in models if isinstance(m, dict) and _name(m)] if isinstance(models, list) else []


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry.get("name") or entry.get("model") or "")


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _texts(value: Any) -> frozenset[str]:
    return (
        frozenset(text for text in value if isinstance(text, str)) if isinstance(value, list) else frozenset()
    )


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
