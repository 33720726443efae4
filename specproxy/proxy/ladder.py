"""The start-up ladder: which rung a running server stands on, why not a lower one, and what to do about it.

Pure: facts go in, sentences come out.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from specproxy.adapters.base import ProbeResult, ServedModel
from specproxy.adapters.gguf_facts import ModelFacts
from specproxy.adapters.managed import ManagedPlan
from specproxy.adapters.ollama_serve import OllamaPlan
from specproxy.adapters.weights import Weights
from specproxy.proxy.reload_lanes import other_way
from specproxy.proxy.router_lanes import choices
from specproxy.proxy.status import Rung
from specproxy.records import Strategy, TempBucket
from specproxy.strategies.cost import LaneFacts, log_prior

__all__ = ["Standing", "climb", "focus", "model_facts", "own_strategy"]

MTP, NGRAM = Strategy(("mtp",), 3), Strategy(("ngram",), 8)
FLAGS = {
    MTP: ("--spec-type", "draft-mtp", "--spec-draft-n-max", "3"),
    NGRAM: (
        "--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8",
    ),
}  # fmt: skip
"""How a llama-server is told to draft."""

BEST_KIND, WORTHWHILE = "code_edit", 1.05  # advice is given from this speed on, on the kind that gains most

NOT_TO_REPEAT = frozenset({"--spec-type", "--api-key", "--hf-token", "-hft"})
"""Flags that keep a command line from being given back as advice: secrets, and what would clash."""

NO_RELOAD = "no reload by request switches its drafting"
NO_FIELD = {
    "llama-server": "no request field can switch on a drafter that is not loaded",
    "llama-router": "llama-server has no request field that switches drafting",
    "ollama": "Ollama has no request field that switches drafting without a reload",
    "llama-swap": "llama-swap has no request field but the model's name (name models of it under deployments)",
    "lmstudio": "LM Studio's request field draft_model wants the name of a draft model (under deployments)",
    "mlx-vlm": "mlx_vlm.server wants a setting and the name of a drafter (under deployments)",
    "vllm": "vLLM has no request field that switches drafting",
    "sglang": "SGLang has no request field that switches drafting",
}


@dataclass(frozen=True, slots=True)
class Standing:
    """All that the rung of one server depends on. `field` says, as a clause, what came of the request field.

    `peers` are other servers with the same model that decode in another way, as (URL, strategy).
    `by_reload` is whether lanes of its own displace each other, `may_reload` whether that was consented to.
    `plan` is of lanes beside it, `offered` whether requests may go to them yet, `trouble` why there are none
    although they were wanted.
    """

    url: str
    found: ProbeResult
    model: ServedModel | None = None
    weights: Weights | None = None
    consent: bool = False
    peers: tuple[tuple[str, str], ...] = ()
    plan: ManagedPlan | None = None
    offered: bool = True
    trouble: str = ""
    field: str = ""
    by_field: bool = False
    may_reload: bool = False
    by_reload: bool = False


def focus(found: ProbeResult, current: str = "") -> ServedModel | None:
    """The model to look after: the only one, or of several the one that is loaded. It stays as long as it is
    loaded, or no other one is."""
    able = [model for model in found.served if not model.unrouted]
    loaded = [model for model in able if model.loaded]
    models = loaded or able
    return next((model for model in models if model.name == current), models[0] if models else None)


def own_strategy(model: ServedModel, weights: Weights | None) -> Strategy:
    """How the server itself decodes: plain, what its command line says, or ``server`` if only it knows."""
    if not model.drafting:
        return Strategy()
    listener = weights.listener if weights is not None else None
    told = listener.strategy if listener is not None else None
    if told is None and (model.mtp_layers or model.draft):
        return Strategy(("mtp",))
    return told or Strategy(("server",))


def model_facts(model: ServedModel, facts: ModelFacts | None) -> LaneFacts:
    """What may be known about a server's model before anything was measured, from its file if there is one."""
    if facts is None:
        experts = model.experts if 0 < model.experts_used < model.experts else 0
        used = model.experts_used if experts else 0
        return LaneFacts(experts, used, mtp_layers=model.mtp_layers, slots=model.slots)
    return LaneFacts(
        experts=facts.expert_count if facts.is_moe else 0,
        experts_used=facts.expert_used_count if facts.is_moe else 0,
        expert_share=facts.expert_share,
        mtp_layers=facts.mtp_layers,
        layers=facts.block_count,
        slots=model.slots,
    )


def climb(at: Standing) -> Rung | None:
    """The rung that a server stands on; None while nobody answers there."""
    found = at.found
    if not found.reachable:
        return None
    if found.loading:
        return Rung(4, "observe", "its model is still loading; this is looked at again once it has")
    if at.by_field:
        beside = at.plan.lanes if at.plan is not None else ()
        more = (
            f"; further lanes on its weights: {', '.join(p.lane.strategy.name for p in beside)}"
            if beside
            else ""
        )
        return Rung(1, "a request field", at.field + more)
    if found.kind == "llama-router" and (ways := choices(found)):
        return _presets(found, ways)
    if at.plan is not None and at.plan.lanes:
        return _beside(at, at.plan)
    if at.peers and at.model is not None:
        others = ", ".join(f"{strategy} at {url}" for url, strategy in at.peers)
        own = own_strategy(at.model, at.weights).name
        return Rung(2, "several servers", f"{own} here, {others}, on the same model")
    if found.kind == "ollama" and at.by_reload and at.model is not None:
        return _reload(at, at.model)
    why = f"there is nothing to choose from yet, so it is measured: {'; '.join(_missing(at))}"
    return Rung(4, "observe", why, tuple(_advice(at)))


def _reload(at: Standing, model: ServedModel) -> Rung:
    """Drafting or not, by an option with which Ollama loads the model."""
    facts = at.weights.facts if at.weights is not None else None
    other = other_way(model, facts)
    own = own_strategy(model, at.weights).name
    why = (
        f"{own}, or {other.name if other else own} by draft_num_predict, which has Ollama load {model.name} "
        "anew; that is done where it is expected to save more than it costs, and for Ollama's own routes only"
    )
    return Rung(3, "reload", why, tuple(_advice(at)))


def _presets(found: ProbeResult, ways: list[tuple[str, tuple[str, ...]]]) -> Rung:
    """Sections of a router's preset file that decode one model in several ways."""
    told = "; ".join(f"{name}: {', '.join(strategies)}" for name, strategies in ways)
    most = found.detail.get("models_max")
    advice = []
    if isinstance(most, int) and 0 < most < max(len(strategies) for _, strategies in ways):
        advice.append(
            f"The router keeps {most} models in memory (--models-max), so lanes displace each other, and a "
            "change of lane costs a load. More of them would avoid that, if memory allows."
        )
    return Rung(2, "presets of the router", told, tuple(advice))


def _beside(at: Standing, plan: ManagedPlan) -> Rung:
    names = ", ".join(planned.lane.strategy.name for planned in plan.lanes)
    budget = plan.memory.budget
    used = f"{plan.memory.ram / 2**30:.1f} of {budget.ram / 2**30:.1f} GiB of {budget.bound}"
    own = own_strategy(at.model, at.weights).name if at.model is not None else "plain"
    why = f"{names} on the weights of the server, which is {own} itself ({used}, {plan.ctx} tokens of context)"
    why += ", each an Ollama of its own" if isinstance(plan, OllamaPlan) else ""
    why += "" if at.offered else "; they are being started and compared with it"
    advice = [*plan.warnings, *(f"No lane {refused.id}: {refused.reason}." for refused in plan.refused)]
    if at.model is not None and at.model.ctx is not None and plan.ctx < at.model.ctx:
        advice.append(
            f"The server has {at.model.ctx} tokens of context, and that much would not fit: "
            "requests that may need more than the lanes have stay on the server."
        )
    return Rung(2, "further lanes", why, tuple(advice))


def _missing(at: Standing) -> Iterator[str]:
    """Why none of the lower rungs was taken."""
    yield at.field or NO_FIELD.get(at.found.kind, "no request field is known for this server")
    if at.found.kind == "llama-router":
        yield "no two of its presets decode one model in different ways"
    elif at.plan is not None and at.plan.refused:
        yield "no further lane fits (" + "; ".join(f"{r.id}: {r.reason}" for r in at.plan.refused) + ")"
    elif at.trouble:
        yield f"further lanes could not be had: {at.trouble}"
    elif at.weights is not None and at.weights.reason:
        yield f"further lanes would need its weights: {at.weights.reason}"
    elif at.weights is not None and not at.consent:
        yield "further lanes on its weights need your consent"
    elif at.model is None:
        yield "it names no model that further lanes could decode with"
    else:
        yield "further lanes are being prepared"
    facts = at.weights.facts if at.weights is not None else None
    if at.found.kind != "ollama":
        yield NO_RELOAD
    elif at.model is not None and other_way(at.model, facts) is None:
        yield f"{at.model.name} has no MTP layers and no DRAFT, so that a reload would change nothing"
    elif not at.may_reload:
        yield "switching by reloading the model needs your consent"


def _advice(at: Standing) -> Iterator[str]:
    """What would bring it further, with commands."""
    weights, model = at.weights, at.model
    if model is None:
        return
    facts = model_facts(model, weights.facts if weights is not None else None)
    if weights is not None and weights.facts is not None:
        if not at.consent and at.found.kind != "llama-router":
            command = shlex.join(["specproxy", "start", "--upstream", at.url, "--manage"])
            yield f"To let specproxy start further lanes on the same weights:\n{command}"
        if at.found.kind == "ollama" and not at.may_reload and other_way(model, weights.facts) is not None:
            command = shlex.join(["specproxy", "start", "--upstream", at.url, "--reload"])
            yield (
                f"To let Ollama load the model anew, with drafts or without, where that should pay:\n{command}"
            )
        if at.found.kind == "ollama":
            command = shlex.join(["specproxy", "start", "--model", model.name, "--upstream", at.url])
            yield (f"With a strategy for each request, in the embedded engine and not in Ollama:\n{command}")
        if at.found.kind == "llama-router":
            command = shlex.join(["specproxy", "init", "--model", str(weights.facts.path)])
            yield f"For presets of this model with every way to decode it, written to a file:\n{command}"
        if at.found.kind == "llama-server":
            command = shlex.join(["specproxy", "start", "--model", str(weights.facts.path)])
            yield f"Instead of this server, with a strategy for each request:\n{command}"
            yield from _restart(model, weights, facts)
    idle_mtp = facts.mtp_layers and not model.drafting
    if at.found.kind == "ollama" and idle_mtp and _speed(MTP, facts, BEST_KIND) >= WORTHWHILE:
        yield from _ollama_mtp(at.url, model, facts)


def _restart(model: ServedModel, weights: Weights, facts: LaneFacts) -> Iterator[str]:
    """How the server itself could draft, with the strategy that promises most, if any promises something."""
    if model.drafting or weights.facts is None:
        return
    able = (MTP, NGRAM) if weights.facts.has_mtp else (NGRAM,)
    strategy = max(able, key=lambda s: _speed(s, facts, BEST_KIND))
    if _speed(strategy, facts, BEST_KIND) < WORTHWHILE:
        return
    started = weights.listener.command if weights.listener is not None else ()
    known = bool(started) and NOT_TO_REPEAT.isdisjoint(word.partition("=")[0] for word in started)
    command = started if known else ("llama-server", "-m", str(weights.facts.path))
    yield (
        f"For drafts by this server itself, for every request alike ({_gain(strategy, facts)}), start it so:\n"
        + shlex.join([*command, *FLAGS[strategy]])
    )


def _ollama_mtp(url: str, model: ServedModel, facts: LaneFacts) -> Iterator[str]:
    body = f'{{"model": "{model.name}-mtp", "from": "{model.name}", "parameters": {{"draft_num_predict": 3}}}}'
    yield (
        f"{model.name} has MTP layers that Ollama leaves idle. A copy that uses them, for every request alike "
        f"({_gain(MTP, facts)}):\n" + shlex.join(["curl", f"{url}/api/create", "-d", body])
    )


def _gain(strategy: Strategy, facts: LaneFacts) -> str:
    """What the cost model expects before anything was measured."""
    edits, json, prose = (_speed(strategy, facts, kind) for kind in ("code_edit", "json_schema", "creative"))
    return (
        f"by rule of thumb {edits:.1f} times as fast on edits, {json:.1f} on JSON, {prose:.1f} on open writing"
    )


def _speed(strategy: Strategy, facts: LaneFacts, kind: str) -> float:
    return math.exp(-log_prior(strategy, facts, kind, TempBucket.GREEDY))
