"""What is at a URL: llama-server (one model or its router), llama-swap, Ollama, LM Studio, vLLM, SGLang,
mlx_vlm.server, or something else.

Answers are read leniently: a field that is missing or of another type counts as unknown. Nothing is asked that
loads, wakes or decodes a model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from specproxy.adapters.ask import get_json, post_json
from specproxy.adapters.base import ProbeResult, ServedModel
from specproxy.adapters.endpoint import Endpoint
from specproxy.adapters.http import HttpTransport
from specproxy.adapters.llama_router import read_sections
from specproxy.adapters.llama_server import ask_slots
from specproxy.adapters.ollama import read_models, read_show
from specproxy.errors import BackendError, UpstreamConnectError

__all__ = ["Prober"]

MAX_SHOWS = 32  # models of one Ollama that are asked about one by one

Reply = tuple[int, Any]  # status and parsed body; status 0: no answer in time
Ask = Callable[[str], Awaitable[Reply]]


class Prober:
    """Finds out what is at a URL, and remembers what is not to be asked twice.

    Args:
        connect_s: how long a connection may take, in seconds.
        answer_s: how long one answer may take.
        whole_s: how long everything may take; what is unknown then stays unknown.
    """

    def __init__(self, *, connect_s: float = 1.0, answer_s: float = 2.0, whole_s: float = 4.0) -> None:
        self._connect_s, self._answer_s, self._whole_s = connect_s, answer_s, whole_s
        self._drafting: dict[str, tuple[object, bool | None]] = {}  # URL → process there, what its slots said
        self._shown: dict[tuple[str, str, str], ServedModel] = {}  # URL, name, digest

    async def __call__(self, url: str) -> ProbeResult:
        """Look at `url` (a base URL). Takes at most `whole_s`; nobody there is a result, not an error.

        Raises:
            ConfigError: this is no URL.
        """
        transport = HttpTransport(Endpoint.parse(url, connect_timeout_s=self._connect_s, strip_origin=True))
        refused: list[bool] = []

        async def ask(path: str) -> Reply:
            try:
                return await get_json(transport.open, path, timeout_s=self._answer_s)
            except UpstreamConnectError:
                refused.append(True)
            except BackendError:
                refused.append(False)
            return 0, None

        try:
            async with asyncio.timeout(self._whole_s):
                models, props, version = await asyncio.gather(
                    ask("/v1/models"), ask("/props"), ask("/api/version")
                )
                if len(refused) == 3:
                    return ProbeResult(False, silent=not all(refused))
                return await self._identify(url, transport, ask, models, props, version)
        except UpstreamConnectError:
            return ProbeResult(False)
        except (TimeoutError, BackendError):
            return ProbeResult(False, silent=True)
        finally:
            await transport.aclose()

    async def _identify(
        self, url: str, transport: HttpTransport, ask: Ask, models: Reply, props: Reply, version: Reply
    ) -> ProbeResult:
        owners = {str(entry.get("owned_by", "")) for entry in _data(models[1])}
        number = _field(version[1], "version") if version[0] == 200 else None
        if "llama-swap" in owners:
            return _llama_swap(_data(models[1]), str(number or ""))
        if isinstance(number, str):
            found = await self._ollama(url, transport, ask, number)
            if found is not None:
                return found
        if any(status == 503 and "loading model" in _error(body) for status, body in (models, props)):
            return ProbeResult(True, "llama-server", loading=True)
        if any(status == 401 and _error(body) == "invalid api key" for status, body in (models, props)):
            return await self._llama_server(url, transport, models[1], {})  # behind a prefix nothing is public
        if (props[0] == 200 and isinstance(_field(props[1], "build_info"), str)) or "llamacpp" in owners:
            if props[0] == 0:
                return ProbeResult(False, silent=True)
            properties = _object(props[1]) if props[0] == 200 else {}
            if properties.get("role") == "router" or any("status" in entry for entry in _data(models[1])):
                return await self._llama_router(url, transport, models[1], properties)
            return await self._llama_server(url, transport, models[1], properties)
        return await _other(ask, models, owners)

    async def _llama_server(
        self, url: str, transport: HttpTransport, listed: Any, properties: Mapping[str, Any]
    ) -> ProbeResult:
        entry = next(iter(_data(listed)), {})
        meta = _object(entry.get("meta"))
        name = str(properties.get("model_alias") or entry.get("id") or "")
        modalities = _object(properties.get("modalities"))
        model = ServedModel(
            name,
            path=str(properties.get("model_path") or ""),
            ctx=_int(_field(properties.get("default_generation_settings"), "n_ctx")) or _int(meta.get("n_ctx")),
            slots=_int(properties.get("total_slots")),
            drafting=await self._slots(url, transport, properties),
            weights=_int(meta.get("n_params")) or 0,
            capabilities=frozenset(name for name, there in modalities.items() if there),
        )
        version = str(properties.get("build_info") or "")
        return ProbeResult(True, "llama-server", version, (name,) if name else (), served=(model,))

    async def _slots(self, url: str, transport: HttpTransport, properties: Mapping[str, Any]) -> bool | None:
        """Whether drafts are made there; asked once of each process, since asking wakes one that sleeps.

        Raises:
            BackendError: it did not answer, and then nothing may be believed of it.
        """
        process = tuple(str(properties.get(key)) for key in ("build_info", "model_path", "media_marker"))
        known = self._drafting.get(url)
        if (known is None or known[0] != process) and properties.get("is_sleeping") is not True:
            known = self._drafting[url] = (process, await ask_slots(transport))
        return known[1] if known is not None and known[0] == process else None

    async def _llama_router(
        self, url: str, transport: HttpTransport, listed: Any, properties: Mapping[str, Any]
    ) -> ProbeResult:
        """llama-server in router mode: a model for each preset, loaded or not."""
        sections = read_sections(_data(listed))
        served = [replace(s, drafting=await self._section_drafts(url, transport, s)) for s in sections]
        version = str(properties.get("build_info") or "")
        return ProbeResult(
            True,
            "llama-router",
            version,
            tuple(model.name for model in served),
            {
                "models_max": _int(properties.get("max_instances")) or 0,
                "autoload": properties.get("models_autoload") is not False,
            },
            served=tuple(served),
        )

    async def _section_drafts(self, url: str, transport: HttpTransport, model: ServedModel) -> bool | None:
        """Whether drafts are made by a preset, by its slots while it is loaded; asked once of each load."""
        key = f"{url} {model.name}"
        if not model.loaded:
            self._drafting.pop(key, None)
            return model.drafting
        if key not in self._drafting:
            try:
                self._drafting[key] = (None, await ask_slots(transport, model.name))
            except BackendError:
                return model.drafting
        told = self._drafting[key][1]
        return model.drafting if told is None else told

    async def _ollama(self, url: str, transport: HttpTransport, ask: Ask, version: str) -> ProbeResult | None:
        """An Ollama with its models; None where it has no such list, as others that tell a version there."""
        tags, loaded = await asyncio.gather(ask("/api/tags"), ask("/api/ps"))
        if tags[0] == 404:
            return None
        if tags[0] != 200 or loaded[0] == 0:
            return ProbeResult(False, silent=True)
        models = read_models(tags[1], loaded[1])
        shown = [self._show(url, transport, model) for model in models[:MAX_SHOWS]]
        served = (*await asyncio.gather(*shown), *models[MAX_SHOWS:])
        return ProbeResult(True, "ollama", version, tuple(model.name for model in served), served=served)

    async def _show(self, url: str, transport: HttpTransport, model: ServedModel) -> ServedModel:
        """The model with its files and layers, asked for once as long as it stays the same."""
        if model.unrouted:
            return model
        key = (url, model.name, model.digest)
        if key not in self._shown:
            try:
                status, show = await post_json(
                    transport.open, "/api/show", {"model": model.name}, timeout_s=self._answer_s
                )
            except BackendError:
                return model
            if status != 200:
                return model
            self._shown[key] = read_show(model, show)
        return replace(self._shown[key], loaded=model.loaded, ctx=model.ctx)


def _llama_swap(entries: list[dict[str, Any]], version: str) -> ProbeResult:
    """A proxy that starts the server of a model when the model is first asked for."""
    served = tuple(
        ServedModel(
            str(entry["id"]),
            loaded=_object(entry.get("status")).get("value", "loaded") == "loaded",
            ctx=_int(entry.get("context_length")),
        )
        for entry in entries
        if entry.get("id")
    )
    return ProbeResult(True, "llama-swap", version, tuple(model.name for model in served), served=served)


async def _other(ask: Ask, models: Reply, owners: set[str]) -> ProbeResult:
    """Servers that speak OpenAI's API, told apart by the owner of their models or by what else they answer."""
    names = tuple(str(entry["id"]) for entry in _data(models[1]) if entry.get("id"))
    served = tuple(ServedModel(name) for name in names)
    if "vllm" in owners or "sglang" in owners:
        kind = "vllm" if "vllm" in owners else "sglang"
        answer = await ask("/version" if kind == "vllm" else "/get_server_info")
        version = _field(answer[1], "version") if answer[0] == 200 else None
        return ProbeResult(True, kind, version if isinstance(version, str) else "", names, served=served)
    listed = await ask("/api/v0/models")
    entries = [e for e in _data(listed[1]) if "compatibility_type" in e or "state" in e]
    if entries:
        served = tuple(_lm_studio_model(entry) for entry in entries)
        return ProbeResult(True, "lmstudio", "", tuple(model.name for model in served), served=served)
    health = _object((await ask("/health"))[1])
    if {"loaded_model", "loaded_adapter"} <= health.keys():
        served = tuple(ServedModel(name, loaded=name == health["loaded_model"]) for name in names)
        return ProbeResult(True, "mlx-vlm", "", names, served=served)
    kind = "openai" if models[0] == 200 and isinstance(_field(models[1], "data"), list) else "unknown"
    return ProbeResult(True, kind, "", names, {"status": models[0]}, served=served)


def _lm_studio_model(entry: Mapping[str, Any]) -> ServedModel:
    return ServedModel(
        str(entry.get("id", "")),
        loaded=entry.get("state") == "loaded",
        ctx=_int(entry.get("loaded_context_length")) or _int(entry.get("max_context_length")),
        unrouted="it generates no text" if entry.get("type") == "embeddings" else "",
    )


def _field(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _data(reply: Any) -> list[dict[str, Any]]:
    """Entries of an OpenAI list."""
    data = _field(reply, "data")
    return [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []


def _error(reply: Any) -> str:
    error = _field(reply, "error")
    message = _field(error, "message") if isinstance(error, dict) else error
    return message.lower() if isinstance(message, str) else ""


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
