"""What this machine is and has free: processor, memory (under cgroup limits too), NVIDIA GPUs."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = [
    "Gpu",
    "Memory",
    "available_memory",
    "gpus",
    "machine_id",
    "memory_stalls",
    "parse_gpus",
    "processor",
]

CGROUP = Path("/sys/fs/cgroup")
STALLS = (CGROUP / "memory.pressure", Path("/proc/pressure/memory"))
SOME = re.compile(r"^some .*avg60=([\d.]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Gpu:
    """An NVIDIA GPU; bytes."""

    name: str
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that can be had without swapping, and what sets the bound: the machine or its cgroup."""

    available: int
    bound: str


def available_memory(cgroup: Path = CGROUP) -> Memory:
    """What is free now, page cache included, as far as this process's cgroup lets us have it."""
    free = int(psutil.virtual_memory().available)
    left = _cgroup_left(cgroup)
    return Memory(left, "cgroup limit") if left is not None and left < free else Memory(free, "free memory")


def _cgroup_left(root: Path) -> int | None:
    """Bytes left below the limit of a cgroup (version 2, then 1); reclaimable page cache counts as free."""
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            bound = int((root / limit).read_text())  # "max", no limit, is not a number
            used = int((root / usage).read_text())
            stat = (root / usage).with_name("memory.stat").read_text()
        except (OSError, ValueError):
            continue
        entries = dict(line.split() for line in stat.splitlines())
        return max(0, bound - used + int(entries.get(cache, 0)))
    return None


def memory_stalls(files: Sequence[Path] = STALLS) -> float:
    """Share of the last minute, 0 to 1, in which something here waited for memory that had to be read in again.

    Free memory does not tell: mapped weights count as free until somebody needs them. 0 where the system does
    not say (Linux does: docs.kernel.org, accounting/psi).
    """
    shares = [0.0]
    for file in files:
        with contextlib.suppress(OSError):
            shares += [float(found[1]) / 100.0 for found in SOME.finditer(file.read_text())]
    return max(shares)


def gpus() -> tuple[Gpu, ...]:
    """NVIDIA GPUs as nvidia-smi lists them; none where it is missing or fails. Blocks for a moment."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    command = [tool, "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603 - fixed
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpus(done.stdout)


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Read nvidia-smi's lines ``name, total MiB, free MiB``; others are left out."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.rsplit(",", 2)]
        if len(cells) == 3 and cells[1].isdigit() and cells[2].isdigit():
            found.append(Gpu(cells[0], int(cells[1]) << 20, int(cells[2]) << 20))
    return tuple(found)


@functools.cache
def processor() -> str:
    """Name of the processor, as well as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine_id(devices: tuple[Gpu, ...] = ()) -> str:
    """Short hash of what sets one machine's timings apart from another's: processor, cores, GPUs."""
    facts = (
        platform.system(),
        platform.machine(),
        processor(),
        psutil.cpu_count(),
        *(gpu.name for gpu in devices),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
