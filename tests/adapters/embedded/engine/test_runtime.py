"""What is loaded for a model, and how."""

from __future__ import annotations

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
