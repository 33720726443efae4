"""Pages that come from the code are what the code says now."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from specproxy.cli import COMMANDS
from specproxy.config import key_paths

DOCS = Path(__file__).parent.parent / "docs"


def test_generated_pages_are_up_to_date() -> None:
    """Otherwise run `make docs`. In a process of its own: a command remembers its first help option."""
    command = [sys.executable, str(DOCS / "generate.py"), "--check"]
    done = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_stale_page_is_found(tmp_path: Path) -> None:
    """A row that says something else than the code."""
    for name in ("configuration.md", "help.md", "generate.py"):
        (tmp_path / name).write_text((DOCS / name).read_text())
    page = tmp_path / "configuration.md"
    page.write_text(page.read_text().replace("| `port` |", "| `prot` |"))
    command = [sys.executable, str(tmp_path / "generate.py"), "--check"]
    done = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "docs/configuration.md is out of date: run `make docs`" in done.stderr
    assert "help.md" not in done.stderr


def test_every_key_and_command_is_there() -> None:
    """Whatever the generator does."""
    rows = re.findall(r"^\| `([a-z_.]+)` \|", (DOCS / "configuration.md").read_text(), re.MULTILINE)
    assert rows == list(key_paths())
    text = (DOCS / "help.md").read_text()
    assert all(f"## specproxy {name}\n" in text for name in COMMANDS)
