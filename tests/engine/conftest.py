"""Tiny calibrated models, written once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.calibrated import CalibratedPair, Region, write_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> CalibratedPair:
    """A target with an MTP block and its draft model, 7 MB and 4 MB."""
    return write_pair(tmp_path_factory.mktemp("pair"), seed=5)


@pytest.fixture(scope="session")
def moe_pair(tmp_path_factory: pytest.TempPathFactory) -> CalibratedPair:
    """The same with experts."""
    return write_pair(tmp_path_factory.mktemp("moe"), seed=6, experts=8, experts_used=2)


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model whose vocabulary belongs to no target here."""
    regions = (Region("other", 200, mtp=0.9, draft=0.9),)
    return write_pair(tmp_path_factory.mktemp("stranger"), regions=regions).draft
