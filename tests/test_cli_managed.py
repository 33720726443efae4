"""`specproxy start --model` with real llama-server children."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.support.calibrated import CalibratedPair, write_pair
from tests.support.command import clean_env, get, leaks, run, settled, started

CANARY = "xylophone-canary-7421"  # must be found nowhere afterwards
pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> CalibratedPair:
    return write_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return clean_env(tmp_path)


def arguments(pair: CalibratedPair, *more: str) -> list[str]:
    model = ["--model", str(pair.target), "--draft", str(pair.draft)]
    return [*model, "--engine", "managed", "--threads", "1", "--ctx", "1024", *more]


def test_it_serves_on_a_lane_for_each_strategy(env: dict[str, str], pair: CalibratedPair) -> None:
    """Four real lanes come up; a pin chooses one; text is the same on all; SIGTERM leaves no child behind."""
    with started(env, *arguments(pair)) as (child, url):
        data = settled(url)
        assert {lane["strategy"]: lane["health"] for lane in data["lanes"]} == dict.fromkeys(
            ["plain", "ngram", "mtp", "draft"], "ready"
        )
        assert all(lane["memory_bytes"] > 0 and get(f"{lane['address']}/props") for lane in data["lanes"])
        assert data["rung"]["number"] == 2
        texts = set()
        for strategy in ("plain", "ngram", "mtp", "draft"):
            body = {"prompt": f"{CANARY} {pair.marker('json', 3)}", "max_tokens": 20, "temperature": 0}
            request = urllib.request.Request(f"{url}/v1/completions", data=json.dumps(body).encode())
            request.add_header("X-Specproxy-Strategy", strategy)
            with urllib.request.urlopen(request) as reply:
                assert reply.headers["X-Specproxy-Strategy"] == strategy
                texts.add(json.load(reply)["choices"][0]["text"])
        assert len(texts) == 1
        table = run(env | {"COLUMNS": "80"}, "status", "--url", url).stdout
        assert all(strategy in table for strategy in ("plain", "ngram", "mtp", "draft"))
        children = psutil.Process(child.pid).children(recursive=True)
        assert len(children) >= 4
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=30)
        assert child.returncode == 0
        assert leaks(CANARY, out + err, env) == []
        assert psutil.wait_procs(children, timeout=10)[1] == []


def test_killed_outright_it_leaves_no_child_behind(env: dict[str, str], pair: CalibratedPair) -> None:
    """Children die with a proxy that was given no chance to stop them."""
    with started(env, *arguments(pair, "--strategies", "ngram")) as (child, url):
        settled(url)
        children = psutil.Process(child.pid).children(recursive=True)
        assert children
        child.kill()
        assert psutil.wait_procs(children, timeout=10)[1] == []


def test_a_signal_while_models_load_ends_it(env: dict[str, str], pair: CalibratedPair) -> None:
    """Being stopped before the first lane is ready is an orderly end too."""
    with started(env, *arguments(pair)) as (child, _):
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=30)
        assert (child.returncode, err) == (0, ""), out


@pytest.mark.parametrize(
    ("model", "draft", "says"),
    [
        ("missing.gguf", None, "missing.gguf"),
        ("text.gguf", None, "text.gguf is not a GGUF file"),
        ("target", "missing.gguf", "missing.gguf"),
        ("target", "text.gguf", "text.gguf is not a GGUF file"),
        ("target", "target", "the draft model is the target itself"),
    ],
)
def test_an_unusable_model_ends_it_with_exit_code_2(
    env: dict[str, str], pair: CalibratedPair, tmp_path: Path, model: str, draft: str | None, says: str
) -> None:
    """One or two lines on stderr that name the file and the fault."""
    (tmp_path / "text.gguf").write_text("no model at all")

    def path(name: str) -> str:
        return str(pair.target) if name == "target" else str(tmp_path / name)

    more = ["--draft", path(draft)] if draft else []
    done = run(env, "start", "--port", "0", "--engine", "managed", "--model", path(model), *more)
    assert done.returncode == 2, done.stdout
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 2
