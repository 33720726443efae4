"""Contenders that answer the same new prompts in turn: strategies of one engine, and other servers."""

from __future__ import annotations

import itertools
import random
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.engine_client import Reply, ask, header
from benchmarks.engine_figures import Ratio
from benchmarks.engine_servers import Server
from specproxy.adapters.embedded.side_channel import (
    PRIORS_HEADER,
    REPORTS_PATH,
    REQUEST_ID_HEADER,
    decode_report,
    encode_priors,
)
from specproxy.strategies.engine_book import EngineBook

__all__ = ["AUTO", "Contender", "Contest", "Engine"]

AUTO = "auto"
Ask = Callable[[str, str], Reply]  # kind, prompt


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to get an answer."""

    name: str
    ask: Ask


class Engine:
    """The engine as the proxy uses it: `auto` gets as priors what earlier requests of the kind have shown.

    Reports are fetched between requests, outside of what is timed.
    """

    def __init__(self, server: Server, tokens: int, **fields: object) -> None:
        self._server, self._tokens, self._fields = server, tokens, fields
        self._book = EngineBook()
        self._numbers = itertools.count()

    def contender(self, strategy: str, name: str = "", **fields: object) -> Contender:
        """A strategy of this engine."""
        return Contender(name or strategy, lambda kind, prompt: self._ask(strategy, kind, prompt, fields))

    def plans(self, kind: str) -> str:
        """What `auto` did lately, the most frequent first."""
        page = self._book.pages("bench").get(kind)
        steps = sorted(page.plans.items(), key=lambda pair: -pair[1])[:4] if page is not None else []
        return ", ".join(f"{plan} ×{n:.0f}" for plan, n in steps)

    def _ask(self, strategy: str, kind: str, prompt: str, fields: Mapping[str, object]) -> Reply:
        request_id = f"b{next(self._numbers)}"
        sent = header(strategy) | {REQUEST_ID_HEADER: request_id}
        if strategy == AUTO:
            sent[PRIORS_HEADER] = encode_priors(self._book.priors("bench", kind, request_id)).decode()
        reply = ask(self._server.port, prompt, self._tokens, sent, **{**self._fields, **fields})
        url = f"http://127.0.0.1:{self._server.port}{REPORTS_PATH}{request_id}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            report = decode_report(answer.read())
        self._book.learn("bench", kind, report if strategy == AUTO else replace(report, plans=()))
        return reply


@dataclass
class Contest:
    """Seconds by kind, contender and round."""

    prompt: Callable[[str, int], str]
    rng: random.Random = field(default_factory=lambda: random.Random(2))
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def round(self, kind: str, contenders: Sequence[Contender]) -> None:
        """One new prompt of a kind for all contenders, in shuffled order."""
        number = next(self.numbers)
        text = self.prompt(kind, number)
        for contender in self.rng.sample(list(contenders), len(contenders)):
            # a prefix of its own for each, or later ones would find the prompt processed
            reply = contender.ask(kind, f"{contender.name} {number} {text}")
            per_token = reply.seconds / max(1, int(reply.timings.get("predicted_n", reply.tokens)))
            self.seconds.setdefault(kind, {}).setdefault(contender.name, []).append(per_token)

    def rounds(self, kinds: Mapping[str, Sequence[Contender]], end: float, *, least: int = 3) -> None:
        """Round after round over all kinds until `end` by the monotonic clock; none that would end after it."""
        done = 0
        began = time.monotonic()
        while done < least or time.monotonic() + (time.monotonic() - began) / done < end:
            for kind, contenders in kinds.items():
                self.round(kind, contenders)
            done += 1

    def fastest(self, kind: str, contenders: Sequence[Contender], count: int) -> list[Contender]:
        """Those of the contenders with the lowest medians so far."""
        found = self.seconds[kind]
        return sorted(contenders, key=lambda each: float(np.median(found[each.name])))[:count]

    def forget(self) -> None:
        """What comes now is measured by itself."""
        self.seconds.clear()

    def ratio(self, kind: str, other: str, ours: str = AUTO) -> Ratio:
        """The other's time over ours, prompt by prompt."""
        found = self.seconds[kind]
        return Ratio.of([np.array(found[other]) / np.array(found[ours])])

    def against_best(self, kind: str, names: Iterable[str]) -> tuple[Ratio, str]:
        """The time of the best of several over ours, and which one that was, in most rounds.

        The lowest of several medians with noise lies below the median of the one that is truly best, so who
        is best is decided for each round by all others: leave-one-out cross-fitting. What is expected of the
        ratio is then that of a choice in hindsight, with neither good nor bad luck in it.
        """
        names = list(names)
        found = np.array([self.seconds[kind][name] for name in names])
        ours = np.array(self.seconds[kind][AUTO])
        chosen = [int(np.median(np.delete(found, i, axis=1), axis=1).argmin()) for i in range(len(ours))]
        ratio = Ratio.of([found[chosen, np.arange(len(ours))] / ours])
        return ratio, names[int(np.bincount(chosen).argmax())]

    def best(self, kind: str, names: Iterable[str]) -> str:
        """The name with the lowest median."""
        return min(names, key=lambda name: float(np.median(self.seconds[kind][name])))
