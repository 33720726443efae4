"""How much of the time of requests with images or audio goes into their prompts, and what that caps.

Such requests are decoded plainly on most servers. Where nearly all of their time is the prompt, nothing is lost
by that: no way of decoding could make them much faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specproxy.records import Decision, Observation, Outcome

__all__ = ["MEDIA", "MediaShare"]

MEDIA = ("images", "audio")


@dataclass(slots=True)
class _Sum:
    requests: int = 0
    prompt_s: float = 0.0
    total_s: float = 0.0


class MediaShare:
    """Sums up complete requests with images or audio, by model; a listener of the router."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], _Sum] = {}

    def __call__(self, seen: Observation, _decision: Decision | None = None) -> None:
        prompt_s = seen.prefill_s if seen.prefill_s is not None else seen.ttft_s
        if seen.outcome is not Outcome.COMPLETE or prompt_s is None or seen.total_s <= 0 or seen.load_s > 0:
            return
        for flag in MEDIA:
            if flag in seen.workload.flags:
                total = self._sums.setdefault((seen.target, flag), _Sum())
                total.requests += 1
                total.prompt_s += min(prompt_s, seen.total_s)
                total.total_s += seen.total_s

    def json(self) -> list[dict[str, Any]]:
        """By model and kind of media: requests, and the prompt's share of their time (0 to 1).

        `most_gain` is how many times as fast they would be if decoding took no time; None: without bound.
        """
        rows = []
        for (target, flag), total in sorted(self._sums.items()):
            share = total.prompt_s / total.total_s
            rows.append(
                {
                    "target": target,
                    "media": flag,
                    "requests": total.requests,
                    "prefill_share": share,
                    "most_gain": 1 / share if share > 0 else None,
                }
            )
        return rows
