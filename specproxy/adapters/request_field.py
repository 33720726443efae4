"""Whether a request field switches drafting at a llama-server: tried, since nothing else tells.

Builds up to b9108 and some forks honour ``speculative.n_max``; later ones read it and do nothing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from specproxy.adapters.ask import get_json, post_json
from specproxy.adapters.http import HttpTransport
from specproxy.errors import BackendError

__all__ = ["FIELD", "Finding", "try_field"]

FIELD: tuple[str, int] = ("speculative.n_max", 0)
"""What switches drafting off for one request, where it is honoured."""

PROMPT = "one two three four five six seven eight\n" * 6 + "one two three"  # any drafter has guesses for this
TOKENS = 24
TIMEOUT_S = 120.0


class Finding(StrEnum):
    """What came of trying the field."""

    HONOURED = "honoured"
    IGNORED = "ignored"
    UNCLEAR = "unclear"  # tokens were decoded, and told nothing
    BUSY = "busy"  # nothing was tried


async def try_field(transport: HttpTransport) -> Finding:
    """Have an idle llama-server decode a few tokens twice, without and with the field, and compare drafts.

    Decodes at most `TOKENS` tokens twice, and nothing on a server that is busy or does not say.
    """
    try:
        _, slots = await get_json(transport.open, "/slots")
    except BackendError:
        return Finding.BUSY
    if not isinstance(slots, list) or not slots or any(_busy(slot) for slot in slots):
        return Finding.BUSY
    try:
        usual = await _drafted(transport, {})
        without = await _drafted(transport, {FIELD[0]: FIELD[1]}) if usual else None
    except BackendError:
        return Finding.UNCLEAR
    if not usual or without is None:
        return Finding.UNCLEAR
    return Finding.IGNORED if without else Finding.HONOURED


def _busy(slot: Any) -> bool:
    return not isinstance(slot, dict) or slot.get("is_processing") is not False


async def _drafted(transport: HttpTransport, fields: dict[str, Any]) -> int | None:
    """Tokens that were drafted for a short completion; None if it failed."""
    body = {"prompt": PROMPT, "n_predict": TOKENS, "temperature": 0, "cache_prompt": False, **fields}
    status, reply = await post_json(transport.open, "/completion", body, timeout_s=TIMEOUT_S)
    timings = reply.get("timings") if status == 200 and isinstance(reply, dict) else None
    if not isinstance(timings, dict):
        return None
    drafted = timings.get("draft_n", 0)
    return drafted if isinstance(drafted, int) else None
