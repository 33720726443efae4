"""Faults against the real proxy, scripted and then at random; the last line is a JSON object.

    python -m benchmarks.chaos [--seconds N] [--seed N] [--only NAME]

First every fault of an upstream in every dialect and on both lanes, every client that fails, and every fault of
the proxy's own surroundings, one after the other; then all of them mixed, many at a time, until the time is up.
Every request has to end complete, with an error in its dialect, or cut as its upstream cut it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import structlog
import uvloop

from benchmarks.chaos.arena import MIXED, Arena, Tally, arena
from benchmarks.chaos.client import CLIENT_FAULTS
from benchmarks.chaos.faults import SHAPES
from benchmarks.chaos.itself import PROCESS_FAULTS

AT_ONCE = 24


async def scripted(here: Arena, only: str) -> None:
    """Every fault once in each dialect and place."""
    for shape in SHAPES.values():
        for fault in MIXED:
            if only in fault:
                await here.upstream_fault(fault, shape, on_drafts=False)
                await here.upstream_fault(fault, shape, on_drafts=True)
        for name in CLIENT_FAULTS:
            if only in name:
                await here.client_fault(name, shape)
    for alone in (here.refuses_connections, here.closes_idle_connections, here.clock_jumps):
        if only in alone.__name__:
            await alone()
    await here.check_count()


async def mixed(here: Arena, until: float) -> None:
    """Faults at random, many at a time, and now and then one that concerns everybody."""
    rng = here.rng
    while time.monotonic() < until:
        jobs = []
        for _ in range(AT_ONCE * 4):
            shape = here.any_shape()
            if rng.random() < 0.25:
                jobs.append(here.client_fault(rng.choice(list(CLIENT_FAULTS)), shape))
            else:
                jobs.append(here.upstream_fault(rng.choice(MIXED), shape, on_drafts=rng.random() < 0.5))
        width = asyncio.Semaphore(AT_ONCE)

        async def run(job: object, width: asyncio.Semaphore = width) -> None:
            async with width:
                await job  # type: ignore[misc]  # a coroutine of one of the two kinds

        await asyncio.gather(*(run(job) for job in jobs))
        await here.check_count()
        alone = rng.choice((here.refuses_connections, here.closes_idle_connections, here.clock_jumps))
        if rng.random() < 0.2:
            await alone()


async def run(args: argparse.Namespace, tally: Tally, state: Path) -> None:
    """All of it."""
    begun = time.monotonic()
    async with arena(state / "arena", tally, args.seed) as here:
        await scripted(here, args.only)
        print(f"scripted: {tally.requests} requests in {time.monotonic() - begun:.0f} s", flush=True)
    for name, fault in PROCESS_FAULTS.items():
        if args.only in name:
            tally.kinds.add(name)
            (state / name).mkdir()
            await fault(state / name, tally)
    print(f"with its surroundings: {time.monotonic() - begun:.0f} s", flush=True)
    async with arena(state / "mixed", tally, args.seed + 1) as here:
        if not args.only:
            await mixed(here, max(begun + args.seconds, time.monotonic() + 5.0))


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="names of faults that hold this text, scripted only")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    tally = Tally()
    with tempfile.TemporaryDirectory() as state, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(args, tally, Path(state)))
    print("endings: " + ", ".join(f"{n} {name}" for name, n in tally.endings.most_common()))
    result = {
        "faults": len(tally.kinds),
        "requests": tally.requests,
        "lost": tally.lost,
        "hung": tally.hung,
        "leaked_tasks": tally.leaked_tasks,
        "leaked_sockets": tally.leaked_sockets,
    }
    print(json.dumps(result))
    sys.exit(any(list(result.values())[2:]))


if __name__ == "__main__":
    main()
