"""`specproxy start --upstream` in front of a real llama-server: the start-up ladder, end to end."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from specproxy.adapters import xllama_child
from specproxy.cli.start import start
from tests.support.calibrated import CalibratedPair, write_pair
from tests.support.command import clean_env, get, run, started
from tests.support.ports import free_port, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> CalibratedPair:
    return write_pair(tmp_path_factory.mktemp("models"), seed=5)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return clean_env(tmp_path)


@contextmanager
def llama_server(*arguments: str, cwd: Path | None = None, port: int = 0) -> Iterator[str]:
    """A real llama-server that somebody else runs; its URL."""
    port = port or free_port()
    fixed = ["--port", str(port), "-c", "1024", "-np", "1", "-t", "1", "--slots"]
    command = [sys.executable, "-m", "specproxy.adapters.xllama_child", *arguments, *fixed]
    with subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        try:
            wait_for(f"http://127.0.0.1:{port}/health")
            yield f"http://127.0.0.1:{port}"
        finally:
            child.kill()


def until(url: str, condition: Any) -> dict[str, Any]:
    """The status once a condition on it holds."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        data: dict[str, Any] = get(f"{url}/specproxy/api/status")
        if condition(data):
            return data
        time.sleep(0.05)
    raise AssertionError(f"never came: {data}")


def complete(url: str, prompt: str, pin: str | None = None, **fields: Any) -> tuple[str, str]:
    """The lane and the text of a greedy completion."""
    body = {"model": "any", "prompt": prompt, "max_tokens": 20, "temperature": 0, **fields}
    request = urllib.request.Request(f"{url}/v1/completions", data=json.dumps(body).encode())
    if pin:
        request.add_header("X-Specproxy-Strategy", pin)
    with urllib.request.urlopen(request, timeout=30) as reply:
        return reply.headers["X-Specproxy-Lane"], json.load(reply)["choices"][0]["text"]


def health(data: dict[str, Any]) -> dict[str, str]:
    return {lane["id"]: lane["health"] for lane in data["lanes"]}


def test_lanes_come_up_on_the_weights_of_a_running_server(env: dict[str, str], pair: CalibratedPair) -> None:
    """Same text on all; plain and what is not inference stay on the server; SIGTERM leaves our children dead
    and the server alive."""
    arguments = ("--manage", "--threads", "1", "--draft", str(pair.draft))
    with (
        llama_server("-m", str(pair.target)) as upstream,
        started(env, "--upstream", upstream, *arguments) as (child, url),
    ):
        lanes = dict.fromkeys(["upstream", "ngram", "mtp", "draft"], "ready")
        data = until(url, lambda data: health(data) == lanes)
        assert data["rung"]["number"] == 2
        assert "GiB" in data["rung"]["why"]
        assert {lane["target"] for lane in data["lanes"]} == {str(pair.target)}
        prompt = f"words {pair.marker('json', 3)}"
        said = {pin: complete(url, prompt, pin) for pin in ("plain", "ngram", "mtp", "draft")}
        assert {pin: lane for pin, (lane, _) in said.items()} == {
            "plain": "upstream", "ngram": "ngram", "mtp": "mtp", "draft": "draft",
        }  # fmt: skip
        assert len({text for _, text in said.values()}) == 1
        assert complete(url, prompt, logprobs=3)[0] == "upstream"
        slots = get(f"{url}/slots")
        assert [slot["speculative"] for slot in slots] == [False]
        assert get(f"{url}/v1/models")["data"][0]["id"] == str(pair.target)
        for lane in data["lanes"]:
            assert get(f"{lane['address']}/v1/models")["data"][0]["id"] == str(pair.target)
        children = psutil.Process(child.pid).children(recursive=True)
        assert len(children) >= 3
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=30)
        assert child.returncode == 0
        assert psutil.wait_procs(children, timeout=10)[1] == []
        assert get(f"{upstream}/health") == {"status": "ok"}


def test_a_server_that_drafts_gets_a_plain_lane_beside_it(env: dict[str, str], pair: CalibratedPair) -> None:
    """What it does is read from its slots and command line, and not started again. Its path is relative."""
    spec = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "3")
    with (
        llama_server("-m", pair.target.name, *spec, cwd=pair.target.parent) as upstream,
        started(env, "--upstream", upstream, "--manage", "--threads", "1") as (_, url),
    ):
        data = until(url, lambda data: health(data) == dict.fromkeys(["upstream", "plain", "ngram"], "ready"))
        assert {lane["id"]: lane["strategy"] for lane in data["lanes"]} == {
            "upstream": "mtp", "plain": "plain", "ngram": "ngram",
        }  # fmt: skip
        assert complete(url, "x", logprobs=3)[0] == "plain"


def test_todays_build_is_tried_and_found_to_ignore_the_field(env: dict[str, str], pair: CalibratedPair) -> None:
    """Once: a second start knows it, and decodes nothing on the server."""
    spec = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "3")

    def tried(data: dict[str, Any]) -> bool:
        return data["rung"] is not None and "was tried and ignores" in data["rung"]["why"]

    with llama_server("-m", str(pair.target), *spec, "--metrics") as upstream:
        with started(env, "--upstream", upstream) as (_, url):
            assert until(url, tried)["rung"]["number"] == 4
        decoded = metric(upstream, "llamacpp:tokens_predicted_total")
        assert 24 <= decoded <= 48
        with started(env, "--upstream", upstream) as (_, url):
            until(url, tried)
        assert metric(upstream, "llamacpp:tokens_predicted_total") == decoded


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as reply:
        text = reply.read().decode()
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(name + " "))


def test_a_lone_server_is_told_what_works(env: dict[str, str], pair: CalibratedPair) -> None:
    """Rung 4 in status and on the command line; every command is accepted, and the first one gives lanes."""
    with llama_server("-m", str(pair.target)) as upstream:
        with started(env, "--upstream", upstream) as (_, url):
            data = until(url, lambda data: data["rung"] is not None)
            assert data["rung"]["number"] == 4
            shown = run(env | {"COLUMNS": "80"}, "status", "--url", url).stdout
        commands = [item.partition("\n")[2] for item in data["rung"]["advice"] if "\n" in item]
        assert all(command in shown for command in commands)
        split = [shlex.split(command) for command in commands]
        ours = [words for words in split if words[0] == "specproxy"]
        assert len(ours) == 2
        for words in ours:
            assert words[1] == "start"
            start.make_context("start", words[2:]).close()
        for words in split:
            if "xllama_child" in " ".join(words):
                assert xllama_child.parse(words[3:])["model.path"] == str(pair.target)
        with started(env, *ours[0][2:], "--threads", "1") as (_, url):
            until(url, lambda data: data["rung"] is not None and data["rung"]["number"] == 2)


def test_a_server_with_another_template_is_not_stood_in_for(env: dict[str, str], pair: CalibratedPair) -> None:
    """Unless the lanes are given the same one: they would make other prompts of a chat."""
    template = "--chat-template chatml"
    with llama_server("-m", str(pair.target), *template.split()) as upstream:
        base = ("--upstream", upstream, "--manage", "--threads", "1")
        with started(env, *base) as (_, url):
            data = until(url, lambda data: data["rung"] is not None and "template" in data["rung"]["why"])
            assert (data["rung"]["number"], set(health(data))) == (4, {"upstream"})
        with started(env, *base, "--llama-args", template) as (_, url):
            until(url, lambda data: health(data) == dict.fromkeys(["upstream", "ngram", "mtp"], "ready"))


def test_lanes_follow_the_server(env: dict[str, str], pair: CalibratedPair, tmp_path: Path) -> None:
    """A server that comes up later gets its lanes; one with another model gets others in their place."""
    other = write_pair(tmp_path, seed=9)
    port = free_port()
    upstream = f"http://127.0.0.1:{port}"
    with started(env, "--upstream", upstream, "--manage", "--threads", "1") as (child, url):
        assert health(get(f"{url}/specproxy/api/status")) == {"upstream": "unhealthy"}
        for model in (pair, other):
            with llama_server("-m", str(model.target), port=port):
                data = until(
                    url,
                    lambda data, model=model: (
                        health(data) == dict.fromkeys(["upstream", "ngram", "mtp"], "ready")
                        and {lane["target"] for lane in data["lanes"]} == {str(model.target)}
                    ),
                )
                assert data["upstreams"][0]["models"] == [str(model.target)]
                assert complete(url, model.marker("json", 3), "mtp")[1] == model.text("json", 20, 3)
            with pytest.raises(urllib.error.HTTPError, match="503") as caught:
                get(f"{url}/health")  # a request that finds nobody there is noticed at once
            caught.value.close()
            assert health(get(f"{url}/specproxy/api/status"))["upstream"] == "unhealthy"
        models = [
            word
            for p in psutil.Process(child.pid).children(recursive=True)
            for word in p.cmdline()
            if ".gguf" in word
        ]
        assert set(models) == {str(other.target)}
