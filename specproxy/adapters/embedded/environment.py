"""Environment of the engine's process: llama.cpp's OpenMP reads it when the library is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["engine_environment"]

SPINS = "1000"
OTHERS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def engine_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What to add to `environ`; nothing if it says itself how threads are to wait.

    Threads of a decode wait for each other hundreds of times a token. libgomp lets them spin for milliseconds,
    so that one which has lost its core to another process is waited for by all the others, at full load: on two
    cores beside one busy process a token took up to 168 ms, and 60 ms with 1000 spins. On a quiet machine both
    took 28 ms; with 100 spins it was 38 ms.
    """
    return {} if any(name in environ for name in OTHERS) else {"GOMP_SPINCOUNT": SPINS}
