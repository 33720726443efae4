"""The engine's `auto` against every fixed strategy and length, on one engine, over HTTP by wall clock.

    python -m benchmarks.bench_auto [--quick] [--minutes N]

For each kind of text all contenders answer the same new prompt in shuffled order, round after round until the
time is up. The best of the grid is chosen in hindsight, by its median over the rounds, so that auto is measured
against what nobody could have known beforehand. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import sys
import time

import numpy as np

from benchmarks.engine_client import ask, header
from benchmarks.engine_figures import Ratio
from benchmarks.engine_servers import Server, start_engine
from benchmarks.models import calibrated
from tests.support.calibrated import CalibratedPair

KINDS = ("json", "code", "edit", "prose", "creative")
GRID = ("plain", "ngram:2", "ngram:4", "ngram:8", "draft:1", "draft:2", "draft:3", "mtp:1", "mtp:2", "mtp:3")
QUICK_GRID = ("plain", "ngram:8", "draft:3", "mtp:2", "mtp:3")
AUTO = "auto"

Seconds = dict[str, dict[str, list[float]]]  # kind → contender → seconds by round


def measure(
    engine: Server, pair: CalibratedPair, grid: tuple[str, ...], *, minutes: float, tokens: int
) -> Seconds:
    """Rounds over all kinds and contenders until the time is up; at least two."""
    rng, end = random.Random(2), time.monotonic() + 60 * minutes
    found: Seconds = {kind: {name: [] for name in (*grid, AUTO)} for kind in KINDS}
    for number in itertools.count():
        for kind in KINDS:
            prompt = f"please write the text number {number} " + pair.marker(kind, number)
            for name in rng.sample((*grid, AUTO), len(grid) + 1):
                # a prefix of its own for each, or later ones would find the prompt processed
                reply = ask(engine.port, f"{name} {prompt}", tokens, header(name))
                found[kind][name].append(reply.seconds)
        if number and time.monotonic() >= end:
            return found
    raise AssertionError("count has no end")


def show(found: Seconds) -> dict[str, float | None]:
    """Print a line for each kind; returns the figures."""
    to_best, to_plain = {}, {}
    for kind, by_name in found.items():
        medians = {name: float(np.median(seconds)) for name, seconds in by_name.items() if name != AUTO}
        best = min(medians, key=lambda name: medians[name])
        auto = np.array(by_name[AUTO])
        to_best[kind] = Ratio.of(np.array(by_name[best]) / auto)
        to_plain[kind] = Ratio.of(np.array(by_name["plain"]) / auto)
        print(f"{kind:9} {to_best[kind]} of the best, {best:8}   {to_plain[kind]} of plain", flush=True)
    worst = min(to_best.values(), key=lambda ratio: ratio.median)
    against_plain = min(to_plain.values(), key=lambda ratio: ratio.median)
    return {
        "auto_vs_best_grid_worst": round(worst.median, 4),
        "auto_vs_best_grid_worst_lo": round(worst.low, 4),
        "auto_vs_plain_worst": round(against_plain.median, 4),
        "auto_vs_plain_worst_lo": round(against_plain.low, 4),
        "rounds": len(next(iter(found.values()))[AUTO]),
    }


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=6.0, help="about how long to measure")
    parser.add_argument("--tokens", type=int, default=128, help="length of each reply")
    parser.add_argument("--quick", action="store_true", help="two minutes, a smaller grid, shorter replies")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the engine is stopped
    pair = calibrated()
    grid, minutes, tokens = (QUICK_GRID, 2.0, 64) if args.quick else (GRID, args.minutes, args.tokens)
    with start_engine(pair.target, pair.draft, threads=args.threads) as engine:
        found = measure(engine, pair, grid, minutes=minutes, tokens=tokens)
    print(json.dumps(show(found)))


if __name__ == "__main__":
    main()
