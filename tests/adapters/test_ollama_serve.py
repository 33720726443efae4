"""Further Ollama servers of our own: planned by model and running server, proven before they are used."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specproxy.adapters import ollama_serve as module
from specproxy.adapters.ask import get_json
from specproxy.adapters.base import Backend, DraftsNgrams, ServedModel, TellsDrafts, UpstreamRequest
from specproxy.adapters.endpoint import Endpoint
from specproxy.adapters.http import HttpTransport, fetch
from specproxy.adapters.managed import ManagedOptions
from specproxy.adapters.memory import Budget
from specproxy.adapters.ollama_serve import ManagedOllama, OllamaPlan, ServeLog, find_ollama, plan_ollama
from specproxy.adapters.supervise import Backoff
from specproxy.adapters.tokens import Tokenizer
from specproxy.adapters.weights import Listener
from specproxy.errors import ConfigError
from specproxy.records import Dialect, Health, Lane
from tests.adapters.contract import BackendContract
from tests.support.model_facts import facts

PLAIN = ServedModel("m:latest", ctx=2048, drafting=False)
DRAFTING = replace(PLAIN, drafting=True, parameters=(("draft_num_predict", "4"),))
WITH_DRAFT = replace(PLAIN, drafting=True, draft="/store/blobs/sha256-d")
GENERATE = UpstreamRequest("POST", "/api/generate", (), b'{"model": "m", "prompt": "p"}')


@pytest.fixture
def blob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's file in a store, said to have an MTP layer; the machine has memory and no GPU."""
    (tmp_path / "models" / "manifests").mkdir(parents=True)
    (tmp_path / "models" / "blobs").mkdir()
    monkeypatch.setattr(
        module, "read_facts", lambda path: facts(path=path, mtp_layers=1, architecture="glm4moe")
    )
    monkeypatch.setattr(module, "measure_budget", lambda options: (Budget(1 << 40), ()))
    return tmp_path / "models" / "blobs" / "sha256-m"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program that starts the stub."""
    script = tmp_path / "ollama"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.support.stub_ollama "$@"\n')
    script.chmod(0o755)
    return script


def planned(
    blob: Path,
    model: ServedModel = PLAIN,
    *,
    program: Path = Path("/bin/ollama"),
    listener: Listener | None = None,
    **options: Any,
) -> OllamaPlan:
    return plan_ollama(ManagedOptions(blob, exclude=("plain",), **options), program, model, "0.33.0", listener)


def ways(plan: OllamaPlan) -> dict[str, tuple[dict[str, str], Any]]:
    """Of each lane what its environment says to llama-server, and its overrides."""
    return {
        p.lane.id: ({k: v for k, v in p.spec.env.items() if k.startswith("LLAMA_ARG_SPEC")}, p.lane.overrides)
        for p in plan.lanes
    }


# --- plans ---------------------------------------------------------------------------------------

NGRAM = {"LLAMA_ARG_SPEC_TYPE": "ngram-simple"}
MTP = {"LLAMA_ARG_SPEC_TYPE": "draft-mtp", "LLAMA_ARG_SPEC_DRAFT_N_MAX": "3"}
OFF = (("/options/draft_num_predict", 0),)


def test_a_model_that_does_not_draft_gets_lanes_for_every_route(blob: Path) -> None:
    """The environment says it all, so that no request is changed."""
    plan = planned(blob)
    assert ways(plan) == {"ngram-simple": (NGRAM, ()), "mtp": (MTP, ())}
    assert {p.lane.dialects for p in plan.lanes} == {frozenset()}
    assert not any(p.lane.media for p in plan.lanes)


@pytest.mark.parametrize("model", [DRAFTING, WITH_DRAFT])
def test_a_model_that_drafts_gets_plain_lanes_by_its_option(blob: Path, model: ServedModel) -> None:
    """Only Ollama's own routes have it; nobody else does what the server itself does."""
    plan = plan_ollama(ManagedOptions(blob, exclude=("mtp",)), Path("/bin/ollama"), model, "0.33.0", None)
    assert ways(plan) == {"plain": ({}, OFF), "ngram-simple": (NGRAM, OFF)}
    native = frozenset({Dialect.OLLAMA_CHAT, Dialect.OLLAMA_GENERATE})
    assert {p.lane.dialects for p in plan.lanes} == {native}
    assert plan.lanes[0].lane.media


def test_what_was_asked_for_is_all_there_is(blob: Path) -> None:
    assert list(ways(planned(blob, strategies=("plain", "ngram")))) == ["ngram-simple"]
    assert list(ways(planned(blob, strategies=("mtp:4",)))) == ["mtp"]


def test_no_mtp_lane_without_the_layers(blob: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_facts", lambda path: facts(path=path))
    plan = planned(blob)
    assert (list(ways(plan)), [r.id for r in plan.refused]) == (["ngram-simple"], ["mtp"])


def test_each_lane_takes_the_weights_again(blob: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ollama does not map files: what does not fit is left out, and said."""
    need = planned(blob).memory.started[0].private
    assert need > facts().weight_bytes
    monkeypatch.setattr(module, "measure_budget", lambda options: (Budget(need + 1), ()))
    plan = planned(blob)
    assert (list(ways(plan)), [r.id for r in plan.refused]) == (["ngram-simple"], ["mtp"])


def test_the_running_servers_setup_is_taken_over(blob: Path, tmp_path: Path) -> None:
    """Apart from where it listens; the store is that of the file, nothing is tidied up in it, models stay."""
    told = {"OLLAMA_HOST": "0.0.0.0", "OLLAMA_KV_CACHE_TYPE": "q8_0", "OLLAMA_NUM_PARALLEL": "2"}
    told |= {"OLLAMA_MODELS": "/other", "CUDA_VISIBLE_DEVICES": "1"}
    plan = planned(blob, listener=Listener((), tmp_path, "", tuple(told.items())), threads=3)
    env = plan.lanes[0].spec.env
    assert (env["OLLAMA_HOST"], env["OLLAMA_MODELS"]) == ("127.0.0.1:0", str(tmp_path / "models"))
    assert (env["OLLAMA_NOPRUNE"], env["OLLAMA_KEEP_ALIVE"], env["OLLAMA_CONTEXT_LENGTH"]) == (
        "1",
        "-1",
        "2048",
    )
    assert (env["OLLAMA_KV_CACHE_TYPE"], env["CUDA_VISIBLE_DEVICES"]) == ("q8_0", "1")
    assert (env["LLAMA_ARG_THREADS"], plan.options.slots, plan.warnings) == ("3", 2, ())
    assert "cannot be read" in planned(blob).warnings[0]


def test_a_file_outside_a_store_is_no_model_of_a_further_ollama(tmp_path: Path, blob: Path) -> None:
    with pytest.raises(ConfigError, match="in no store of Ollama's"):
        planned(tmp_path / "m.gguf")


def test_another_setup_is_another_fingerprint(blob: Path, tmp_path: Path) -> None:
    """Where it listens and lies is not."""

    def prints(**told: str) -> list[str]:
        listener = Listener((), tmp_path, "", tuple(told.items()))
        return [p.lane.fingerprint for p in planned(blob, listener=listener).lanes]

    assert prints() == prints(OLLAMA_HOST="x")
    assert not set(prints()) & set(prints(OLLAMA_KV_CACHE_TYPE="q8_0"))


def test_the_running_program_is_used_before_that_on_the_path(
    tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no other program that happens to listen there."""
    monkeypatch.setenv("PATH", "")
    assert find_ollama(Listener((), tmp_path, str(program))) == program
    assert find_ollama(Listener((), tmp_path, sys.executable)) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_ollama(None) == program


# --- the log -------------------------------------------------------------------------------------

LINE = "slot print_timing: id  0 | task 0 | draft acceptance = 0.47917 (   46 accepted /    96 generated), mean"


async def test_drafts_belong_to_the_request_that_was_alone() -> None:
    """What came too late for one is not counted for the next, and mixed requests have none."""
    log = ServeLog()
    log.begin()
    log.add(LINE)
    log.end()
    assert log.take() == (96, 46)
    log.add(LINE)
    log.begin()
    assert log.take() == (0, 0)
    log.begin()
    log.add(LINE)
    log.end()
    assert log.take() == (0, 0)
    log.end()
    log.begin()
    log.add(LINE)
    assert log.take() == (96, 46)


# --- lanes ---------------------------------------------------------------------------------------


@asynccontextmanager
async def running(plan: OllamaPlan) -> AsyncIterator[ManagedOllama]:
    backend = ManagedOllama(plan, backoff=Backoff(first_s=0.01))
    try:
        await backend.start()
        await backend.settled()
        yield backend
    finally:
        await backend.aclose()


def lane_of(backend: ManagedOllama, lane_id: str) -> Lane:
    return next(s.lane for s in backend.lanes() if s.lane.id == lane_id)


async def asked(backend: ManagedOllama, lane_id: str, path: str) -> Any:
    transport = HttpTransport(Endpoint.parse(backend.address(lane_id)))
    try:
        return (await get_json(transport.open, path))[1]
    finally:
        await transport.aclose()


class TestContract(BackendContract):
    @pytest.fixture
    async def backend(self, blob: Path, program: Path) -> AsyncIterator[Backend]:
        async with running(planned(blob, DRAFTING, program=program, strategies=("ngram",))) as backend:
            yield backend


async def test_lanes_load_the_model_and_tell_what_became_of_drafts(blob: Path, program: Path) -> None:
    """The model is loaded with the lane's own option before the lane is ready."""
    async with running(planned(blob, DRAFTING, program=program, strategies=("ngram",))) as backend:
        assert isinstance(backend, TellsDrafts)
        assert [s.health for s in backend.lanes()] == [Health.READY]
        [load] = await asked(backend, "ngram-simple", "/bodies")
        assert load == {"model": "m:latest", "stream": False, "options": {"draft_num_predict": 0}}
        env = await asked(backend, "ngram-simple", "/environ")
        assert env["LLAMA_ARG_SPEC_TYPE"] == "ngram-simple"
        lane = lane_of(backend, "ngram-simple")
        assert not backend.busy()
        await fetch(lambda request, sink: backend.open(request, lane, sink), GENERATE)
        assert not backend.busy()
        while "draft acceptance" not in backend.output(lane.id):  # noqa: ASYNC110 - it comes through a pipe
            await asyncio.sleep(0.001)
        assert backend.take_drafts(lane.id) == (12, 9)
        assert backend.take_drafts(lane.id) == (0, 0)


async def test_it_says_how_its_ngram_lane_drafts(
    blob: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With llama-server's own lengths, and the model's file as the vocabulary, which ends with the lanes."""
    closed: list[Tokenizer] = []

    async def aclose(tokenizer: Tokenizer) -> None:
        closed.append(tokenizer)

    monkeypatch.setattr(Tokenizer, "aclose", aclose)
    async with running(planned(blob, program=program)) as backend:
        assert isinstance(backend, DraftsNgrams)
        drafts = backend.ngrams(lane_of(backend, "ngram-simple"))
        assert drafts is not None
        assert (drafts.size, drafts.longest) == (12, 48)
        assert isinstance(drafts.vocabulary, Tokenizer)
        assert drafts.vocabulary.path == blob
        assert backend.ngrams(lane_of(backend, "mtp")) is None
    assert closed == [drafts.vocabulary]


async def test_a_request_in_flight_is_known_until_it_is_over(blob: Path, program: Path) -> None:
    """Given up ones too."""

    class Nobody:
        def head(self, head: object) -> None: ...
        def data(self, parts: object) -> None: ...
        def end(self, trailers: object) -> None: ...
        def fail(self, error: object) -> None: ...

    async with running(planned(blob, program=program, strategies=("ngram",))) as backend:
        exchange = backend.open(GENERATE, lane_of(backend, "ngram-simple"), Nobody())
        assert backend.busy()
        exchange.abort()
        exchange.abort()
        assert not backend.busy()


@pytest.mark.parametrize(
    ("mood", "health", "note"),
    [
        ("deaf", Health.DROPPED, "it claims mtp, and its log names no drafter"),
        ("old", Health.DROPPED, "it is Ollama 0.1.0, and the server that runs is 0.33.0"),
        ("sorry", Health.DROPPED, "Ollama did not load m:latest: model requires more system memory"),
    ],
)
async def test_what_is_not_what_it_says_is_dropped(
    blob: Path, program: Path, monkeypatch: pytest.MonkeyPatch, mood: str, health: Health, note: str
) -> None:
    monkeypatch.setattr(module, "LOG_WAIT_S", 0.05)
    monkeypatch.setenv("STUB_OLLAMA", mood)
    async with running(planned(blob, program=program, strategies=("mtp",))) as backend:
        [status] = backend.lanes()
        assert (status.health, note in status.note) == (health, True), status.note


async def test_a_plain_lane_that_drafts_is_dropped(
    blob: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a setting of the user's that reaches every llama-server."""
    monkeypatch.setenv("LLAMA_ARG_SPEC_TYPE", "ngram-mod")
    plan = plan_ollama(ManagedOptions(blob, strategies=("plain",)), program, DRAFTING, "0.33.0", None)
    async with running(plan) as backend:
        [status] = backend.lanes()
        assert (status.health, "drafts with ngram-mod" in status.note) == (Health.DROPPED, True), status.note


async def test_a_server_that_dies_comes_back(blob: Path, program: Path) -> None:
    """With its model loaded again."""
    async with running(planned(blob, program=program, strategies=("ngram",))) as backend:
        pid, address = backend.pid("ngram-simple"), backend.address("ngram-simple")
        assert pid is not None
        os.kill(pid, 15)
        while backend.address("ngram-simple") in ("", address):  # noqa: ASYNC110 - another process comes up
            await asyncio.sleep(0.01)
        assert [s.health for s in backend.lanes()] == [Health.READY]
        assert len(await asked(backend, "ngram-simple", "/bodies")) == 1
