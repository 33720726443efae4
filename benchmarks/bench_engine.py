"""The embedded engine against llama-server: the same model, threads and draft lengths, over HTTP by wall clock.

    python -m benchmarks.bench_engine [--quick] [--minutes N] [--llama-server PATH]

Every comparison is made in pairs, one request after the other on the same new text, in shuffled order; rounds
go through all comparisons, so that a slow spell of the machine meets them all alike, and end when the time is
up. All servers are started several times, in shuffled order: processes of one program differ for as long as
they live, by the memory that they were given. Both load their weights in the same way, in the same environment;
`shipped` is a llama-server with its own defaults, which maps the file. What is shown is the median of the
ratios (above 1: the engine is faster) with a bootstrap interval of 90% over servers and pairs. A second
llama-server without speculation, paired with the first, shows what a ratio of equals looks like here. The last
line is one JSON object, null where nothing was measured; it comes after an interruption too.
"""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bandwidth import read_bandwidth
from benchmarks.engine_client import Reply, ask, header
from benchmarks.engine_figures import Figures
from benchmarks.engine_servers import Server, native_program, start_engine, start_llama_server
from benchmarks.engine_steps import step_times
from benchmarks.models import calibrated, smollm2
from specproxy.adapters.gguf_reader import GgufFile
from specproxy.adapters.server_program import ServerProgram
from tests.support.calibrated import CalibratedPair

STRATEGIES = ("plain", "ngram", "draft", "mtp")
LENGTHS = {"plain": "plain", "ngram": "ngram:8", "draft": "draft:3", "mtp": "mtp:3"}
REGIONS = ("json", "code", "edit", "prose")
STREAMS = 4
SHARES = {
    "calibrated": 0.55,
    "streams": 0.2,
    "real": 0.15,
}  # of the time; the rest is for loading, and for steps
STARTS = 4  # of all servers
LEAST_ROUNDS = 1  # for each of them

Prompt = Callable[[int], str]
Side = tuple[Server, dict[str, str]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ours against theirs, under the name that figures have."""

    name: str
    ours: Side
    theirs: Side


class Bench:
    """Runs pairs of requests on new texts, and collects what they show."""

    def __init__(self, figures: Figures, minutes: float, tokens: int, starts: int = STARTS) -> None:
        self.figures, self.tokens, self.starts = figures, tokens, starts
        self.seconds = 60 * minutes
        self.rng = random.Random(1)
        self.numbers = itertools.count()

    def started(self, starts: Mapping[str, Callable[[], Server]]) -> Iterator[dict[str, Server]]:
        """All servers by name, started again and again, in another order each time; stopped in between."""
        for _ in range(self.starts):
            self.figures.new_servers()
            with ExitStack() as running:
                names = self.rng.sample(list(starts), len(starts))
                yield {name: running.enter_context(starts[name]()) for name in names}

    def rounds(self, part: str) -> Iterator[int]:
        """Round after round until the servers' share of the part's time is used up."""
        end = time.monotonic() + SHARES[part] * self.seconds / self.starts
        for number in itertools.count():
            if number >= LEAST_ROUNDS and time.monotonic() >= end:
                return
            yield number

    def pair(self, comparison: Comparison, prompt: Prompt) -> None:
        """One request to each side, on the same new text."""
        text = prompt(next(self.numbers))
        sides = (comparison.ours, comparison.theirs)
        replies: dict[int, Reply] = {}
        for side in self.rng.sample((0, 1), 2):
            server, headers = sides[side]
            replies[side] = ask(server.port, text, self.tokens, headers)
        self.figures.add_pair(comparison.name, replies[0], replies[1])

    def streams(self, comparison: Comparison, headers: list[list[dict[str, str]]], prompt: Prompt) -> None:
        """As many streams at once on each side as there are headers; measured until the last has ended."""
        texts = [prompt(next(self.numbers)) for _ in range(STREAMS)]
        sides = (comparison.ours, comparison.theirs)
        seconds = [0.0, 0.0]
        with ThreadPoolExecutor(STREAMS) as pool:
            for side in self.rng.sample((0, 1), 2):
                port = sides[side][0].port
                started = time.perf_counter()
                work = [
                    pool.submit(ask, port, text, self.tokens, sent)
                    for text, sent in zip(texts, headers[side], strict=True)
                ]
                for each in work:
                    each.result()
                seconds[side] = time.perf_counter() - started
        self.figures.add_ratio(comparison.name, seconds[1] / seconds[0])


def calibrated_prompt(pair: CalibratedPair) -> Prompt:
    """New texts of all regions in turn: a quarter of them repeats, the others are guessed more or less well."""

    def prompt(number: int) -> str:
        return f"please write the text number {number} " + pair.marker(REGIONS[number % len(REGIONS)], number)

    return prompt


def real_prompt(number: int) -> str:
    """For a real model; its texts only have to be new."""
    topics = ("the sea", "bread", "a small town", "trains", "winter", "a garden", "the moon", "letters")
    return f"Story {number} about {topics[number % len(topics)]}, told twice.\n"


def bench_calibrated(bench: Bench, program: ServerProgram, pair: CalibratedPair, threads: int) -> None:
    """All strategies on the calibrated model, and four streams at once."""

    def rival(strategy: str, slots: int = 1, *, shipped: bool = False) -> Callable[[], Server]:
        draft = pair.draft if strategy == "draft" else None
        return lambda: start_llama_server(
            program, pair.target, draft, LENGTHS[strategy], threads=threads, slots=slots, shipped=shipped
        )

    starts = {strategy: rival(strategy) for strategy in STRATEGIES} | {
        "engine": lambda: start_engine(pair.target, pair.draft, threads=threads),
        "null": rival("plain"),
        "shipped": rival("plain", shipped=True),
        "slots": rival("plain", STREAMS),
    }
    prompt = calibrated_prompt(pair)
    names = ("null", *STRATEGIES, "shipped", "batch4_plain", "batch4_mixed")
    for servers in bench.started(starts):
        engine = servers["engine"]
        comparisons = [Comparison("null", (servers["plain"], {}), (servers["null"], {}))]
        for strategy in STRATEGIES:
            comparisons.append(Comparison(strategy, (engine, header(strategy)), (servers[strategy], {})))
        comparisons.append(Comparison("shipped", (engine, header("plain")), (servers["shipped"], {})))
        for _ in bench.rounds("calibrated"):
            for comparison in comparisons:
                bench.pair(comparison, prompt)
            next(bench.numbers)  # seven a round, four kinds of text: each comparison meets all in turn
        all_plain, mixed = [header("plain")] * STREAMS, [header(s) for s in STRATEGIES]
        bare: list[dict[str, str]] = [{}] * STREAMS
        batch = Comparison("batch4_plain", (engine, {}), (servers["slots"], {}))
        both = Comparison("batch4_mixed", (engine, {}), (engine, {}))
        for _ in bench.rounds("streams"):
            bench.streams(batch, [all_plain, bare], prompt)
            bench.streams(both, [mixed, all_plain], prompt)
    for name in names:
        bench.figures.show(name)


def bench_real(bench: Bench, program: ServerProgram, threads: int) -> None:
    """Plain and n-gram on SmolLM2 in F16."""
    model = smollm2("F16")
    strategies = ("plain", "ngram")

    def rival(strategy: str) -> Callable[[], Server]:
        return lambda: start_llama_server(program, model, None, LENGTHS[strategy], threads=threads)

    starts = {strategy: rival(strategy) for strategy in strategies}
    for servers in bench.started(starts | {"engine": lambda: start_engine(model, None, threads=threads)}):
        comparisons = [
            Comparison(f"smollm2_{strategy}", (servers["engine"], header(strategy)), (servers[strategy], {}))
            for strategy in strategies
        ]
        for _ in bench.rounds("real"):
            for comparison in comparisons:
                bench.pair(comparison, real_prompt)
    for strategy in strategies:
        bench.figures.show(f"smollm2_{strategy}")


def bytes_a_token(model: Path) -> int:
    """Weights that are read for one token: all but the MTP block and the embedding table (it is one row)."""
    with GgufFile(model) as file:
        blocks = file.scalars[f"{file.scalars['general.architecture']}.block_count"]
        mtp = file.scalars.get(f"{file.scalars['general.architecture']}.nextn_predict_layers", 0)
        tied = "output.weight" not in file.tensors
        skipped = tuple(f"blk.{i}." for i in range(blocks - mtp, blocks))
        return sum(
            tensor.nbytes
            for name, tensor in file.tensors.items()
            if not name.startswith(skipped) and (tied or name != "token_embd.weight")
        )


def bench_steps(figures: Figures, pair: CalibratedPair, threads: int, tokens: int) -> None:
    """What a plain step costs besides llama_decode, and how near it comes to the memory's speed."""
    prompt = "please write " + pair.marker("json", 1)
    before = read_bandwidth(threads)
    outside, whole = step_times(pair.target, threads, prompt, tokens)
    print(f"a plain step: {whole:.2f} ms, {outside:.3f} ms of it outside llama_decode", flush=True)
    figures.set("python_ms_per_step", outside)
    if before is not None:
        bandwidth = max(before, read_bandwidth(threads) or 0.0)
        used = bytes_a_token(pair.target) * 1000 / whole
        print(f"memory: {used / 1e9:.1f} of {bandwidth / 1e9:.1f} GB/s read for weights", flush=True)
        figures.set("bandwidth_share", used / bandwidth)


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=8.0, help="about how long to measure")
    parser.add_argument("--tokens", type=int, default=64, help="length of each reply")
    parser.add_argument("--quick", action="store_true", help="two minutes, and no compiling of a llama-server")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped
    program, source = native_program(args.llama_server, compile_it=not args.quick)
    print(f"llama-server: {source}\n{program.build}", flush=True)
    figures = Figures(source)
    minutes, starts = (2.0, 2) if args.quick else (args.minutes, STARTS)
    bench = Bench(figures, minutes, args.tokens, starts)
    try:
        pair = calibrated()
        bench_calibrated(bench, program, pair, args.threads)
        bench_real(bench, program, args.threads)
        bench_steps(figures, pair, args.threads, 2 * args.tokens)
    finally:
        figures.finish()


if __name__ == "__main__":
    main()
