"""What a figure was measured on: machine, versions, models with quantisation and context, lanes."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from specproxy.adapters import machine
from specproxy.adapters.gguf_facts import read_facts
from specproxy.cli.options import NO_ANSWER, opener
from specproxy.cli.version import versions
from specproxy.errors import ConfigError

__all__ = ["Fetch", "fetch_json", "machine_facts", "model_facts", "setup_facts", "setup_lines"]

TIMEOUT_S = 5.0
UNTOLD = "not told"

Row = dict[str, Any]
Fetch = Callable[[str, Row | None], Any]  # URL, and a body to POST → JSON; else raises one of `NO_ANSWER`


def fetch_json(base: str, headers: Mapping[str, str]) -> Fetch:
    """Fetches JSON; `headers`, which may hold the proxy's token, go to the proxy at `base` alone."""

    def fetch(url: str, body: Row | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        given = {"Content-Type": "application/json"} | (dict(headers) if url.startswith(f"{base}/") else {})
        request = urllib.request.Request(url, data, given)  # noqa: S310 (the user's own URL)
        with opener().open(request, timeout=TIMEOUT_S) as reply:
            return json.load(reply)

    return fetch


def setup_facts(status: Row | None, base: str, fetch: Fetch) -> Row:
    """Everything as JSON-serialisable data; without a running proxy (`status` None) its part is empty."""
    lanes = status["lanes"] if status is not None else []
    upstreams = status["upstreams"] if status is not None else []
    seen: dict[str, Row] = {}
    for lane in lanes:
        if lane["target"] not in seen or lane["strategy"] == "plain":
            seen[lane["target"]] = lane
    return {
        "machine": machine_facts(),
        "versions": {name: number for name, number in versions().items() if number is not None},
        "servers": [{key: one[key] for key in ("url", "kind", "version")} for one in upstreams],
        "models": [model_facts(lane, base, fetch) for lane in seen.values()],
        "lanes": [
            {key: lane[key] for key in ("id", "strategy", "n_max", "control", "fingerprint", "memory_bytes")}
            for lane in lanes
        ],
    }


def machine_facts() -> Row:
    """Processor, cores, memory, GPUs and system."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": machine.processor(),
        "cores": cores,
        "memory_bytes": int(psutil.virtual_memory().total),
        "gpus": [asdict(gpu) for gpu in machine.gpus()],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def model_facts(lane: Row, base: str, fetch: Fetch) -> Row:
    """The model of a lane, as llama-server, the engine or Ollama tells it; None where it does not."""
    names = lane.get("models") or []
    row: Row = {
        "target": lane["target"],
        "name": names[0] if names else None,
        "file": None,
        "quantisation": None,
        "context": None,
        "server": None,
    }
    address = lane["address"] if str(lane["address"]).startswith("http") else base
    try:
        row |= _from_props(fetch(f"{address}/props", None))
    except (*NO_ANSWER, LookupError, TypeError):
        with contextlib.suppress(*NO_ANSWER, LookupError, TypeError, AttributeError):
            row |= _from_show(fetch(f"{base}/api/show", {"model": row["name"]}))
    return row


def _from_props(props: Row) -> Row:
    """llama-server's ``/props``: the file is read for its quantisation if it is on this machine."""
    path = Path(props["model_path"])
    found: Row = {
        "file": path.name,
        "context": props["default_generation_settings"]["n_ctx"],
        "server": props.get("build_info"),
    }
    with contextlib.suppress(ConfigError, OSError):
        facts = read_facts(path)
        found |= {"quantisation": facts.quantisation, "bytes": facts.weight_bytes}
    return found


def _from_show(shown: Row) -> Row:
    """Ollama's ``/api/show``."""
    context = next((v for k, v in shown.get("model_info", {}).items() if k.endswith(".context_length")), None)
    return {"quantisation": shown["details"]["quantization_level"], "context": context, "server": "ollama"}


def setup_lines(setup: Row) -> Sequence[str]:
    """The set-up as people read it, one fact a line."""
    here = setup["machine"]
    gpus = ", ".join(gpu["name"] for gpu in here["gpus"]) or "no NVIDIA GPU"
    memory = f"{here['memory_bytes'] / 1024**3:.0f} GiB"
    lines = [f"Machine: {here['processor']}, {here['cores']} cores, {memory}, {gpus}; {here['system']}"]
    lines += [_model_line(model) for model in setup["models"]]
    lines += [f"Server: {one['url']}, {one['kind']} {one['version']}".rstrip() for one in setup["servers"]]
    lanes = [f"{lane['id']} ({_strategy(lane)})" for lane in setup["lanes"]]
    lines += [f"Lanes: {', '.join(lanes)}"] if lanes else ["Lanes and models: not told, no proxy is running"]
    lines.append("Versions: " + ", ".join(f"{name} {number}" for name, number in setup["versions"].items()))
    return lines


def _strategy(lane: Row) -> str:
    return f"{lane['strategy']}:{lane['n_max']}" if lane["n_max"] else str(lane["strategy"])


def _model_line(model: Row) -> str:
    name = model["file"] or model["name"] or model["target"]
    context = f"{model['context']} tokens" if model["context"] else UNTOLD
    return (
        f"Model: {name}, quantisation {model['quantisation'] or UNTOLD}, context {context}, "
        f"server {model['server'] or UNTOLD}"
    )
