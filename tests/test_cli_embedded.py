"""`specproxy start --model` on the embedded engine."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path

import psutil
import pytest

from specproxy.adapters.gguf_facts import read_facts
from tests.support.assistant import write_assistant
from tests.support.calibrated import CalibratedPair, write_pair
from tests.support.command import clean_env, leaks, run, settled, started

CANARY = "xylophone-canary-7421"  # must be found nowhere afterwards
pytestmark = [pytest.mark.embedded, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> CalibratedPair:
    return write_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return clean_env(tmp_path)


def test_the_engine_is_preferred_and_switches_by_request(env: dict[str, str], pair: CalibratedPair) -> None:
    """One child serves every strategy on one copy of the weights; a pin chooses; SIGTERM ends the child too."""
    arguments = ["--model", str(pair.target), "--draft", str(pair.draft), "--threads", "1", "--ctx", "1024"]
    with started(env, *arguments, "--strategies", "ngram,mtp,draft") as (child, url):
        data = settled(url)
        assert [lane["id"] for lane in data["lanes"]] == ["plain", "ngram", "draft", "mtp"]
        assert {lane["backend"] for lane in data["lanes"]} == {"embedded"}
        assert (data["rung"]["number"], data["rung"]["name"]) == (1, "a strategy per request")
        texts = set()
        for strategy in ("plain", "ngram", "mtp", "draft"):
            body = {"prompt": f"{CANARY} {pair.marker('json', 3)}", "max_tokens": 20, "temperature": 0}
            request = urllib.request.Request(f"{url}/v1/completions", data=json.dumps(body).encode())
            request.add_header("X-Specproxy-Strategy", strategy)
            with urllib.request.urlopen(request) as reply:
                assert reply.headers["X-Specproxy-Strategy"] == strategy
                texts.add(json.load(reply)["choices"][0]["text"])
        assert len(texts) == 1
        children = psutil.Process(child.pid).children(recursive=True)
        assert children
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=30)
        assert child.returncode == 0
        assert leaks(CANARY, out + err, env) == []
        assert psutil.wait_procs(children, timeout=10)[1] == []


def test_an_assistant_given_as_draft_is_the_head(env: dict[str, str], tmp_path: Path) -> None:
    """It is known by its file, told of by its name, and drafts under the name of mtp."""
    pair = write_assistant(tmp_path / "assisted")
    arguments = ["--model", str(pair.target), "--draft", str(pair.draft), "--threads", "1", "--ctx", "1024"]
    with started(env, *arguments) as (child, url):
        data = settled(url)
        memory = {lane["id"]: lane["memory_bytes"] for lane in data["lanes"]}
        assert set(memory) >= {"plain", "ngram", "mtp"}
        assert "draft" not in memory
        assert memory["mtp"] == read_facts(pair.draft).weight_bytes
        advice = "\n".join(data["rung"]["advice"])
        assert "Prediction head draft.gguf: gemma4-assistant" in advice
        body = {"prompt": pair.marker("json", 3), "max_tokens": 40, "temperature": 0}
        request = urllib.request.Request(f"{url}/v1/completions", data=json.dumps(body).encode())
        request.add_header("X-Specproxy-Strategy", "mtp")
        with urllib.request.urlopen(request) as reply:
            told = json.load(reply)
        expected = pair.expect("json", "mtp", 40, start=3)
        assert told["choices"][0]["text"] == pair.text("json", 40, 3)
        timings = told["timings"]
        assert (timings["draft_n"], timings["draft_n_accepted"]) == (expected.drafted, expected.accepted)
        child.terminate()
        child.communicate(timeout=15)


def test_ngram_learns_from_requests_on_other_lanes(env: dict[str, str], pair: CalibratedPair) -> None:
    """Repetitive text that only plain has decoded makes the policy expect more of the n-gram lane: replay."""
    request_file = Path(env["XDG_CONFIG_HOME"]).parent / "request.json"
    request_file.write_text(json.dumps({"prompt": pair.marker("edit", 9), "temperature": 0}))

    def expected(url: str) -> float:
        done = run(env, "explain", str(request_file), "--path", "/v1/completions", "--url", url, "--json")
        return float({c["lane"]: c["ratio"] for c in json.loads(done.stdout)["candidates"]}["ngram"])

    arguments = ["--model", str(pair.target), "--threads", "1", "--ctx", "1024", "--strategies", "ngram"]
    with started(env, *arguments) as (_, url):
        settled(url)
        before = expected(url)
        for start in range(4):
            body = {"prompt": pair.marker("edit", start), "max_tokens": 60, "temperature": 0}
            request = urllib.request.Request(f"{url}/v1/completions", data=json.dumps(body).encode())
            request.add_header("X-Specproxy-Strategy", "plain")
            with urllib.request.urlopen(request):
                pass
        while expected(url) > 0.9 * before:  # replay runs in the background
            pass


def test_facts_memory_and_idle_unloading(env: dict[str, str], pair: CalibratedPair) -> None:
    """The rung says what the files mean and what is in use; without requests the model is freed."""
    arguments = ["--model", str(pair.target), "--draft", str(pair.draft), "--threads", "1", "--ctx", "1024"]
    env = env | {"SPECPROXY_IDLE_UNLOAD": "0.2", "SPECPROXY_ENGINE_ARGS": "--ngram-max 4"}
    with started(env, *arguments) as (child, url):
        data = settled(url)
        advice = "\n".join(data["rung"]["advice"])
        assert "Target target.gguf: glm4moe, F16" in advice
        assert "of the target's, another family (llama), the same tokenizer" in advice
        assert "4 × 1024 tokens of context" in data["rung"]["why"]
        assert {lane["id"]: lane["memory_bytes"] > 0 for lane in data["lanes"]}["mtp"]
        (engine,) = psutil.Process(child.pid).children()
        assert {"--ngram-max", "--idle-unload"} <= set(engine.cmdline())
        log = next(Path(env["XDG_STATE_HOME"]).rglob("embedded.log"))
        body = {"prompt": pair.marker("json", 1), "max_tokens": 40, "temperature": 0}
        request = urllib.request.Request(f"{url}/v1/completions", data=json.dumps(body).encode())
        request.add_header("X-Specproxy-Strategy", "auto")
        with urllib.request.urlopen(request):
            pass
        while not (told := settled(url)["engine"]):  # the report is fetched in the background
            pass
        assert sum(told[0]["steps"].values()) > 5
        with urllib.request.urlopen(f"{url}/specproxy/api/recent?limit=1") as reply:
            (row,) = json.load(reply)["recent"]
        assert row["steps"] == told[0]["steps"], "the same of the request alone"
        while "unloading the model" not in log.read_text():  # the test's own limit ends a wait in vain
            pass
        child.terminate()
        child.communicate(timeout=15)
    state = next(Path(env["XDG_STATE_HOME"]).rglob("engine"))
    names = sorted(file.name.partition("-")[0] for file in state.iterdir())
    assert names == ["costs", "workloads.json"], "what steps cost, and what drafters can do"


def test_an_unusable_model_ends_it_with_exit_code_2(env: dict[str, str], tmp_path: Path) -> None:
    """One or two lines on stderr that name the file."""
    (tmp_path / "text.gguf").write_text("no model at all")
    done = run(env, "start", "--port", "0", "--engine", "embedded", "--model", str(tmp_path / "text.gguf"))
    assert done.returncode == 2, done.stdout
    assert "text.gguf is not a GGUF file" in done.stderr
    assert len(done.stderr.splitlines()) <= 2


def test_what_the_engine_refuses_is_said_once(env: dict[str, str], pair: CalibratedPair) -> None:
    """It is not started again: it would only refuse again."""
    asked = ("--model", str(pair.target), "--engine-args", "--cache-type-k q3")
    done = run(env, "start", "--port", "0", "--engine", "embedded", *asked)
    assert done.returncode == 2, done.stdout
    [line] = done.stderr.splitlines()
    assert "a KV cache can be" in line
    assert "failures" not in line
