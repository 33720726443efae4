"""`make docs-test`: run the commands of all pages; the last line says how many there are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, exception


def main() -> int:
    """The tests' exit code; what is not run is listed with its reason."""
    code = int(pytest.main(["-q", "-m", "docs", str(Path(__file__).parent), *sys.argv[1:]]))
    commands = [command for page in PAGES for command in page.commands]
    inline = sum(len(page.inline) for page in PAGES)
    skipped = {command: found for command in commands if (found := exception(command))}
    for command, found in skipped.items():
        print(f"not run as it stands: {command}: {found.why}")
    away = sum(command in skipped for command in commands)
    pages = sum(bool(page.commands) for page in PAGES)
    print(
        f"{len(commands)} commands on {pages} pages: {len(commands) - away} run, {away} not as they stand; "
        f"{inline} more within the text held against the code" + ("" if code == 0 else "; SOME FAILED")
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
