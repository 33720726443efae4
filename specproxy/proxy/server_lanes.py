"""The lanes of a server that somebody else runs, and those that should be beside it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from specproxy.adapters.base import ProbeResult, ServedModel
from specproxy.adapters.request_field import FIELD
from specproxy.adapters.running_server import RunningServer
from specproxy.adapters.twin_ollama import refusal
from specproxy.adapters.weights import Weights
from specproxy.proxy.beside import Beside, Wish
from specproxy.proxy.ladder import model_facts, own_strategy
from specproxy.proxy.router_lanes import router_lanes, section_status
from specproxy.proxy.status import Upstream
from specproxy.records import Control, Dialect, Health, Lane, Strategy
from specproxy.strategies.cost import LaneFacts

__all__ = [
    "Server",
    "drafting_lane",
    "health_of",
    "lane_of",
    "lanes_of",
    "mark_lanes",
    "own_facts",
    "plain_by_field",
    "waits",
    "wish_of",
]

SINGLE_MODEL_KINDS = ("llama-server", "unknown")  # answer for one model, whatever name a request gives
FIELD_DIALECTS = frozenset(
    {Dialect.OPENAI_CHAT, Dialect.OPENAI_COMPLETIONS, Dialect.LLAMACPP, Dialect.LLAMACPP_INFILL}
)
"""Whose request fields llama-server reads as they are; the other dialects are translated first."""


@dataclass(slots=True)
class Server:
    """A server with its own lanes, those beside it, and the file of the model that is looked after.

    `surveyed` is what `weights` is of: the server's version and the model. `loads` are measured load times of
    its models in seconds. `doubted` is whether a connection has failed since it last answered a look.
    """

    upstream: Upstream
    backend: RunningServer
    beside: Beside | None = None
    surveyed: tuple[str, ServedModel] | None = None
    weights: Weights | None = None
    loads: dict[str, float] = field(default_factory=dict)
    doubted: bool = False


def drafting_lane(server: Server) -> Lane | None:
    """The lane of a llama-server that drafts by itself."""
    if server.upstream.found.kind != "llama-server":
        return None
    lanes = [status.lane for status in server.backend.lanes()]
    return next((lane for lane in lanes if not lane.strategy.is_plain), None)


def plain_by_field(lane: Lane) -> Lane:
    """Plain decoding on a server that drafts, by the request field that switches that off."""
    fingerprint = hashlib.sha256(f"{lane.fingerprint}\0{FIELD}".encode()).hexdigest()[:16]
    return replace(
        lane,
        id=f"{lane.id}-plain",
        strategy=Strategy(),
        control=Control.REQUEST,
        fingerprint=fingerprint,
        overrides=(FIELD,),
        dialects=FIELD_DIALECTS,
    )


def waits(beside: Beside, model: ServedModel | None) -> bool:
    """Whether the model that lanes are beside has only been put out of memory: they serve on."""
    known = beside.model
    return model is not None and known is not None and not model.loaded and _same(known, model)


def _same(one: ServedModel, other: ServedModel) -> bool:
    return (one.name, one.digest) == (other.name, other.digest)


def wish_of(server: Server, lane: Lane | None, *, plain_there: bool) -> tuple[Wish | None, str]:
    """The lanes that should be beside a server, or None and as a clause why there can be none."""
    found, model = server.upstream.found, server.upstream.model
    if lane is None or model is None:
        return None, ""
    if found.kind == "ollama" and not model.loaded:
        return None, "Ollama has no model loaded; they come with the first one"
    trouble = refusal(model, found.version) if found.kind == "ollama" else ""
    wish = Wish.of(server.upstream.url, found.kind, lane, model, server.weights, found.version)
    return (replace(wish, plain_there=plain_there, trouble=trouble) if wish is not None else None), ""


def health_of(url: str, found: ProbeResult) -> tuple[Health, str]:
    """Of a server's own lanes, with a note."""
    if not found.reachable:
        what = "takes connections, but does not answer in HTTP" if found.silent else "cannot be reached"
        return Health.UNHEALTHY, f"{url} {what}"
    return (Health.UNHEALTHY, "it is loading") if found.loading else (Health.READY, "")


def mark_lanes(server: Server) -> None:
    """Bring the health of a server's own lanes up to what was found there."""
    health, note = health_of(server.upstream.url, server.upstream.found)
    sections = {model.name: model for model in server.upstream.found.served}
    for status in server.backend.lanes():
        model = sections.get(status.lane.upstream_model or "")
        if health is Health.READY and model is not None:
            autoload = server.upstream.found.detail.get("autoload") is not False
            now = section_status(status.lane, model, autoload=autoload)
            server.backend.mark(status.lane.id, now.health, now.note, resident=now.resident)
        else:
            server.backend.mark(status.lane.id, health, note)


def lanes_of(server: Server, *, alone: bool, named: bool = False) -> dict[str, Lane]:
    """By model: one lane for each that the server names and that has a choice, or one for all.

    A server with a single model takes any name, unless it is to be asked for by name: another one comes first.
    """
    upstream, found = server.upstream, server.upstream.found
    if found.kind == "llama-router":
        facts = server.weights.facts if server.weights is not None else None
        return router_lanes(upstream, alone=alone, loads=server.loads, facts=facts)
    served = {model.name: model for model in found.served} | {
        name: ServedModel(name) for name in found.models if name not in {m.name for m in found.served}
    }
    if found.kind in SINGLE_MODEL_KINDS or not served:
        model = next(iter(served.values()), ServedModel(""))
        only = frozenset({model.name} if named else ())
        return {model.name: lane_of(upstream, upstream.backend, model, only, server.weights)}
    lanes = {}
    for name, model in served.items():
        if not model.unrouted:
            names = {name, name.removesuffix(":latest")} if found.kind == "ollama" else {name}
            lane_id = name if alone else f"{name}@{upstream.backend}"
            weights = server.weights if upstream.model == model else None
            lanes[name] = lane_of(upstream, lane_id, model, frozenset(names), weights)
    return lanes


def lane_of(
    upstream: Upstream,
    lane_id: str,
    model: ServedModel | None = None,
    names: frozenset[str] = frozenset(),
    weights: Weights | None = None,
) -> Lane:
    """Statistics belong to this server: another address may be another machine."""
    model = model or ServedModel("")
    strategy = own_strategy(model, weights)
    in_file = weights.facts.digest if weights is not None and weights.facts is not None else ""
    digest = model.digest or in_file
    found = upstream.found
    facts = "\0".join((upstream.url, found.kind, found.version, model.name, digest, strategy.name))
    fingerprint = hashlib.sha256(facts.encode()).hexdigest()[:16]
    return Lane(lane_id, upstream.backend, model.name, strategy, Control.OBSERVE, fingerprint, models=names)


def note_ngrams(server: Server) -> None:
    """Tell a server's backend how its n-gram lanes draft, where they are on the model that is looked after."""
    weights, model = server.weights, server.upstream.model
    file = weights.facts.path if weights is not None and weights.facts is not None else None
    same = [m for m in server.upstream.found.served if model is not None and m.path == model.path]
    server.backend.look_up({m.name: m.ngram for m in same if m.ngram is not None}, file)


def own_facts(server: Server) -> dict[str, LaneFacts]:
    """What is known of the models on a server's own lanes."""
    upstream = server.upstream
    models = {model.name: model for model in upstream.found.served}
    weights = server.weights.facts if server.weights is not None else None
    looked_after = upstream.model.group or upstream.model.name if upstream.model is not None else ""
    return {
        status.lane.id: model_facts(model, weights if (model.group or model.name) == looked_after else None)
        for status in server.backend.lanes()
        if (model := models.get(status.lane.target)) is not None
    }
