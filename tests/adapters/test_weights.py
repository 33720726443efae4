"""Where a running server's weights are, and when they are not ours to use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from specproxy.adapters.base import ServedModel
from specproxy.adapters.gguf_facts import read_facts
from specproxy.adapters.weights import Listener, find_listener, find_weights
from specproxy.records import Strategy
from tests.support.calibrated import CalibratedPair, Region, write_pair
from tests.support.ports import free_port

REGIONS = (Region("a", 20, mtp=0.5, draft=0.5), Region("b", 20, mtp=0.5, draft=0.5))
LISTEN = """
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> CalibratedPair:
    return write_pair(tmp_path_factory.mktemp("weights"), regions=REGIONS)


@pytest.fixture
def port(pair: CalibratedPair) -> Iterator[int]:
    """Of a process that listens in the models' directory, started as a llama-server with a draft would be."""
    port = free_port()
    command = [
        sys.executable,
        "-c",
        LISTEN,
        str(port),
        "-md",
        pair.draft.name,
        "--spec-type",
        "ngram-simple,draft-mtp",
    ]
    with subprocess.Popen(
        command, cwd=pair.target.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        yield port
        child.kill()


def test_a_file_is_read_where_the_server_says(pair: CalibratedPair) -> None:
    found = find_weights(f"http://127.0.0.1:{free_port()}", ServedModel("m", path=str(pair.target)))
    assert (found.facts, found.draft, found.reason) == (read_facts(pair.target), None, "")


def test_a_relative_path_belongs_to_the_servers_directory(pair: CalibratedPair, port: int) -> None:
    """Found by the process that listens there; so is the draft on its command line."""
    found = find_weights(f"http://localhost:{port}", ServedModel("m", path=pair.target.name))
    assert found.facts is not None
    assert found.facts.path == pair.target
    assert found.draft == read_facts(pair.draft)
    assert found.listener is not None
    assert found.listener.strategy == Strategy(("ngram", "mtp"))


def test_the_servers_word_on_its_draft_comes_first(pair: CalibratedPair, port: int) -> None:
    """A draft that cannot be read is none, and the model can be used without."""
    model = ServedModel("m", path=str(pair.target), draft="ghost.gguf")
    found = find_weights(f"http://127.0.0.1:{port}", model)
    assert (found.draft, found.reason) == (None, "")


@pytest.mark.parametrize(
    ("url", "path", "says"),
    [
        ("http://gpu-box:8080", "/m.gguf", "gpu-box may be another machine"),
        ("http://127.0.0.1:{port}", "", "does not say which file"),
        ("http://127.0.0.1:{port}", "/nowhere/m.gguf", "/nowhere/m.gguf"),
        ("http://127.0.0.1:{port}", "m.gguf", "relative path, m.gguf"),
    ],
)
def test_weights_that_are_not_ours_to_use(url: str, path: str, says: str) -> None:
    found = find_weights(url.format(port=free_port()), ServedModel("m", path=path))
    assert found.facts is None
    assert says in found.reason


def test_another_file_of_the_same_name_is_not_taken(pair: CalibratedPair) -> None:
    """A server in a container names a path that may be something else here; MTP layers may be left out."""
    url, model = f"http://127.0.0.1:{free_port()}", ServedModel("m", path=str(pair.target))
    count = read_facts(pair.target).parameters
    assert "another model" in find_weights(url, replace(model, weights=count * 2)).reason
    assert find_weights(url, replace(model, weights=count * 9 // 10)).reason == ""


def test_nobody_listens() -> None:
    assert find_listener(free_port()) is None


def test_a_command_line_that_says_nothing_of_drafts() -> None:
    listener = Listener(("llama-server", "--spec-type", "none"), Path("/"))
    assert (listener.strategy, listener.behind("-md")) == (None, "")


def test_a_server_is_known_by_its_program_and_what_its_environment_says_of_models() -> None:
    """Nothing else of that is kept, and no key."""
    told = {"OLLAMA_KV_CACHE_TYPE": "q8_0", "CUDA_VISIBLE_DEVICES": "1", "OLLAMA_API_KEY": "k", "SECRET": "s"}
    port = free_port()
    command = [sys.executable, "-S", "-c", LISTEN, str(port)]
    with subprocess.Popen(
        command, env={**os.environ, **told}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        listener = find_listener(port)
        child.kill()
    assert listener is not None
    assert Path(listener.program).resolve() == Path(sys.executable).resolve()
    environ = dict(listener.environ or ())
    assert {"OLLAMA_KV_CACHE_TYPE": "q8_0", "CUDA_VISIBLE_DEVICES": "1"}.items() <= environ.items()
    assert not {"OLLAMA_API_KEY", "SECRET", "PATH"} & set(environ)
