"""What `specproxy verify` finds, and how often it cries wolf, on real models.

Four parts: honest n-gram lanes (every fault is a false one); forced bad accepts, by how far behind the accepted
token was; foreign models; and requantised copies of a model, with the shift in log-odds that each makes beside
the shift that verify promises to find. Nothing here is timed, so other work does not disturb it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import stdev

import numpy as np

from benchmarks.models import restore, smollm2
from specproxy.adapters.managed import ManagedOptions, plan_managed
from specproxy.cli.lane_client import LaneClient, Prompt, Said
from specproxy.cli.verify_run import LaneUnderTest, Round, run
from specproxy.strategies.power import chance_of_shift, smallest_shift
from specproxy.strategies.verify import TIE_GAP, LaneReport, Position, Verdict
from tests.support.calibrated import write_pair
from tests.support.liars import BadAccepts

DATA = Path(__file__).parent / "data" / "everyday.jsonl"
KINDS = 7  # the file is sorted by kind: every n-th line is a mixture
LEADS = (0.0, TIE_GAP, 1.0, 2.0, 4.0, math.inf)  # edges of the table of bad accepts
QUANTS = ("Q8_0", "Q5_1", "Q5_0", "Q4_0")
STRANGERS = 8


class Servers:
    """Lanes by name, each a llama-server of its own; ended with the stack."""

    def __init__(self, stack: AsyncExitStack, tokens: int, threads: int) -> None:
        self._stack = stack
        self._tokens = tokens
        self._threads = threads
        self._clients: dict[str, LaneClient] = {}

    async def start(self, file: Path, names: dict[str, str]) -> list[LaneUnderTest]:
        """Lanes of a model file: strategy → name under which it is spoken to."""
        options = ManagedOptions(file, threads=self._threads, ctx=1024, strategies=tuple(names))
        backend = plan_managed(options).backend()
        self._stack.push_async_callback(backend.aclose)
        await backend.start()
        await backend.settled()
        for strategy, name in names.items():
            self._clients[name] = LaneClient(backend.address(strategy), max_tokens=self._tokens)
        return [LaneUnderTest(name, strategy, "", "m") for strategy, name in names.items()]

    def say(self, lane: str, model: str, prompt: Prompt, *, logprobs: bool = False) -> Said:
        return self._clients[lane].say("", model, prompt, logprobs=logprobs)


def chats() -> list[Prompt]:
    """Everyday questions of all kinds, mixed."""
    rows = [json.loads(line)["request"] for line in DATA.read_text(encoding="utf-8").splitlines()]
    return [Prompt("/v1/chat/completions", row) for k in range(KINDS) for row in rows[k::KINDS]]


def raws() -> list[Prompt]:
    """The same as raw prompts, which can be continued from any point."""
    texts = [str(chat.body["messages"][-1]["content"]) for chat in chats()]
    return [Prompt("/v1/completions", {"prompt": f"Question: {text}\nAnswer:"}) for text in texts]


def checked(found: Round) -> Sequence[LaneReport]:
    """The reports, if all lanes answered."""
    for report in found.reports:
        if report.failures:
            raise SystemExit(f"{report.lane}: {report.failures[0]}")
    return found.reports


# --- honest lanes -------------------------------------------------------------------------------------


async def clean(servers: Servers, count: int, skip: int) -> Iterator[str]:
    """Plain and n-gram lanes of one file; a fault would be a false one."""
    lanes = await servers.start(smollm2("Q4_1"), {"plain": "plain", "ngram": "ngram"})
    found = await asyncio.to_thread(run, servers, lanes, chats()[skip : skip + count])
    lines = [f"honest lanes, SmolLM2-135M Q4_1, {count} clean prompts"]
    for report in checked(found):
        prompts = {fork.prompt for fork in report.forks if fork.judgement == "fault"}
        lines.append(
            f"  {report.lane:<8}{report.tokens:7d} tokens{len(report.forks):5d} differences"
            f"{len(prompts):5d} false faults{report.unsteady:5d} unsteady; "
            f"95% sure: at most {bound(len(prompts), count):.2%} of clean prompts"
        )
    return iter(lines)


def bound(found: int, n: int) -> float:
    """Clopper and Pearson's one-sided 95% upper bound of a share, by halving."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        fewer = sum(math.comb(n, k) * middle**k * (1 - middle) ** (n - k) for k in range(found + 1))
        low, high = (middle, high) if fewer > 0.05 else (low, middle)
    return high


# --- forced bad accepts -------------------------------------------------------------------------------


async def accepts(servers: Servers, count: int) -> Iterator[str]:
    """One wrong token in each text, at a token drawn at random."""
    [plain] = await servers.start(smollm2("Q4_1"), {"plain": "accepts"})
    lines = [f"forced bad accepts, SmolLM2-135M Q4_1, {count} prompts, one wrong token in each text"]
    lines.append("  taken instead     plain led by (nats)   forced   found   text the same")
    for rank, name in ((1, "the runner-up"), (3, "the fourth")):
        liar = BadAccepts(servers, plain.id, np.random.default_rng(rank), rank)
        prompts = raws()[:count]
        found = await asyncio.to_thread(run, liar, [plain, LaneUnderTest("liar", "liar", "", "m")], prompts)
        report = checked(found)[1]
        lines += _accepts_table(name, liar, report, prompts)
    return iter(lines)


def _accepts_table(name: str, liar: BadAccepts, report: LaneReport, prompts: list[Prompt]) -> Iterator[str]:
    judged = {fork.prompt: fork.judgement for fork in report.forks}
    rows = [
        (lead, judged.get(number))
        for number, prompt in enumerate(prompts)
        if (lead := liar.forced[str(prompt.body["prompt"])]) is not None
    ]
    for low, high in pairwise(LEADS):
        here = [judgement for lead, judgement in rows if low <= lead < high]
        faults, same = sum(j == "fault" for j in here), sum(j is None for j in here)
        note = "  (ties by definition)" if high == TIE_GAP else ""
        yield f"  {name:<18}{low:8g} to {high:<9g}{len(here):9d}{faults:8d}{same:16d}{note}"


# --- other models -------------------------------------------------------------------------------------


async def foreign(servers: Servers, folder: Path) -> Iterator[str]:
    """Models with other weights behind a lane: each must be found."""
    own = write_pair(folder / "own", seed=5)
    lanes = await servers.start(own.target, {"plain": "own"})
    for seed in range(STRANGERS):
        other = write_pair(folder / str(seed), seed=100 + seed)
        lanes += await servers.start(other.target, {"plain": f"seed {100 + seed}"})
    markers = [f"words {own.marker(region, k)}" for region in ("json", "edit") for k in range(3)]
    prompts = [Prompt("/v1/completions", {"prompt": text}) for text in markers]
    reports = checked(await asyncio.to_thread(run, servers, lanes, prompts))[1:]
    found = sum(report.verdict is Verdict.FAULT for report in reports)
    return iter([f"foreign models: {found} of {STRANGERS} found, with {len(prompts)} prompts"])


# --- requantised copies -------------------------------------------------------------------------------


@dataclass
class Shifts:
    """How far a copy's log-odds are from plain's, token by token of the text that they share."""

    values: list[float] = field(default_factory=list)

    def add(self, plain: Sequence[Position], other: Sequence[Position]) -> None:
        for a, b in zip(plain, other, strict=False):
            theirs = dict(b.top)
            rival = max((t for t in a.top if t[0] != a.text), key=lambda t: t[1], default=None)
            if rival is not None and rival[0] in theirs and a.text in theirs:
                self.values.append((a.logprob - rival[1]) - (theirs[a.text] - theirs[rival[0]]))
            if a.text != b.text:
                return


async def quants(servers: Servers, folder: Path, count: int) -> Iterator[str]:
    """Copies of a model stored more coarsely, in the place of a lane."""
    source = smollm2("F16")
    lanes = await servers.start(source, {"plain": "F16"})
    for ftype in QUANTS:
        restore(source, folder / f"{ftype}.gguf", ftype)
        lanes += await servers.start(folder / f"{ftype}.gguf", {"plain": ftype})
    prompts = chats()[:count]
    found = await asyncio.to_thread(run, servers, lanes, prompts)
    reports = checked(found)[1:]
    shifts = {ftype: Shifts() for ftype in QUANTS}
    for prompt in prompts[: count // 2]:
        told = {
            lane.id: (await asyncio.to_thread(servers.say, lane.id, "m", prompt, logprobs=True)).positions
            for lane in lanes
        }
        for ftype in QUANTS:
            shifts[ftype].add(told["F16"], told[ftype])
    lines = [f"requantised copies of SmolLM2-135M against its F16, {count} prompts"]
    lines.append(
        "  copy   shift (nats)   prompts with a fault   expected of that shift   prompts until 95% sure"
    )
    for report in reports:
        shift = stdev(shifts[report.lane].values)
        faults = len({fork.prompt for fork in report.forks if fork.judgement == "fault"})
        expected = sum(chance_of_shift([text], found.tie_gap, shift) for text in found.leads)
        needed = math.ceil(math.log(0.05) / math.log(1 - faults / count)) if 0 < faults < count else None
        until = "1" if faults == count else str(needed or "–")
        lines.append(f"  {report.lane:<7}{shift:12.3f}{faults:23d}{expected:25.1f}{until:>25}")
    for n in (4, 13, count):
        least = smallest_shift(found.leads[:n], found.tie_gap)
        lines.append(f"  with {n} prompts a shift of {least or math.nan:.3f} nats or more shows, 95% sure")
    return iter(lines)


async def measure(args: argparse.Namespace) -> None:
    """Run the parts that are asked for, one after the other."""
    for part in args.parts:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            servers = Servers(stack, args.tokens, args.threads)
            match part:
                case "clean":
                    lines = await clean(servers, args.prompts, args.skip)
                case "accepts":
                    lines = await accepts(servers, args.prompts // 2)
                case "foreign":
                    lines = await foreign(servers, folder)
                case _:
                    lines = await quants(servers, folder, args.prompts // 5)
            print("\n".join(lines), flush=True)


def main() -> None:
    """Print a table a part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["clean", "accepts", "foreign", "quants"])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--skip", type=int, default=0, help="prompts to leave out at the start of `clean`")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    print(
        f"wheel's llama-server, {args.threads} threads, {args.tokens} tokens a text, twice, greedy", flush=True
    )
    asyncio.run(measure(args))


if __name__ == "__main__":
    main()
