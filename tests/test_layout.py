"""The shape of the package: which way imports go, and that strategies/ is pure."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import specproxy

ROOT = Path(specproxy.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

# part → parts of specproxy that it may import; proxy, cli and demo may import everything
MAY_IMPORT = {
    "errors": set(),
    "records": {"errors"},
    "strategies": {"records", "errors", "strategies"},
    "adapters": {"records", "errors", "adapters", "strategies.base", "strategies.drafters"},
    "store": {"records", "errors", "store"},
    "config_values": {"records", "errors"},
    "config": {"config_values", "errors"},
}
IMPURE = {"asyncio", "time", "socket", "aiohttp", "random", "os", "subprocess", "threading", "datetime"}


def imports(path: Path) -> list[str]:
    """Every module that a file imports, full names."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    """Lower layers never import higher ones."""
    part = part_of(path)
    if part not in MAY_IMPORT:
        return
    allowed = MAY_IMPORT[part]
    for name in imports(path):
        if not name.startswith("specproxy."):
            continue
        inner = name.removeprefix("specproxy.")
        first = inner.split(".")[0]
        ok = first in allowed or any(inner == a or inner.startswith(a + ".") for a in allowed)
        ok = ok or any(a.startswith(inner + ".") for a in allowed)
        ok = ok or first.startswith("__")
        assert ok, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize(
    "path", [p for p in MODULES if part_of(p) == "strategies"], ids=lambda p: str(p.relative_to(ROOT))
)
def test_strategies_are_pure(path: Path) -> None:
    """Decision logic has no async, clock, socket or randomness of its own."""
    impure = {name.split(".")[0] for name in imports(path)} & IMPURE
    assert not impure, f"imports {impure}"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef | ast.Await)]
