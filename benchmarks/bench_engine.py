"""The embedded engine against llama-server: the same model, threads and draft lengths, over HTTP by wall clock.

    python -m benchmarks.bench_engine [--quick] [--llama-server PATH]

Every comparison is made in pairs, one request after the other on the same new text, in shuffled order; what is
shown is the median of the ratios (above 1: the engine is faster) with a bootstrap interval of 90%. A second
llama-server without speculation, paired with the first, shows what a ratio of equals looks like here. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.bandwidth import read_bandwidth
from benchmarks.engine_servers import Server, native_program, start_engine, start_llama_server
from benchmarks.models import calibrated, smollm2
from specproxy.adapters.gguf_reader import GgufFile
from specproxy.adapters.server_program import ServerProgram
from tests.support.calibrated import CalibratedPair

STRATEGIES = ("plain", "ngram", "draft", "mtp")
REGIONS = ("json", "code", "edit", "prose")
STREAMS = 4
STRATEGY_HEADER = "X-Specproxy-Engine-Strategy"

Prompt = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Reply:
    """One streamed completion."""

    seconds: float
    text: str


@dataclass(frozen=True, slots=True)
class Ratio:
    """A median with its interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Ratio:
        """Bootstrap over pairs."""
        values = np.asarray(ratios)
        draws = np.random.default_rng(0).choice(values, (2000, len(values)))
        low, high = np.quantile(np.median(draws, axis=1), [0.05, 0.95])
        return cls(float(np.median(values)), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ask(port: int, prompt: str, tokens: int, headers: dict[str, str] | None = None) -> Reply:
    """Stream one greedy completion; the time covers the whole exchange."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    started = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    sent = {"Content-Type": "application/json"} | (headers or {})
    connection.request("POST", "/v1/completions", json.dumps(body), sent)
    reply = connection.getresponse()
    raw = reply.read()
    seconds = time.perf_counter() - started
    connection.close()
    if reply.status != 200:
        raise SystemExit(f"status {reply.status}: {raw[:500]!r}")
    events = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: {")]
    text = "".join(c.get("text", "") for event in events for c in json.loads(event).get("choices", ()))
    return Reply(seconds, text)


def header(strategy: str) -> dict[str, str]:
    """What makes the engine use a strategy."""
    return {STRATEGY_HEADER: strategy}


class Bench:
    """Runs pairs of requests on new texts."""

    def __init__(self, pairs: int, tokens: int) -> None:
        self.pairs, self.tokens = pairs, tokens
        self.rng = random.Random(1)
        self.numbers = itertools.count()
        self.forks = self.texts = 0

    def compare(
        self, ours: tuple[Server, dict[str, str]], theirs: tuple[Server, dict[str, str]], prompt: Prompt
    ) -> tuple[Ratio, float, float]:
        """Ratio of their time to ours over pairs, and tokens a second of both (medians)."""
        ratios, speeds = [], ([], [])
        for _ in range(self.pairs):
            text = prompt(next(self.numbers))
            order = [0, 1]
            self.rng.shuffle(order)
            replies: dict[int, Reply] = {}
            for side in order:
                server, headers = (ours, theirs)[side]
                replies[side] = ask(server.port, text, self.tokens, headers)
            self.texts += 1
            self.forks += replies[0].text != replies[1].text
            ratios.append(replies[1].seconds / replies[0].seconds)
            for side in (0, 1):
                speeds[side].append(self.tokens / replies[side].seconds)
        return Ratio.of(ratios), float(np.median(speeds[0])), float(np.median(speeds[1]))

    def compare_streams(
        self,
        ours: tuple[Server, list[dict[str, str]]],
        theirs: tuple[Server, list[dict[str, str]]],
        prompt: Prompt,
    ) -> Ratio:
        """Ratio of the times until as many streams at once have ended as there are headers."""
        ratios = []
        with ThreadPoolExecutor(STREAMS) as pool:
            for _ in range(max(3, self.pairs // 2)):
                texts = [prompt(next(self.numbers)) for _ in range(STREAMS)]
                order = [0, 1]
                self.rng.shuffle(order)
                seconds = [0.0, 0.0]
                for side in order:
                    server, headers = (ours, theirs)[side]
                    started = time.perf_counter()
                    work = [
                        pool.submit(ask, server.port, text, self.tokens, each)
                        for text, each in zip(texts, headers, strict=True)
                    ]
                    for each in work:
                        each.result()
                    seconds[side] = time.perf_counter() - started
                ratios.append(seconds[1] / seconds[0])
        return Ratio.of(ratios)


def calibrated_prompt(pair: CalibratedPair, region: str | None = None) -> Prompt:
    """New texts of one region, or of all in turn."""

    def prompt(number: int) -> str:
        name = region or REGIONS[number % len(REGIONS)]
        return f"please write the text number {number} " + pair.marker(name, number)

    return prompt


def real_prompt(number: int) -> str:
    """For a real model; its texts only have to be new."""
    topics = ("the sea", "bread", "a small town", "trains", "winter", "a garden", "the moon", "letters")
    return f"Story {number} about {topics[number % len(topics)]}, told twice.\n"


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


async def python_share(model: Path, threads: int, prompt: str, tokens: int) -> tuple[float, float]:
    """Milliseconds of a step outside llama_decode, and of the step, one stream over HTTP.

    The engine runs in this process, since only it knows how long it was in llama_decode; the client is another
    process, as it is in life.
    """
    from aiohttp import web

    from specproxy.adapters.embedded.app import build_app, serve_site
    from specproxy.adapters.embedded.engine import LlamaEngine
    from specproxy.adapters.embedded.options import EngineOptions

    engine = LlamaEngine(EngineOptions(model=model, context=4096, threads=threads))
    runner = await serve_site(build_app(engine), lambda runner: web.TCPSite(runner, "127.0.0.1", 0))
    port = runner.addresses[0][1]
    shares = []
    for _ in range(5):
        native = engine.native_s
        command = [sys.executable, "-m", "benchmarks.bench_engine", "--ask", str(port), prompt, str(tokens)]
        client = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        out, _ = await client.communicate()
        timings = json.loads(out)
        # one step a token behind the first, which the prompt's own step gives
        steps = tokens - 1
        decode_ms = timings["predicted_ms"]
        prompt_native = timings["prompt_ms"]  # at most: the prompt's step is taken to be all native
        native_ms = 1000 * (engine.native_s - native) - prompt_native
        shares.append(((decode_ms - native_ms) / steps, decode_ms / steps))
    await runner.cleanup()
    outside, whole = zip(*shares, strict=True)
    return float(np.median(outside)), float(np.median(whole))


def ask_timings(port: int, prompt: str, tokens: int) -> None:
    """As a client process: stream one completion, then print the server's timings."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    headers = {"Content-Type": "application/json"} | header("plain")
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    events = [line[6:] for line in connection.getresponse() if line.startswith(b"data: {")]
    print(json.dumps(next(e["timings"] for e in map(json.loads, reversed(events)) if "timings" in e)))


def bench_calibrated(bench: Bench, program: ServerProgram, threads: int, figures: dict[str, float]) -> Path:
    """All strategies, and four streams at once, on the calibrated model."""
    pair = calibrated()
    engine = start_engine(pair.target, pair.draft, threads=threads)
    servers = [engine]
    try:
        plain = [start_llama_server(program, pair.target, None, "plain", threads=threads) for _ in range(2)]
        servers += plain
        prompt = calibrated_prompt(pair)
        null, *_ = bench.compare((plain[0], {}), (plain[1], {}), prompt)
        figures["null"] = null.median
        print(f"llama-server against itself: {null}")
        for strategy in STRATEGIES:
            if strategy == "plain":
                rival = plain[0]
            else:
                draft = pair.draft if strategy == "draft" else None
                length = "ngram:8" if strategy == "ngram" else f"{strategy}:3"
                rival = start_llama_server(program, pair.target, draft, length, threads=threads)
                servers.append(rival)
            ratio, ours, theirs = bench.compare((engine, header(strategy)), (rival, {}), prompt)
            print(f"calibrated {strategy:6} {ratio}   {ours:6.1f} against {theirs:6.1f} tok/s", flush=True)
            figures[f"{strategy}_vs_llama_server"] = ratio.median
            figures[f"{strategy}_vs_llama_server_lo"] = ratio.low
            if strategy == "plain":
                figures["plain_tok_s"] = ours
            if rival not in plain:
                rival.stop()
        plain[1].stop()
        slots = start_llama_server(program, pair.target, None, "plain", threads=threads, slots=STREAMS)
        servers.append(slots)
        all_plain = [header("plain")] * STREAMS
        batch = bench.compare_streams((engine, all_plain), (slots, [{}] * STREAMS), prompt)
        print(f"{STREAMS} streams, plain            {batch}")
        mixed = bench.compare_streams((engine, [header(s) for s in STRATEGIES]), (engine, all_plain), prompt)
        print(f"{STREAMS} streams, mixed : plain    {mixed}", flush=True)
        figures["batch4_plain_vs_llama_server"] = batch.median
        figures["batch4_plain_vs_llama_server_lo"] = batch.low
        figures["batch4_mixed_vs_plain"] = mixed.median
    finally:
        for server in servers:
            server.stop()
    return pair.target


def bench_real(bench: Bench, program: ServerProgram, threads: int, figures: dict[str, float]) -> None:
    """Plain and n-gram on SmolLM2 in F16."""
    model = smollm2("F16")
    servers = [start_engine(model, None, threads=threads)]
    try:
        for strategy in ("plain", "ngram"):
            length = "ngram:8" if strategy == "ngram" else "plain"
            rival = start_llama_server(program, model, None, length, threads=threads)
            servers.append(rival)
            ratio, ours, theirs = bench.compare((servers[0], header(strategy)), (rival, {}), real_prompt)
            print(f"SmolLM2    {strategy:6} {ratio}   {ours:6.1f} against {theirs:6.1f} tok/s", flush=True)
            figures[f"smollm2_{strategy}_vs_llama_server"] = ratio.median
            figures[f"smollm2_{strategy}_vs_llama_server_lo"] = ratio.low
            rival.stop()
    finally:
        for server in servers:
            server.stop()


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="a few pairs, calibrated model only")
    parser.add_argument("--ask", nargs=3, metavar=("PORT", "PROMPT", "TOKENS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ask:
        ask_timings(int(args.ask[0]), args.ask[1], int(args.ask[2]))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped
    program, source = native_program(args.llama_server)
    print(f"llama-server: {source}\n{program.build}", flush=True)
    bench = Bench(6 if args.quick else args.pairs, args.tokens)
    figures: dict[str, float] = {}
    model = bench_calibrated(bench, program, args.threads, figures)
    if not args.quick:
        bench_real(bench, program, args.threads, figures)
    outside, whole = asyncio.run(python_share(model, args.threads, "please write " + "<|json:1|>", args.tokens))
    print(f"a plain step: {whole:.2f} ms, {outside:.3f} ms of it outside llama_decode")
    figures["python_ms_per_step"] = outside
    if (bandwidth := read_bandwidth(args.threads)) is not None:
        used = bytes_a_token(model) * 1000 / whole
        print(f"memory: {used / 1e9:.1f} of {bandwidth / 1e9:.1f} GB/s read for weights")
        figures["bandwidth_share"] = used / bandwidth
    print(f"texts that differed between the two: {bench.forks} of {bench.texts}")
    print(json.dumps({name: round(value, 4) for name, value in figures.items()} | {"llama_server": source}))


if __name__ == "__main__":
    main()
