"""Sends a bench's prompts: each once to every lane and once to wherever the proxy chooses, and never twice.

A lane that has seen a prompt may copy its own earlier answer (n-gram drafting does), so nothing is sent to a
lane again. What the proxy chooses counts for the chosen lane too, and is sent first, since that lane is not
known beforehand; the others follow in random order.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from specproxy.cli.bench_client import Sample, body_of
from specproxy.cli.lane_client import Prompt
from specproxy.errors import BackendError

__all__ = ["ROUTED", "Result", "Round", "fresh", "measure"]

ROUTED = "adaptive"
WARM_UP = Prompt(
    "/v1/chat/completions", {"messages": [{"role": "user", "content": "One two three"}], "max_tokens": 8}
)


class Sender(Protocol):
    """Sends one request and says what it took; a `BenchClient` in real life."""

    def send(self, path: str, body: dict[str, Any], pin: str | None) -> Sample:
        """What it took.

        Raises:
            BackendError: there is no answer.
        """
        ...

    def explain(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What the proxy says of a request that is not sent.

        Raises:
            BackendError: it would not route it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Round:
    """One prompt on every lane, and where it was routed: samples by lane, and `adaptive`."""

    line: int
    kind: str
    seen_before: bool
    samples: dict[str, Sample]


@dataclass(slots=True)
class Result:
    """All rounds, and what was left out and why: line numbers, or messages."""

    rounds: list[Round] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)
    seen_before: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    not_run: int = 0


def fresh(prompts: Iterable[Prompt]) -> tuple[list[Prompt], list[int]]:
    """The prompts without repeats, and the lines of the repeats."""
    kept: dict[str, Prompt] = {}
    repeated = []
    for prompt in prompts:
        key = repr((prompt.path, [prompt.body.get(name) for name in ("messages", "prompt", "system", "input")]))
        if kept.setdefault(key, prompt) is not prompt:
            repeated.append(prompt.line)
    return list(kept.values()), repeated


def measure(
    sender: Sender,
    lanes: Sequence[str],
    model: str,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    again: bool = False,
    seconds: float = float("inf"),
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
    progress: Callable[[Sequence[Prompt]], Iterable[Prompt]] = iter,
) -> Result:
    """Run every prompt, as far as `seconds` go. A failure is told, not raised.

    Prompts that the proxy has seen before are left out, or with `again` sent and marked.
    """
    chosen, repeated = fresh(prompts)
    result, rng, begun = Result(repeated=repeated), random.Random(seed), clock()
    _warm_up(sender, lanes, model)
    for number, prompt in enumerate(progress(chosen)):
        if clock() - begun > seconds:
            result.not_run = len(chosen) - number
            break
        body = body_of(prompt, model, max_tokens)
        try:
            told = sender.explain(prompt.path, body)
        except BackendError as error:
            result.failures.append(f"{_name(prompt, number)}: {error.message}")
            continue
        if told["repeat"] and not again:
            result.seen_before.append(prompt.line or number + 1)
            continue
        kind = str(told["workload"]).partition("/")[0]
        samples = _round(sender, lanes, prompt, body, rng, result.failures, _name(prompt, number))
        result.rounds.append(Round(prompt.line or number + 1, kind, bool(told["repeat"]), samples))
    return result


def _round(
    sender: Sender,
    lanes: Sequence[str],
    prompt: Prompt,
    body: dict[str, Any],
    rng: random.Random,
    failures: list[str],
    name: str,
) -> dict[str, Sample]:
    samples: dict[str, Sample] = {}
    try:
        routed = samples[ROUTED] = sender.send(prompt.path, body, None)
        if routed.lane in lanes:
            samples[routed.lane] = routed
    except BackendError as error:
        failures.append(f"{name}, {ROUTED}: {error.message}")
        return samples  # which lane has seen it is not known
    for lane in rng.sample(list(lanes), len(lanes)):
        if lane in samples:
            continue
        try:
            samples[lane] = sender.send(prompt.path, body, lane)
        except BackendError as error:
            failures.append(f"{name}, {lane}: {error.message}")
    return samples


def _warm_up(sender: Sender, lanes: Sequence[str], model: str) -> None:
    """A few tokens on each lane, unmeasured: the first request after a start reads the weights in."""
    for lane in lanes:
        try:
            sender.send(WARM_UP.path, body_of(WARM_UP, model, 8), lane)
        except BackendError:  # the measured requests will say so
            continue


def _name(prompt: Prompt, number: int) -> str:
    return f"line {prompt.line}" if prompt.line else f"prompt {number + 1}"
