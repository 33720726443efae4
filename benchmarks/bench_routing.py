"""`make bench-routing`: what routing gains on real lanes, from the first request on.

Starts `specproxy start` with managed lanes twice: on the calibrated model, whose best strategies are known and
differ by kind (plain, n-gram, draft and MTP lanes), and on SmolLM2-135M (plain and n-gram). A fresh mix goes
through the proxy, which knows nothing at first; fresh prompts of the same kinds go straight to every lane as
controls, in random order between the routed ones. No prompt comes twice. One request runs at a time.

A fixed strategy's time for the routed requests is their tokens times the mean time per token of its controls of
the same kind, end to end. The last line is one JSON object, ``smollm2_…`` being those of the real model; keys
with ``_lo`` and ``_hi`` are the bounds of 90% bootstrap intervals over requests and controls:

- ``gain_over_plain``, ``gain_over_best_static``: time of always-plain, and of the best single strategy in
  hindsight, over the routed time, less 1;
- ``gap_to_oracle``: routed time over that of each kind's best strategy in hindsight, less 1. Both hindsights
  pick the least of several noisy means, which favours them;
- ``worst_kind_vs_plain``: plain's time over the routed time, on the kind where that is least;
- ``null``: plain's time by one half of its controls over that by the other: what noise alone does;
- ``replay_error``: tokens a step of the n-gram lane as replayed from token ids, against those that the server
  counted, mean of the absolute relative differences of single requests.

    python -m benchmarks.bench_routing [--part calibrated|smollm2|both] [--requests N] [--controls N]
                                       [--minutes M] [--threads N] [--seed N]
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks import synthetic, workload
from benchmarks.demo import TEMPERATURES
from benchmarks.demo_table import print_part
from benchmarks.live import Row, Running, Sample, send, started
from benchmarks.models import calibrated, smollm2
from specproxy.strategies.drafters.ngram_simple import NgramSimpleDrafter
from specproxy.strategies.replay import replay

TOKENS = 48
NGRAM_SIZE, NGRAM_MAX = 3, 8  # of the managed n-gram lane, see specproxy/adapters/server_program.py
DRAWS = 400
TARGETS = {"gain_over_best_static": 0.08, "worst_kind_vs_plain": 0.98}
MOST_REPLAY_ERROR = 0.03

Pools = Mapping[tuple[str, str], Sequence[Sample]]
"""Controls by kind and strategy."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one model was measured by."""

    name: str
    routed: list[Sample]
    controls: list[Sample]
    replay_errors: list[float]


# --- measuring -----------------------------------------------------------------------------------


def interleave(
    rows: Sequence[Row], spare: Sequence[Row], strategies: Sequence[str], controls: int, rng: random.Random
) -> list[tuple[Row, str | None]]:
    """Routed rows in order (strategy None), and between them at random places `controls` spare rows of each
    kind for each strategy."""
    by_kind: dict[str, list[Row]] = defaultdict(list)
    for row in spare:
        by_kind[row.kind].append(row)
    runs: list[tuple[Row, str | None]] = [(row, None) for row in rows]
    pinned = [
        (kind_rows.pop(), strategy)
        for kind_rows in by_kind.values()
        for _ in range(controls)
        for strategy in strategies
        if kind_rows
    ]
    for row, strategy in pinned:
        runs.insert(rng.randrange(len(runs) + 1), (row, strategy))
    return runs


def measure(
    name: str, proxy: Running, runs: Sequence[tuple[Row, str | None]], seconds: float, console: Console
) -> Part:
    """Send everything, one request at a time, or as much as there is time for; then the requests that are
    replayed."""
    part = Part(name, [], [], [])
    begun = time.monotonic()
    for i, (row, strategy) in enumerate(runs):
        if time.monotonic() - begun > seconds:
            console.print(f"  time is up after {i} of {len(runs)} requests", style="dim", highlight=False)
            break
        if strategy is None:
            part.routed.append(send(proxy.url, row, stream=i % 2 == 0))
        else:
            part.controls.append(send(proxy.lanes[strategy], row, stream=i % 2 == 0, strategy=strategy))
        if (i + 1) % 50 == 0:
            console.print(
                f"  {i + 1} of {len(runs)} after {time.monotonic() - begun:.0f} s", style="dim", highlight=False
            )
    if "ngram" in proxy.lanes:
        picked = {row.kind: row for row, strategy in runs if strategy is None}
        part.replay_errors.extend(replay_error(proxy.lanes["ngram"], row) for row in picked.values())
    return part


def replay_error(lane: str, row: Row) -> float:
    """Relative difference of tokens a step, replayed and counted, of one request on an n-gram lane."""
    rendered = _post(f"{lane}/apply-template", {"messages": row.request["messages"]})
    ids = _post(f"{lane}/tokenize", {"content": rendered["prompt"], "add_special": True})["tokens"]
    body = {"prompt": ids, "n_predict": 2 * TOKENS, "temperature": row.request["temperature"], "seed": 1}
    reply = _post(f"{lane}/completion", body | {"return_tokens": True, "cache_prompt": False})
    decoded = len(reply["tokens"]) - 1
    if decoded < 1:
        return 0.0
    counted: float = decoded / (decoded - reply["timings"].get("draft_n_accepted", 0))
    drafter = NgramSimpleDrafter(NGRAM_SIZE, NGRAM_MAX)
    found = replay(ids, reply["tokens"], drafter, NGRAM_MAX, max_tokens=2 * TOKENS)
    return abs(found.tokens_per_step / counted - 1.0)


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        data: dict[str, Any] = json.load(reply)
        return data


# --- figures -------------------------------------------------------------------------------------


def pools_of(controls: Sequence[Sample]) -> dict[tuple[str, str], list[Sample]]:
    """Usable controls by kind and strategy."""
    pools: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in controls:
        if sample.tokens >= 2:
            pools[sample.kind, sample.strategy].append(sample)
    return pools


def compare(routed: Sequence[Sample], pools: Pools) -> dict[str, float]:
    """The figures of one set of requests and controls."""
    cost = {key: float(np.mean([s.total_per_token for s in group])) for key, group in pools.items()}
    strategies = sorted({strategy for _, strategy in cost})
    tokens: dict[str, float] = defaultdict(float)
    seconds: dict[str, float] = defaultdict(float)
    for sample in routed:
        tokens[sample.kind] += sample.tokens
        seconds[sample.kind] += sample.total_s
    spent = sum(seconds.values())
    fixed = {s: sum(n * cost[kind, s] for kind, n in tokens.items()) for s in strategies}
    oracle = sum(n * min(cost[kind, s] for s in strategies) for kind, n in tokens.items())
    return {
        "gain_over_plain": fixed["plain"] / spent - 1.0,
        "gain_over_best_static": min(fixed.values()) / spent - 1.0,
        "gap_to_oracle": spent / oracle - 1.0,
        "worst_kind_vs_plain": min(n * cost[kind, "plain"] / seconds[kind] for kind, n in tokens.items()),
    }


def with_intervals(routed: Sequence[Sample], pools: Pools) -> dict[str, float]:
    """The same with 90% bootstrap intervals, resampled within kinds and within controls."""
    rng = np.random.default_rng(0)
    by_kind: dict[str, list[Sample]] = defaultdict(list)
    for sample in routed:
        by_kind[sample.kind].append(sample)

    def again(group: Sequence[Sample]) -> list[Sample]:
        return [group[i] for i in rng.integers(len(group), size=len(group))]

    draws = [
        compare(
            [sample for group in by_kind.values() for sample in again(group)],
            {key: again(group) for key, group in pools.items()},
        )
        for _ in range(DRAWS)
    ]
    found: dict[str, float] = {}
    for name, value in compare(routed, pools).items():
        lo, hi = np.percentile([draw[name] for draw in draws], [5, 95])
        found |= {name: value, f"{name}_lo": float(lo), f"{name}_hi": float(hi)}
    return found


def null_ratio(pools: Pools) -> float:
    """Plain's time by every other control over its time by those between, each kind alike."""
    ratios = []
    for (_, strategy), group in pools.items():
        if strategy == "plain" and len(group) >= 2:
            one, other = (np.mean([s.total_per_token for s in group[start::2]]) for start in (0, 1))
            ratios.append(float(np.log(one / other)))
    return float(np.exp(np.mean(ratios))) if ratios else 1.0


def figures(part: Part, prefix: str) -> dict[str, float]:
    """All numbers of a part."""
    pools = pools_of(part.controls)
    strategies = {strategy for _, strategy in pools}
    held = {kind for kind, _ in pools if all((kind, s) in pools for s in strategies)}
    pools = {key: group for key, group in pools.items() if key[0] in held}
    routed = [s for s in part.routed if s.tokens >= 2 and s.kind in held]
    found = with_intervals(routed, pools)
    late = compare(routed[len(routed) // 2 :], pools)
    found |= {f"{name}_second_half": value for name, value in late.items()}
    found["null"] = null_ratio(pools)
    if part.replay_errors:
        found["replay_error"] = float(np.mean(part.replay_errors))
    return {prefix + name: round(value, 4) for name, value in found.items()}


# --- parts ---------------------------------------------------------------------------------------


def calibrated_part(args: argparse.Namespace, seed: int, console: Console) -> Part:
    """The calibrated model on four lanes."""
    requests, controls, threads = args.requests, args.controls, args.threads
    pair, rng = calibrated(seed), random.Random(seed)
    rows = synthetic.build(pair, requests, rng, max_tokens=TOKENS)
    with tempfile.TemporaryDirectory(prefix="specproxy-routing-") as state:
        models = ["--model", str(pair.target), "--draft", str(pair.draft)]
        with started(models, state=Path(state), console=console, threads=threads) as proxy:
            wanted = len(synthetic.KINDS) * controls * len(proxy.lanes)
            spare = synthetic.build(pair, wanted, rng, max_tokens=TOKENS)
            runs = interleave(rows, spare, list(proxy.lanes), controls, rng)
            return measure("calibrated model", proxy, runs, 60 * args.minutes, console)


def smollm2_part(args: argparse.Namespace, seed: int, console: Console) -> Part:
    """SmolLM2-135M in F16 on two lanes, with prompts from the workload generator."""
    requests, controls, threads = args.requests, max(2, args.controls // 2), args.threads
    kinds = [kind for kind in workload.kinds() if kind != "infill"]
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="specproxy-routing-") as state:
        model = ["--model", str(smollm2("F16"))]
        with started(model, state=Path(state), console=console, threads=threads) as proxy:
            spared = len(kinds) * controls * len(proxy.lanes)
            rows = [
                Row(r.kind, {**r.request, "temperature": TEMPERATURES.get(r.kind, 0.0)})
                for r in workload.build(requests + spared, seed, max_tokens=TOKENS, kinds=kinds)
            ]
            spare, rest = split(rows, controls * len(proxy.lanes))
            runs = interleave(rest, spare, list(proxy.lanes), controls, rng)
            return measure("SmolLM2-135M F16", proxy, runs, 60 * args.minutes, console)


def split(rows: Sequence[Row], each: int) -> tuple[list[Row], list[Row]]:
    """`each` rows of every kind, and the rest."""
    taken: dict[str, int] = defaultdict(int)
    first: list[Row] = []
    rest: list[Row] = []
    for row in rows:
        taken[row.kind] += 1
        (first if taken[row.kind] <= each else rest).append(row)
    return first, rest


def report(console: Console, part: Part, found: Mapping[str, float], prefix: str) -> None:
    """Table and verdicts of a part."""
    print_part(console, part.name, part.routed, part.controls)
    for name in ("gain_over_plain", "gain_over_best_static", "gap_to_oracle", "worst_kind_vs_plain"):
        value, lo, hi = (found[f"{prefix}{name}{end}"] for end in ("", "_lo", "_hi"))
        verdict = ""
        if not prefix and name in TARGETS:
            verdict = f"   target {TARGETS[name]:g}   {'ok' if value >= TARGETS[name] else 'MISSED'}"
        console.print(f"{prefix + name:32} {value:8.4f}  ({lo:.4f} to {hi:.4f}){verdict}", highlight=False)
    if (error := found.get(f"{prefix}replay_error")) is not None:
        verdict = "ok" if error <= MOST_REPLAY_ERROR else "MISSED"
        console.print(
            f"{prefix + 'replay_error':32} {error:8.4f}   target {MOST_REPLAY_ERROR:g}   {verdict}",
            highlight=False,
        )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--part", choices=["calibrated", "smollm2", "both"], default="both")
    parser.add_argument("--requests", type=int, default=150, help="routed requests in each part")
    parser.add_argument("--controls", type=int, default=7, help="control prompts of each kind on each lane")
    parser.add_argument("--minutes", type=float, default=4.5, help="at most so long for the requests of a part")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="0 draws a new one, so that all prompts are fresh")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the lanes are stopped
    console = Console(width=110)
    seed = args.seed or random.SystemRandom().randrange(1, 1_000_000)
    console.print(f"bench-routing, seed {seed} (repeat with --seed {seed})", highlight=False)
    begun = time.monotonic()
    found: dict[str, float] = {}
    if args.part in ("calibrated", "both"):
        part = calibrated_part(args, seed, console)
        mine = figures(part, "")
        report(console, part, mine, "")
        found |= mine
    if args.part in ("smollm2", "both"):
        part = smollm2_part(args, seed, console)
        mine = figures(part, "smollm2_")
        report(console, part, mine, "smollm2_")
        found |= mine
    console.print(f"Done in {time.monotonic() - begun:.0f} s.")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
