"""Shared fixtures. A marked part that is missing fails with CI=true, and is skipped elsewhere."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys

import pytest
from hypothesis import HealthCheck, settings

from tests.support.browser import BROWSER

# A busy machine makes an example slow, not wrong.
settings.register_profile(
    "untimed", deadline=None, parent=settings(), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("untimed")

BIN = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", "")))

NEEDS = {
    "linters": lambda: shutil.which("hadolint", path=BIN) and shutil.which("compose-lint", path=BIN),
    "nginx": lambda: shutil.which("nginx", path=f"{BIN}:/usr/sbin"),
    "engine": lambda: shutil.which("llama-server") or importlib.util.find_spec("xllamacpp"),
    "browser": lambda: BROWSER,
    "embedded": lambda: importlib.util.find_spec("llama_cpp"),
    "redis": lambda: shutil.which("redis-server") and importlib.util.find_spec("redis"),
}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many contract checks ran, and over how many adapters: they are the same for all of them."""
    names = [report.nodeid for report in terminalreporter.stats.get("passed", [])]
    passed = [name for name in names if "/test_contract.py::Test" in name or "::TestContract::" in name]
    if passed:
        adapters = {name.rpartition("::")[0] for name in passed}
        terminalreporter.write_line(f"Contract: {len(passed)} checks passed over {len(adapters)} adapters")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Decide what becomes of a test whose part is not installed."""
    for name, present in NEEDS.items():
        if item.get_closest_marker(name) and not present():
            message = f"the part for tests marked '{name}' is not installed"
            if os.environ.get("CI") == "true":
                pytest.fail(message, pytrace=False)
            pytest.skip(message)
