"""The demo's result table, and the sums behind its last line."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.live import Sample

__all__ = ["Gain", "gain_over", "per_token", "print_part"]

Key = tuple[str, str]  # kind, strategy


def per_token(samples: Iterable[Sample]) -> dict[Key, tuple[float, float]]:
    """Median decode and end-to-end seconds per token for each (kind, strategy)."""
    groups: dict[Key, list[Sample]] = defaultdict(list)
    for s in samples:
        if s.tokens >= 2:
            groups[s.kind, s.strategy].append(s)
    return {
        key: (
            statistics.median(s.decode_per_token for s in group),
            statistics.median(s.total_per_token for s in group),
        )
        for key, group in groups.items()
    }


@dataclass(frozen=True, slots=True)
class Gain:
    """Time of a fixed strategy over the routed time, for the same tokens: above 1 is a gain. 90% interval."""

    ratio: float
    lo: float
    hi: float


def gain_over(
    strategy: str, routed: Sequence[Sample], control: Sequence[Sample], *, draws: int = 400
) -> Gain | None:
    """What routing gained over always using `strategy`, end to end.

    The fixed strategy's time for a routed request is its tokens times the mean end-to-end time per token of the
    control prompts of the same kind on that strategy. The interval is a bootstrap over requests and controls.
    None where a kind has no control on it.
    """
    pools: dict[str, list[Sample]] = defaultdict(list)
    for s in control:
        if s.strategy == strategy and s.tokens >= 2:
            pools[s.kind].append(s)
    usable = [s for s in routed if s.tokens >= 2]
    if not usable or any(s.kind not in pools for s in usable):
        return None

    def ratio(chosen: Sequence[Sample], draw: dict[str, Sequence[Sample]]) -> float:
        cost = {k: statistics.fmean(s.total_per_token for s in group) for k, group in draw.items()}
        return sum(s.tokens * cost[s.kind] for s in chosen) / sum(s.total_s for s in chosen)

    rng = np.random.default_rng(0)
    samples = sorted(
        ratio(
            [usable[i] for i in rng.integers(len(usable), size=len(usable))],
            {k: [g[i] for i in rng.integers(len(g), size=len(g))] for k, g in pools.items()},
        )
        for _ in range(draws)
    )
    return Gain(ratio(usable, pools), samples[draws // 20], samples[-draws // 20 - 1])


def acceptance(samples: Iterable[Sample]) -> str:
    rows = list(samples)
    drafted = sum(s.drafted for s in rows)
    return f"{sum(s.accepted for s in rows) / drafted:.0%}" if drafted else "–"


def kind_row(kind: str, routed: Sequence[Sample], costs: dict[Key, tuple[float, float]]) -> list[str]:
    """One line of the table."""
    tried = Counter(s.strategy for s in routed)
    settled = Counter(s.strategy for s in routed[len(routed) // 2 :])
    chosen = settled.most_common(1)[0][0]
    mine = [s for s in routed if s.tokens >= 2]
    plain = costs.get((kind, "plain"))
    decode = sum(s.decode_s for s in mine) / max(1, sum(s.tokens - 1 for s in mine))
    total = sum(s.total_s for s in mine) / max(1, sum(s.tokens for s in mine))
    versus = (f"{plain[0] / decode:.2f}×", f"{plain[1] / total:.2f}×") if plain and decode else ("–", "–")
    best = min((k for k in costs if k[0] == kind), key=lambda k: costs[k][0], default=(kind, "–"))
    return [
        kind,
        " ".join(f"{name} {n}" for name, n in tried.most_common()),
        chosen,
        best[1],
        acceptance(routed),
        f"{1 / decode:.0f}" if decode else "–",
        *versus,
    ]


def print_part(console: Console, title: str, routed: Sequence[Sample], control: Sequence[Sample]) -> None:
    """The table, and one line on what routing gained over always-plain and over the best single strategy."""
    costs = per_token(control)
    heading = f"{title}: {len(routed)} routed requests, {len(control)} control prompts"
    table = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("kind", "tried", "chosen", "fastest"):
        table.add_column(name, no_wrap=name != "tried")
    for name in ("acc.", "tok/s", "decode", "total"):
        table.add_column(name, justify="right", no_wrap=True)
    by_kind: dict[str, list[Sample]] = defaultdict(list)
    for s in routed:
        by_kind[s.kind].append(s)
    for kind in sorted(by_kind):
        table.add_row(*kind_row(kind, by_kind[kind], costs))
    console.print(table)
    console.print(
        "chosen: most often in the second half of its requests; fastest: least decode time per token among "
        "the controls; acc.: accepted / drafted; decode, total: speed against plain controls of the same "
        "kind, decoding alone and end to end, first tries included.",
        style="dim",
    )
    gains = {s: gain_over(s, routed, control) for s in sorted({s.strategy for s in control})}
    plain = gains.pop("plain", None)
    fixed = {s: g for s, g in gains.items() if g}
    if plain is None:
        console.print("No plain controls: the gain over plain cannot be told.")
        return
    best_name, best = min([("plain", plain), *fixed.items()], key=lambda item: item[1].ratio)
    console.print(
        f"[bold]Against always plain: {plain.ratio - 1:+.1%}[/bold] "
        f"({plain.lo - 1:+.1%} to {plain.hi - 1:+.1%}); "
        f"[bold]against the best single strategy in hindsight ({best_name}): {best.ratio - 1:+.1%}[/bold] "
        f"({best.lo - 1:+.1%} to {best.hi - 1:+.1%}), end to end, exploration included, 90% intervals.",
        highlight=False,
    )
