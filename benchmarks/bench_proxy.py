"""Time to first byte that proxies add, for a small JSON call and for a 200-event stream, side by side.

    python -m benchmarks.bench_proxy [--calls N] [--streams N] [--leavers N] [--litellm PROGRAM|install]

The events of a `stream` come as fast as they are read, which keeps upstream and proxy busy: with few cores the
time to its first byte is that of a contest for them too. A `paced` one rests for 2 ms behind its first event,
as one from a model does, and finds colder caches. Events per second are the former's.

A raw server answers at once, in a process of its own; `specproxy start` stands in front of it, as users run it,
and so do nginx and HAProxy where they are installed, and LiteLLM's proxy if asked for. One client with a
kept-alive connection to each sends the same request to all of them in turn, in shuffled order. What is shown as
added is the difference to the direct call's percentiles in the same run. Calls and events per core are by the
CPU time that a proxy took for them. Then clients leave before the first byte or in mid-stream, and the time
until the upstream's connection closes is taken. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import psutil

from benchmarks.live import get_json
from benchmarks.peers import cpu_s, haproxy, litellm, nginx
from tests.support.ports import free_port

EVENTS = 200
PAUSE_S = 0.002  # behind the first event of a paced stream
PACED = b'"paced"'
KINDS = {"json": {"stream": False}, "stream": {"stream": True}, "paced": {"stream": True, "user": "paced"}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Write a haiku about rivers. " * 4}]}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
REPLY = json.dumps(
    {
        "id": "c1",
        "object": "chat.completion",
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 20, "completion_tokens": 2, "total_tokens": 22},
    }
).encode()
EVENT = b'data: {"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
left_at = 0.0  # in the server's process: when the last connection was closed on a request that is held


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer requests on one connection: JSON, or a stream where the body asks for one."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (ln.split(b":")[1] for ln in head.lower().split(b"\r\n") if ln.startswith(b"content-length")),
                b"0",
            )
            body = await reader.readexactly(int(length))
            if head.startswith(b"GET /left"):
                text = b"%.9f" % left_at
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text))
            elif b'"hold' in body:
                await hold(reader, writer, begun=b'"hold in stream"' in body)
            elif b'"stream": true' in body:
                writer.write(STREAM_HEAD)
                for i in range(EVENTS):
                    writer.write(chunk(EVENT))
                    await writer.drain()
                    await asyncio.sleep(PAUSE_S if i == 0 and PACED in body else 0)
                writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            else:
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                    % len(REPLY)
                )
                writer.write(REPLY)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, begun: bool) -> None:
    """Never answer, or only begin to; note when the other side has gone."""
    global left_at
    if begun:
        writer.write(STREAM_HEAD + chunk(EVENT))
        await writer.drain()
    await reader.read()
    left_at = time.perf_counter()
    writer.close()


async def serve(port: int) -> None:
    async with await asyncio.start_server(answer, "127.0.0.1", port) as server:
        await server.serve_forever()


class Client:
    """A kept-alive connection."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def call(self, body: bytes) -> tuple[float, float]:
        """Seconds from sending a request to the first byte of its response, and to its last."""
        begun = time.perf_counter()
        self.sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        got = self.sock.recv(1 << 16)
        taken = time.perf_counter() - begun
        while b"\r\n\r\n" not in got:
            got += self._more()
        head, _, rest = got.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        if length is not None:
            left = int(length[1]) - len(rest)
            while left > 0:
                left -= len(self._more())
        else:
            while not rest.endswith(b"0\r\n\r\n"):
                rest = rest[-64:] + self._more()
        return taken, time.perf_counter() - begun

    def _more(self) -> bytes:
        more = self.sock.recv(1 << 16)
        if not more:
            raise ConnectionError("the connection ended within a response")
        return more


def wait_open(port: int, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)
        else:
            return


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A child process, ended afterwards."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        try:
            yield child
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()


def wait_ready(url: str) -> None:
    """Until the proxy answers, and has a lane on its upstream."""
    for _ in range(4000):
        try:
            if get_json(f"{url}/specproxy/api/status")["lanes"]:
                return
        except (OSError, urllib.request.HTTPError):
            pass
        time.sleep(0.005)
    sys.exit("the proxy did not become ready")


class Peer:
    """One way to the upstream: its connection, its process, and what calls took, in ms."""

    def __init__(self, name: str, port: int, process: psutil.Process | None, every: int = 1) -> None:
        self.name = name
        self.client = Client(port)
        self.process = process
        self.every = every  # slow ones are asked once in so many rounds
        self.first: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.whole: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.cpu: dict[str, float] = {}

    def added(self, kind: str, percent: float, direct: Peer) -> float:
        """Milliseconds to the first byte beyond those of a direct call."""
        return float(np.percentile(self.first[kind], percent) - np.percentile(direct.first[kind], percent))

    def per_core(self, kind: str) -> float:
        """Calls, or events, that a second of CPU time was enough for."""
        return len(self.first[kind]) * (1 if kind == "json" else EVENTS) / max(self.cpu[kind], 1e-9)

    def events_per_s(self) -> float:
        """Events a second of the middle stream, from its request to its last byte."""
        return float(EVENTS / (np.median(self.whole["stream"]) / 1e3))


def measure(peers: list[Peer], n: int, kind: str, rng: random.Random) -> None:
    """Call each peer about `n` times, in shuffled order each round."""
    body = json.dumps(CHAT | KINDS[kind]).encode()
    for round_ in range(n + n // 10):
        if round_ == n // 10:  # the first tenth warms up
            for peer in peers:
                peer.cpu[kind] = -cpu_s(peer.process) if peer.process is not None else 0.0
        for peer in rng.sample(peers, len(peers)):
            if round_ % peer.every:
                continue
            first, whole = peer.client.call(body)
            if round_ >= n // 10:
                peer.first[kind].append(first * 1e3)
                peer.whole[kind].append(whole * 1e3)
    for peer in peers:
        if peer.process is not None:
            peer.cpu[kind] += cpu_s(peer.process)


def leave(upstream: int, port: int, *, begun: bool) -> float:
    """Milliseconds from a client's leaving to the end of the upstream's connection.

    The clock (CLOCK_MONOTONIC) is the same in all processes of a machine.
    """
    url = f"http://127.0.0.1:{upstream}/left"
    before = float(urllib.request.urlopen(url).read())
    client = Client(port)
    body = json.dumps({**CHAT, "user": "hold in stream" if begun else "hold"}).encode()
    client.sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
    if begun:
        client.sock.recv(1 << 16)
    time.sleep(0.03)  # the request is with the upstream by then
    begin = time.perf_counter()
    client.sock.close()
    while (at := float(urllib.request.urlopen(url).read())) == before:
        time.sleep(0.002)
    return (at - begin) * 1e3


def show(peers: list[Peer]) -> dict[str, float]:
    """Print a line for each peer and kind, and return the figures."""
    direct, own = peers[0], peers[1]
    result: dict[str, float] = {}
    for kind, unit in (("json", "added_ms"), ("stream", "added_ttfb_ms"), ("paced", "added_ttfb_ms")):
        own_p50 = own.added(kind, 50, direct)
        for peer in peers:
            p50, p99 = np.percentile(peer.first[kind], 50), np.percentile(peer.first[kind], 99)
            line = f"{kind:7}{peer.name:10} p50 {p50:.3f} ms, p99 {p99:.3f} ms"
            if peer is direct:
                print(f"{line}; {direct.events_per_s():.0f} events/s" if kind == "stream" else line)
                continue
            added = {percent: peer.added(kind, percent, direct) for percent in (50, 99)}
            line += f"; added {added[50]:.3f}, {added[99]:.3f} ms; {peer.per_core(kind):.0f} per core-second"
            if kind == "stream":
                line += f", {peer.events_per_s():.0f} events/s"
            prefix = "" if peer is own else f"{peer.name}_"
            for percent, value in added.items():
                result[f"{prefix}{kind}_{unit}_p{percent}"] = round(value, 3)
            result[f"{prefix}{kind}_per_core_s"] = round(peer.per_core(kind))
            if peer is not own:
                line += f"; specproxy adds {own_p50 / added[50]:.2f} times as much"
                result[f"over_{peer.name}_{kind}"] = round(own_p50 / added[50], 2)
            print(line)
        if litellm_ := next((peer for peer in peers if peer.name == "litellm"), None):
            result[f"litellm_over_us_{kind}"] = round(litellm_.added(kind, 50, direct) / own_p50, 1)
    if "litellm_over_us_json" in result:
        result["litellm_over_us"] = min(result["litellm_over_us_json"], result["litellm_over_us_stream"])
    result["events_per_s"] = round(own.events_per_s())
    return result


def start_peers(stack: ExitStack, upstream: int, program: str) -> list[Peer]:
    """Start the other proxies that there are."""
    found = []
    for name, every in (("nginx", 1), ("haproxy", 1), ("litellm", 10)):
        port = free_port()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if name == "litellm":
            process = stack.enter_context(litellm(folder, port, upstream, program))
        else:
            process = stack.enter_context({"nginx": nginx, "haproxy": haproxy}[name](folder, port, upstream))
        if process is None:
            print(f"{name}: not {'asked for' if name == 'litellm' else 'installed'}")
            continue
        wait_open(port, 120.0)
        found.append(Peer(name, port, process, every))
    return found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--streams", type=int, default=400)
    parser.add_argument("--leavers", type=int, default=40)
    parser.add_argument("--litellm", default="", help="LiteLLM's executable, or install")
    parser.add_argument(
        "--lanes", type=int, default=1, help="upstreams with the same model, so that there is a choice"
    )
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.serve))
        return
    upstreams, port = [free_port() for _ in range(args.lanes)], free_port()
    upstream = upstreams[0]
    url = f"http://127.0.0.1:{port}"
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        state = stack.enter_context(tempfile.TemporaryDirectory())
        command = [sys.executable, "-m", "specproxy", "start", "--port", str(port), "--state-dir", state]
        command += ["--log-level", "warning"]
        for each in upstreams:
            stack.enter_context(running([sys.executable, "-m", "benchmarks.bench_proxy", "--serve", str(each)]))
            wait_open(each)
            command += ["--upstream", f"http://127.0.0.1:{each}"]
        begun = time.perf_counter()
        proxy = stack.enter_context(running(command))
        wait_open(port)
        start_s = time.perf_counter() - begun
        wait_ready(url)
        others = start_peers(stack, upstream, args.litellm)
        time.sleep(1.0)
        process = psutil.Process(proxy.pid)
        rss = process.memory_info().rss / 1e6
        rng = random.Random(1)
        peers = [Peer("direct", upstream, None), Peer("specproxy", port, process), *others]
        measure(peers, args.calls, "json", rng)
        measure(peers, args.streams, "stream", rng)
        measure(peers, args.streams, "paced", rng)
        gone = (
            [leave(upstream, port, begun=i % 2 == 0) for i in range(args.leavers)] if args.lanes == 1 else [0.0]
        )
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {load:.1f}, Python {platform.python_version()}")
    print(f"{args.calls} JSON calls, {args.streams} streams of {EVENTS} events, one client, {args.lanes} lanes")
    result = show(peers)
    print(
        f"client left, upstream closed: p50 {np.median(gone):.2f} ms, slowest of {len(gone)} {max(gone):.2f} ms"
    )
    result |= {
        "client_gone_ms_p50": round(float(np.median(gone)), 3),
        "client_gone_ms_max": round(max(gone), 3),
    }
    print(f"idle memory {rss:.0f} MB, start to listening {start_s:.2f} s")
    print(json.dumps({**result, "idle_rss_mb": round(rss, 1), "start_ready_s": round(start_s, 3)}))


if __name__ == "__main__":
    main()
