"""Further Ollama servers of our own beside one that runs: its models in place, decoded in another way.

What they say is what Ollama says, templates, thoughts and tools included. How they decode is told to the
llama-server that each of them starts: by its environment, which reaches it unchanged, or by the option
``draft_num_predict`` in each request, where the model would otherwise make drafts by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from specproxy.adapters import machine, memory
from specproxy.adapters.ask import get_json, post_json
from specproxy.adapters.base import Exchange, NgramDrafts, ServedModel, Sink, UpstreamRequest
from specproxy.adapters.gguf_facts import ModelFacts, read_facts
from specproxy.adapters.http import HttpTransport
from specproxy.adapters.llama_server import (
    LOAD_TIMEOUT_S,
    PROBE_TIMEOUT_S,
    LanePlan,
    ManagedLlamaServer,
    Misfit,
    wait_for_status,
)
from specproxy.adapters.managed import ManagedOptions, ManagedPlan, measure_budget
from specproxy.adapters.memory import LaneNeed, Refusal
from specproxy.adapters.server_program import SHIPPED_NGRAM_MAX, SHIPPED_NGRAM_SIZE, ServerProgram
from specproxy.adapters.supervise import Backoff, Child, ChildSpec
from specproxy.adapters.tokens import Tokenizer
from specproxy.adapters.watched import watch
from specproxy.adapters.weights import Listener
from specproxy.errors import ConfigError, LaneStartError
from specproxy.records import Control, Dialect, Lane, Strategy

__all__ = ["NUM_PREDICT", "ManagedOllama", "OllamaPlan", "ServeLog", "find_ollama", "plan_ollama"]

LISTENING = re.compile(r'msg="Listening on (\S+:\d+) ')
ACCEPTANCE = re.compile(r"draft acceptance = *[\d.]+ \( *(\d+) accepted / *(\d+) generated\)")
DRAFTER = re.compile(r"adding speculative implementation '([\w-]+)'")
NUM_PREDICT = "/options/draft_num_predict"
"""The request field that says how many tokens Ollama drafts; 0 is none. Only its own routes have it."""

NATIVE = frozenset({Dialect.OLLAMA_CHAT, Dialect.OLLAMA_GENERATE})
SPEC_TYPE, DRAFT_MAX = "LLAMA_ARG_SPEC_TYPE", "LLAMA_ARG_SPEC_DRAFT_N_MAX"
MTP = Strategy(("mtp",), 3)
NGRAM = Strategy(("ngram-simple",), SHIPPED_NGRAM_MAX)  # no variable changes these lengths
LOG_WAIT_S = 1.0  # how long a line of the log may lag behind the reply to a load


@dataclass(frozen=True, slots=True)
class Way:
    """How one further server decodes: what its environment and its requests say."""

    strategy: Strategy
    environ: tuple[tuple[str, str], ...] = ()
    overrides: tuple[tuple[str, int], ...] = ()


class ServeLog:
    """What an Ollama's output says about drafts: the drafter of its llama-server, and what became of them."""

    def __init__(self) -> None:
        self.drafter = ""
        self.news = asyncio.Event()
        self.in_flight = 0
        self._mixed = False
        self._drafted = self._accepted = 0

    def begin(self) -> None:
        """A request is on its way. What the log has said before is not about it."""
        if not self.in_flight:
            self.take()
            self._mixed = False
        self.in_flight += 1
        self._mixed = self._mixed or self.in_flight > 1

    def end(self, how: str | None = None) -> None:  # noqa: ARG002 - over is over
        """A request is over."""
        self.in_flight -= 1

    def add(self, line: str) -> None:
        """Take one line."""
        if found := ACCEPTANCE.search(line):
            self._accepted += int(found[1])
            self._drafted += int(found[2])
        elif found := DRAFTER.search(line):
            self.drafter = found[1]
            self.news.set()

    def take(self) -> tuple[int, int]:
        """Tokens drafted and accepted since this was last asked; nothing where requests were mixed."""
        taken, self._drafted, self._accepted = (self._drafted, self._accepted), 0, 0
        return (0, 0) if self._mixed else taken


@dataclass(frozen=True, slots=True)
class OllamaPlan(ManagedPlan):
    """What will be started: one ``ollama serve`` for each lane, with `model` in it."""

    model: str = ""
    version: str = ""

    def backend(self, on_change: Callable[[], None] = lambda: None) -> ManagedOllama:
        """The lanes as a backend, not yet started; call it in the event loop."""
        return ManagedOllama(self, on_change=on_change)


class ManagedOllama(ManagedLlamaServer):
    """Ollama servers of our own (a `Backend`). Each has the model loaded before its lane is ready."""

    def __init__(
        self, plan: OllamaPlan, *, backoff: Backoff | None = None, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._model, self._version = plan.model, plan.version
        self._logs = {p.lane.id: ServeLog() for p in plan.lanes}
        self._vocabulary = Tokenizer(plan.options.model)
        heard = [replace(p, spec=replace(p.spec, on_line=self._logs[p.lane.id].add)) for p in plan.lanes]
        super().__init__(plan.options.backend, heard, needs_plain=False, backoff=backoff, on_change=on_change)

    def ngrams(self, lane: Lane) -> NgramDrafts | None:
        """How a lane drafts by n-grams. Ollama has no route that cuts texts, so the model's file has to do."""
        if lane.strategy != NGRAM:
            return None
        return NgramDrafts(SHIPPED_NGRAM_SIZE, SHIPPED_NGRAM_MAX, self._vocabulary)

    async def aclose(self) -> None:
        """Stop all lanes; idempotent."""
        await super().aclose()
        await self._vocabulary.aclose()

    def open(self, request: UpstreamRequest, lane: Lane, sink: Sink) -> Exchange:
        said = self._logs.get(lane.id)
        if said is None:
            return super().open(request, lane, sink)
        said.begin()
        return watch(partial(super().open, request, lane), sink, said.end)

    def take_drafts(self, lane_id: str) -> tuple[int, int]:
        """Tokens drafted and accepted by the request that a lane has just answered, as its server's log says.

        Nothing where another request was in flight there too: the log names none.
        """
        return self._logs[lane_id].take()

    def busy(self) -> bool:
        """Whether a request is in flight on any of the lanes."""
        return any(said.in_flight for said in self._logs.values())

    async def ask_little(self, lane: Lane, transport: HttpTransport) -> int:
        """Have the lane make one token; returns the status.

        Raises:
            BackendError: it does not answer.
        """
        options = {"num_predict": 1, **{name.rpartition("/")[2]: value for name, value in lane.overrides}}
        body = {"model": self._model, "prompt": "1", "stream": False, "options": options}
        return (await post_json(transport.open, "/api/generate", body, timeout_s=PROBE_TIMEOUT_S))[0]

    async def prove(self, lane: Lane, child: Child, transport: HttpTransport) -> None:
        """Wait for the server, load the model, and see by its log whether it drafts as the lane says.

        Raises:
            LaneStartError: it ended meanwhile, or did not load the model.
            Misfit: it is another version than the server beside it, or decodes in another way.
        """
        said = self._logs[lane.id]
        said.drafter = ""
        said.news.clear()
        await wait_for_status(child, transport, "/api/version")
        _, reply = await get_json(transport.open, "/api/version")
        version = str(reply.get("version", "")) if isinstance(reply, dict) else ""
        if version != self._version:
            raise Misfit(f"it is Ollama {version}, and the server that runs is {self._version}")
        options = {name.rpartition("/")[2]: value for name, value in lane.overrides}
        body = {"model": self._model, "stream": False, **({"options": options} if options else {})}
        status, reply = await post_json(transport.open, "/api/generate", body, timeout_s=LOAD_TIMEOUT_S)
        if status != 200:
            told = str(reply.get("error", "")) if isinstance(reply, dict) else ""
            raise LaneStartError(f"Ollama did not load {self._model}: {told or f'status {status}'}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOG_WAIT_S):
                await said.news.wait()
        if not lane.strategy.is_plain and not said.drafter:
            raise Misfit(f"it claims {lane.strategy.name}, and its log names no drafter")
        if lane.strategy.is_plain and said.drafter:
            raise Misfit(f"the plain lane drafts with {said.drafter}")


def find_ollama(listener: Listener | None) -> Path | None:
    """The program of a running Ollama, or the one on PATH."""
    told = Path(listener.program) if listener is not None and listener.program else None
    if told is not None and told.name.startswith("ollama") and told.is_file():
        return told
    found = shutil.which("ollama")
    return Path(found) if found else None


def plan_ollama(
    options: ManagedOptions, program: Path, model: ServedModel, version: str, listener: Listener | None
) -> OllamaPlan:
    """Decide which further Ollama servers to start beside one that has `model` loaded. Blocks: reads files.

    Raises:
        ModelFileError: the model's file cannot be used.
        ConfigError: its store is not where Ollama's stores are.
    """
    target = read_facts(options.model)
    store = _store(options.model)
    budget, devices = measure_budget(options)
    ctx, slots = model.ctx or options.ctx or 4096, _parallel(listener)
    ways, refused = _ways(options, target, model)
    needs = [_need(way.strategy, target, ctx=ctx, slots=slots, on_gpu=bool(devices)) for way in ways]
    fitting = memory.plan(needs, budget)
    device = machine.machine_id(devices)
    started = {need.id for need in fitting.started}
    environ = _environment(listener, store, ctx, options.threads)
    plans = tuple(
        _lane_plan(options, program, (target.digest, version, device), way, environ, need)
        for way, need in zip(ways, needs, strict=True)
        if need.id in started
    )
    warnings: tuple[str, ...] = ()
    if listener is None or listener.environ is None:
        warnings = (
            "How the running Ollama was set up cannot be read, so further ones use Ollama's defaults "
            "and the context of the loaded model.",
        )
    known = ServerProgram("binary", (str(program), "serve"), f"Ollama {version}", frozenset(), frozenset())
    return OllamaPlan(
        replace(options, slots=slots), known, target, None, ctx, plans, fitting,
        (*refused, *fitting.refused), warnings, model.name, version,
    )  # fmt: skip


def _ways(options: ManagedOptions, target: ModelFacts, model: ServedModel) -> tuple[list[Way], list[Refusal]]:
    """Plain where the server itself drafts, n-gram always, MTP where the model has it and leaves it idle."""
    off = ((NUM_PREDICT, 0),) if model.drafting else ()
    able = [Way(Strategy(), (), off)] if model.drafting else []
    able.append(Way(NGRAM, ((SPEC_TYPE, "ngram-simple"),), off))
    refused = []
    if target.has_mtp and not model.draft:
        able.append(Way(MTP, ((SPEC_TYPE, "draft-mtp"), (DRAFT_MAX, str(MTP.n_max)))))
    elif not model.draft:
        refused.append(Refusal("mtp", "the model file has no MTP layers"))
    asked = [name.partition(":")[0] for name in options.strategies or ()]
    wanted = [
        way
        for way in able
        if way.strategy.name not in options.exclude
        and (not asked or any(way.strategy.name.startswith(name) for name in asked))
    ]
    return wanted, refused


def _need(strategy: Strategy, target: ModelFacts, *, ctx: int, slots: int, on_gpu: bool) -> LaneNeed:
    """What a server takes: Ollama has models read and not mapped, so that nothing is shared."""
    need = memory.lane_need(strategy.name, strategy, target, None, ctx=ctx, slots=slots, on_gpu=on_gpu)
    return LaneNeed(need.id, need.total, (), need.gpu)


def _store(blob: Path) -> Path:
    """The store that a model's file is in, which Ollama calls OLLAMA_MODELS."""
    if blob.parent.name != "blobs" or not (blob.parent.parent / "manifests").is_dir():
        raise ConfigError(f"{blob} is in no store of Ollama's, so a further Ollama would not find its model")
    return blob.parent.parent


def _parallel(listener: Listener | None) -> int:
    told = dict(listener.environ or ()).get("OLLAMA_NUM_PARALLEL", "") if listener is not None else ""
    return int(told) if told.isdigit() and int(told) else 1


def _environment(listener: Listener | None, store: Path, ctx: int, threads: int | None) -> dict[str, str]:
    """The environment of a further server: that of the running one, with the same store and context, a free
    port of its own choice, a model that stays, and nothing tidied up in a store that is not its own."""
    told = dict(listener.environ or ()) if listener is not None else {}
    own = {"OLLAMA_HOST": "127.0.0.1:0", "OLLAMA_MODELS": str(store), "OLLAMA_NOPRUNE": "1"}
    own |= {"OLLAMA_CONTEXT_LENGTH": str(ctx), "OLLAMA_KEEP_ALIVE": "-1", "OLLAMA_MAX_LOADED_MODELS": "1"}
    if threads is not None:
        own["LLAMA_ARG_THREADS"] = str(threads)
    return told | own


def _lane_plan(
    options: ManagedOptions,
    program: Path,
    facts: tuple[str, ...],
    way: Way,
    environ: Mapping[str, str],
    need: LaneNeed,
) -> LanePlan:
    told = {name: value for name, value in environ.items() if name not in ("OLLAMA_HOST", "OLLAMA_MODELS")}
    parts = (*facts, sorted(told.items()), way.environ, way.overrides)
    fingerprint = hashlib.sha256("\0".join(map(str, parts)).encode())
    lane = Lane(
        need.id,
        options.backend,
        "",
        way.strategy,
        Control.INSTANCE,
        fingerprint.hexdigest()[:16],
        overrides=way.overrides,
        memory_bytes=need.total + need.gpu,
        dialects=NATIVE if way.overrides else frozenset(),
        media=way.strategy.is_plain,
    )
    spec = ChildSpec(
        f"lane {need.id}",
        (str(program), "serve"),
        env={**environ, **dict(way.environ)},
        log_file=options.log_dir / f"ollama-{need.id}.log" if options.log_dir else None,
        listening=LISTENING,
        family=True,
    )
    return LanePlan(lane, spec)
