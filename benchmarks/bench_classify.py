"""How well requests are classified, and what the mistakes cost.

    python -m benchmarks.bench_classify [--n N] [--seed N] [--rows FILE.jsonl] [--ratios FILE.json]

Prompts are those of `benchmarks.workload`, or labelled rows of your own: JSON lines {"class": …, "request": …}
with OpenAI chat requests. Temperatures are random and independent of the class. Two sets of hand-written
everyday prompts follow: `everyday`, on which the rules were improved, and `heldout`, from which no rule was
ever taken, so that it shows what to expect of phrasings that nobody thought of. It stays honest only as long
as nobody tunes on it.

A mistake matters as far as it sends a request to a slower lane. Regret is the time per token of the lane that
is best for the predicted class, under the true class, relative to the best lane of the true class, minus one;
averaged over all rows. It needs the time per token of every class on every lane relative to plain: two tables
of measured figures are built in, and `--ratios` gives another, {"class": {"lane": ratio, …}, …}. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from benchmarks import workload
from specproxy.proxy.dialects import read_facts
from specproxy.records import Dialect, RequestFacts, Turn
from specproxy.strategies.classify import KINDS, classify

Ratios = Mapping[str, Mapping[str, float]]

# Decided by fields or content alone; word problems against prose, and talk against prose, may stay confused.
DECIDABLE = frozenset(KINDS) - {"math", "prose", "chat"}

# Time per token relative to plain (below 1 is faster). Measured on one F16 model of 1024 x 16 layers with
# lanes of plain, n-gram, draft model and MTP in native llama-server on two cores: five kinds of text, to which
# the others are mapped. Greedy, except creative text at temperature 1.
_TEXTS = {
    "json": {"plain": 1.0, "ngram": 49 / 51, "draft": 49 / 99, "mtp": 49 / 105},
    "code": {"plain": 1.0, "ngram": 54 / 50, "draft": 54 / 83, "mtp": 54 / 87},
    "edit": {"plain": 1.0, "ngram": 53 / 142, "draft": 53 / 61, "mtp": 53 / 68},
    "prose": {"plain": 1.0, "ngram": 54 / 51, "draft": 54 / 47, "mtp": 54 / 50},
    "creative": {"plain": 1.0, "ngram": 55 / 56, "draft": 55 / 31, "mtp": 55 / 30},
}
FOUR_LANES: Ratios = {
    "json_schema": _TEXTS["json"],
    "json": _TEXTS["json"],
    "tool_call": _TEXTS["json"],
    "code": _TEXTS["code"],
    "infill": _TEXTS["code"],
    "code_edit": _TEXTS["edit"],
    "grounded": _TEXTS["prose"],
    "translation": _TEXTS["prose"],
    "math": _TEXTS["prose"],
    "prose": _TEXTS["prose"],
    "chat": _TEXTS["prose"],
    "creative": _TEXTS["creative"],
}

# SmolLM2-135M F16 on the llama-server of the xllamacpp wheel, plain against ngram-simple (3, 8), nine real
# kinds; the three that were not measured take the figures of the kind nearest to them.
TWO_LANES: Ratios = {
    "json_schema": {"plain": 1.0, "ngram": 69 / 76},
    "json": {"plain": 1.0, "ngram": 69 / 76},
    "tool_call": {"plain": 1.0, "ngram": 76 / 70},
    "code": {"plain": 1.0, "ngram": 77 / 69},
    "infill": {"plain": 1.0, "ngram": 77 / 69},
    "code_edit": {"plain": 1.0, "ngram": 67 / 71},
    "grounded": {"plain": 1.0, "ngram": 60 / 48},
    "translation": {"plain": 1.0, "ngram": 76 / 88},
    "math": {"plain": 1.0, "ngram": 77 / 69},
    "prose": {"plain": 1.0, "ngram": 79 / 75},
    "chat": {"plain": 1.0, "ngram": 79 / 75},
    "creative": {"plain": 1.0, "ngram": 77 / 76},
}

Labelled = tuple[str, dict[str, object]]  # true class, request
Pair = tuple[str, str]  # true class, predicted class


def main() -> None:
    """Print the report."""
    args = _arguments()
    console = Console()
    tables = (
        {"file": _load_ratios(args.ratios)}
        if args.ratios
        else {"four lanes": FOUR_LANES, "two lanes": TWO_LANES}
    )
    rows = _generated(args.n, args.seed) if args.rows is None else _from_file(args.rows, args.seed)
    pairs = _classified(rows)
    accuracy = {kind: _share(pairs, kind) for kind in _order(kind for kind, _ in pairs)}
    regrets = {name: _regret(pairs, ratios) for name, ratios in tables.items()}
    console.print(_confusion(pairs))
    console.print(_accuracy_table(pairs, accuracy, tables))
    if args.show:
        _show_mistakes(console, rows, pairs, args.show)
    for name, regret in regrets.items():
        console.print(f"routing regret, {name}: {regret:.2%} of decode time")
    sets = {
        name: _classified(_from_file(workload.DATA / f"{name}.jsonl", args.seed))
        for name in ("everyday", "heldout")
    }
    for name, of_set in sets.items():
        cost = ", ".join(f"{_regret(of_set, ratios):.2%} ({table})" for table, ratios in tables.items())
        console.print(f"hand-written, {name}: {_accuracy(of_set):.1%} of {len(of_set)} right, regret {cost}")
    p50, p99 = _timing()
    console.print(f"classify a 100 kB prompt: p50 {p50:.3f} ms, p99 {p99:.3f} ms")
    decidable = [share for kind, share in accuracy.items() if kind in DECIDABLE]
    summary = {
        "accuracy": round(_accuracy(pairs), 4),
        "accuracy_min_decidable": round(min(decidable, default=1.0), 4),
        "accuracy_heldout": round(_accuracy(sets["heldout"]), 4),
        "regret": round(max(regrets.values()), 5),
        "classify_100kb_ms_p99": round(p99, 4),
    }
    print(json.dumps(summary))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Accuracy of the classifier, and what its mistakes cost.")
    parser.add_argument("--n", type=int, default=1200, help="prompts to generate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=Path, help="labelled rows to use instead, as JSON lines")
    parser.add_argument("--ratios", type=Path, help="time per token by class and lane, as JSON")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print up to N mistakes")
    return parser.parse_args()


def _generated(n: int, seed: int) -> list[Labelled]:
    return [
        (row.kind, row.request) for row in workload.build(n, seed, max_tokens=128, randomise_temperature=True)
    ]


def _from_file(path: Path, seed: int) -> list[Labelled]:
    """Labelled requests of a file, with random temperatures as the generated ones have."""
    rng = random.Random(seed)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        (row["class"], {**row["request"], "temperature": rng.choice(workload.TEMPERATURES)}) for row in rows
    ]


def _classified(rows: Sequence[Labelled]) -> list[Pair]:
    return [(kind, classify(_facts(request)).kind) for kind, request in rows]


def _facts(request: dict[str, object]) -> RequestFacts:
    facts = read_facts(Dialect.OPENAI_CHAT, orjson.dumps(request))
    assert facts is not None, "the body is an object"
    return facts


def _load_ratios(path: Path) -> Ratios:
    table: Ratios = json.loads(path.read_text(encoding="utf-8"))
    missing = set(KINDS) - set(table)
    if missing:
        raise SystemExit(f"{path}: no ratios for {', '.join(sorted(missing))}")
    return table


# --- figures -------------------------------------------------------------------------------------


def _order(kinds: Iterable[str]) -> list[str]:
    present = set(kinds)
    return [kind for kind in KINDS if kind in present] + sorted(present - set(KINDS))


def _accuracy(pairs: Sequence[Pair]) -> float:
    return sum(true == predicted for true, predicted in pairs) / len(pairs)


def _share(pairs: Sequence[Pair], kind: str) -> float:
    of_kind = [predicted for true, predicted in pairs if true == kind]
    return sum(predicted == kind for predicted in of_kind) / len(of_kind)


def _cost(ratios: Ratios, true: str, predicted: str) -> float:
    """Relative extra time of routing a request of class `true` as if it were `predicted`."""
    by_lane = ratios[true]
    chosen = min(ratios[predicted], key=ratios[predicted].__getitem__)
    return by_lane[chosen] / min(by_lane.values()) - 1


def _regret(pairs: Sequence[Pair], ratios: Ratios) -> float:
    return sum(_cost(ratios, true, predicted) for true, predicted in pairs) / len(pairs)


def _timing(rounds: int = 300) -> tuple[float, float]:
    """p50 and p99 of classifying prompts of 100 kB, of four shapes in turn, in ms of processor time.

    Processor time, because on a busy machine the wall clock shows the scheduler's time slices.
    """
    shapes: tuple[Callable[[], RequestFacts], ...] = (
        lambda: _long("word " * 20_000),
        lambda: _long("    total = compute(value, other)[index]\n" * 2_500),
        lambda: _long("Summarise this.\n\n" + "A sentence with 3 words, about nothing.\n" * 2_500),
        lambda: _long("x" * 100_000),
    )
    made = [shape() for shape in shapes]
    times = []
    for index in range(rounds):
        facts = made[index % len(made)]
        start = time.thread_time()
        classify(facts)
        times.append((time.thread_time() - start) * 1e3)
    times.sort()
    return times[len(times) // 2], times[int(len(times) * 0.99)]


def _long(text: str) -> RequestFacts:
    return RequestFacts(Dialect.OPENAI_CHAT, turns=(Turn("user", text),))


# --- printing ------------------------------------------------------------------------------------


def _confusion(pairs: Sequence[Pair]) -> Table:
    columns = _order(predicted for _, predicted in pairs)
    table = Table(title="true class (rows) and predicted class (columns)")
    table.add_column("")
    for kind in columns:
        table.add_column(kind[:9], justify="right")
    counts = Counter(pairs)
    for true in _order(true for true, _ in pairs):
        table.add_row(true, *(str(counts[true, kind] or "") for kind in columns))
    return table


def _accuracy_table(
    pairs: Sequence[Pair], accuracy: Mapping[str, float], tables: Mapping[str, Ratios]
) -> Table:
    table = Table(title="accuracy, and regret by class")
    for name in ("class", "n", "accuracy", *(f"regret, {name}" for name in tables)):
        table.add_column(name, justify="left" if name == "class" else "right")
    for kind, share in accuracy.items():
        own = [pair for pair in pairs if pair[0] == kind]
        costs = (f"{_regret(own, ratios):.2%}" for ratios in tables.values())
        table.add_row(kind, str(len(own)), f"{share:.1%}", *costs)
    return table


def _show_mistakes(console: Console, rows: Sequence[Labelled], pairs: Sequence[Pair], limit: int) -> None:
    shown = 0
    for (true, request), (_, predicted) in zip(rows, pairs, strict=True):
        if true == predicted:
            continue
        facts = _facts(request)
        text = facts.turns[-1].text if facts.turns else ""
        signals = ", ".join(classify(facts).signals)
        console.print(f"{true} → {predicted} ({signals}): {text[:120]!r} … {text[-60:]!r}", markup=False)
        shown += 1
        if shown == limit:
            return


if __name__ == "__main__":
    main()
