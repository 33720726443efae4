"""Many streams at once through the proxy: what it adds between events, what it costs, and what slow clients do.

    python -m benchmarks.bench_load [--streams N] [--rate N] [--seconds N]

A server of the test's own sends N streams of stamped events; one process reads them all, straight from the
server and through `specproxy start`. What is shown as added is how much longer the pause between two events was
for the client than between their stamps. Then some clients stop reading a stream without end, while the others
go on. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import uvloop

from benchmarks.bench_proxy import running, wait_open, wait_ready
from benchmarks.live import get_json
from benchmarks.load_server import STAMP
from tests.support.ports import free_port

SLOW = 50


def request_for(wanted: str) -> bytes:
    """A chat request that asks the test's server for something."""
    message = {"role": "user", "content": "Write a haiku about rivers."}
    body = json.dumps({"model": "m", "stream": True, "messages": [message], "user": wanted}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Reader(asyncio.Protocol):
    """Reads one stream: for each event its stamp and its arrival (both monotonic, ns)."""

    def __init__(self, wanted: str) -> None:
        self.sent: list[int] = []
        self.seen: list[int] = []
        self.done = asyncio.get_running_loop().create_future()
        self._wanted = wanted
        self._tail = b""

    def connection_made(self, transport: Any) -> None:  # uvloop's is no subclass of asyncio.Transport
        self.transport = transport
        transport.write(request_for(self._wanted))

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        for stamp in STAMP.findall(data):
            self.sent.append(int(stamp))
            self.seen.append(now)
        self._tail = (self._tail + data)[-16:]
        if self._tail.endswith(b"0\r\n\r\n"):
            self.transport.close()
            self._finish(whole=True)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (asyncio calls it)
        self._finish(whole=False)

    def _finish(self, *, whole: bool) -> None:
        if not self.done.done():
            self.done.set_result(whole)


@dataclass
class Run:
    """What a run of many streams showed; times in ms, memory in MB, CPU in cores."""

    events: int = 0
    lost: int = 0  # events that did not come
    added: list[float] = field(default_factory=list)
    lag: list[float] = field(default_factory=list)
    cpu: float = 0.0
    memory: list[float] = field(default_factory=list)

    def percentile(self, percent: float) -> float:
        """Of what was added between events."""
        return float(np.percentile(self.added, percent))


async def stream_all(port: int, streams: int, rate: int, seconds: float, process: psutil.Process | None) -> Run:
    """Open streams, read them to their end, and watch a process meanwhile."""
    loop = asyncio.get_running_loop()
    events = int(rate * seconds)
    readers: list[Reader] = []
    for _ in range(streams):
        _, reader = await loop.create_connection(lambda: Reader(f"rate|{rate}|{events}"), "127.0.0.1", port)
        readers.append(reader)
    run = Run()
    cpu_before, begun = _cpu(process), time.perf_counter()
    while not all(reader.done.done() for reader in readers):
        if process is not None:
            run.memory.append(process.memory_info().rss / 1e6)
        await asyncio.wait([reader.done for reader in readers if not reader.done.done()], timeout=1.0)
    run.cpu = (_cpu(process) - cpu_before) / (time.perf_counter() - begun)
    for reader in readers:
        run.events += len(reader.sent)
        run.lost += events - len(reader.sent)
        sent, seen = np.array(reader.sent[rate:]), np.array(reader.seen[rate:])  # the first second warms up
        run.lag += ((seen - sent) / 1e6).tolist()
        run.added += (np.maximum(0, np.diff(seen) - np.diff(sent)) / 1e6).tolist()
    return run


def _cpu(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = process.cpu_times()
    return float(times.user + times.system)


class Sleeper(asyncio.Protocol):
    """Asks for a stream without end, and does not read it."""

    def connection_made(self, transport: Any) -> None:  # uvloop's is no subclass of asyncio.Transport
        self.transport = transport
        transport.write(request_for("flood"))
        asyncio.get_running_loop().call_soon(transport.pause_reading)  # it begins to read behind this


async def with_sleepers(
    port: int, upstream: int, args: argparse.Namespace, process: psutil.Process
) -> tuple[Run, float]:
    """A run beside clients that do not read; also the MB that the server could hand over for each of these."""
    loop = asyncio.get_running_loop()
    sleepers = [await loop.create_connection(Sleeper, "127.0.0.1", port) for _ in range(SLOW)]
    await asyncio.sleep(2.0)
    run = await stream_all(port, args.streams - SLOW, args.rate, args.seconds / 2, process)
    url = f"http://127.0.0.1:{upstream}/flooded"
    handed = (await asyncio.to_thread(get_json, url))["flooded"] / 1e6 / SLOW
    for transport, _ in sleepers:
        transport.abort()
    return run, handed


def show(name: str, run: Run) -> None:
    """One line a run."""
    memory = f", memory {run.memory[len(run.memory) // 4]:.0f} → {run.memory[-1]:.0f} MB" if run.memory else ""
    cpu = f", {run.cpu:.2f} cores" if run.memory else ""
    print(
        f"{name:22} {run.events} events, {run.lost} lost; between events p50 +{run.percentile(50):.2f} ms, "
        f"p99 +{run.percentile(99):.2f} ms; late p99 {np.percentile(run.lag, 99):.2f} ms{cpu}{memory}",
        flush=True,
    )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--rate", type=int, default=30, help="events a second of each stream")
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    upstream, port = free_port(), free_port()
    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory() as state,
        running([sys.executable, "-m", "benchmarks.load_server", str(upstream)]),
    ):
        wait_open(upstream)
        command = [sys.executable, "-m", "specproxy", "start", "--port", str(port), "--state-dir", state]
        with running([*command, "--upstream", f"http://127.0.0.1:{upstream}"]) as child:
            wait_ready(f"http://127.0.0.1:{port}")
            process = psutil.Process(child.pid)
            direct = uvloop.run(stream_all(upstream, args.streams, args.rate, args.seconds / 3, None))
            through = uvloop.run(stream_all(port, args.streams, args.rate, args.seconds, process))
            beside, handed = uvloop.run(with_sleepers(port, upstream, args, process))
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {load:.1f}, Python {platform.python_version()}")
    print(f"{args.streams} streams at {args.rate} events a second; server, proxy and client on the same cores")
    show("direct", direct)
    show("through specproxy", through)
    show(f"beside {SLOW} that sleep", beside)
    print(f"a client that does not read: the server could hand over {handed:.1f} MB, then had to wait")
    flat = through.memory[-1] / through.memory[len(through.memory) // 4]
    result = {
        "streams": args.streams,
        "events": through.events,
        "lost": through.lost + beside.lost,
        "direct_added_ms_p99": round(direct.percentile(99), 2),
        "added_ms_p50": round(through.percentile(50), 3),
        "added_ms_p99": round(through.percentile(99), 2),
        "cpu_cores": round(through.cpu, 2),
        "memory_mb": round(through.memory[-1], 1),
        "memory_growth": round(flat, 3),
        "beside_slow_added_ms_p99": round(beside.percentile(99), 2),
        "handed_to_sleeper_mb": round(handed, 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
