"""Environment of the engine's process, to be set before llama.cpp is loaded, and what of it is in force."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["engine_environment", "huge_pages"]

SPINS = "10000"
OTHERS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
TUNABLES, HUGE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def engine_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What to add to `environ`; nothing about a matter on which it says something itself.

    Threads of a decode wait for each other hundreds of times a token. libgomp lets them spin for milliseconds,
    so that one which has lost its core to another process is waited for by all the others, at full load: on two
    cores beside one busy process a token took up to 168 ms, and a draft of three was verified in 73 ms instead
    of 62 with `SPINS`. Too few spins put threads to sleep that are waited for at once: with 1000, beside
    processes of low priority, a token took 19.9 ms instead of 13.7, and as long as now beside a busy one.

    Every token reads all weights once, and with pages of 4 KiB the processor looks up an address for each of
    them. glibc can ask the kernel for pages of 2 MiB (`huge_pages`).
    """
    added = {}
    if not any(name in environ for name in OTHERS):
        added["GOMP_SPINCOUNT"] = SPINS
    if TUNABLES not in environ:
        added[TUNABLES] = HUGE
    return added


def huge_pages(environ: Mapping[str, str] = os.environ, pages: Path = PAGES) -> bool:
    """Whether large blocks of memory that this process asks for come in huge pages (Linux with glibc)."""
    try:
        enabled = pages.read_text()
    except OSError:  # another system, or a kernel without them
        return False
    return "[always]" in enabled or ("[madvise]" in enabled and HUGE in environ.get(TUNABLES, "").split(":"))
