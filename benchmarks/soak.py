"""Hours in minutes: mixed traffic on real lanes, which are killed at random; the last line is a JSON object.

    python -m benchmarks.soak [--minutes N] [--clients N] [--seed N]

`specproxy start` runs one llama-server for each of four strategies on a small calibrated model. Clients send
chat, completion, Anthropic and llama.cpp requests, streamed and not, pinned and not, and some leave in the
middle. Every half a minute or so one lane's process is killed, and is expected back. Every request has to end
complete, with an error in its dialect, or cut. At the end the statistics must equal the requests sent, and
memory and open files must be what they were when all was warm.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop

from benchmarks.bench_proxy import running
from benchmarks.chaos.client import Seen, read
from benchmarks.live import get_json
from tests.support.calibrated import write_pair
from tests.support.client import RawClient
from tests.support.ports import free_port

STRATEGIES = ("plain", "ngram", "draft", "mtp")
LIMIT_S = 60.0
WARM_SHARE = 0.25  # of the time, after which memory and files have to be flat
WORDS = ("river", "order", "city", "report", "value", "story", "function", "record")


def message(rng: random.Random) -> str:
    """A prompt that was not sent before."""
    a, b = rng.sample(WORDS, 2)
    return f"Explain how the {a} and the {b} came about, {rng.randrange(10**9)}."


def chat(rng: random.Random) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": message(rng)}], "max_tokens": rng.randrange(8, 64)}


def completion(rng: random.Random) -> dict[str, Any]:
    return {"prompt": message(rng), "max_tokens": rng.randrange(8, 64)}


def native(rng: random.Random) -> dict[str, Any]:
    return {"prompt": message(rng), "n_predict": rng.randrange(8, 64)}


ROUTES = {
    "/v1/chat/completions": chat,
    "/v1/completions": completion,
    "/v1/messages": chat,
    "/completion": native,
}


@dataclass
class Tally:
    """What happened. `endings` counts what clients saw."""

    endings: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    lost: int = 0
    hung: int = 0
    restarts: int = 0
    not_back: int = 0
    memory: list[tuple[float, float]] = field(default_factory=list)  # (share of the time, MB)
    files: list[tuple[float, int]] = field(default_factory=list)
    busy: bool = True

    def wrong(self, what: str) -> None:
        """Count and show what must not happen."""
        self.lost += 1
        print(f"WRONG: {what}", file=sys.stderr, flush=True)


async def one(port: int, rng: random.Random, tally: Tally) -> None:
    """One request, of any kind."""
    path = rng.choice(list(ROUTES))
    body = ROUTES[path](rng) | {"stream": rng.random() < 0.6, "temperature": rng.choice((0.0, 0.7, 1.0))}
    data = json.dumps(body | {"model": "m"}).encode()
    pin = f"X-Specproxy-Strategy: {rng.choice(STRATEGIES)}\r\n" if rng.random() < 0.3 else ""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{pin}Content-Length: {len(data)}\r\n\r\n"
    leaves = rng.random() < 0.1
    async with await RawClient.connect(port, limit=1 << 20) as client:
        tally.sent += 1
        await client.send(head.encode() + data)
        if leaves:
            await asyncio.sleep(rng.random() * 0.2)
            tally.endings["left"] += 1
            return
        try:
            async with asyncio.timeout(LIMIT_S):
                tally.endings[judge(path, await read(client), tally)] += 1
        except TimeoutError:
            tally.hung += 1


def judge(path: str, seen: Seen, tally: Tally) -> str:
    """How a request ended; what is none of the permitted endings is counted as lost."""
    if seen.whole and seen.status == 200:
        return "complete"
    if seen.whole and seen.status >= 400:
        try:
            error = json.loads(seen.content)["error"]
            assert isinstance(error, dict)
            assert error["message"]
        except (ValueError, KeyError, AssertionError):
            tally.wrong(f"{path}: {seen.status} {seen.content[:200]!r}")
        return "error"
    if seen.status == 200:
        return "cut"
    tally.wrong(f"{path}: no answer")
    return "nothing"


async def client(port: int, rng: random.Random, tally: Tally) -> None:
    """Send requests, one after the other, until told to stop."""
    while tally.busy:
        await one(port, rng, tally)
        await asyncio.sleep(rng.random() * 0.05)


async def killer(port: int, proxy: psutil.Process, rng: random.Random, tally: Tally) -> None:
    """Kill a lane's process now and then, and wait until it is back."""
    while tally.busy:
        await asyncio.sleep(rng.uniform(10, 40))
        lanes = [child for child in proxy.children(recursive=True) if "-m" in child.cmdline()[1:]]
        if not lanes or not tally.busy:
            continue
        rng.choice(lanes).kill()
        tally.restarts += 1
        await asyncio.sleep(1.0)
        if not await ready(port, 90.0):
            tally.not_back += 1


async def ready(port: int, seconds: float) -> bool:
    """Wait until every lane is ready."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            status = await asyncio.to_thread(get_json, f"http://127.0.0.1:{port}/specproxy/api/status")
        except OSError:
            status = {"lanes": []}
        lanes = status["lanes"]
        if len(lanes) == len(STRATEGIES) and all(lane["health"] == "ready" for lane in lanes):
            return True
        await asyncio.sleep(0.3)
    return False


async def watch(proxy: psutil.Process, minutes: float, tally: Tally) -> None:
    """Sample memory and open files of the proxy itself."""
    begun = time.monotonic()
    while tally.busy:
        share = (time.monotonic() - begun) / (minutes * 60)
        tally.memory.append((share, proxy.memory_info().rss / 1e6))
        tally.files.append((share, proxy.num_fds()))
        await asyncio.sleep(1.0)


async def soak(port: int, proxy: psutil.Process, args: argparse.Namespace) -> tuple[Tally, dict[str, Any]]:
    """All of it; returns the tally and the status once all is quiet."""
    tally = Tally()
    if not await ready(port, 120.0):
        sys.exit("the lanes did not come up")
    rng = random.Random(args.seed)
    jobs = [asyncio.create_task(client(port, random.Random(rng.random()), tally)) for _ in range(args.clients)]
    jobs.append(asyncio.create_task(killer(port, proxy, rng, tally)))
    jobs.append(asyncio.create_task(watch(proxy, args.minutes, tally)))
    await asyncio.sleep(args.minutes * 60)
    tally.busy = False
    await asyncio.gather(*jobs)
    for _ in range(200):
        status: dict[str, Any] = get_json(f"http://127.0.0.1:{port}/specproxy/api/status?all=1")
        if not status["requests"]["in_flight"]:
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(6.0)  # states are saved every five seconds
    return tally, status


def conservation(tally: Tally, status: dict[str, Any], state: Path) -> list[str]:
    """Where the statistics and the requests sent do not agree. Those that left may not have come in whole."""
    found = []
    outcomes = status["requests"]["outcomes"]
    least, most = tally.sent - tally.endings["left"] - tally.hung, tally.sent
    rows = sum(row["n"] for row in status["kinds"])
    with sqlite3.connect(state / "state.db") as db:
        logged = db.execute("SELECT COUNT(*) FROM observation").fetchone()[0]
    db.close()
    for what, n in (("counted", status["requests"]["total"]), ("rows add up to", rows), ("logged", logged)):
        if not least <= n <= most:
            found.append(f"{what} {n} requests, sent {least} to {most}")
    complete, left = tally.endings["complete"], tally.endings["left"]
    if not complete <= outcomes.get("complete", 0) <= complete + left:
        found.append(f"{outcomes.get('complete', 0)} counted as complete, {complete} seen so by clients")
    return found


def growth(samples: list[tuple[float, float]] | list[tuple[float, int]]) -> float:
    """Mean of the last quarter of the time over that of the quarter behind the warm-up."""
    early = [value for share, value in samples if WARM_SHARE <= share < 2 * WARM_SHARE]
    late = [value for share, value in samples if share >= 1 - WARM_SHARE]
    return float(np.mean(late) / np.mean(early)) if early and late else 1.0


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        state, models = Path(folder) / "state", Path(folder) / "models"
        models.mkdir()
        pair = write_pair(models, seed=args.seed)
        command = [sys.executable, "-m", "specproxy", "start", "--port", str(port), "--state-dir", str(state)]
        command += ["--model", str(pair.target), "--draft", str(pair.draft), "--engine", "managed"]
        command += ["--strategies", ",".join(STRATEGIES), "--threads", "1", "--slots", "2", "--ctx", "1024"]
        with running([*command, "--log-level", "error"]) as child:
            tally, status = uvloop.run(soak(port, psutil.Process(child.pid), args))
            mismatches = conservation(tally, status, state)
    print(f"{os.cpu_count()} cores, {args.minutes:g} minutes, {args.clients} clients, 4 lanes")
    print("clients saw: " + ", ".join(f"{n} {name}" for name, n in tally.endings.most_common()))
    print(f"counted: {status['requests']['outcomes']}")
    for mismatch in mismatches:
        print(f"WRONG: {mismatch}")
    result = {
        "minutes": args.minutes,
        "requests": tally.sent,
        "restarts": tally.restarts,
        "not_back": tally.not_back,
        "lost": tally.lost,
        "hung": tally.hung,
        "mismatches": len(mismatches),
        "memory_mb": round(tally.memory[-1][1], 1),
        "memory_growth": round(growth(tally.memory), 3),
        "open_files": tally.files[-1][1],
        "open_files_growth": round(growth(tally.files), 3),
    }
    print(json.dumps(result))
    bad = tally.lost + tally.hung + tally.not_back + len(mismatches)
    sys.exit(bad > 0 or result["memory_growth"] > 1.1 or result["open_files_growth"] > 1.25)


if __name__ == "__main__":
    main()
