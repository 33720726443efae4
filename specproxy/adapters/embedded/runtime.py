"""Everything that is loaded for one model: weights, caches, and which strategies they allow."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import psutil
from llama_cpp import llama_cpp as lib

from specproxy.adapters.embedded.batch import Batch
from specproxy.adapters.embedded.drafters import ChainedDrafter, DraftModel, MtpChain, MtpHead
from specproxy.adapters.embedded.environment import huge_pages
from specproxy.adapters.embedded.facts import (
    MTP_CHAINS,
    MTP_GRAPHS,
    check_memory,
    memory_needs,
    model_card,
)
from specproxy.adapters.embedded.llama import Context, ContextParams, DecodeError, Model, nextn_missing
from specproxy.adapters.embedded.mtp_assistant import MtpAssistant
from specproxy.adapters.embedded.options import EngineOptions
from specproxy.adapters.embedded.vocabulary import Vocabulary
from specproxy.adapters.gguf_facts import ASSISTANTS, ModelFacts, check_pair, read_facts
from specproxy.errors import ModelFileError, RequestError
from specproxy.records import Strategy

__all__ = ["Runtime"]

log = logging.getLogger(__name__)

DEFAULT_CONTEXT = 8192
OWN_SHARE = 0.4  # of the available memory that weights may take when they are read instead of mapped
CAPACITY = {"ngram": 16, "draft": 8, "mtp": 6}  # tokens that a draft may have where that costs no memory


class Runtime:
    """Loads target, draft and MTP head, as far as they exist and fit.

    Attributes:
        facts: of the target's file.
        draft_digest: of the draft model's content, or an empty text.
        context: the target's context.
        batch: the batch for it.
        drafters: those that run a model, by name.
        limits: longest draft by drafter name, n-gram included; empty if the target cannot roll back.
        usual: longest draft by drafter name where a request's fixed strategy says nothing.
        longest: tokens that one sequence's draft may have at all.
        refused: why a drafter cannot run, by name.
        per_sequence: tokens of context that each sequence has.
        cache_bytes: memory that parked sequences may take, as much as the caches themselves do.

    Raises:
        ModelFileError: the target cannot be loaded or run.
        PairError: the draft does not fit the target.
        ConfigError: an option cannot be used.
    """

    def __init__(self, options: EngineOptions, vocabulary: Vocabulary) -> None:
        self.options = options
        self.threads = options.threads or psutil.cpu_count(logical=False) or 2
        self.drafters: dict[str, ChainedDrafter] = {}
        self.refused: dict[str, str] = {}
        self.limits: dict[str, int] = {}
        self.usual = {"ngram": options.ngram_max, "draft": options.draft_max, "mtp": options.mtp_max}
        self._closers: list[Model | Context] = []
        try:
            self._load(options)
        except BaseException:
            self.close()
            raise
        self.card = model_card(
            options,
            self.facts,
            vocabulary,
            context=self.per_sequence,
            limits=self.limits,
            refused=self.refused,
            memory=self.memory,
        )

    def _load(self, options: EngineOptions) -> None:
        self.facts = read_facts(options.model)
        draft = None if options.draft is None else read_facts(options.draft)
        if draft is not None:
            for warning in check_pair(self.facts, draft):
                log.warning("%s", warning)
        self.draft_digest = "" if draft is None else draft.digest
        self._sidecar = "" if draft is None else draft.sidecar_type or ""
        self._head: ModelFacts | None = self.facts if self.facts.mtp_layers else None  # whose file has a head
        if self._sidecar == "draft-mtp":
            self._head = draft
        if self._sidecar:
            draft = None  # it is no model to draft with by itself
        own_head = self._head is self.facts and options.mtp and not self._no_head()
        train = self.facts.context_length or DEFAULT_CONTEXT
        self.per_sequence = options.context or min(train, DEFAULT_CONTEXT)
        self.target = self._model(options.model, options, mtp=own_head)
        if not self.target.generates:
            raise ModelFileError(f"{options.model} is not a causal language model")
        self._most = dict(self.usual)
        if not self.target.recurrent:  # which would need a copy of its state for every token of a draft
            self._most = {name: max(n, CAPACITY[name]) for name, n in self.usual.items()}
        self.longest = longest = max(self._most.values())
        states = longest if self.target.recurrent else 0
        head = self._head if options.mtp and not self._no_head() else None
        self.memory = memory_needs(self.facts, draft, head, options, context=self.per_sequence, states=states)
        if not options.weights.gpu_layers:
            check_memory(self.memory, psutil.virtual_memory().available, self.per_sequence, options.parallel)
        self.cache_bytes = sum(self.memory.get(name, 0) for name in ("kv", "mtp")) + (
            0 if draft is None else self.memory["draft"] - draft.weight_bytes
        )
        outputs = options.parallel * (longest + 1)
        self.slots = options.parallel + (0 if self.target.recurrent else options.cached)
        self.context = self._context(self.target, options, outputs=outputs, states=states)
        self.batch = Batch(options.batch + outputs)
        self._allow(options)

    def _allow(self, options: EngineOptions) -> None:
        """Find out which drafters can run."""
        rollback = self.context.states if self.target.recurrent else None
        if rollback == 0:
            why = "the model keeps a recurrent state that llama.cpp cannot roll back for this architecture"
            self.refused = dict.fromkeys(("ngram", "draft", "mtp", "auto"), why)
            return
        longest = rollback or 10**9
        self.limits["ngram"] = min(self._most["ngram"], longest)
        if why := self._load_draft(options):
            self.refused["draft"] = why
        else:
            self.limits["draft"] = min(self._most["draft"], longest)
        if why := self._load_mtp(options):
            self.refused["mtp"] = why
        else:
            assert self._head is not None
            heads = self._head.mtp_layers  # one can go on from its own rows, each of several guesses once
            self.limits["mtp"] = min(self._most["mtp"], longest, heads if heads > 1 else longest)

    def _load_draft(self, options: EngineOptions) -> str:
        """Set up the draft model; returns why not, if not."""
        if options.draft is None:
            return "no draft model was given"
        if self._sidecar == "draft-mtp":
            return "the draft file is a prediction head, which strategy 'mtp' runs"
        if self._sidecar:
            return (
                f"a drafter of the kind {self._sidecar} cannot run in this engine, which gives no rows "
                "of the target's inner layers to a second model; managed lanes can run it"
            )
        model = self._model(options.draft, options)
        if model.recurrent:
            # it drafts token by token, and llama.cpp keeps states of one decode only
            return "the draft model keeps a recurrent state, which cannot be rolled back over several decodes"
        context = self._context(model, options, outputs=self.slots)
        self.drafters["draft"] = DraftModel(context, Batch(options.batch))
        return ""

    def _load_mtp(self, options: EngineOptions) -> str:
        """Set up the MTP head; returns why not, if not."""
        if not options.mtp:
            return "it was switched off"
        if why := self._no_head():
            return why
        try:
            self.drafters["mtp"] = self._heads(options)
        except ModelFileError as error:
            return error.message
        except DecodeError as error:
            return f"its prediction head cannot be run: {error}"
        return ""

    def _heads(self, options: EngineOptions) -> ChainedDrafter:
        """The prediction head, or a chain of them, in the target's file or in one of its own."""
        head, width = self._head, self.target.n_embd
        assert head is not None
        model = self.target
        if head is not self.facts:
            model = self._model(head.path, options, mtp=True)
            if model.n_embd != width:
                raise ModelFileError(f"its rows are {model.n_embd} wide, and the target's {width}")
        if head.architecture in ASSISTANTS:
            return MtpAssistant(
                self._context(model, options, outputs=self.slots, mtp=True), Batch(self.slots, width)
            )
        heads = head.mtp_layers
        if heads == 1:
            context = self._context(model, options, outputs=self.slots, mtp=True)
            return MtpHead(context, Batch(options.batch, width))
        guesses = options.parallel * (heads - 1)
        outputs = max(self.slots, guesses)
        contexts = [self._context(model, options, outputs=outputs, mtp=True) for _ in range(heads)]
        return MtpChain(contexts, Batch(options.batch + guesses, width), guesses)

    def _no_head(self) -> str:
        """Why there is no MTP head that can be used, or an empty text."""
        if self._head is None:
            return "the model has no multi-token-prediction head"
        heads, architecture = self._head.mtp_layers, self._head.architecture
        if architecture not in MTP_GRAPHS and architecture not in ASSISTANTS:
            return f"this llama-cpp-python has no multi-token prediction for {architecture}"
        if heads > 1 and architecture not in MTP_CHAINS:
            # llama-server cannot do it either: it ends at the graph's assertion
            return (
                f"the model chains {heads} prediction heads, and llama.cpp runs one alone for "
                f"{architecture} (several for {', '.join(sorted(MTP_CHAINS))})"
            )
        if missing := nextn_missing():
            log.warning("no multi-token prediction: %s", missing)
        return missing

    def check(self, strategy: Strategy) -> None:
        """Refuse a strategy that cannot run.

        Raises:
            RequestError: with the reason.
        """
        for name in strategy.drafters:
            able = self.limits if name == "auto" else name in self.limits
            if not able:
                why = self.refused.get(name, "this engine does not have it")
                raise RequestError(f"strategy {strategy.name!r} cannot run on this model: {why}")

    def _model(self, path: Path, options: EngineOptions, *, mtp: bool = False) -> Model:
        weights = options.weights
        if weights.mmap is None:
            weights = replace(weights, mmap=not self._copying_pays(path, weights.gpu_layers))
        model = Model(path, replace(weights, mtp=mtp))
        self._closers.append(model)
        return model

    @staticmethod
    def _copying_pays(path: Path, gpu_layers: int) -> bool:
        """Whether to read weights into memory of our own, in huge pages, instead of mapping the file.

        That takes two or three seconds a gigabyte, once, and saves 6 to 8% of every token's time. It needs
        room, since others may go on using the file's pages.
        """
        if gpu_layers or not huge_pages():
            return False
        return path.stat().st_size <= OWN_SHARE * psutil.virtual_memory().available

    def _context(
        self, model: Model, options: EngineOptions, *, outputs: int, states: int = 0, mtp: bool = False
    ) -> Context:
        context = Context(
            model,
            ContextParams(
                cells=self.per_sequence * options.parallel,
                sequences=self.slots,
                outputs=outputs,
                batch=options.batch + outputs,
                ubatch=options.batch,
                threads=self.threads,
                threads_batch=options.threads_batch or self.threads,
                states=states,
                flash_attention=options.flash_attention,
                type_k=_cache_type(options.type_k),
                type_v=_cache_type(options.type_v),
                offload_kqv=options.offload_kqv,
                mtp=mtp,
                other=self.context if mtp else None,
            ),
        )
        self._closers.append(context)
        return context

    @property
    def native_s(self) -> float:
        """Seconds spent in llama.cpp's decodes so far."""
        return self.context.native_s + sum(drafter.native_s for drafter in self.drafters.values())

    def close(self) -> None:
        """Free everything; idempotent."""
        while self._closers:
            self._closers.pop().close()


def _cache_type(name: str | None) -> int | None:
    """The ggml type of a KV cache; the name has been checked with the memory that it needs."""
    return None if name is None else int(getattr(lib, f"GGML_TYPE_{name.upper()}"))
