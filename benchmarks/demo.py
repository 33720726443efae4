"""`make demo`: the main job on a real model, then on a model whose best strategies are known.

Starts `specproxy start` with managed lanes, sends a fresh mix of requests through it with the official openai
client (the embedded engine also gets some from the ollama client), and sends fresh prompts of the same kinds
straight to every lane as the control, interleaved (with the embedded engine pinned through the proxy, which
learns from them too). Ends with a table for each part: what was tried, what was chosen, and what it gained or
lost. Losing numbers are shown as they are.

    python -m benchmarks.demo [--requests N] [--seed N] [--part real|synthetic|both]
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import synthetic, workload
from benchmarks.demo_table import print_part
from benchmarks.live import Row, Running, Sample, ollama_body, send, send_ollama, started
from benchmarks.models import calibrated, smollm2

CONTROLS = 2  # control prompts for each kind on each lane
TEMPERATURES = {"creative": 1.0, "prose": 0.7, "chat": 0.7, "code": 0.2}  # as clients ask; 0 for other kinds


def share_out(rows: list[Row], controls: int) -> tuple[list[Row], list[Row]]:
    """Split a mix without repeats into what is routed and `controls` rows of each kind."""
    routed: list[Row] = []
    control: list[Row] = []
    for row in rows:
        enough = sum(c.kind == row.kind for c in control) >= controls
        (routed if enough else control).append(row)
    return routed, control


def plan_runs(
    rows: list[Row], controls: list[Row], strategies: list[str], rng: random.Random
) -> list[tuple[Row, str | None]]:
    """Routed requests in order, with each control (row, strategy) dropped in at a random place."""
    runs: list[tuple[Row, str | None]] = [(row, None) for row in rows]
    by_kind: dict[str, list[Row]] = {}
    for row in controls:
        by_kind.setdefault(row.kind, []).append(row)
    for strategy in strategies:
        for kind_rows in by_kind.values():
            for _ in range(min(CONTROLS, len(kind_rows))):
                runs.insert(rng.randrange(len(runs) + 1), (kind_rows.pop(), strategy))
    return runs


def send_routed(proxy: Running, row: Row, i: int) -> Sample:
    """Every other request as a stream; every third in Ollama's shape, where the lanes answer that."""
    body = ollama_body(row.request) if proxy.ollama_model and i % 3 == 0 else None
    if body is None:
        return send(proxy.url, row, stream=i % 2 == 0)
    return send_ollama(proxy.url, proxy.ollama_model, row.kind, body, stream=i % 2 == 0)


def run_part(
    title: str, proxy: Running, rows: list[Row], controls: list[Row], rng: random.Random, console: Console
) -> tuple[list[Sample], list[Sample]]:
    """Send everything, one request at a time; returns routed and control samples."""
    routed: list[Sample] = []
    control: list[Sample] = []
    runs = plan_runs(rows, controls, list(proxy.lanes), rng)
    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}"),
    )
    with Progress(*columns, console=console, transient=console.is_terminal) as progress:
        task = progress.add_task(title, total=len(runs), last="")
        for i, (row, strategy) in enumerate(runs):
            if strategy is None:
                sample = send_routed(proxy, row, i)
                routed.append(sample)
                last = f"{sample.kind} → {sample.strategy}"
            else:
                control.append(send(proxy.lanes[strategy], row, stream=False, strategy=strategy))
                last = f"{row.kind}: control on {strategy}"
            progress.update(task, advance=1, last=last)
    return routed, control


def real_part(n: int, seed: int, console: Console, state: Path, engine: str) -> None:
    """SmolLM2-135M: a trained model, with plain and n-gram lanes."""
    console.print("\n[bold]Part 1: SmolLM2-135M-Instruct, a real model[/bold]")
    model = smollm2("F16")
    console.print(
        "Re-stored once from Q4_1 as F16, so that decoding is bound by memory bandwidth, as it is for the "
        "large models that people run. It has no MTP layers, and no smaller model drafts for it usefully: "
        "plain and n-gram lanes."
    )
    rng = random.Random(seed)
    kinds = [k for k in workload.kinds() if k != "infill"]
    rows = [
        Row(r.kind, {**r.request, "temperature": TEMPERATURES.get(r.kind, 0.0)})
        for r in workload.build(n + len(kinds) * CONTROLS * 2, seed, max_tokens=48, kinds=kinds)
    ]
    mix, pool = share_out(rows, CONTROLS * 2)
    with started(["--model", str(model)], state=state, console=console, engine=engine) as proxy:
        routed, control = run_part("real model", proxy, mix, pool, rng, console)
        print_part(console, "SmolLM2-135M F16", routed, control)


def synthetic_part(n: int, seed: int, console: Console, state: Path, engine: str) -> None:
    """The calibrated model: the best strategy of every kind is known beforehand."""
    console.print("\n[bold]Part 2: synthetic[/bold], a model written to have known acceptance by kind of text")
    pair = calibrated(seed)
    console.print(
        f"{pair.target.stat().st_size / 1e6:.0f} MB F16 with an MTP layer, and a draft model. Its text is "
        "meaningless; its matrix products, caches and sizes are real."
    )
    rng = random.Random(seed)
    mix = synthetic.build(pair, n, rng)
    with started(
        ["--model", str(pair.target), "--draft", str(pair.draft)], state=state, console=console, engine=engine
    ) as proxy:
        pool = synthetic.build(pair, len(synthetic.KINDS) * CONTROLS * len(proxy.lanes), rng)
        routed, control = run_part("synthetic", proxy, mix, pool, rng, console)
        print_part(console, "calibrated model (synthetic)", routed, control)


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=60, help="routed requests in each part")
    parser.add_argument(
        "--seed", type=int, default=0, help="0 draws a new one, so that every run has fresh prompts"
    )
    parser.add_argument("--part", choices=["real", "synthetic", "both"], default="both")
    parser.add_argument("--engine", choices=["managed", "embedded"], default="managed")
    args = parser.parse_args()
    console = Console()
    seed = args.seed or random.SystemRandom().randrange(1, 1_000_000)
    console.print(f"specproxy demo, seed {seed} (repeat with --seed {seed})")
    begun = time.monotonic()
    parts: list[Callable[[int, int, Console, Path, str], None]] = []
    if args.part in ("real", "both"):
        parts.append(real_part)
    if args.part in ("synthetic", "both"):
        parts.append(synthetic_part)
    for part in parts:
        with tempfile.TemporaryDirectory(prefix="specproxy-demo-") as state:
            part(args.requests, seed, console, Path(state), args.engine)
    console.print(f"\nDone in {time.monotonic() - begun:.0f} s.")


if __name__ == "__main__":
    main()
