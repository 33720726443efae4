"""docs/threat-model.md names tests and targets that there are."""

from __future__ import annotations

import re

from tests.test_docs import ROOT, named

TEXT = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")


def test_every_file_it_names_is_there() -> None:
    """Tests, pages and scripts."""
    files = {name for name in named(TEXT) if re.fullmatch(r"[\w./-]+\.(py|md)|\.ci/\w+", name)}
    assert len(files) > 10
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_every_row_is_held_by_something() -> None:
    """No threat without a test, a target or a script."""
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| attacker")]
    assert len(rows) > 10
    assert [row for row in rows if not re.search(r"`(tests/[\w/]+\.py|make \w+|\.ci/\w+)` \|$", row)] == []


def test_every_target_it_names_is_there() -> None:
    """In the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in {name.removeprefix("make ") for name in named(TEXT) if name.startswith("make ")}:
        assert re.search(rf"^{target}:", makefile, re.M), target
