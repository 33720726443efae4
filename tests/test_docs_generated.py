"""Pages that come from the code are what the code says now."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from specproxy.cli import COMMANDS
from specproxy.config import key_paths

DOCS = Path(__file__).parent.parent / "docs"
GENERATOR = runpy.run_path(str(DOCS / "generate.py"))


@pytest.mark.parametrize("name", sorted(GENERATOR["PAGES"]))
def test_a_generated_page_is_up_to_date(name: str) -> None:
    """Otherwise run `make docs`."""
    assert (DOCS / name).read_text(encoding="utf-8") == GENERATOR["page"](name)


def test_every_key_and_command_is_there() -> None:
    """Whatever the generator does."""
    rows = re.findall(r"^\| `([a-z_.]+)` \|", (DOCS / "configuration.md").read_text(), re.MULTILINE)
    assert rows == list(key_paths())
    text = (DOCS / "help.md").read_text()
    assert all(f"## specproxy {name}\n" in text for name in COMMANDS)
