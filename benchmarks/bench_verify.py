"""What `specproxy verify` finds, and how often it cries wolf: honest lanes and foreign ones on a real model.

Plain decoding of SmolLM2-135M is compared with n-gram lanes on the same file (honest: every fault is a false
one), and with plain decoding of requantised copies of it (foreign: every prompt without a fault is a miss).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.models import restore, smollm2
from specproxy.adapters.managed import ManagedOptions, plan_managed
from specproxy.cli.lane_client import LaneClient, Prompt, Said
from specproxy.cli.verify import LaneUnderTest, run
from specproxy.strategies.verify import Fork, LaneReport

DATA = Path(__file__).parent / "data" / "everyday.jsonl"
THRESHOLDS = (0.1, 0.25, 0.5, 1.0)
WIDTHS = (8, 8, 7, 9, 8, 9, 9)  # of the columns before those


class Servers:
    """Lanes by name, each the URL of a llama-server of its own."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._clients: dict[str, LaneClient] = {}

    def add(self, lane: str, url: str) -> LaneUnderTest:
        self._clients[lane] = LaneClient(url, max_tokens=self._tokens)
        return LaneUnderTest(lane, lane, "", "m")

    def say(self, lane: str, model: str, prompt: Prompt, *, logprobs: bool = False) -> Said:
        return self._clients[lane].say("", model, prompt, logprobs=logprobs)


@dataclass
class Tally:
    """Forks of one lane, and how many prompts and tokens were compared."""

    prompts: int = 0
    tokens: int = 0
    unsteady: int = 0
    forks: list[Fork] = field(default_factory=list)

    def add(self, report: LaneReport) -> None:
        if report.failures:
            raise SystemExit(f"{report.lane}: {report.failures[0]}")
        self.prompts += 1
        self.tokens += report.tokens
        self.unsteady += report.unsteady
        self.forks += report.forks

    def faults(self, tie_gap: float) -> int:
        """Prompts whose first difference is a fault at this threshold."""
        return sum(fork.gap is not None and fork.gap > tie_gap for fork in self.forks)

    def line(self, lane: str) -> str:
        gaps = [fork.gap for fork in self.forks if fork.gap is not None]
        middle, top = (f"{f(gaps):7.3f}" if gaps else "      –" for f in (median, max))
        cells = [f"{self.faults(t):4d} ({_needed(self.faults(t), self.prompts)})" for t in THRESHOLDS]
        unknown = len(self.forks) - len(gaps)
        return (
            f"{lane:<14}{self.prompts:8d}{self.tokens:8d}{len(self.forks):7d}{self.unsteady:9d}{unknown:8d}"
            f"{middle:>9}{top:>9}  " + "".join(f"{cell:>13}" for cell in cells)
        )


def _needed(found: int, prompts: int) -> str:
    """Prompts after which at least one fault has shown with 95% certainty, by the share seen here."""
    if not found:
        return "–"
    return "1" if found >= prompts else str(math.ceil(math.log(0.05) / math.log(1 - found / prompts)))


async def measure(prompts: list[Prompt], seconds: float, tokens: int, threads: int) -> dict[str, Tally]:
    """Compare until the time or the prompts are used up."""
    f16, q4_1 = smollm2("F16"), smollm2("Q4_1")
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = Servers(tokens)

        async def start(file: Path, names: dict[str, str]) -> list[LaneUnderTest]:
            options = ManagedOptions(file, threads=threads, ctx=1024, strategies=("ngram",))
            backend = plan_managed(options).backend()
            stack.push_async_callback(backend.aclose)
            await backend.start()
            await backend.settled()
            return [servers.add(name, backend.address(lane)) for lane, name in names.items()]

        first = await start(f16, {"plain": "F16 plain", "ngram": "F16 ngram"})
        for ftype in ("Q8_0", "Q5_0", "Q4_0"):
            copy = scratch / f"{ftype}.gguf"
            restore(f16, copy, ftype)
            first += await start(copy, {"plain": f"{ftype} plain"})
        second = await start(q4_1, {"plain": "Q4_1 plain", "ngram": "Q4_1 ngram"})
        tallies = {lane.id: Tally() for lane in (*first, *second)}
        until = time.monotonic() + seconds
        for prompt in prompts:
            if time.monotonic() > until:
                break
            for lanes in (first, second):
                for report in await asyncio.to_thread(run, servers, lanes, [prompt]):
                    tallies[report.lane].add(report)
        return tallies


def main() -> None:
    """Print one line a lane."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    rows = [json.loads(line)["request"] for line in DATA.read_text(encoding="utf-8").splitlines()]
    step = 7  # the file is sorted by kind
    prompts = [Prompt("/v1/chat/completions", row) for k in range(step) for row in rows[k::step]]
    tallies = asyncio.run(measure(prompts, args.seconds, args.tokens, args.threads))
    print(
        f"SmolLM2-135M on the wheel's server, {args.threads} threads, {args.tokens} tokens a text, twice,\n"
        "greedy; F16 lanes and requantised copies against F16 plain, Q4_1 lanes against Q4_1 plain.\n"
        "gap: nats by which plain's own token was likelier. > x: prompts with a fault at that threshold (and\n"
        "how many prompts it takes until one has shown, 95% sure)."
    )
    columns = zip(("prompts", "tokens", "forks", "unsteady", "unknown", "med. gap", "max"), WIDTHS, strict=True)
    head = f"{'lane':<14}" + "".join(f"{name:>{width}}" for name, width in columns)
    print(head + "  " + "".join(f"{f'> {t:g}':>13}" for t in THRESHOLDS))
    for lane, tally in tallies.items():
        print(tally.line(lane))


if __name__ == "__main__":
    main()
