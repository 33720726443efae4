"""What measuring lanes first is worth: first requests of a recorded world, with a profile before them or not.

    python -m benchmarks.profile_sim [--worlds NAME,NAME] [--requests N] [--seeds N] [--shift SD]

A profile's prompts are not the user's: on each kind and lane they take `--shift` (standard deviation of the
logarithm) more or less of plain's time than the requests that follow. Gains are over always-plain and over the
best single lane in hindsight, `worst_kind_vs_plain` is plain's time over the policy's on the kind where that is
least, and `gap_to_oracle` what it takes above the oracle; means over seeds, with standard errors. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.sim import TARGET, LaneTable, observe, oracle_path, play, replayed
from benchmarks.stream import draw_stream
from benchmarks.world import World, load_worlds
from specproxy.config_values import PROFILE_S
from specproxy.records import PROFILE, TempBucket, Workload
from specproxy.strategies import profiling
from specproxy.strategies.learner import Learner

WORLDS = Path(__file__).parent / "worlds"
FIGURES = ("gain_over_plain", "gain_over_best_static", "worst_kind_vs_plain", "gap_to_oracle", "profile_s")
PROMPT = 100  # tokens of a profile's prompt
POOL = 800  # requests that a profile draws on
NOISE = 0.06  # of short runs beyond the world's own


def profiled(learner: Learner, world: World, seed: int, shift: float) -> float:
    """Measure all lanes as an idle proxy does, on other requests of the world; returns the seconds it took."""
    pool, table, rng = draw_stream(world, POOL, seed + 1_000_000), LaneTable(world), np.random.default_rng(seed)
    waiting: dict[str, list[int]] = defaultdict(list)
    for i, kind in enumerate(pool.kinds):
        waiting[world.kinds[kind].kind].append(i)
    lanes = profiling.subjects([status.lane for status in table.status if status.resident])
    model, spent = learner.model(TARGET), 0.0
    off: dict[tuple[str, str], float] = {}
    while (
        spent < PROFILE_S
        and (planned := profiling.next_round(model, lanes, [kind for kind, rows in waiting.items() if rows]))
        is not None
    ):
        i = waiting[planned.kind].pop()
        for lane in planned.lanes:
            seen = observe(pool, table, i, table.index[lane.id], 0.0, spent)
            tokens, whole = min(planned.tokens, seen.output_tokens), seen.output_tokens
            share = (tokens - 1) / max(whole - 1, 1)
            factor = math.exp(NOISE * rng.standard_normal())
            if not lane.strategy.is_plain:
                factor *= math.exp(off.setdefault((planned.kind, lane.id), shift * rng.standard_normal()))
            seen = replace(
                seen,
                workload=Workload(planned.kind, TempBucket.WARM, frozenset({PROFILE})),
                prompt_tokens=PROMPT,
                prefill_s=PROMPT / world.plain.prefill_tokens_per_s,
                output_tokens=tokens,
                decode_s=(seen.decode_s or 0.0) * share * factor,
                draft_tokens=round(seen.draft_tokens * share),
                accepted_tokens=round(seen.accepted_tokens * share),
                concurrency=1.0,
            )
            spent += (seen.decode_s or 0.0) + (seen.prefill_s or 0.0)
            profiling.learn(model, seen)
            for other, widths in pool.drafts[i].items():
                learner.learn_replay(table.status[other].lane, seen, replayed(widths, tokens))
    return spent


def measure(world: World, requests: int, seed: int, shift: float | None) -> list[float]:
    """The figures of one seed; without a `shift` there is no profile."""
    stream, learner = draw_stream(world, requests, seed), Learner()
    spent = 0.0 if shift is None else profiled(learner, world, seed, shift)
    run = play(stream, learner, seed)
    plain = next(i for i, lane in enumerate(world.lanes) if lane.strategy == "plain")
    fixed = [i for i, lane in enumerate(world.lanes) if lane.control != "reload"]
    whole, by_lane = run.cost_s.sum(), stream.cost_s.sum(axis=0)
    kinds = [stream.kinds == kind for kind in set(stream.kinds.tolist())]
    worst = min(stream.cost_s[rows, plain].sum() / run.cost_s[rows].sum() for rows in kinds)
    gains = by_lane[plain] / whole - 1.0, by_lane[fixed].min() / whole - 1.0
    return [*gains, worst, whole / oracle_path(stream).sum() - 1.0, spent]


def main() -> None:
    """Print a line for each world and variant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--worlds", default="smollm2-wheel,dense-cpu,many-kinds")
    parser.add_argument("--requests", type=int, default=137)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--shift", type=float, default=0.2)
    args = parser.parse_args()
    known = {world.name: world for world in load_worlds(WORLDS)}
    found: dict[str, float] = {}
    for name in args.worlds.split(","):
        for label, shift in (("without", None), ("with", args.shift)):
            rows = np.array([measure(known[name], args.requests, s, shift) for s in range(1, args.seeds + 1)])
            for key, column in zip(FIGURES, rows.T, strict=True):
                mean, error = float(column.mean()), float(column.std()) / math.sqrt(len(rows))
                found[f"{name}_{label}_{key}"] = round(mean, 4)
                print(f"{name:14} {label:8} {key:22} {mean:8.4f} ± {error:.4f}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
