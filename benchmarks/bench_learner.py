"""`make bench-learner`: simulated traffic, the learner beside its baselines.

Plays every policy through every world (worlds/README.md) with many seeds. For each world a table; then the
figures, of which the last line is one JSON object:

- ``gap_to_oracle_500``: time above the oracle's over the first 500 requests, mean of the worlds without events;
- ``gap_to_oracle_last_500_of_1000``: the same over requests 500 to 1000;
- ``loss_vs_plain_worst_500``: time above always-plain's over 500 requests, worst world, mean of its seeds;
- ``recovery_requests``: after a change for the worse, requests until the next 100 are again within two
  percentage points of the gap before it, worst world;
- ``false_alarms_per_2000``: drift events in worlds without any;
- ``decide_us_p99``: time of a choice; ``replay_ms_per_1k_tokens``: of a replay; both in processor time of the
  thread, and taken when the other figures are done, so that other work does not count. Every choice is timed in
  three equal runs, and the least counts: what is slow by itself is slow in all of them, what other programs do
  to the caches is not. Python's garbage collector starts alike in each run and strikes the same choices, so its
  time counts.

Keys that end in ``_worst_world`` or ``_p95`` show what the means leave out. The learning curve goes to a CSV
file and to a PNG.

    python -m benchmarks.bench_learner [--worlds DIR] [--seeds N] [--jobs N] [--out DIR]
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from benchmarks.sim import informed_path, oracle_path, play
from benchmarks.stream import draw_stream, mean_ratio
from benchmarks.world import World, WorldError, load_worlds
from specproxy.plot import Line, Panel, write_png
from specproxy.records import Strategy
from specproxy.strategies.base import Policy
from specproxy.strategies.baselines import AlwaysPlain, EpsilonGreedy, FixedLane, RulesOnly, ThompsonOnly, Ucb1
from specproxy.strategies.drafters.ngram import NgramDrafter
from specproxy.strategies.learner import Learner
from specproxy.strategies.replay import replay

Floats = npt.NDArray[np.float64]

REQUESTS = 1000
LONG = 2000  # for false alarms
ORACLE, INFORMED, PLAIN = "oracle", "all that can be known", "always-plain"
OURS, NO_REPLAY = "learner", "learner, no replay"
TARGETS = {
    "gap_to_oracle_500": 0.05,
    "gap_to_oracle_last_500_of_1000": 0.02,
    "loss_vs_plain_worst_500": 0.02,
    "recovery_requests": 300.0,
    "false_alarms_per_2000": 0.05,
    "decide_us_p99": 100.0,
    "replay_ms_per_1k_tokens": 1.0,
}


@dataclass
class Outcome:
    """One world and seed: expected seconds of every request by policy, and what the learner showed beside."""

    cost_s: dict[str, Floats]
    lanes: dict[str, npt.NDArray[np.int64]]
    alarms: list[tuple[int, str]] = field(default_factory=list)


def policies(world: World) -> dict[str, Callable[[], Policy]]:
    """Every policy by the name it has in the tables; `oracle` is computed, not played."""
    fixed = {
        f"fixed {lane.id}": (lambda name=lane.id: FixedLane(name))
        for lane in world.lanes
        if not Strategy.parse(lane.strategy).is_plain
    }
    return {
        PLAIN: AlwaysPlain,
        **fixed,
        "rules only": RulesOnly,
        "epsilon-greedy": EpsilonGreedy,
        "ucb1": Ucb1,
        "thompson": ThompsonOnly,
        NO_REPLAY: Learner,
        OURS: Learner,
    }


def run_seed(world: World, seed: int) -> Outcome:
    """Play all policies through one seed of a world; where nothing happens the learner goes on to 2000
    requests."""
    long = draw_stream(world, REQUESTS if world.events else LONG, seed)
    short = long.head(REQUESTS)
    outcome = Outcome({ORACLE: oracle_path(short)}, {})
    if any(lane.control == "reload" for lane in world.lanes) and not (world.events or world.absences):
        outcome.cost_s[INFORMED] = informed_path(short)
    for name, make in policies(world).items():
        ours = name == OURS
        run = play(long if ours else short, make(), seed + 1_000_003, replay=name != NO_REPLAY)
        outcome.cost_s[name], outcome.lanes[name] = run.cost_s[:REQUESTS], run.lanes[:REQUESTS]
        if ours:
            outcome.alarms = run.events
    return outcome


def gap(outcomes: list[Outcome], name: str, start: int, end: int, base: str = ORACLE) -> Floats:
    """Time above a base policy's between two requests, relative, by seed."""
    return np.array([o.cost_s[name][start:end].sum() / o.cost_s[base][start:end].sum() - 1.0 for o in outcomes])


def recovery(outcomes: list[Outcome], name: str, after: int) -> float:
    """Requests after an event until the next 100 are within 0.02 of the gap before it; inf if never seen."""
    before = float(gap(outcomes, name, max(0, after - 200), after).mean())
    for start in range(after, REQUESTS - 100, 10):
        if float(gap(outcomes, name, start, start + 100).mean()) <= before + 0.02:
            return float(start - after)
    return float("inf")


def print_world(console: Console, world: World, outcomes: list[Outcome]) -> None:
    """One table: a row a policy."""
    table = Table(title=f"{world.name}: {len(outcomes)} seeds", title_justify="left")
    for column in ("policy", "gap 0–500", "gap 500–1000", "vs plain 0–500", "worst seed", "recovery"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    events = [event.after for event in world.events if event.ratio > 1.0]
    for name in outcomes[0].cost_s:
        loss = gap(outcomes, name, 0, 500, PLAIN)
        back = f"{recovery(outcomes, name, events[0]):.0f}" if events and name != ORACLE else ""
        table.add_row(
            name,
            f"{gap(outcomes, name, 0, 500).mean():+.1%}",
            f"{gap(outcomes, name, 500, REQUESTS).mean():+.1%}",
            f"{loss.mean():+.1%}",
            f"{loss.max():+.1%}",
            back,
            style="bold" if name == OURS else None,
        )
    console.print(table)
    _print_cells(console, world, outcomes)


def _print_cells(console: Console, world: World, outcomes: list[Outcome]) -> None:
    """Where the learner goes in the end, kind by kind."""
    shares = []
    for k, kind in enumerate(world.kinds):
        means = ", ".join(
            f"{lane.id} {mean_ratio(world, i, k):.2f}"
            for i, lane in enumerate(world.lanes)
            if lane.id in kind.lanes
        )
        shares.append(f"{kind.key}: {means}")
    console.print("  ratios to plain: " + "; ".join(shares), style="dim", highlight=False)
    alarms = sum(len(o.alarms) for o in outcomes)
    if alarms:
        first = next(o.alarms[0] for o in outcomes if o.alarms)
        console.print(
            f"  {alarms} drift events; one after request {first[0]}: {first[1]}", style="dim", highlight=False
        )


def decide_times(worlds: list[World]) -> Floats:
    """Seconds of every choice, least of three runs of each world, nothing else of the benchmark running."""
    streams = [draw_stream(world, REQUESTS, 0) for world in worlds]
    runs = []
    for _ in range(3):
        gc.collect()
        runs.append(np.concatenate([play(stream, Learner(), 1, timed=True).decide_s for stream in streams]))
    return np.min(runs, axis=0)


def replay_ms_per_1k() -> float:
    """Median time of replaying answers that repeat their prompts in part, per 1000 tokens of prompt and
    answer."""
    rng = np.random.default_rng(5)
    times = []
    for copied in (0.0, 0.3, 0.8):
        tokens: list[int] = []
        while len(tokens) < 1000:
            if len(tokens) > 50 and rng.random() < copied:
                start = int(rng.integers(0, len(tokens) - 20))
                tokens += tokens[start : start + int(rng.geometric(0.1))]
            else:
                tokens += np.minimum(rng.zipf(1.2, 5), 40_000).tolist()
        for _ in range(21):
            started = time.thread_time()
            replay(tokens[:500], tokens[500:1000], NgramDrafter(), 8)
            times.append(time.thread_time() - started)
    return float(np.median(times)) * 1000.0


def figures(worlds: list[World], results: dict[str, list[Outcome]]) -> dict[str, float]:
    """The numbers of the last line."""
    steady = [results[w.name] for w in worlds if not w.events]
    early = [float(gap(o, OURS, 0, 500).mean()) for o in steady]
    late = [float(gap(o, OURS, 500, REQUESTS).mean()) for o in steady]
    losses = {w.name: gap(results[w.name], OURS, 0, 500, PLAIN) for w in worlds}
    worst = max(losses, key=lambda name: float(losses[name].mean()))
    worse = [(w.name, e.after) for w in worlds for e in w.events if e.ratio > 1.0]
    decide = decide_times(worlds)
    alarms = [len(o.alarms) for outcomes in steady for o in outcomes]
    found = {
        "gap_to_oracle_500": _mean(early),
        "gap_to_oracle_500_worst_world": max(early, default=0.0),
        "gap_to_oracle_last_500_of_1000": _mean(late),
        "gap_to_oracle_last_500_of_1000_worst_world": max(late, default=0.0),
        "loss_vs_plain_worst_500": float(losses[worst].mean()),
        "loss_vs_plain_worst_500_p95": float(np.percentile(losses[worst], 95)),
        "recovery_requests": max((recovery(results[name], OURS, after) for name, after in worse), default=0.0),
        "false_alarms_per_2000": _mean(alarms),
        "decide_us_p50": float(np.percentile(decide, 50)) * 1e6,
        "decide_us_p99": float(np.percentile(decide, 99)) * 1e6,
        "replay_ms_per_1k_tokens": replay_ms_per_1k(),
    }
    return {key: round(value, 4) for key, value in found.items()}


def _mean(values: list[float] | list[int]) -> float:
    return float(np.mean(values)) if values else 0.0


def write_curve(worlds: list[World], results: dict[str, list[Outcome]], folder: Path) -> Path:
    """Cumulative gap to the oracle after every ten requests, by world and policy, and a PNG of it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "learning_curve.csv"
    curves: dict[tuple[str, str], Floats] = {}
    for world in worlds:
        outcomes = results[world.name]
        best = np.mean([np.cumsum(o.cost_s[ORACLE]) for o in outcomes], axis=0)
        for name in outcomes[0].cost_s:
            spent = np.mean([np.cumsum(o.cost_s[name]) for o in outcomes], axis=0)
            curves[world.name, name] = (spent / best - 1.0)[9::10]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["world", "policy", "requests", "cumulative_gap_to_oracle"])
        for (world_name, name), curve in curves.items():
            writer.writerows([world_name, name, 10 * i + 10, round(float(v), 5)] for i, v in enumerate(curve))
    _draw(curves, path.with_suffix(".png"))
    return path


def _draw(curves: dict[tuple[str, str], Floats], path: Path) -> None:
    """One panel a world."""
    worlds = list(dict.fromkeys(world for world, _ in curves))
    panels = []
    for world in worlds:
        lines = []
        for (name, policy), curve in curves.items():
            if name == world and policy != ORACLE:
                x = 10.0 * np.arange(1, len(curve) + 1)
                lines.append(Line(policy, x.tolist(), (100 * curve).tolist(), bold=policy == OURS))
        panels.append(Panel(world, lines, REQUESTS, 40.0, "requests", "% above oracle"))
    write_png(path, panels)


def main() -> int:
    """Run all, print all; exit code 1 for worlds that can't be read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--worlds", type=Path, default=Path(__file__).parent / "worlds")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(".cache/bench-learner"))
    args = parser.parse_args()
    console = Console(width=100)
    try:
        worlds = load_worlds(args.worlds)
    except WorldError as error:
        console.print(f"bench-learner: {error}", style="red", highlight=False)
        return 1
    results: dict[str, list[Outcome]] = {}
    with ProcessPoolExecutor(args.jobs) as pool:
        futures = {w.name: [pool.submit(run_seed, w, seed) for seed in range(args.seeds)] for w in worlds}
        for world in worlds:
            results[world.name] = [future.result() for future in futures[world.name]]
            print_world(console, world, results[world.name])
    found = figures(worlds, results)
    for key, target in TARGETS.items():
        verdict = "ok" if found[key] <= target else "MISSED"
        console.print(f"{key:34} {found[key]:9.4f}   target {target:g}   {verdict}", highlight=False)
    console.print(f"learning curve: {write_curve(worlds, results, args.out)}", highlight=False)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
