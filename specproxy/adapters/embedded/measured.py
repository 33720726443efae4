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
ROUNDS = 5
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
            self._costs = StepCosts(facts.kv_bytes_per_token / max(1, facts.weight_bytes))
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
    """Time decodes of several widths, and single guesses of each drafter that runs a model.

    The caches must be empty, and are empty afterwards. Nothing is started that would take longer than what is
    left of the time.
    """
    if budget_s <= 0:
        return
    started = clock()
    try:
        _time(
            runtime.context, runtime.batch, 1, runtime.target.n_vocab, clock
        )  # the weights may come from disk
        for number in range(ROUNDS):
            for width in WIDTHS[: 1 + runtime.longest]:
                expected = 0.0 if number == 0 and width == 1 else costs.verify(width)
                if clock() - started + expected > budget_s:
                    continue
                costs.decoded(
                    width, _time(runtime.context, runtime.batch, width, runtime.target.n_vocab, clock)
                )
            for name, drafter in runtime.drafters.items():
                if number and clock() - started > budget_s:
                    continue
                vocab = drafter.context.model.n_vocab
                seconds = _time(drafter.context, drafter.batch, 1, vocab, clock)
                if number:  # the first one warms up
                    costs.guessed(name, 1, seconds)
    except DecodeError as error:
        log.warning("profiling this model failed: %s", error)
    finally:
        runtime.context.clear()
        for drafter in runtime.drafters.values():
            for context in drafter.contexts.values():
                context.clear()
    curve = ", ".join(f"{width}: {seconds * 1e3:.1f}" for width, seconds in costs.widths.items())
    log.info("a step takes by its tokens, in ms: %s (profiled in %.1f s)", curve, clock() - started)


def _time(context: Context, batch: Batch, width: int, vocab: int, clock: Callable[[], float]) -> float:
    """Seconds of one decode, logits read as a step reads them. Different tokens wake different experts."""
    tokens = np.random.default_rng(width).integers(0, vocab, BEHIND + width).tolist()
    hidden = batch.takes_rows
    context.clear()
    batch.clear()
    rows = np.zeros((BEHIND, hidden), np.float32) if hidden else None
    batch.add(tokens[:BEHIND], 0, 0, outputs=1, rows=rows)
    context.decode(batch)
    batch.clear()
    batch.add(tokens[BEHIND:], BEHIND, 0, outputs=width, rows=None if rows is None else rows[:width])
    started = clock()
    context.decode(batch)
    context.logits(width).argmax(axis=1)
    return clock() - started


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
