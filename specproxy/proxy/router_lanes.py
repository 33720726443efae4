"""The lanes of a llama-server in router mode: sections of its preset file that decode the same model. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from specproxy.adapters.base import ProbeResult, ServedModel
from specproxy.adapters.gguf_facts import ModelFacts
from specproxy.adapters.server_program import SAMPLED
from specproxy.proxy.status import Upstream
from specproxy.records import Control, Health, Lane, LaneStatus, Strategy

__all__ = ["choices", "guess_load_s", "router_lanes", "section_status", "targets"]

LOAD_BYTES_S = 1e9  # read while loading, before a load was measured
LEAST_LOAD_S, UNKNOWN_LOAD_S = 0.5, 5.0


def targets(served: Sequence[ServedModel]) -> list[list[ServedModel]]:
    """Models that are one and the same but for how they are decoded, together; the plain one first."""
    groups: dict[str, list[ServedModel]] = {}
    for model in served:
        if not model.unrouted:
            groups.setdefault(model.group or model.name, []).append(model)
    return [
        sorted(group, key=lambda m: (not (m.strategy or Strategy()).is_plain, m.name))
        for group in groups.values()
    ]


def router_lanes(
    upstream: Upstream, *, alone: bool, loads: Mapping[str, float], facts: ModelFacts | None = None
) -> dict[str, Lane]:
    """By section: a lane on the target that is named after the group's plain section.

    Any name of the group asks for the target. `loads` are measured load times in seconds by section, `facts`
    are of the file of the model that is looked after.
    """
    lanes = {}
    for group in targets(upstream.found.served):
        names = frozenset(name for model in group for name in (model.name, *model.aliases))
        for model in group:
            looked_after = upstream.model is not None and upstream.model.path == model.path
            lanes[model.name] = Lane(
                model.name if alone else f"{model.name}@{upstream.backend}",
                upstream.backend,
                group[0].name,
                _strategy(model),
                Control.RELOAD,
                _fingerprint(upstream.url, upstream.found, model),
                upstream_model=model.name,
                load_s=loads.get(model.name) or guess_load_s(facts if looked_after else None),
                models=names,
                seeded=not any(name.endswith(SAMPLED) for name in _strategy(model).drafters),
            )
    return lanes


def guess_load_s(facts: ModelFacts | None) -> float:
    """How long a load may take, in seconds, before one was measured."""
    return UNKNOWN_LOAD_S if facts is None else LEAST_LOAD_S + facts.weight_bytes / LOAD_BYTES_S


def section_status(lane: Lane, model: ServedModel, *, autoload: bool = True) -> LaneStatus:
    """Whether a section's lane can take requests, and whether it is in memory.

    `autoload` is whether the router loads what it is asked for.
    """
    status = LaneStatus(lane, Health.READY, resident=model.loaded)
    if not (model.loaded or autoload):
        return replace(status, health=Health.STOPPED, note="not loaded, and the router loads nothing unasked")
    if model.failed:
        return replace(status, health=Health.UNHEALTHY, note=model.failed)
    wanted = model.strategy is not None and not model.strategy.is_plain
    if wanted and model.loaded and not model.drafting:
        assert model.strategy is not None
        note = f"it claims {model.strategy.name} but does not draft: the drafter does not fit the model"
        return replace(status, health=Health.DROPPED, note=note)
    return status


def choices(found: ProbeResult) -> list[tuple[str, tuple[str, ...]]]:
    """Targets with more than one way to decode: the target's name and the strategies."""
    grouped = [group for group in targets(found.served) if len(group) > 1]
    return [(group[0].name, tuple(_strategy(model).name for model in group)) for group in grouped]


def _strategy(model: ServedModel) -> Strategy:
    """By the command line; a server that drafts unasked does so in a way that only it knows."""
    told = model.strategy or Strategy()
    return Strategy(("server",)) if told.is_plain and model.drafting else told


def _fingerprint(url: str, found: ProbeResult, model: ServedModel) -> str:
    facts = "\0".join((url, found.kind, found.version, model.path, model.setup))
    return hashlib.sha256(facts.encode()).hexdigest()[:16]
