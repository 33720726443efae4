"""Run the real proxy as a child process and send it requests with the official clients."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import ollama
import openai
from rich.console import Console

from tests.support.ports import free_port

__all__ = ["Row", "Running", "Sample", "get_json", "ollama_body", "send", "send_ollama", "started"]


@dataclass(frozen=True, slots=True)
class Row:
    """One request to send: `kind` is its label, `request` an OpenAI chat request without model."""

    kind: str
    request: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """What one request took. `decode_s` is the server's own figure, `total_s` wall clock."""

    kind: str
    strategy: str
    workload: str
    total_s: float
    tokens: int
    decode_s: float
    drafted: int
    accepted: int

    @property
    def decode_per_token(self) -> float:
        """Decode seconds per token."""
        return self.decode_s / max(1, self.tokens - 1)

    @property
    def total_per_token(self) -> float:
        """Wall-clock seconds of the whole request per output token."""
        return self.total_s / max(1, self.tokens)


@dataclass(slots=True)
class Running:
    """A started proxy: its address, and where each strategy is reached (its lane's own URL, or the proxy's)."""

    url: str
    lanes: dict[str, str] = field(default_factory=dict)
    ollama_model: str = ""  # what the model is called in Ollama's API, where the lanes answer it


def get_json(url: str, timeout: float = 5.0) -> dict[str, Any]:
    """GET a JSON object."""
    with urllib.request.urlopen(url, timeout=timeout) as reply:
        data: dict[str, Any] = json.load(reply)
        return data


def wait_ready(url: str, child: subprocess.Popen[str], log: Path, seconds: float) -> dict[str, Any]:
    """Wait until every lane is ready or given up; returns the status."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if child.poll() is not None:
            sys.exit(f"specproxy ended with exit code {child.returncode}:\n{log.read_text()[-3000:]}")
        try:
            status = get_json(f"{url}/specproxy/api/status")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            status = {}
        lanes = status.get("lanes", [])
        if lanes and all(lane["health"] != "starting" for lane in lanes):
            return status
        time.sleep(0.2)
    sys.exit(f"the lanes were not ready after {seconds:.0f} s:\n{log.read_text()[-3000:]}")


def wait_profiled(url: str, console: Console, seconds: float) -> None:
    """Wait until the proxy has measured its lanes, and say what that took."""
    begun = time.monotonic()
    while time.monotonic() - begun < 2.0 * seconds + 60.0:
        status = get_json(f"{url}/specproxy/api/status")
        if status["profile"]["state"] == "done":
            told = [event["message"] for event in status["events"] if event["kind"] == "profiled"]
            waited = time.monotonic() - begun
            console.print(f"  {told[-1] if told else 'nothing was measured'} ({waited:.0f} s with the wait)")
            return
        time.sleep(0.5)
    sys.exit(f"lanes were not measured in time: {status['profile']}")


@contextmanager
def started(
    args: Sequence[str],
    *,
    state: Path,
    console: Console,
    engine: str = "managed",
    threads: int = 2,
    profile_s: float = 0.0,
) -> Iterator[Running]:
    """`specproxy start` with these arguments, ready and stopped again.

    With `profile_s` it measures its lanes first, for so many seconds at most.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log = state / "proxy.log"
    command = [sys.executable, "-m", "specproxy", "start", "--port", str(port), "--state-dir", str(state)]
    command += ["--engine", engine, "--threads", str(threads), "--slots", "1", *args]
    command += ["--profile", f"{profile_s:g}"]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, text=True) as child:
        try:
            status = wait_ready(url, child, log, 240)
            running = Running(url)
            running.ollama_model = _ollama_model(url)
            for lane in status["lanes"]:
                if lane["health"] == "ready":
                    running.lanes[lane["strategy"]] = lane.get("address") or url
                note = f": {lane['note']}" if lane.get("note") else ""
                memory = lane.get("memory_bytes", 0) / 1e6
                console.print(
                    f"  lane [bold]{lane['id']}[/bold] {lane['health']}, {memory:.0f} MB{note}", highlight=False
                )
            if profile_s:
                wait_profiled(url, console, profile_s)
            yield running
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()


def send(base: str, row: Row, *, stream: bool, strategy: str = "") -> Sample:
    """Send one chat request with the openai client, pinned to `strategy` if one is given."""
    client = _client(base, strategy)
    begun = time.perf_counter()
    kwargs: dict[str, Any] = {"model": "local", **row.request}
    extra = {k: kwargs.pop(k) for k in ("top_k", "min_p", "cache_prompt") if k in kwargs}
    if extra:
        kwargs["extra_body"] = extra
    timings: dict[str, Any] = {}
    if stream:
        raw = client.chat.completions.with_raw_response.create(stream=True, **kwargs)
        for chunk in raw.parse():
            timings = (chunk.model_extra or {}).get("timings") or timings
    else:
        raw = client.chat.completions.with_raw_response.create(**kwargs)
        timings = (raw.parse().model_extra or {}).get("timings") or {}
    total = time.perf_counter() - begun
    return Sample(
        kind=row.kind,
        strategy=raw.headers.get("x-specproxy-strategy", strategy),
        workload=raw.headers.get("x-specproxy-workload", ""),
        total_s=total,
        tokens=int(timings.get("predicted_n", 0)),
        decode_s=float(timings.get("predicted_ms", 0.0)) / 1000,
        drafted=int(timings.get("draft_n", 0)),
        accepted=int(timings.get("draft_n_accepted", 0)),
    )


@cache
def _client(base: str, strategy: str) -> openai.OpenAI:
    """A client takes longer to make than a short request."""
    pin = {"X-Specproxy-Strategy": strategy} if strategy else {}
    return openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, default_headers=pin)


def ollama_body(request: dict[str, Any]) -> dict[str, Any] | None:
    """An OpenAI chat request in Ollama's shape (/api/chat), without model; None if that lacks a word."""
    if "tool_choice" in request or any(not isinstance(m.get("content"), str) for m in request["messages"]):
        return None
    names = {"max_tokens": "num_predict", "temperature": "temperature", "top_k": "top_k", "min_p": "min_p"}
    body: dict[str, Any] = {
        "messages": request["messages"],
        "options": {ours: request[name] for name, ours in names.items() if name in request},
    }
    if "tools" in request:
        body["tools"] = request["tools"]
    wanted = request.get("response_format", {"type": "text"})
    if wanted["type"] != "text":
        schema = wanted["type"] == "json_schema"
        body["format"] = wanted["json_schema"]["schema"] if schema else "json"
    return body


def send_ollama(base: str, model: str, kind: str, body: dict[str, Any], *, stream: bool) -> Sample:
    """Send one chat request with the ollama client. Its API tells no draft counts."""
    headers: dict[str, str] = {}
    client = ollama.Client(host=base, event_hooks={"response": [lambda reply: headers.update(reply.headers)]})
    begun = time.perf_counter()
    if stream:
        *_, last = client.chat(model=model, stream=True, **body)
    else:
        last = client.chat(model=model, **body)
    return Sample(
        kind=kind,
        strategy=headers.get("x-specproxy-strategy", ""),
        workload=headers.get("x-specproxy-workload", ""),
        total_s=time.perf_counter() - begun,
        tokens=last.eval_count or 0,
        decode_s=(last.eval_duration or 0) / 1e9,
        drafted=0,
        accepted=0,
    )


def _ollama_model(url: str) -> str:
    """The first model that Ollama's API names here, empty where nobody answers it."""
    try:
        return str(get_json(f"{url}/api/tags")["models"][0]["name"])
    except (urllib.error.URLError, KeyError, IndexError, TypeError, ValueError):
        return ""
