"""Where docs' commands are run: a home of its own, tiny models, servers that stand in, ports that are free.

Commands are run as they stand, but for port numbers: those of specproxy, Ollama, llama-server and LM Studio are
replaced by free ones, since a developer may have any of them running. What starts a server runs in the
background until the next one is started or the page ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.docs.pages import ROOT
from tests.support.calibrated import CalibratedPair
from tests.support.fakes import fake_ollama, ollama_model
from tests.support.ports import free_port

__all__ = ["Sandbox"]

SERVERS = re.compile(r"(^|\s)(specproxy start|llama-server)\b")
READY_S, RUN_S = 120, 300  # for a server to answer, and for a command to end, on a busy machine


class Sandbox:
    """Runs the commands of one page."""

    def __init__(self, folder: Path, pair: CalibratedPair) -> None:
        self.folder = folder
        self.ports = {port: str(free_port()) for port in ("8484", "11434", "8080", "1234", "9000")}
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._started: dict[str, str] = {}
        for source, name in ((pair.target, "model.gguf"), (pair.draft, "small.gguf")):
            shutil.copy(source, folder / name)
        (folder / "examples").symlink_to(ROOT / "examples")
        prompts = [f"words {pair.marker('json', k)}" for k in range(3)]
        (folder / "mine.jsonl").write_text("".join(json.dumps(text) + "\n" for text in prompts))
        (folder / "request.json").write_text('{"messages": [{"role": "user", "content": "hi"}]}')
        self._store_model("llama3.2", pair.target)
        self._tools()
        self.env = self._environment()

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SPECPROXY_")}
        home = self.folder / "home"
        home.mkdir()
        (home / ".curlrc").write_text("fail-with-body\n")
        settings = {"SPECPROXY_PORT": self.ports["8484"], "SPECPROXY_THREADS": "1", "SPECPROXY_CTX": "1024"}
        return (
            kept
            | settings
            | {
                "HOME": str(home),
                "XDG_CONFIG_HOME": str(home / "config"),
                "XDG_STATE_HOME": str(home / "state"),
                "OLLAMA_MODELS": str(self.folder / "ollama"),
                "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "COLUMNS": "100",
            }
        )

    def _tools(self) -> None:
        """Programs that pages name: specproxy of this tree, the wheel's llama-server, a systemctl that nods."""
        scripts = {
            "bin/specproxy": f'exec {sys.executable} -m specproxy "$@"',
            "bin/systemctl": "exit 0",
            # not on the PATH of specproxy, which would ask it what it can do
            "llama/llama-server": f'exec {sys.executable} -m specproxy.adapters.xllama_child "$@" -c 1024 -t 1',
        }
        for name, line in scripts.items():
            file = self.folder / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"#!/bin/sh\n{line}\n")
            file.chmod(0o755)

    def _store_model(self, name: str, file: Path) -> None:
        """A model in Ollama's folder, as `ollama pull` leaves it."""
        store = self.folder / "ollama"
        manifest = store / "manifests" / "registry.ollama.ai" / "library" / name / "latest"
        manifest.parent.mkdir(parents=True)
        layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:" + "a" * 64}
        manifest.write_text(json.dumps({"layers": [layer]}))
        (store / "blobs").mkdir()
        shutil.copy(file, store / "blobs" / ("sha256-" + "a" * 64))

    def write(self, name: str, text: str) -> None:
        """A file that a page says to write."""
        (self.folder / name).write_text(self.with_ports(text))

    def with_ports(self, text: str) -> str:
        """The text with ports that are free here."""
        return re.sub(r"\b(8484|11434|8080|1234|9000)\b", lambda found: self.ports[found[0]], text)

    def run(self, command: str) -> None:
        """Run a command to its end, or a server until it answers; what fails raises AssertionError."""
        command = self.with_ports(command)
        if found := SERVERS.search(command):
            self._serve(command, found[2])
            return
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=RUN_S,
        )
        assert done.returncode == 0, f"{command}\nexit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr

    def restart(self) -> None:
        """Stop the proxy and start it as it was: its lanes have forgotten what they were sent."""
        self._serve(self._started["specproxy start"], "specproxy start")

    def _serve(self, command: str, kind: str) -> None:
        self._stop(kind)
        self._started[kind] = command
        words = re.match(r"((?:\w+=\S+\s+)*)(.*)", command, re.DOTALL)
        assert words is not None
        log = (self.folder / f"{kind.split()[0]}.log").open("w")
        lanes = "plain,ngram,draft" if "--draft" in command else "plain,ngram"  # enough, and quick
        path = f"PATH={self.folder / 'llama'}:$PATH " if kind == "llama-server" else ""
        line = f"{path}SPECPROXY_STRATEGIES={lanes} {words[1]}exec {words[2]}"
        child = subprocess.Popen(
            ["bash", "-c", line], cwd=self.folder, env=self.env, stdout=log, stderr=log, text=True
        )
        log.close()
        self._running[kind] = child
        port = self.ports["8484" if kind == "specproxy start" else "8080"]
        path = "/specproxy/health" if kind == "specproxy start" else "/health"
        self._wait(child, f"http://127.0.0.1:{port}{path}", Path(log.name))
        if kind == "specproxy start" and "SPECPROXY_TOKEN" not in command:
            self._settle(f"http://127.0.0.1:{port}", own="--model" in command)

    def _wait(self, child: subprocess.Popen[str], url: str, log: Path) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            assert child.poll() is None, f"it ended with {child.returncode}:\n{log.read_text()}"
            with suppress(OSError), urllib.request.urlopen(url, timeout=5):
                return
            time.sleep(0.05)
        raise AssertionError(f"nothing answers at {url}:\n{log.read_text()}")

    def _settle(self, url: str, *, own: bool) -> None:
        """Wait for lanes that are starting; `own`: there must be some."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            with urllib.request.urlopen(f"{url}/specproxy/api/status", timeout=10) as reply:
                lanes = json.load(reply)["lanes"]
            if (lanes or not own) and all(lane["health"] != "starting" for lane in lanes):
                return
            time.sleep(0.05)
        raise AssertionError("the lanes did not settle")

    def _stop(self, kind: str) -> None:
        """As a person does, with Ctrl-C; specproxy must end well."""
        child = self._running.pop(kind, None)
        if child is None:
            return
        if kind != "specproxy start":
            child.kill()
            child.wait()
            return
        child.send_signal(signal.SIGINT)
        code = child.wait(READY_S)
        assert code == 0, f"specproxy ended with {code}"

    @contextmanager
    def servers(self) -> Iterator[None]:
        """An Ollama that stands in where pages have Ollama and LM Studio; all is stopped at the end."""
        loop, stop, up = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

        async def serve() -> None:
            model = ollama_model("llama3.2:latest")
            async with (
                fake_ollama(model, port=int(self.ports["11434"])),
                fake_ollama(model, port=int(self.ports["1234"])),
            ):
                up.set()
                await stop.wait()

        thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
        thread.start()
        assert up.wait(10)
        try:
            yield
            for kind in list(self._running):
                self._stop(kind)
        finally:
            for child in self._running.values():
                child.kill()
                child.wait()
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()
