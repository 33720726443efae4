"""The engine's `auto` against what it chooses from, and against llama-server, over HTTP by wall clock.

    python -m benchmarks.bench_auto [--quick] [--part PART]... [--minutes N]

Parts, each of which fills in its own keys of the last line, one JSON object:

- grid: on five kinds of text, against the best of a grid of strategies and lengths, chosen in hindsight.
- mixed: on requests whose text changes its nature, against the best fixed strategy and length, chains included.
- moe: on a fast model of many experts, where every drafter loses, against plain.
- servers: on the mixed requests, against the best of several configurations of llama-server, chains included.
- schema: on JSON-schema requests with a real model, against plain.

Contenders answer the same new prompts in shuffled order. The whole grid is run once to find the few that are
fastest on each kind; those are then measured against auto by themselves. Which of them is the best in
hindsight is decided for each round by the other rounds, since the fastest of several looks faster than it is.
The successors of all words are drawn anew for every run. Strategies of llama-server that remember earlier
requests are left out: texts of one run overlap. Below twelve minutes the grid is smaller; each part has a least
number of pairs, however short it is.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.auto_contest import AUTO, Contender, Contest, Engine
from benchmarks.engine_client import Reply, ask
from benchmarks.engine_figures import Ratio
from benchmarks.engine_servers import native_program, start_engine, start_llama_server
from benchmarks.models import calibrated, smollm2
from tests.support.calibrated import REGIONS, CalibratedPair, Region

KINDS = ("json", "code", "edit", "prose", "creative")
Lengths = dict[str, tuple[int, ...]]
LENGTHS: Lengths = {"ngram": (2, 4, 6, 8, 16), "draft": (1, 2, 3, 4, 6), "mtp": (1, 2, 3, 4, 6)}
QUICK_LENGTHS: Lengths = {"ngram": (4, 8, 16), "draft": (2, 3, 4), "mtp": (2, 3, 4)}
CHAINS = ("ngram+draft:3", "ngram+draft:4", "ngram+mtp:3", "ngram+mtp:4")
SERVERS = ("plain", "ngram:8", "draft:3", "mtp:3", "mtp:4", "ngram+draft:3", "ngram+mtp:3")
FINALISTS = 3
STRETCH = 40  # words of one nature in a mixed text
MIXED = Region(
    "mixed",
    400,
    mtp=0.6,
    draft=0.6,
    # prose, a JSON object, prose, code; which of it is also quoted in the prompt differs
    stretches=((STRETCH, 0.35, 0.25), (STRETCH, 0.95, 0.80), (STRETCH, 0.35, 0.25), (STRETCH, 0.62, 0.96)),
)
SHARES = {
    "grid": 0.38,
    "mixed": 0.26,
    "moe": 0.11,
    "servers": 0.15,
    "schema": 0.1,
}  # of the time, start-up included
SHORT = 12.0  # minutes below which a smaller grid is looked through
SCHEMAS = Path(__file__).parent / "data" / "schemas.json"


@dataclass
class Bench:
    """What all parts share, and the figures so far."""

    seed: int
    threads: int
    minutes: float
    tokens: int
    quick: bool
    llama_server: Path | None
    figures: dict[str, float | str | None] = field(default_factory=dict)
    end: float = 0.0  # of the part that runs now, by the monotonic clock

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def note(self, key: str, ratio: Ratio) -> None:
        """A figure with its interval."""
        self.figures |= {key: ratio.median, f"{key}_lo": ratio.low, f"{key}_hi": ratio.high}

    def lengths(self) -> Lengths:
        """The grid."""
        return QUICK_LENGTHS if self.quick or self.minutes < SHORT else LENGTHS

    def pair(self) -> CalibratedPair:
        """The model of all parts but two."""
        return calibrated(self.seed, regions=(*REGIONS, MIXED))


def grid(bench: Bench) -> None:
    """Homogeneous text."""
    pair = bench.pair()
    with start_engine(pair.target, pair.draft, threads=bench.threads) as server:
        engine = Engine(server, bench.tokens)
        names = ["plain", *(f"{name}:{n}" for name, lengths in bench.lengths().items() for n in lengths)]
        fixed = [engine.contender(name) for name in names]
        contest = Contest(lambda kind, number: f"please write the text {pair.marker(kind, number)}")
        for kind in KINDS:
            contest.round(kind, fixed)
            print(f"{kind:9} fastest of {len(fixed)}: {contest.best(kind, names)}", flush=True)
        finals = {kind: _finals(engine, contest.fastest(kind, fixed, FINALISTS)) for kind in KINDS}
        contest.forget()
        contest.rounds(finals, bench.end, least=4)
        worst: dict[str, Ratio] = {}
        for kind, contenders in finals.items():
            to_best, best = contest.against_best(kind, _fixed(contenders))
            to_plain = contest.ratio(kind, "plain")
            null = contest.ratio(kind, "plain again", "plain")
            print(f"{kind:9} {to_best} of {best:9} {to_plain} of plain   null {null}   {engine.plans(kind)}")
            for key, ratio in (("auto_vs_best_grid_worst", to_best), ("auto_vs_plain_dense_worst", to_plain)):
                if key not in worst or ratio.median < worst[key].median:
                    worst[key] = ratio
        for key, ratio in worst.items():
            bench.note(key, ratio)


def _finals(engine: Engine, fastest: list[Contender]) -> list[Contender]:
    """The fastest with plain, twice, and auto."""
    others = [each for each in fastest if each.name != "plain"]
    return [
        *others,
        engine.contender("plain"),
        engine.contender("plain", "plain again"),
        engine.contender(AUTO),
    ]


def _fixed(contenders: list[Contender]) -> list[str]:
    return [each.name for each in contenders if each.name not in (AUTO, "plain again")]


def mixed_prompt(bench: Bench, pair: CalibratedPair) -> Callable[[str, int], str]:
    """Requests for mixed text, of which one stretch stands in the prompt: an edit inside of a chat."""

    def prompt(_: str, number: int) -> str:
        start = bench.random.randrange(3) * STRETCH + STRETCH // 2
        ids = pair.text_ids("mixed", start + STRETCH, number)[start:]
        quoted = b"".join(pair.vocabulary.tokens[token] for token in ids).decode()
        return f"please rewrite this{quoted} and explain {pair.marker('mixed', number)}"

    return prompt


def mixed(bench: Bench) -> None:
    """Text that changes its nature within a request."""
    pair = bench.pair()
    with start_engine(pair.target, pair.draft, threads=bench.threads) as server:
        engine = Engine(server, 4 * STRETCH)
        names = [
            "plain",
            *(f"{name}:{n}" for name, lengths in bench.lengths().items() for n in lengths),
            *CHAINS,
        ]
        fixed = [engine.contender(name) for name in names]
        contest = Contest(mixed_prompt(bench, pair))
        contest.round("mixed", fixed)
        finals = _finals(engine, contest.fastest("mixed", fixed, FINALISTS + 1))
        contest.forget()
        contest.rounds({"mixed": finals}, bench.end, least=8)
        ratio, best = contest.against_best("mixed", _fixed(finals))
        null = contest.ratio("mixed", "plain again", "plain")
        print(f"mixed     {ratio} of {best}   null {null}   {engine.plans('mixed')}")
        bench.note("auto_vs_best_fixed_mixed", ratio)
        bench.figures["best_fixed_mixed"] = best


def moe(bench: Bench) -> None:
    """A model of many experts."""
    pair = calibrated(bench.seed, experts=32)
    with start_engine(pair.target, pair.draft, threads=bench.threads) as server:
        engine = Engine(server, 2 * bench.tokens)
        contest = Contest(lambda kind, number: f"please write the text {pair.marker(kind, number)}")
        contenders = [engine.contender(name) for name in ("plain", AUTO)]
        finals = {kind: [*contenders, engine.contender("plain", "plain again")] for kind in KINDS}
        contest.rounds(finals, bench.end, least=4)
        worst: Ratio | None = None
        for kind in KINDS:
            ratio, null = contest.ratio(kind, "plain"), contest.ratio(kind, "plain again", "plain")
            print(f"moe {kind:9} {ratio} of plain   null {null}   {engine.plans(kind)}")
            worst = ratio if worst is None or ratio.median < worst.median else worst
        if worst is not None:
            bench.note("auto_vs_plain_moe_worst", worst)


def servers(bench: Bench) -> None:
    """llama-server, compiled for this machine where it can be."""
    pair = bench.pair()
    program, source = native_program(bench.llama_server, compile_it=not bench.quick)
    print(f"llama-server: {source}: {program.build}", flush=True)
    bench.figures["llama_server"] = source
    with ExitStack() as stack:
        ours = stack.enter_context(start_engine(pair.target, pair.draft, threads=bench.threads))
        engine = Engine(ours, 4 * STRETCH)
        rivals = []
        for name in SERVERS:
            draft = pair.draft if "draft" in name else None
            server = start_llama_server(program, pair.target, draft, name, threads=bench.threads)
            port = stack.enter_context(server).port
            rivals.append(Contender(f"llama-server {name}", _asking(port, 4 * STRETCH)))
        contest = Contest(mixed_prompt(bench, pair))
        contest.round("mixed", [*rivals, engine.contender(AUTO)])
        finals = [*contest.fastest("mixed", rivals, 2), engine.contender(AUTO)]
        contest.forget()
        contest.rounds({"mixed": finals}, bench.end, least=5)
        ratio, best = contest.against_best("mixed", _fixed(finals))
        print(f"mixed     {ratio} of {best}")
        bench.note("auto_vs_llama_server_best", ratio)
        bench.figures["llama_server_best"] = best


def _asking(port: int, tokens: int) -> Callable[[str, str], Reply]:
    return lambda _, prompt: ask(port, prompt, tokens)


def schema(bench: Bench) -> None:
    """JSON-schema requests: what the grammar forces, with n-grams and without."""
    schemas = json.loads(SCHEMAS.read_text())
    with start_engine(smollm2("F16"), None, threads=bench.threads) as server:
        engine = Engine(server, 96)

        def prompt(kind: str, number: int) -> str:
            return f"Example {number} of a JSON object for '{kind}', with made-up values:\n"

        contest = Contest(prompt)
        kinds = {}
        for each in schemas[:: 2 if bench.quick else 1]:
            asked = {"json_schema": each["schema"], "ignore_eos": False}
            kinds[each["name"]] = [engine.contender(name, **asked) for name in ("plain", "ngram:8", AUTO)]
        contest.rounds(kinds, bench.end, least=2)
        pooled = Contest(prompt)
        for by_name in contest.seconds.values():
            for name, seconds in by_name.items():
                pooled.seconds.setdefault("all", {}).setdefault(name, []).extend(seconds)
        for key, other in (("schema_gain", "plain"), ("schema_gain_over_ngram", "ngram:8")):
            ratio = pooled.ratio("all", other)
            print(f"schema    {ratio} of {other}")
            bench.note(key, ratio)


PARTS: dict[str, Callable[[Bench], None]] = {
    "grid": grid,
    "mixed": mixed,
    "moe": moe,
    "servers": servers,
    "schema": schema,
}


def finish(bench: Bench) -> None:
    """Print the last line."""
    found = bench.figures
    dense, experts = found.get("auto_vs_plain_dense_worst"), found.get("auto_vs_plain_moe_worst")
    if isinstance(dense, float) and isinstance(experts, float):
        worst = "dense" if dense < experts else "moe"
        for end in ("", "_lo", "_hi"):
            found[f"auto_vs_plain_worst{end}"] = found[f"auto_vs_plain_{worst}_worst{end}"]
    print(json.dumps({key: round(v, 4) if isinstance(v, float) else v for key, v in found.items()}), flush=True)


def main() -> None:
    """Run the parts and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=list(PARTS), help="all, if none is named")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--minutes", type=float, default=25.0, help="about how long all takes that is asked for"
    )
    parser.add_argument("--tokens", type=int, default=128, help="length of a reply of one kind")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 2**31, help="of the texts; else new")
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--quick", action="store_true", help="a smaller grid, no llama-server compiled")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped
    started = time.monotonic()
    minutes = min(args.minutes, 4.0) if args.quick else args.minutes
    bench = Bench(args.seed, args.threads, minutes, args.tokens, args.quick, args.llama_server)
    try:
        names = args.part or list(PARTS)
        for i, name in enumerate(names):
            left = sum(SHARES[each] for each in names[i:])  # what one part leaves or takes over is the others'
            bench.end = time.monotonic() + (started + 60 * minutes - time.monotonic()) * SHARES[name] / left
            PARTS[name](bench)
    finally:
        finish(bench)


if __name__ == "__main__":
    main()
