"""The page's figures: its size, how soon it shows something, and what keeping it up to date costs.

    python -m benchmarks.bench_page [--seconds N] [--rounds N]

`specproxy start` runs in front of a raw server that answers at once, with 10,000 decisions stored. A headless
Chromium opens the page several times; paints are the browser's own figures, and *filled* is when numbers stand
in the page, both from the start of navigation. Then a client sends 50 requests a second, and the proxy's CPU
time is taken with and without a page listening, in turn. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median, stdev

import numpy as np
import psutil

from benchmarks.bench_proxy import CHAT, Client, running, wait_open, wait_ready
from benchmarks.live import get_json
from specproxy.proxy.admin import page
from specproxy.proxy.board import Board
from specproxy.proxy.service import STATE_FILE
from specproxy.records import Observation, Outcome, TempBucket, TimingSource, Workload
from specproxy.store import SqliteStore
from tests.support.browser import Page, browsing
from tests.support.ports import free_port

STORED = 10_000
RATE = 50.0  # requests a second
KINDS = ("chat", "code", "code_edit", "grounded", "json_schema", "prose", "tool_call", "translation")
LANES = ("plain", "ngram", "draft", "mtp")
WATCH = """
new MutationObserver(() => {
  const total = document.getElementById("total");
  if (total && total.textContent !== "–" && !window.filledAt) window.filledAt = performance.now();
}).observe(document, { childList: true, subtree: true, characterData: true });
"""


def decisions(fingerprint: str) -> list[Observation]:
    """Requests of an earlier run, of all kinds on four lanes."""
    rng = np.random.default_rng(1)
    found = []
    for n in range(STORED):
        lane = LANES[rng.integers(4)]
        per_token = float(0.02 * rng.lognormal(0, 0.3) * (1 if lane == "plain" else 0.7))
        drafted = 0 if lane == "plain" else 80
        found.append(
            Observation(
                request_id=f"old{n}",
                at=1.79e9 + n,
                workload=Workload(KINDS[rng.integers(8)], TempBucket.WARM),
                lane=lane,
                strategy=lane,
                fingerprint=fingerprint,
                target="m",
                outcome=Outcome.COMPLETE,
                rule="exploit",
                source=TimingSource.SERVER,
                ttft_s=0.05,
                total_s=100 * per_token + 0.05,
                prompt_tokens=60,
                output_tokens=101,
                prefill_s=0.05,
                decode_s=100 * per_token,
                draft_tokens=drafted,
                accepted_tokens=int(drafted * rng.beta(5, 3)),
            )
        )
    return found


def store(folder: Path, fingerprint: str) -> None:
    """Write them where the proxy keeps its statistics."""
    board, seen = Board(), decisions(fingerprint)
    for observation in seen:
        board.observe(observation)
    state = SqliteStore(folder / STATE_FILE)
    state.append(seen)
    state.save_policy("board", {"last": seen[-1].request_id, "state": board.dump()}, seen[-1].at)
    state.close()


@contextmanager
def proxy(upstream: int, folder: Path) -> Iterator[tuple[int, psutil.Process]]:
    """A running proxy: its port and process."""
    port = free_port()
    command = [sys.executable, "-m", "specproxy", "start", "--port", str(port), "--state-dir", str(folder)]
    with running([*command, "--upstream", f"http://127.0.0.1:{upstream}"]) as child:
        wait_ready(f"http://127.0.0.1:{port}")
        yield port, psutil.Process(child.pid)


async def paints(port: int, rounds: int) -> dict[str, list[float]]:
    """First paint, first contentful paint and the first numbers, in ms; a fresh browser each time."""
    found: dict[str, list[float]] = {"first-paint": [], "first-contentful-paint": [], "filled": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            async with browsing(Path(profile)) as tab:
                await opened(tab, port)
                for name, at in (await tab.evaluate(TIMES)).items():
                    found[name].append(at)
                assert tab.said == [], tab.said
    return found


TIMES = """
(async () => {
  const paints = () => performance.getEntriesByType("paint");
  while (!window.filledAt || paints().length < 2) await new Promise(requestAnimationFrame);
  const times = Object.fromEntries(paints().map(e => [e.name, e.startTime]));
  return { ...times, filled: window.filledAt };
})()
"""


async def opened(tab: Page, port: int) -> None:
    await tab.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
    await tab.open(f"http://127.0.0.1:{port}/specproxy/")
    await tab.until("document.querySelectorAll('#kinds tbody tr').length > 20")


@contextmanager
def listening(port: int) -> Iterator[list[int]]:
    """A page that listens: the bytes that it was sent, one item a read."""
    got: list[int] = []
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"GET /specproxy/api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")

        def read() -> None:
            while data := sock.recv(1 << 20):
                got.append(len(data))

        thread = threading.Thread(target=read)
        thread.start()
        try:
            yield got
        finally:
            sock.shutdown(socket.SHUT_RDWR)
            thread.join()


def cpu(process: psutil.Process, client: Client, seconds: float) -> float:
    """CPU seconds that the proxy used a second, while requests came in at `RATE`."""
    body = json.dumps(CHAT).encode()
    times = process.cpu_times()
    begun, due = time.perf_counter(), time.perf_counter()
    while time.perf_counter() - begun < seconds:
        client.call(body, stream=False)
        due += 1 / RATE
        time.sleep(max(0.0, due - time.perf_counter()))
    spent = process.cpu_times()
    return (spent.user + spent.system - times.user - times.system) / (time.perf_counter() - begun)


def upkeep(port: int, process: psutil.Process, seconds: float, rounds: int) -> tuple[list[float], float]:
    """Added share of a CPU with a page listening, round by round, and KiB a second that it was sent."""
    client, added, sent = Client(port), [], 0
    cpu(process, client, seconds / 2)
    for number in range(rounds):
        without = cpu(process, client, seconds) if number % 2 else None
        with listening(port) as got:
            watched = cpu(process, client, seconds)
        sent += sum(got)
        without = cpu(process, client, seconds) if without is None else without
        added.append(watched - without)
    return added, sent / 1024 / seconds / rounds


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    upstream = free_port()
    server = [sys.executable, "-m", "benchmarks.bench_proxy", "--serve", str(upstream)]
    with tempfile.TemporaryDirectory() as name, running(server):
        folder = Path(name)
        wait_open(upstream)
        with proxy(upstream, folder) as (port, _):
            fingerprint = get_json(f"http://127.0.0.1:{port}/specproxy/api/status")["lanes"][0]["fingerprint"]
        for file in folder.iterdir():
            file.unlink()
        store(folder, fingerprint)
        with proxy(upstream, folder) as (port, process):
            shown = asyncio.run(paints(port, args.rounds))
            added, kib = upkeep(port, process, args.seconds, args.rounds)
    size = len(page())
    print(f"{platform.machine()}, {psutil.cpu_count()} CPUs, Python {platform.python_version()}, {browser()}")
    print(
        f"page: {size / 1000:.1f} kB in one request ({len(gzip.compress(page())) / 1000:.1f} kB if compressed)"
    )
    print(f"with {STORED} decisions stored, {args.rounds} openings, ms from navigation (median, slowest):")
    for what, at in shown.items():
        print(f"  {what:<24}{median(at):7.0f}{max(at):7.0f}")
    half = 2.57 * stdev(added) / len(added) ** 0.5  # Student's t for six rounds
    cost = f"{mean(added):+.2%} ± {half:.2%} of one CPU, {kib:.0f} KiB/s to a page"
    print(f"live at {RATE:g} requests a second: {cost}")
    figures = {
        "bytes": size,
        **{k: median(v) for k, v in shown.items()},
        "added_cpu": mean(added),
        "kib_s": kib,
    }
    print(json.dumps(figures))


def browser() -> str:
    """The browser's own words on its version."""
    from tests.support.browser import BROWSER

    assert BROWSER is not None, "no Chromium here"
    return subprocess.run([BROWSER, "--version"], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
