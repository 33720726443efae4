"""Time to first byte that the proxy adds, for a small JSON call and for a 200-event stream.

    python -m benchmarks.bench_proxy [--calls N] [--streams N] [--leavers N]

A raw server answers at once, in a process of its own; `specproxy start` stands in front of it, as users run it.
One client with a kept-alive connection to each sends the same request to both in turn, in shuffled order. What
is shown as added is the difference of the percentiles of the same run. Then clients leave before the first byte
or in mid-stream, and the time until the upstream's connection closes is taken. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import psutil

from benchmarks.live import free_port, get_json

EVENTS = 200
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
                for _ in range(EVENTS):
                    writer.write(chunk(EVENT))
                    await writer.drain()
                    await asyncio.sleep(0)
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

    def call(self, body: bytes, *, stream: bool) -> float:
        """Seconds from sending a request to the first byte of its response, which is read to its end."""
        begun = time.perf_counter()
        self.sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        got = self.sock.recv(1 << 16)
        taken = time.perf_counter() - begun
        ending = b"0\r\n\r\n" if stream else REPLY
        while not got.endswith(ending):
            more = self.sock.recv(1 << 16)
            if not more:
                raise ConnectionError("the connection ended within a response")
            got = got[-64:] + more if stream else got + more
        return taken


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


def measure(
    direct: Client, proxied: Client, n: int, *, stream: bool, rng: random.Random
) -> tuple[list[float], list[float]]:
    """Times to first byte in ms, direct and through the proxy."""
    body = json.dumps({**CHAT, "stream": stream}).encode()
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(n + n // 10):
        for which in rng.sample((0, 1), 2):
            taken = (direct, proxied)[which].call(body, stream=stream)
            if i >= n // 10:  # the first tenth warms up
                times[which].append(taken * 1e3)
    return times


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


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--streams", type=int, default=400)
    parser.add_argument("--leavers", type=int, default=40)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.serve))
        return
    upstream, port = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory() as state,
        running([sys.executable, "-m", "benchmarks.bench_proxy", "--serve", str(upstream)]),
    ):
        wait_open(upstream)
        begun = time.perf_counter()
        command = [sys.executable, "-m", "specproxy", "start", "--upstream", f"http://127.0.0.1:{upstream}"]
        with running([*command, "--port", str(port), "--state-dir", state, "--log-level", "warning"]) as proxy:
            wait_open(port)
            start_s = time.perf_counter() - begun
            wait_ready(url)
            time.sleep(1.0)
            rss = psutil.Process(proxy.pid).memory_info().rss / 1e6
            rng = random.Random(1)
            direct, proxied = Client(upstream), Client(port)
            calls = measure(direct, proxied, args.calls, stream=False, rng=rng)
            streams = measure(direct, proxied, args.streams, stream=True, rng=rng)
            gone = [leave(upstream, port, begun=i % 2 == 0) for i in range(args.leavers)]
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {load:.1f}, Python {platform.python_version()}")
    print(
        f"{args.calls} JSON calls and {args.streams} streams of {EVENTS} events each way, one client at a time"
    )
    result: dict[str, float] = {}
    for name, unit, (plain, through) in (("json", "added_ms", calls), ("stream", "added_ttfb_ms", streams)):
        for percent in (50, 99):
            a, b = np.percentile(plain, percent), np.percentile(through, percent)
            print(f"{name:7} p{percent}: direct {a:.3f} ms, through specproxy {b:.3f} ms, added {b - a:.3f} ms")
            result[f"{name}_{unit}_p{percent}"] = round(float(b - a), 3)
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
