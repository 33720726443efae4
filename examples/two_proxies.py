"""Two proxies that learn together: one Redis, three servers with one model, and what each proxy knows then.

    pip install 'specproxy[managed,redis]'
    python examples/two_proxies.py MODEL.gguf [--requests N]

Starts a redis-server and three llama-servers on the model (plain, n-gram, and the n-gram variant that keeps a
pool), and two proxies in front of all three. Half of the requests go to each proxy. Both then show the same
figures, over all requests. Servers of any kind do: on several machines, give both proxies the same --upstream
list and the same --store.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from specproxy.adapters.server_program import find_program

LANES = ("none", "ngram-simple", "ngram-mod")
PROMPTS = ("Write a haiku about rivers.", "Say the list again: one, two, three, four, five.", "def add(a, b):")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def running(*command: str) -> Iterator[None]:
    """A process for as long as the block lasts."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        child.terminate()
        child.wait(20)


def ask(url: str, body: dict[str, object] | None = None) -> dict[str, object]:
    """GET, or POST of a JSON object."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        found: dict[str, object] = json.load(reply)
        return found


def until(url: str, good: str, seconds: float = 60.0) -> None:
    """Wait until a page answers and holds a text."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if json.dumps(ask(url)).count(good) >= (len(LANES) if good.startswith('"health"') else 1):
                return
        except OSError:
            pass
        time.sleep(0.1)
    sys.exit(f"{url} did not come up")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    if not Path(args.model).is_file():
        sys.exit(f"{args.model}: no such file; give the path of a .gguf file")
    if shutil.which("redis-server") is None:
        sys.exit("redis-server is not installed: apt install redis-server")
    program = find_program()
    with ExitStack() as stack:
        state = stack.enter_context(tempfile.TemporaryDirectory())
        redis_port = free_port()
        stack.enter_context(running("redis-server", "--port", str(redis_port), "--dir", state, "--save", ""))
        servers = []
        for kind in LANES:
            port = free_port()
            command = [*program.command, "-m", args.model, "--port", str(port), "-c", "2048", "-np", "1"]
            stack.enter_context(running(*command, "--spec-type", kind, "-a", "model", "-t", "1"))
            servers.append(f"http://127.0.0.1:{port}")
        for server in servers:
            until(f"{server}/health", "ok")
        proxies = []
        for number in (1, 2):
            port = free_port()
            command = [sys.executable, "-m", "specproxy", "start", "--port", str(port)]
            command += ["--store", f"redis://127.0.0.1:{redis_port}/0", "--state-dir", f"{state}/{number}"]
            for server in servers:
                command += ["--upstream", server]
            stack.enter_context(running(*command))
            proxies.append(f"http://127.0.0.1:{port}")
        for proxy in proxies:
            until(f"{proxy}/specproxy/api/status", '"health": "ready"')
        for i in range(args.requests):
            message = {"role": "user", "content": f"{PROMPTS[i % len(PROMPTS)]} ({i})"}
            body = {"model": "model", "messages": [message], "max_tokens": args.tokens}
            ask(f"{proxies[i % 2]}/v1/chat/completions", body)
        time.sleep(1.0)  # what ended last reaches the other proxy within half a second
        for number, proxy in enumerate(proxies, 1):
            status = ask(f"{proxy}/specproxy/api/status")
            print(f"proxy {number} knows {status['requests']['total']} requests:")  # type: ignore[index]  # JSON
            for row in status["kinds"]:  # type: ignore[attr-defined]  # JSON
                speed = f"{row['n']}, {row['tok_s'] or 0:.0f} tok/s"
                print(f"  {row['workload']} on {row['lane']} ({row['strategy']}): {speed}")


if __name__ == "__main__":
    main()
