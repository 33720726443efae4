"""The child's command line, on its way to llama.cpp: it needs no GPU to see what one would be given."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.calibrated import CalibratedPair
from tests.support.embedded import Model

# isort: split
from llama_cpp import llama_cpp as lib

from specproxy.adapters.embedded.backend import EmbeddedOptions
from specproxy.adapters.embedded.child import _options, parse
from specproxy.errors import ModelFileError

pytestmark = pytest.mark.embedded


def test_options_for_gpus_reach_llama_cpp(pair: CalibratedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def load(path: bytes, raw: Any) -> None:
        split = [raw.tensor_split[i] for i in range(2)]
        given.append((path, raw.n_gpu_layers, raw.main_gpu, split, raw.use_extra_bufts, raw.load_mode))

    monkeypatch.setattr(lib, "llama_model_load_from_file", load)
    switches = ("--no-repack", "--no-mmap", "--mlock", "--no-kv-offload")
    extra = ("--main-gpu", "1", "--tensor-split", "3,1", *switches)
    asked = EmbeddedOptions(pair.target, n_gpu_layers=99, threads=3, ctx=640, extra_args=extra)
    options = _options(parse([*asked.arguments(), "--port", "0"]))
    with pytest.raises(ModelFileError):
        Model(options.model, options.weights)
    assert given == [(str(pair.target).encode(), 99, 1, [3.0, 1.0], False, lib.LLAMA_LOAD_MODE_MLOCK)]
    assert (options.offload_kqv, options.threads, options.context) == (False, 3, 640)


@pytest.mark.parametrize(("text", "asked"), [("on", True), ("off", False), ("auto", None)])
def test_the_kind_of_attention_and_of_cache_is_as_asked(
    pair: CalibratedPair, text: str, asked: bool | None
) -> None:
    flags = ("--flash-attn", text, "--cache-type-k", "q8_0", "--cache-type-v", "q8_0")
    options = _options(parse(["--model", str(pair.target), "--port", "0", *flags]))
    assert (options.flash_attention, options.type_k, options.type_v) == (asked, "q8_0", "q8_0")
