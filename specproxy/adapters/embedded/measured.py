"""What steps cost on this machine: profiled in seconds when a model is first loaded, and kept across restarts.

Each set-up (model, draft, build of llama.cpp, threads, cache types, machine) has a file of its own, which only
its owner can read. A file that cannot be read is as good as none. When one is added, those beyond `MOST_FILES`
that were not written for longest are deleted.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import orjson

from specproxy.adapters.embedded.batch import Batch
from specproxy.adapters.embedded.costs import StepCosts
from specproxy.adapters.embedded.llama import Context, DecodeError
from specproxy.adapters.embedded.options import EngineOptions
from specproxy.adapters.embedded.runtime import Runtime
from specproxy.adapters.machine import machine_id
from specproxy.adapters.private_file import write_private

__all__ = ["Measured", "profile"]

log = logging.getLogger(__name__)

WIDTHS = (1, 2, 4, 3, 8, 5, 6, 12, 17)  # tokens; the first ones tell the most
ROUNDS = 9
LATE_ROUNDS, LATE_TOKENS = 3, 64  # of a drafter that catches up with a text
BEHIND = 16  # tokens of context while profiling
SAVE_EVERY_S = 300.0
MOST_FILES = 32


class Measured:
    """The costs of one engine's steps, from one load of the model to the next.

    Args:
        options: the engine's; `state` is where files are kept, `profile_s` how long a profile may take.
        clock: seconds.
    """

    def __init__(self, options: EngineOptions, clock: Callable[[], float] = time.perf_counter) -> None:
        self._options = options
        self._clock = clock
        self._costs: StepCosts | None = None
        self._path: Path | None = None
        self._saved_at = clock()

    def costs(self, runtime: Runtime) -> StepCosts:
        """What is known; for a set-up that is new, what a profile finds."""
        if self._costs is None:
            facts = runtime.facts
            slope = facts.kv_bytes_per_token / max(1, facts.weight_bytes)
            self._costs = StepCosts(slope, (facts.expert_count, facts.expert_used_count))
            if self._options.state is not None:
                self._path = self._options.state / f"costs-{_fingerprint(runtime)}.json"
            if not self._read():
                profile(runtime, self._costs, self._options.profile_s, self._clock)
                self.save()
                self._forget_oldest()
        return self._costs

    def save(self) -> None:
        """Write what is known now."""
        self._saved_at = self._clock()
        if self._path is None or self._costs is None or not self._costs.knows_plain:
            return
        try:
            write_private(self._path, orjson.dumps(self._costs.to_json()))
        except OSError as error:
            log.warning("what steps cost could not be kept: %s", error)

    def save_now_and_then(self) -> None:
        """`save`, if that is some minutes ago."""
        if self._clock() - self._saved_at >= SAVE_EVERY_S:
            self.save()

    def _forget_oldest(self) -> None:
        """Delete the files of set-ups that were not used for longest."""
        if self._path is None:
            return
        try:
            files = sorted(self._path.parent.glob("costs-*.json"), key=lambda path: path.stat().st_mtime)
            for file in files[:-MOST_FILES]:
                if file != self._path:
                    file.unlink()
        except OSError as error:  # as when another engine was faster
            log.warning("old costs of steps could not be deleted: %s", error)

    def _read(self) -> bool:
        if self._path is None or self._costs is None:
            return False
        try:
            data = orjson.loads(self._path.read_bytes())
            if not isinstance(data, dict):
                raise ValueError("not an object")
            self._costs.restore(data)
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as error:
            log.warning("what steps cost is measured anew: %s: %s", self._path, error)
            return False
        return self._costs.knows_plain


def profile(
    runtime: Runtime, costs: StepCosts, budget_s: float, clock: Callable[[], float] = time.perf_counter
) -> None:
    """Time decodes of several widths, single guesses of each drafter that runs a model, and catching up.

    Decodes are timed as they come in use: one behind another of the same width, with tokens of their own, since
    different tokens wake different experts. Rounds go over all widths, so that a slow moment meets all alike,
    and what is taken for a width is the middle one of its times. The caches must be empty, and are empty
    afterwards. Nothing is started that would take longer than what is left of the time.
    """
    if budget_s <= 0:
        return
    started = clock()
    seconds: dict[int, list[float]] = {}
    guesses: dict[str, list[float]] = {}
    late: dict[str, list[float]] = {}
    widths = WIDTHS[: 1 + runtime.longest]
    try:
        target = _Timed(runtime.context, runtime.batch, runtime.target.n_vocab, clock)
        drafters = {
            name: _Timed(
                drafter.context,
                drafter.batch,
                drafter.context.model.n_vocab,
                clock,
                reads=None if drafter.contexts else target,
            )
            for name, drafter in runtime.drafters.items()
        }
        for number in range(ROUNDS):
            for width in widths:
                known = seconds.get(width) or [median(times) * width for times in seconds.values()]
                if known and clock() - started + 2 * max(known) > budget_s:
                    continue
                target.decode(width)  # which sets the graph up
                seconds.setdefault(width, []).append(target.decode(width))
            for name, drafter in drafters.items():
                if number and clock() - started > budget_s:
                    continue
                drafter.decode(1)
                guesses.setdefault(name, []).append(drafter.decode(1))
                if number < LATE_ROUNDS and runtime.drafters[name].contexts:
                    late.setdefault(name, []).append(drafter.decode(LATE_TOKENS, outputs=1))
    except DecodeError as error:
        log.warning("profiling this model failed: %s", error)
    finally:
        runtime.context.clear()
        for each in runtime.drafters.values():
            for context in each.contexts.values():
                context.clear()
    for width, times in seconds.items():
        for _ in times:
            costs.decoded(width, median(times))
    for name, times in guesses.items():
        for _ in times:
            costs.guessed(name, 1, median(times))
    for name, times in late.items():
        costs.guessed(name, 1, median(times), LATE_TOKENS)
    curve = ", ".join(f"{width}: {seconds * 1e3:.1f}" for width, seconds in costs.widths.items())
    log.info("a step takes by its tokens, in ms: %s (profiled in %.1f s)", curve, clock() - started)


class _Timed:
    """Decodes behind a short text, timed; logits are read as a step reads them.

    Args:
        reads: for a drafter without a cache, whose it reads: it holds the text.
    """

    def __init__(
        self,
        context: Context,
        batch: Batch,
        vocab: int,
        clock: Callable[[], float],
        *,
        reads: _Timed | None = None,
    ) -> None:
        self._context, self._batch, self._vocab, self._clock = context, batch, vocab, clock
        self._reads = reads
        self._rng = np.random.default_rng(0)
        if reads is None:
            context.clear()
            self._feed(BEHIND, 0, 1)  # the weights may come from disk

    def decode(self, width: int, outputs: int | None = None) -> float:
        """Seconds of a decode of `width` tokens."""
        self._go_back()
        started = self._clock()
        self._feed(width, BEHIND, width if outputs is None else outputs)
        return self._clock() - started

    def _go_back(self) -> None:
        """To the end of the short text."""
        if self._reads is not None:
            self._reads._go_back()
        elif not self._context.drop(0, BEHIND):  # a recurrent state may not go back so far
            self._context.clear()
            self._feed(BEHIND, 0, 1)

    def _feed(self, count: int, at: int, outputs: int) -> None:
        tokens = self._rng.integers(0, self._vocab, count).tolist()
        hidden = self._batch.takes_rows
        rows = np.zeros((count, hidden), np.float32) if hidden else None
        self._batch.clear()
        self._batch.add(tokens, at, 0, outputs=outputs, rows=rows)
        self._context.decode(self._batch)
        self._context.logits(outputs).argmax(axis=1)


def _fingerprint(runtime: Runtime) -> str:
    """Of what costs depend on: files by content, build, options, machine."""
    options = runtime.options
    bare = replace(options, model=Path(), draft=None, name="", idle_unload_s=None, state=None, profile_s=0.0)
    parts = (
        runtime.facts.digest,
        runtime.draft_digest,
        importlib.metadata.version("llama-cpp-python"),
        repr(bare),
        str(runtime.threads),
        machine_id(),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
