"""What `specproxy doctor` finds out: servers, engines, memory, a model's strategies, drafts, and what to type.

Nothing is started, loaded or changed. What cannot be found out is told as such.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specproxy.adapters import machine
from specproxy.adapters.ask import get_json
from specproxy.adapters.base import ProbeResult
from specproxy.adapters.draft_search import DraftCandidate, files_beside, find_drafts
from specproxy.adapters.embedded.pair_facts import describe
from specproxy.adapters.endpoint import Endpoint
from specproxy.adapters.gguf_facts import MTP_ARCHITECTURES, ModelFacts, read_facts
from specproxy.adapters.hazards import control, hazards
from specproxy.adapters.http import HttpTransport
from specproxy.adapters.memory import Budget
from specproxy.adapters.ollama_store import locate_model, store_folders, stored_models
from specproxy.adapters.probe import Prober
from specproxy.adapters.server_program import drafter_in, find_program
from specproxy.adapters.weights import find_weights
from specproxy.cli.fitting import fit, shortened
from specproxy.cli.version import versions
from specproxy.errors import BackendError, ConfigError, SpecproxyError
from specproxy.proxy.beside import DIALECTS
from specproxy.proxy.facts import lane_facts
from specproxy.proxy.ladder import focus
from specproxy.proxy.sidecar import USUAL_URLS
from specproxy.records import Control, Lane, Strategy, TempBucket
from specproxy.strategies.cost import prior_ratio

__all__ = ["commands", "diagnose", "look_at_model"]

KINDS = ("code_edit", "json_schema", "creative")  # kinds that gains are estimated for: best to worst for drafts
PLENTY = 1.05  # speed from which on a draft is recommended, by rule of thumb
ANSWER_S = 2.0
LENGTHS = {"ngram": 8, "mtp": 3, "draft": 3}  # draft lengths that estimates are made for

Row = dict[str, Any]


def diagnose(
    model: str | None, draft: str | None, *, urls: Sequence[str] = USUAL_URLS, llama_server: Path | None = None
) -> Row:
    """Everything as JSON-serialisable data. Blocks for some seconds.

    Raises:
        ConfigError: `model` or `draft` cannot be used, or one of `urls` is no URL.
    """
    found = asyncio.run(_survey(urls))
    gpu_use = asyncio.run(_gpu_use(found))
    parts = versions()
    engines = {"embedded": parts["llama-cpp-python"], **_program(llama_server)}
    data: Row = {
        "versions": parts,
        "engines": engines,
        "machine": _machine(),
        "servers": [_server(url, result, llama_server) | gpu_use.get(url, {}) for url, result in found.items()],
        "ollama_models": [name for name, _ in stored_models(store_folders())],
        "model": None,
    }
    serving = next((row for row in data["servers"] if row["path"]), None)
    if model is not None:
        data["model"] = look_at_model(model, draft, llama_server)
    elif serving is not None:
        data["model"] = look_at_model(serving["path"], draft, llama_server, served_as=serving["model"])
    data["commands"] = commands(data)
    return data


async def _survey(urls: Sequence[str]) -> dict[str, ProbeResult]:
    prober = Prober()
    return dict(zip(urls, await asyncio.gather(*(prober(url) for url in urls)), strict=True))


async def _gpu_use(found: Mapping[str, ProbeResult]) -> dict[str, Row]:
    """What servers themselves say that their models take of a GPU, in bytes: Ollama does."""
    said = {}
    for url, result in found.items():
        if result.kind != "ollama":
            continue
        transport = HttpTransport(Endpoint.parse(url))
        try:
            _, running = await get_json(transport.open, "/api/ps", timeout_s=ANSWER_S)
        except BackendError:
            continue
        finally:
            await transport.aclose()
        models = running.get("models") if isinstance(running, dict) else None
        used = [m.get("size_vram") for m in models or () if isinstance(m, dict)]
        said[url] = {"gpu_used": sum(size for size in used if isinstance(size, int))}
    return said


def _program(configured: Path | None) -> Row:
    try:
        program = find_program(configured)
        return {"managed": program.build, "managed_kind": program.kind, "managed_trouble": ""}
    except ConfigError as error:
        return {"managed": None, "managed_kind": "", "managed_trouble": error.message}


def _machine() -> Row:
    memory, devices = machine.available_memory(), machine.gpus()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": machine.processor(),
        "cores": cores,
        "memory_available": memory.available,
        "memory_bound": memory.bound,
        "memory_for_lanes": Budget.of(memory.available).ram,
        "gpus": [asdict(device) for device in devices],
    }


def _server(url: str, found: ProbeResult, llama_server: Path | None) -> Row:
    """A server, how it can be controlled, what goes wrong there, and what would fit beside its model."""
    model = focus(found) if found.reachable else None
    weights = find_weights(url, model) if model is not None else None
    facts = weights.facts if weights is not None else None
    draft = weights.draft.path if weights is not None and weights.draft is not None else None
    beside = None
    if facts is not None and model is not None and found.kind in DIALECTS:
        beside = fit(facts.path, draft, llama_server=llama_server, beside=True, beside_ctx=model.ctx)
    return {
        "control": control(found),
        "hazards": list(hazards(found)),
        "model": model.name if model is not None else "",
        "path": str(facts.path) if facts is not None else "",
        "path_trouble": weights.reason if weights is not None else "",
        "beside": beside,
        "url": url,
        "reachable": found.reachable,
        "silent": found.silent,
        "kind": found.kind if found.reachable else "",
        "version": found.version,
        "models": list(found.models),
        "loaded": [model.name for model in found.served if model.loaded and not model.unrouted],
        "drafting": any(model.drafting for model in found.served),
    }


def look_at_model(
    model: str, draft: str | None, llama_server: Path | None = None, *, served_as: str | None = None
) -> Row:
    """A model's facts, its strategies, drafts for it that are at hand, and what fits in memory.

    `served_as` is its name on the server that has it loaded, if one has.

    Raises:
        ConfigError: it, or the draft, cannot be read.
    """
    path, _ = locate_model(model)
    target = read_facts(path)
    drafts = find_drafts(target, [*files_beside(path), *stored_models(store_folders())])
    given: ModelFacts | None = None
    trouble = ""
    if draft is not None:
        given = read_facts(locate_model(draft)[0])
    try:
        facts = describe(target, given)
    except SpecproxyError as error:
        facts, given, trouble = describe(target, None), None, error.message
    best = next((candidate for candidate in drafts if candidate.fits), None)
    if draft is None and best is not None:
        given = read_facts(best.path)
    if served_as:  # the file may be called after a digest
        facts = tuple(fact.replace(target.path.name, served_as) for fact in facts)
    return {
        "model": served_as or model,
        "served": served_as is not None,
        "fit": fit(path, given.path if given is not None else None, llama_server=llama_server),
        "draft": draft,
        "draft_trouble": trouble,
        "path": str(path),
        "bytes": target.weight_bytes,
        "facts": list(facts),
        "strategies": _strategies(target, given, trouble),
        "drafts": [_draft(candidate) for candidate in drafts],
    }


def _strategies(target: ModelFacts, draft: ModelFacts | None, trouble: str) -> list[Row]:
    """Each strategy, why it is impossible where it is, and what a rule of thumb expects of it."""
    file = drafter_in(draft.sidecar_type) if draft is not None else "draft"
    missing = {
        "mtp": "" if target.has_mtp else _no_mtp(target),
        file: "" if draft is not None else trouble or "no draft model was given, and none was found",
    }
    rows: list[Row] = [{"name": "plain", "possible": True, "why": "", "speed": {}}]
    for name in dict.fromkeys(("ngram", "mtp", file)):
        why, length = missing.get(name, ""), LENGTHS.get(name, LENGTHS["draft"])
        strategy = Strategy((name,), length)
        speed = {} if why else _speed(strategy, target, draft)
        rows.append({"name": name, "possible": not why, "why": why, "speed": speed})
    return rows


def _no_mtp(target: ModelFacts) -> str:
    if target.mtp_layers and target.architecture not in MTP_ARCHITECTURES:
        return f"llama.cpp has no MTP graph for architecture {target.architecture}"
    return "the file has no MTP layers"


def _speed(strategy: Strategy, target: ModelFacts, draft: ModelFacts | None) -> dict[str, float]:
    """How many times as fast as plain it should be, by kind, greedily, before anything was measured."""
    lane = Lane(strategy.name, "", "", strategy, Control.INSTANCE, "")
    facts = lane_facts(lane, target, draft, 1)
    return {kind: 1 / prior_ratio(strategy, facts, kind, TempBucket.GREEDY) for kind in KINDS}


def _draft(candidate: DraftCandidate) -> Row:
    row = asdict(candidate)
    return row | {"path": str(candidate.path), "notes": list(candidate.notes)}


def commands(data: Mapping[str, Any]) -> list[Row]:
    """What to type, the best first, each with the reason for it."""
    engines, model = data["engines"], data["model"]
    found: list[Row] = []
    if not engines["embedded"] and not engines["managed"]:
        found.append(
            _command(("pip", "install", "specproxy[managed]"), "No engine is installed that could run a model.")
        )
    elif model is not None and not model["served"] and model["fit"]["lanes"]:
        words, own = _start(model)
        if own and engines["embedded"]:  # which takes no such drafter
            words = (*words, "--engine", "managed")
        found.append(_command(words, _why(engines | ({"embedded": None} if own else {}), model["fit"])))
    found += (_before(server, engines) for server in data["servers"] if server["reachable"])
    if model is None and data["ollama_models"] and (engines["embedded"] or engines["managed"]):
        name = data["ollama_models"][0]
        found.append(_command(("specproxy", "start", "--model", name), "With a model that Ollama has pulled."))
    if not found:
        small = model is not None and "It does not fit in memory; a smaller one, or one of fewer bits, may."
        why = small or "No server runs, so name a model."
        found.append(_command(("specproxy", "doctor", "--model", "FILE.gguf"), why))
    return found


def _before(server: Mapping[str, Any], engines: Mapping[str, Any]) -> Row:
    """The command for a running server: with further lanes where they are known to fit beside it."""
    command = ("specproxy", "start", "--upstream", server["url"])
    beside = server["beside"]
    if beside is None or not beside["lanes"] or not engines["managed"]:
        why = "In front of the server that runs there; it is measured."
        if beside is not None:
            reasons = "; ".join(f"{row['name']}: {row['why']}" for row in beside["refused"])
            why += f" No further lane beside it: {beside['trouble'] or reasons or 'none is possible'}."
        return _command(command, why)
    short = shortened(beside)
    why = f"In front of the server that runs there, with further lanes beside it ({', '.join(beside['lanes'])})"
    why += f", {short}: longer requests stay on the server." if short else "."
    return _command((*command, "--manage"), why)


def _start(model: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    """Start with the draft that was given if it fits, else with the best one that promises something.

    Returns the command, and whether its draft is of a kind that llama-servers alone take.
    """
    of_file = model["strategies"][-1]  # the one whose drafter comes in a file
    best = next((row["name"] for row in model["drafts"] if row["fits"]), None)
    draft = model["draft"] if not model["draft_trouble"] else None
    if draft is None and max(of_file["speed"].values(), default=0) >= PLENTY:
        draft = best
    words = ("specproxy", "start", "--model", model["model"], *(("--draft", draft) if draft else ()))
    return words, bool(draft) and of_file["name"] not in ("draft", "mtp")


def _why(engines: Mapping[str, Any], fitting: Mapping[str, Any]) -> str:
    if engines["embedded"]:
        return "One copy of the weights, a strategy for each request."
    short = shortened(dict(fitting))
    return f"A llama-server for each strategy that fits in memory ({', '.join(fitting['lanes'])})" + (
        f", {short}." if short else "."
    )


def _command(words: Sequence[str], why: str) -> Row:
    return {"command": shlex.join(words), "why": why}
