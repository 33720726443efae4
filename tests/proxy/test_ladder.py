"""Which rung a server stands on, why, and what it is told to do: facts in, sentences out."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from specproxy.adapters.base import ProbeResult, ServedModel
from specproxy.adapters.llama_server import LanePlan
from specproxy.adapters.managed import ManagedOptions, ManagedPlan
from specproxy.adapters.memory import Budget, MemoryPlan, Refusal
from specproxy.adapters.server_program import ServerProgram
from specproxy.adapters.supervise import ChildSpec
from specproxy.adapters.weights import Listener, Weights
from specproxy.proxy.ladder import Standing, climb, focus, model_facts, own_strategy
from specproxy.proxy.status import Rung
from specproxy.records import Control, Lane, Strategy
from specproxy.strategies.cost import LaneFacts
from tests.support.model_facts import GIB, facts

URL = "http://127.0.0.1:8080"
MODEL = ServedModel("m", path="/my models/m.gguf", ctx=8192, drafting=False)
FOUND = ProbeResult(True, "llama-server", "b1", ("m",), served=(MODEL,))
WEIGHTS = Weights(facts(path=Path("/my models/m.gguf")))
MTP_WEIGHTS = Weights(facts(path=Path("/m.gguf"), architecture="qwen35", mtp_layers=1))
LONE = Standing(URL, FOUND, MODEL, WEIGHTS)


def rung(at: Standing) -> Rung:
    found = climb(at)
    assert found is not None
    return found


def commands(at: Standing) -> list[list[str]]:
    """The commands of the advice, as a shell would split them."""
    return [shlex.split(item.partition("\n")[2]) for item in rung(at).advice if "\n" in item]


def planned(*names: str, ctx: int = 8192, refused: tuple[Refusal, ...] = ()) -> ManagedPlan:
    lanes = [Lane(name, "beside", "m", Strategy.parse(name), Control.INSTANCE, name) for name in names]
    return ManagedPlan(
        ManagedOptions(Path("m.gguf")),
        ServerProgram("wheel", (), "b1", frozenset(), frozenset()),
        facts(),
        None,
        ctx,
        tuple(LanePlan(lane, ChildSpec(lane.id, ())) for lane in lanes),
        MemoryPlan((), (), 1 << 30, 0, Budget(4 << 30)),
        refused,
    )


# --- observe ---------------------------------------------------------------------------------------


def test_a_lone_server_is_measured_and_told_what_would_help() -> None:
    """Rung 4 says why each lower rung was not taken, and gives whole commands."""
    found = rung(LONE)
    assert (found.number, found.name) == (4, "observe")
    for part in ("no request field", "further lanes on its weights need your consent", "no reload by request"):
        assert part in found.why
    assert commands(LONE)[:2] == [
        ["specproxy", "start", "--upstream", URL, "--manage"],
        ["specproxy", "start", "--model", "/my models/m.gguf"],
    ]


def test_a_server_can_be_started_so_that_it_drafts() -> None:
    """With its own command line if that is known, and the drafter that promises most."""
    assert commands(LONE)[2][:3] == ["llama-server", "-m", "/my models/m.gguf"]
    assert "ngram-simple" in commands(LONE)[2]
    started = Listener(("/opt/llama-server", "-m", "m.gguf", "--port", "9"), Path("/my models"))
    known = replace(LONE, weights=replace(MTP_WEIGHTS, listener=started))
    assert commands(known)[2] == [*started.command, "--spec-type", "draft-mtp", "--spec-draft-n-max", "3"]
    assert "by rule of thumb" in rung(known).advice[2]


@pytest.mark.parametrize("secret", [("--api-key", "s3cret"), ("--api-key=s3cret",), ("-hft", "s3cret")])
def test_a_command_line_with_a_secret_is_not_given_back(secret: tuple[str, ...]) -> None:
    """It would end up in the status and on the terminal."""
    started = Listener(("/opt/llama-server", "-m", "m.gguf", *secret), Path("/my models"))
    at = replace(LONE, weights=replace(WEIGHTS, listener=started))
    assert commands(at)[2][:3] == ["llama-server", "-m", "/my models/m.gguf"]
    assert "s3cret" not in str(rung(at))


def test_no_gain_is_promised_where_none_is_expected() -> None:
    """Drafting on a fast mixture of experts brings little: nobody is told to restart a server for that."""
    moe = Weights(
        facts(
            expert_count=128,
            expert_used_count=8,
            expert_bytes=int(3.9 * GIB),
            mtp_layers=1,
            block_count=2,
            architecture="glm4moe",
        )
    )
    assert [command[:2] for command in commands(replace(LONE, weights=moe))] == [["specproxy", "start"]] * 2
    drafting = replace(MODEL, drafting=True)
    assert len(commands(replace(LONE, model=drafting))) == 2


def test_weights_that_cannot_be_used_are_no_advice() -> None:
    """The reason stands in the place of commands."""
    away = replace(LONE, weights=Weights(reason="gpu-box may be another machine"))
    assert "further lanes would need its weights: gpu-box may be another machine" in rung(away).why
    assert rung(away).advice == ()


def test_ollama_is_told_how_idle_mtp_layers_are_used() -> None:
    """By a copy of the model with the parameter set; not if they are at work already."""
    model = ServedModel("qwen3.6", mtp_layers=1, drafting=False)
    at = Standing(
        "http://127.0.0.1:11434", ProbeResult(True, "ollama", served=(model,)), model, Weights(reason="x")
    )
    [command] = commands(at)
    assert command[:2] == ["curl", "http://127.0.0.1:11434/api/create"]
    assert command[3] == '{"model": "qwen3.6-mtp", "from": "qwen3.6", "parameters": {"draft_num_predict": 3}}'
    assert "without a reload" in rung(at).why
    assert commands(replace(at, model=replace(model, drafting=True))) == []


def test_a_model_of_ollamas_can_be_run_instead() -> None:
    """By its name; everything else still goes to Ollama. What differs then is said."""
    model = ServedModel("qwen3:8b", drafting=False)
    at = Standing("http://127.0.0.1:11434", ProbeResult(True, "ollama", served=(model,)), model, WEIGHTS)
    assert commands(at) == [
        ["specproxy", "start", "--upstream", at.url, "--manage"],
        ["specproxy", "start", "--model", "qwen3:8b", "--upstream", at.url],
    ]
    assert "not in Ollama" in rung(at).advice[1]


@pytest.mark.parametrize("kind", ["openai", "vllm", "sglang", "lmstudio", "unknown"])
def test_every_server_has_a_rung(kind: str) -> None:
    """A server without files or models too: it is said that it is measured, and why nothing more."""
    at = Standing(URL, ProbeResult(True, kind))
    assert rung(at).number == 4
    assert "it names no model" in rung(at).why


def test_a_server_that_loads_or_is_away() -> None:
    """Loading is said; of nobody there is nothing to say."""
    assert "still loading" in rung(replace(LONE, found=ProbeResult(True, "llama-server", loading=True))).why
    assert climb(replace(LONE, found=ProbeResult(False))) is None


# --- further lanes ---------------------------------------------------------------------------------


def test_lanes_beside_a_server_are_rung_two() -> None:
    """With memory and context, what was left out, and that longer requests stay on the server."""
    refused = (Refusal("mtp", "the model file has no MTP layers"),)
    found = rung(replace(LONE, consent=True, plan=planned("ngram", "draft", ctx=4096, refused=refused)))
    assert (found.number, found.name) == (2, "further lanes")
    assert "ngram, draft on the weights of the server, which is plain itself (1.0 of 4.0 GiB" in found.why
    assert "No lane mtp: the model file has no MTP layers." in found.advice
    assert any("8192 tokens of context" in line for line in found.advice)


def test_several_servers_with_one_model_are_lanes_of_it() -> None:
    """They are a choice already; lanes of our own beside them come first."""
    at = replace(LONE, peers=(("http://127.0.0.1:9", "mtp"),))
    assert rung(at) == Rung(2, "several servers", "plain here, mtp at http://127.0.0.1:9, on the same model")
    assert rung(replace(at, plan=planned("ngram"))).name == "further lanes"


def test_lanes_that_were_wanted_and_could_not_be_had() -> None:
    """Rung 4 with the reason: nothing fits, or nothing could be planned."""
    none = planned(refused=(Refusal("ngram", "needs 9 MiB of memory, 1 MiB are left"),))
    assert "ngram: needs 9 MiB" in rung(replace(LONE, consent=True, plan=none)).why
    trouble = replace(LONE, consent=True, trouble="no llama-server found")
    assert "could not be had: no llama-server found" in rung(trouble).why
    assert ["specproxy", "start", "--upstream", URL, "--manage"] not in commands(trouble)


# --- models ----------------------------------------------------------------------------------------

A, B = ServedModel("a"), ServedModel("b")


@pytest.mark.parametrize(
    ("served", "current", "expected"),
    [
        ((), "", None),
        ((A, B), "", "a"),
        ((A, B), "b", "b"),
        ((A, replace(B, loaded=False)), "b", "a"),
        ((replace(A, loaded=False), replace(B, loaded=False)), "b", "b"),
        ((replace(A, unrouted="cloud"), B), "a", "b"),
        ((replace(A, unrouted="cloud"),), "a", None),
    ],
)
def test_the_model_that_is_loaded_is_looked_after(
    served: tuple[ServedModel, ...], current: str, expected: str | None
) -> None:
    """It stays until another one is loaded in its place."""
    found = focus(ProbeResult(True, "ollama", served=served), current)
    assert (found.name if found else None) == expected


@pytest.mark.parametrize(
    ("model", "types", "name"),
    [
        (MODEL, "ngram-simple", "plain"),
        (replace(MODEL, drafting=True), "ngram-simple,draft-mtp", "ngram+mtp"),
        (replace(MODEL, drafting=True), "draft-eagle3", "eagle3"),
        (replace(MODEL, drafting=True), "", "server"),
        (replace(MODEL, drafting=True, mtp_layers=1), "", "mtp"),
    ],
)
def test_how_a_server_decodes_by_itself(model: ServedModel, types: str, name: str) -> None:
    """Its slots say whether it drafts, its command line how; not drafting is plain whatever it was told."""
    started = Listener(("llama-server", *(("--spec-type", types) if types else ())), Path("/"))
    assert own_strategy(model, Weights(reason="x", listener=started)).name == name


def test_facts_for_the_learner_come_from_the_file_or_the_server() -> None:
    """The file knows more; experts count only where some are left out of a token."""
    model = ServedModel("m", experts=8, experts_used=8, mtp_layers=1, slots=2)
    assert model_facts(model, None) == LaneFacts(mtp_layers=1, slots=2)
    assert model_facts(replace(model, experts_used=2), None) == LaneFacts(8, 2, mtp_layers=1, slots=2)
    assert model_facts(model, facts(block_count=40)) == LaneFacts(expert_share=0.0, layers=40, slots=2)


# --- presets of a router -----------------------------------------------------------------------------


def section(name: str, strategy: str, group: str = "g") -> ServedModel:
    told = Strategy.parse(strategy)
    return ServedModel(name, path="/m.gguf", drafting=not told.is_plain, group=group, strategy=told)


def test_presets_of_one_model_are_a_choice() -> None:
    """Said by model; where they displace each other, that and the flag."""
    both = (section("m", "plain"), section("m-mtp", "mtp"), section("other", "plain", "o"))
    found = ProbeResult(True, "llama-router", "b1", served=both, detail={"models_max": 4})
    assert rung(Standing(URL, found, both[0])) == Rung(2, "presets of the router", "m: plain, mtp")
    few = rung(Standing(URL, replace(found, detail={"models_max": 1}), both[0]))
    assert "--models-max" in few.advice[0]


def test_a_router_without_a_choice_is_told_how_to_get_one() -> None:
    """By the presets that we can write; lanes beside a router are not to be had."""
    lone = section("m", "plain")
    at = Standing(URL, ProbeResult(True, "llama-router", "b1", served=(lone,)), lone, WEIGHTS)
    assert rung(at).number == 4
    assert "no two of its presets decode one model in different ways" in rung(at).why
    assert commands(at) == [["specproxy", "init", "--model", "/my models/m.gguf"]]
