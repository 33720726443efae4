"""The example of two proxies that learn together, as its docstring says to run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.calibrated import CalibratedPair
from tests.support.command import clean_env

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_proxies.py"


@pytest.mark.engine
@pytest.mark.redis
@pytest.mark.timeout(90)
def test_both_proxies_know_all_requests(pair: CalibratedPair, tmp_path: Path) -> None:
    """Half of them went to each, and both show the same figures."""
    command = [sys.executable, str(EXAMPLE), str(pair.target), "--requests", "8", "--tokens", "16"]
    done = subprocess.run(
        command, env=clean_env(tmp_path), capture_output=True, text=True, timeout=80, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = re.split(r"proxy \d knows 8 requests:\n", done.stdout)[1:]
    assert first == second
    assert sum(map(int, re.findall(r": (\d+), ", first))) == 8
