"""What a plain step of the engine takes, in all and outside llama_decode, one stream over HTTP.

    python -m benchmarks.engine_steps MODEL THREADS PROMPT TOKENS

The engine runs in this process, since only it knows how long it was in llama_decode; the client is another
process, as it is in life. Prints a list of [milliseconds outside, milliseconds in all], one for each run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

from aiohttp import web

from specproxy.adapters.embedded.app import build_app, serve_site
from specproxy.adapters.embedded.engine import LlamaEngine
from specproxy.adapters.embedded.environment import engine_environment
from specproxy.adapters.embedded.options import EngineOptions

__all__ = ["step_times"]


def step_times(model: Path, threads: int, prompt: str, tokens: int) -> tuple[float, float]:
    """Milliseconds outside llama_decode and in all, of the middle one of some runs, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.engine_steps", str(model), str(threads), prompt, str(tokens)]
    env = os.environ | engine_environment()  # some of it is read when a process starts
    runs = json.loads(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout)
    outside, whole = sorted(runs)[len(runs) // 2]
    return outside, whole


async def python_share(model: Path, threads: int, prompt: str, tokens: int) -> list[tuple[float, float]]:
    """Milliseconds of a step outside llama_decode, and of the step, in some runs."""
    engine = LlamaEngine(EngineOptions(model=model, context=4096, threads=threads))
    runner = await serve_site(build_app(engine), lambda runner: web.TCPSite(runner, "127.0.0.1", 0))
    port = runner.addresses[0][1]
    shares = []
    for number in range(3):
        native = engine.native_s
        command = [
            sys.executable,
            "-m",
            "benchmarks.engine_client",
            str(port),
            f"{number} {prompt}",
            str(tokens),
        ]
        client = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        out, _ = await client.communicate()
        timings = json.loads(out)
        # one step a token behind the first, which the prompt's own step gives; that one counts as all native
        steps, decode_ms = tokens - 1, timings["predicted_ms"]
        native_ms = 1000 * (engine.native_s - native) - timings["prompt_ms"]
        shares.append(((decode_ms - native_ms) / steps, decode_ms / steps))
    await runner.cleanup()
    return shares


if __name__ == "__main__":
    with contextlib.suppress(ImportError):  # as in the engine's child process
        import uvloop

        uvloop.install()
    model, threads, prompt, tokens = sys.argv[1:]
    print(json.dumps(asyncio.run(python_share(Path(model), int(threads), prompt, int(tokens)))))
