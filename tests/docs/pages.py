"""The commands that README and docs/ tell people to type, and which of them cannot be run here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["EXCEPTIONS", "PAGES", "ROOT", "Page", "Unrun", "exception"]

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True, slots=True)
class Page:
    """A page's commands in order, files that it says to write, and commands within its text."""

    name: str
    commands: tuple[str, ...]
    files: tuple[tuple[str, str], ...]
    inline: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unrun:
    """Commands that cannot be run here as they stand: why, and what is run in their place (empty: nothing)."""

    pattern: str
    why: str
    instead: str = ""


EXCEPTIONS = (
    Unrun(
        r"pip install 'specproxy\[",
        "installs from a package index; tests/docs/test_wheel.py builds the wheel and installs that",
        "specproxy --version",
    ),
    Unrun(r"make demo(-embedded)?$", "takes five minutes and more", "make -n {0}"),
    Unrun(r"docker ", "no container engine is here; tests/test_containers.py checks the files"),
    Unrun(r"sudo ", "changes the system; tests/docs/test_nginx.py runs nginx with this very block"),
    Unrun(r"curl .*llm\.example", "nobody has this name; tests/docs/test_nginx.py asks nginx"),
    Unrun(r"OLLAMA_HOST=\S+ ollama ", "no Ollama is here", "curl -s http://127.0.0.1:8484/api/tags"),
)


def exception(command: str) -> Unrun | None:
    """Why a command is not run as it stands; None if it is."""
    return next((one for one in EXCEPTIONS if re.match(one.pattern, command)), None)


def _read(path: Path) -> Page:
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    commands = [re.sub(r"\s+# .*", "", line).strip() for line in lines]
    files = re.findall(r"^```yaml\n# (\S+\.yaml)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    inline = re.findall(r"`((?:specproxy|make) [^`\n]+)`", prose)
    name = str(path.relative_to(ROOT))
    return Page(name, tuple(filter(None, commands)), tuple(files), tuple(inline))


PAGES = tuple(
    _read(path)
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
)
