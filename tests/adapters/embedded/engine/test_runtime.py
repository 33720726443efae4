"""What is loaded for a model, and how."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.calibrated import CalibratedPair
from tests.support.embedded import ByHand

# isort: split
from specproxy.adapters.embedded import runtime
from specproxy.adapters.embedded.llama import Model, ModelParams

pytestmark = pytest.mark.embedded


@pytest.mark.parametrize(
    ("available", "asked", "mapped"),
    [(2**40, None, False), (2**10, None, True), (2**40, True, True), (2**10, False, False)],
)
def test_weights_are_read_into_huge_pages_where_there_is_room(
    pair: CalibratedPair, monkeypatch: pytest.MonkeyPatch, available: int, asked: bool | None, mapped: bool
) -> None:
    """Unless the user says how to load them."""
    seen = []

    class Seen(Model):
        def __init__(self, path: Path, params: ModelParams) -> None:
            seen.append(params.mmap)
            super().__init__(path, params)

    memory = psutil.virtual_memory()._replace(available=available)
    monkeypatch.setattr(runtime.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(runtime, "huge_pages", lambda: True)
    monkeypatch.setattr(runtime, "Model", Seen)
    monkeypatch.setattr(runtime, "check_memory", lambda *_: None)
    ByHand(pair.target, context=256, weights=ModelParams(mmap=asked)).close()
    assert seen == [mapped]


OUT_OF_MEMORY = """
import resource, sys
import re
import subprocess
import sys
from pathlib import Path
import psutil
from specproxy.adapters.embedded.options import EngineOptions
from specproxy.adapters.embedded.runtime import Runtime
from specproxy.adapters.embedded.vocabulary import Vocabulary
from specproxy.errors import ModelFileError

model = Path(sys.argv[1])
vocabulary = Vocabulary(model)
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**28, limits[1]))
try:
    Runtime(EngineOptions(model, context=200_000, threads=1), vocabulary)
except ModelFileError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, limits)
Runtime(EngineOptions(model, context=256, threads=1), vocabulary).close()
print("loaded")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on a process's memory is Linux's")
def test_memory_that_runs_out_while_loading_is_an_error_and_not_the_end(pair: CalibratedPair) -> None:
    """llama.cpp's own refusal, with its reason; the process goes on, and loads something smaller."""
    command = [sys.executable, "-c", OUT_OF_MEMORY, str(pair.target)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    message, last = done.stdout.splitlines()
    assert re.search(r"no context of 800000 tokens for .*alloc", message)
    assert "smaller context" in message
    assert last == "loaded"
