"""Models for tests of the engine's core, written once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.calibrated import CalibratedPair, write_pair
from tests.support.random_model import write_random


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> CalibratedPair:
    """A calibrated target with an MTP head, and its draft model."""
    return write_pair(tmp_path_factory.mktemp("calibrated"))


@pytest.fixture(scope="session")
def sparing(tmp_path_factory: pytest.TempPathFactory) -> CalibratedPair:
    """A target with one MTP head, of an architecture that makes hidden rows of tokens with logits alone."""
    return write_pair(tmp_path_factory.mktemp("sparing"), arch="step35")


@pytest.fixture(scope="session")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of random weights, and one that agrees with it now and then."""
    folder = tmp_path_factory.mktemp("random")
    return write_random(folder / "target.gguf"), write_random(folder / "draft.gguf", noise=0.02)
