"""Notices a child that no longer gets on: one whose event loop is silent, or whose decode does not return.

A native call that hangs cannot be interrupted from within its process, so the only help is from outside: the
child is killed, and its supervisor starts it again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from specproxy.adapters.ask import get_json
from specproxy.adapters.embedded.side_channel import PULSE_PATH
from specproxy.adapters.http import Opener
from specproxy.errors import BackendError

__all__ = ["Patience", "stuck"]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a child may take, in seconds.

    It is asked every `every_s`. `answer_s` is for the answer: nothing in its event loop takes long. `step_s` is
    for one decode: a large part of a prompt on a slow machine takes minutes.
    """

    every_s: float = 10.0
    answer_s: float = 60.0
    step_s: float = 600.0


async def stuck(opener: Opener, patience: Patience) -> str:
    """Watch a child; returns what is wrong with it, once something is."""
    while True:
        await asyncio.sleep(patience.every_s)
        try:
            _, pulse = await get_json(opener, PULSE_PATH, timeout_s=patience.answer_s)
        except BackendError as error:
            return f"it does not answer ({error.message})"
        step_s = float(pulse["step_s"]) if isinstance(pulse, dict) else 0.0
        if step_s > patience.step_s:
            return f"one decode has been running for {step_s:.0f} s"
