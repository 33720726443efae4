"""How the command line says that something went wrong."""

from __future__ import annotations

import sys

__all__ = ["report"]


def report(message: str, code: int, *, hint: str = "") -> int:
    """Print each line of `message`, then `hint`, on stderr; return `code`."""
    lines = [line for line in message.splitlines() if line.strip()]
    if hint and len(lines) == 1:
        lines = (
            [f"{lines[0].rstrip('.')} ({hint})"] if len(lines[0]) + len(hint) < 100 else [*lines, f"  {hint}"]
        )
    elif hint:
        lines.append(f"  {hint}")
    for line in lines:
        print(line if line.startswith("  ") else f"specproxy: {line}", file=sys.stderr)
    return code
