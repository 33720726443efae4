"""Continuous batching: what every step decodes, for which sequence, and what becomes of it.

Everything here runs on one thread and never waits. A step takes the newest token of every decoding sequence,
with its draft, and a part of the prompts still to be processed, through the target in one decode.

The MTP cache is kept in step for exactly the requests whose strategy may use it: the head needs a hidden row
for every position, so starting it late would mean going through the text again. A request that may use it
therefore reuses only as much of a cached prefix as the MTP cache covers. Under ``auto`` it goes without the
head where more than `MTP_GAP` tokens would have to be processed again for it, or keeping it in step takes more
than it may gain. A head that reads the target's cache has none of these cares.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from specproxy.adapters.embedded.auto import AutoController
from specproxy.adapters.embedded.controller import Controller, FixedController, StepView
from specproxy.adapters.embedded.costs import StepCosts
from specproxy.adapters.embedded.forced import ForcedDrafter, Spelling
from specproxy.adapters.embedded.llama import DecodeError, NoRoomError
from specproxy.adapters.embedded.runtime import Runtime
from specproxy.adapters.embedded.sampler import Sampler
from specproxy.adapters.embedded.sequence import HiddenRows, Sequence, Sink
from specproxy.adapters.embedded.slots import Slots
from specproxy.adapters.embedded.types import Finished, GenerateRequest, TokenEvent
from specproxy.adapters.embedded.vocabulary import Vocabulary
from specproxy.errors import RequestError, SpecproxyError
from specproxy.strategies.drafters.ngram import NgramDrafter

__all__ = ["Event", "Scheduler"]

log = logging.getLogger(__name__)

Floats = npt.NDArray[np.float32]
Event = TokenEvent | Finished | SpecproxyError

MTP_GAP = 16  # prompt tokens
LAZY_ROWS = 128  # hidden rows that may wait before the MTP cache is brought in step
MOST_ROWS = 512  # that may wait where this may never pay; then the head is given up
FEW_ROWS = 8  # hidden rows that are not worth a decode when a sequence ends
SAMPLED = 8  # steps without a drafter of which one is measured: they are alike, and nothing is planned by them
FEWER = 4  # the same of steps that have drafters but no draft


class Scheduler:
    """Runs requests on a loaded model.

    Args:
        runtime: what is loaded.
        vocabulary: of the target.
        emit: called with every event and the sink that it is for.
        costs: what steps are known to cost; refined by every step.
        deliver: called before a decode at the end of a step, for which its events are not to wait.
    """

    def __init__(
        self,
        runtime: Runtime,
        vocabulary: Vocabulary,
        emit: Callable[[Sink, Event], None],
        costs: StepCosts | None = None,
        *,
        deliver: Callable[[], None] = lambda: None,
    ) -> None:
        self._runtime = runtime
        self._vocabulary = vocabulary
        self._emit = emit
        self._deliver = deliver
        self._slots = Slots(runtime)
        self.costs = costs or StepCosts()
        self._spelling: Spelling | None = None  # made for the first grammar
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def idle(self) -> bool:
        """Whether there is no request at all."""
        return not self._running and not self._waiting

    @property
    def parked_bytes(self) -> int:
        """Memory that idle sequences take outside the caches."""
        return self._slots.parked_bytes

    # --- requests ------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest, sink: Sink, *, load_ms: float = 0.0) -> None:
        """Take in a request; one that cannot be served gets its error as an event."""
        try:
            sequence = self._sequence(request, sink)
        except SpecproxyError as error:
            self._emit(sink, error)
            return
        sequence.load_ms = load_ms
        self._waiting.append(sequence)

    def cancel(self, sink: Sink) -> None:
        """Drop a request, whatever it is doing; what it has in the caches stays for others."""
        for sequence in [s for s in (*self._running, *self._waiting) if s.sink is sink]:
            self._leave(sequence)

    def fail_all(self, error: SpecproxyError) -> None:
        """End every request with an error."""
        for sequence in (*self._running, *self._waiting):
            self._emit(sequence.sink, error)
            self._leave(sequence)

    def reset(self) -> None:
        """Forget all that the caches hold; for when it is unknown. There must be no request."""
        assert self.idle
        self._runtime.context.clear()
        for drafter in self._runtime.drafters.values():
            for context in drafter.contexts.values():
                context.clear()
        self._slots = Slots(self._runtime)

    def check(self, request: GenerateRequest) -> None:
        """Refuse what cannot be served.

        Raises:
            RequestError: see `types.Engine.generate`.
        """
        count, context = len(request.prompt), self._runtime.per_sequence
        if not count:
            raise RequestError("the prompt is empty")
        if count >= context:
            raise RequestError(
                f"request ({count} tokens) exceeds the available context size ({context} tokens), "
                "try increasing it",
                code="exceed_context_size_error",
            )
        size = self._vocabulary.size
        if any(not 0 <= token < size for token in request.prompt):
            raise RequestError(f"the prompt holds a token that is not in the vocabulary of {size}")
        self._runtime.check(request.strategy)

    def _sequence(self, request: GenerateRequest, sink: Sink) -> Sequence:
        self.check(request)
        runtime, sampling = self._runtime, request.sampling
        room = runtime.per_sequence - len(request.prompt)
        limit = room if request.max_tokens is None else min(request.max_tokens, room)
        seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        sampler = Sampler(sampling, self._vocabulary, seed, runtime.per_sequence, request.prompt)
        drafters, controller = self._plan_for(request)
        sequence = Sequence(request, sink, sampler, self._vocabulary, controller, limit)
        sequence.drafters = drafters
        most = request.strategy.n_max
        if most is not None:
            sequence.limits = {name: min(n, most) for name, n in runtime.limits.items()}
        elif request.strategy.is_auto:
            sequence.limits = dict(runtime.limits)
        else:
            sequence.limits = {name: min(n, runtime.usual[name]) for name, n in runtime.limits.items()}
        if sampler.grammar is not None and request.strategy.is_auto:
            self._spelling = self._spelling or Spelling(self._vocabulary)
            sequence.forced = ForcedDrafter(sampler.grammar, self._spelling)
        return sequence

    def _plan_for(self, request: GenerateRequest) -> tuple[tuple[str, ...], Controller]:
        if request.strategy.is_auto:
            controller = AutoController(self.costs, self._runtime.options.ngram_match, request.priors)
            return tuple(self._runtime.limits), controller
        return request.strategy.drafters, FixedController()

    # --- admission -----------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._runtime.options.parallel:
            sequence = self._waiting.popleft()
            mtp = "mtp" in sequence.drafters and bool(self._runtime.drafters["mtp"].contexts)
            choice = self._slots.choose(sequence.tokens, mtp=mtp)
            if mtp and sequence.request.strategy.is_auto:
                without = self._slots.choose(sequence.tokens, mtp=False)
                if without.common - choice.common > MTP_GAP:
                    sequence.disable("mtp", "its cache does not cover the reused prefix")
                    choice, mtp = without, False
            sequence.begin()
            sequence.slot = choice.slot
            sequence.cached = self._slots.place(choice, sequence.tokens, mtp=mtp)
            if "mtp" in sequence.drafters:
                sequence.hidden = HiddenRows(self._runtime.target.n_embd)
                sequence.hidden.reset(start=choice.slot.n_mtp == 0)
            if "ngram" in sequence.drafters:
                sequence.ngram = NgramDrafter(min_n=self._runtime.options.ngram_match)
                sequence.ngram.begin(sequence.tokens)
            self._running.append(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """The sequence has ended; its slot keeps what the caches hold."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
            self._slots.release(sequence.slot, sequence.tokens)
        sequence.sampler.close()

    # --- a step --------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Do one step; False if no sequence could go on.

        Raises:
            DecodeError: the target's cache is in an unknown state, and every request has been ended.
        """
        if self._waiting:
            self._admit()
        started = time.perf_counter()
        decoding = [s for s in self._running if not s.prefilling and not s.sink.full]
        drafting = [s for s in decoding if s.drafters]
        if drafting:
            width, tokens = len(decoding), float(len(decoding))  # that all feed, and are expected to get
            for sequence in drafting:
                self._plan(sequence, len(decoding), width - 1, tokens - 1)
                width += sequence.plan.total
                tokens += sequence.plan.expected - 1
            self._propose(drafting, len(decoding))
            for sequence in drafting:
                sequence.prune()
        parts = self._fill(decoding)
        if not parts:
            return False
        drafted = time.perf_counter()
        self._decode()
        logits = self._runtime.context.logits(max(1, self._runtime.batch.n_out))
        ended = time.perf_counter()
        seconds = ended - started if len(parts) == 1 else None
        measured = len(parts) == len(decoding) and (
            any(sequence.draft for sequence in drafting)
            or decoding[0].n_output % (FEWER if drafting else SAMPLED) == 1
        )
        if measured:
            context = sum(s.slot.n for s in decoding) // len(decoding)
            self.costs.decoded(self._runtime.batch.n, ended - drafted, context)
        for sequence, count, at, row in parts:
            rows = logits[row : row + 1 + len(sequence.draft)]
            try:
                if sequence.prefilling:
                    self._prefilled(sequence, count, at, rows)
                else:
                    self._verified(sequence, at, rows, seconds)
            except DecodeError:
                raise
            except SpecproxyError as error:
                self._abandon(sequence, error)
        if measured and len(parts) == 1 and (only := decoding[0]) in self._running:
            beside = time.perf_counter() - ended + drafted - started - only.draft_seconds
            self.costs.worked(beside, drafting=bool(only.draft))
        return True

    def _plan(self, sequence: Sequence, streams: int, others_width: int, others_tokens: float) -> None:
        sequence.draft_nothing()
        room = min(
            sequence.limit - sequence.n_output - 1,
            self._runtime.per_sequence - len(sequence.tokens) - 1,
            self._runtime.longest,
        )
        if room < 1:
            return
        copied = sequence.copied
        if sequence.ngram is not None:
            copied += sequence.ngram.draft(min(sequence.limits["ngram"], room))
            sequence.match_length = sequence.ngram.match_length
        if sequence.forced is not None:
            sequence.run = sequence.forced.draft(room)
        if not copied and not sequence.run and sequence.controller.rests(streams):
            return
        sequence.plan = sequence.controller.plan(
            StepView(
                ready=sequence.drafters,
                match_length=sequence.match_length,
                limits=sequence.limits,
                room=room,
                position=sequence.n_output,
                streams=streams,
                forced=len(sequence.run),
                context=len(sequence.tokens) - 1,
                others_width=others_width,
                others_tokens=others_tokens,
                late={
                    name: drafter.missing(sequence)
                    for name, drafter in self._runtime.drafters.items()
                    if name in sequence.drafters
                },
            )
        )
        plan, free = sequence.plan, {"ngram": copied, "forced": sequence.run}
        if plan.lead:
            sequence.draft = free[plan.lead][: plan.lead_length]
        elif plan.drafter in free:
            sequence.draft = free[plan.drafter][: plan.length]

    def _propose(self, drafting: list[Sequence], streams: int) -> None:
        """Let the drafters that run a model propose, each for all of its sequences at once."""
        options = self._runtime.options
        most = options.batch // 2  # tokens that may be caught up with in a proposing decode
        for name, drafter in self._runtime.drafters.items():
            ready = []
            room = drafter.room
            for sequence in drafting:
                if sequence.plan.drafter != name:
                    continue
                sequence.late = missing = drafter.missing(sequence)
                if missing > most:
                    budget = options.batch if streams == 1 else options.prefill_share
                    missing -= drafter.catch_up(sequence, keep=1, budget=budget)
                if missing <= min(room, most) and name in sequence.drafters:
                    room -= missing
                    ready.append(sequence)
            if ready:
                drafter.propose(ready)
            if len(ready) == 1:
                (only,) = ready
                self.costs.guessed(name, len(only.draft), only.draft_seconds, only.late)

    def _fill(self, decoding: list[Sequence]) -> list[tuple[Sequence, int, int, int]]:
        """Build the step's batch: (sequence, tokens, index of the first, index of its first logits row)."""
        batch = self._runtime.batch
        batch.clear()
        parts = []
        for sequence in decoding:
            slot = sequence.slot
            tokens = [sequence.tokens[-1], *sequence.draft]
            at, row = batch.add(tokens, slot.n, slot.id, outputs=len(tokens))
            parts.append((sequence, len(tokens), at, row))
        options = self._runtime.options
        budget = options.prefill_share if decoding else options.batch
        for sequence in self._running:
            if not sequence.prefilling or budget < 1:
                continue
            slot = sequence.slot
            tokens = sequence.tokens[slot.n : slot.n + budget]
            last = slot.n + len(tokens) == sequence.n_prompt
            at, row = batch.add(tokens, slot.n, slot.id, outputs=int(last))
            parts.append((sequence, len(tokens), at, row))
            budget -= len(tokens)
        return parts

    def _decode(self) -> None:
        """Decode the batch, making room by forgetting idle sequences where needed."""
        context, batch = self._runtime.context, self._runtime.batch
        if "mtp" in self._runtime.drafters:
            context.want_hidden(bool([s for s in self._running if s.hidden is not None]))
        while True:
            try:
                context.decode(batch)
                return
            except NoRoomError:
                if not self._slots.make_room():
                    raise

    def _prefilled(self, sequence: Sequence, count: int, at: int, rows: Floats) -> None:
        """Part of a prompt has been processed; behind its last part comes the first token."""
        slot = sequence.slot
        slot.n += count
        self._keep_hidden(sequence, at, count)
        if slot.n < sequence.n_prompt:
            self._in_step(sequence)
            return
        if sequence.limit == 0:
            self._finish(sequence, "length")
            return
        new, reason = self._sample(sequence, rows)
        self._went_on(sequence, new, reason)

    def _verified(self, sequence: Sequence, at: int, rows: Floats, seconds: float | None) -> None:
        """The target has judged a draft: keep what it would have said itself, undo the rest."""
        slot, draft = sequence.slot, sequence.draft
        new, reason = self._sample(sequence, rows)
        slot.n += len(new)
        if len(new) <= len(draft) and not self._runtime.context.drop(slot.id, slot.n):
            raise DecodeError("the target's cache could not be rolled back", 0)
        self._keep_hidden(sequence, at, len(new))
        if sequence.drafters:
            accepted = sum([guess == token for guess, token in zip(draft, new, strict=False)])
            if draft and sequence.plan.drafter in self._runtime.drafters:
                self._runtime.drafters[sequence.plan.drafter].settle(sequence, accepted)
            outcome = sequence.outcome(accepted, new, seconds)
            sequence.tally.add(outcome)
            sequence.controller.learn(outcome)
        else:
            sequence.tally.add_plain(seconds)
        self._went_on(sequence, new, reason)
        self._keep_up(sequence, LAZY_ROWS)

    def _sample(self, sequence: Sequence, rows: Floats) -> tuple[list[int], str]:
        """Draw tokens as long as the draft goes on as drawn; returns them and why the sequence ends, if so."""
        draft, sampler = sequence.draft, sequence.sampler
        new: list[int] = []
        for i, row in enumerate(rows):
            if sampler.greedy:
                token = sampler.highest(row)
            else:
                token = sampler.sample(row)
                sampler.accept(token)
            new.append(token)
            reason = sequence.take(token, row)
            if reason or i >= len(draft) or token != draft[i]:
                return new, reason
        raise AssertionError("a step has one more row than its draft has tokens")

    def _went_on(self, sequence: Sequence, new: list[int], reason: str) -> None:
        if sequence.ngram is not None:
            sequence.ngram.extend(new)
        if sequence.forced is not None:
            sequence.forced.extend(new)
        if reason:
            self._finish(sequence, reason)
        elif (event := sequence.event()) is not None:
            self._emit(sequence.sink, event)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        event, end = sequence.finish(reason)
        if event is not None:
            self._emit(sequence.sink, event)
        self._emit(sequence.sink, end)
        self._keep_up(sequence, FEW_ROWS)  # or the next turn would go through the text again; nobody waits
        self._leave(sequence)

    def _abandon(self, sequence: Sequence, error: SpecproxyError) -> None:
        """One sequence cannot go on, say because its grammar has come to a dead end."""
        self._emit(sequence.sink, error)
        self._leave(sequence)
        self._slots.forget(sequence.slot)  # it was left in the middle of a step

    # --- hidden rows ---------------------------------------------------------------------------------

    def _keep_hidden(self, sequence: Sequence, at: int, count: int) -> None:
        """Keep the hidden rows of settled positions for the MTP head."""
        if sequence.hidden is not None:
            rows = self._runtime.context.hidden(self._runtime.batch.n)
            sequence.hidden.push(rows[at : at + count])

    def _keep_up(self, sequence: Sequence, few: int) -> None:
        """If more rows wait, bring the MTP cache in step where that is worth it; no cache costs nothing."""
        rows = 0 if sequence.hidden is None else sequence.hidden.n
        if rows > few and (not self._runtime.drafters["mtp"].contexts or sequence.controller.keeps("mtp")):
            self._in_step(sequence)
        elif rows > MOST_ROWS:
            sequence.disable("mtp", "keeping it in step takes more than it may gain")

    def _in_step(self, sequence: Sequence) -> None:
        """Feed the MTP cache with what it lacks, as far as hidden rows are there, but for the newest token."""
        drafter = self._runtime.drafters.get("mtp")
        if drafter is None or sequence.hidden is None or sequence not in self._running:
            return
        self._deliver()
        behind = len(sequence.tokens) - sequence.slot.n  # tokens without a hidden row before them, plus one
        drafter.catch_up(sequence, keep=max(1, behind), budget=drafter.room)
