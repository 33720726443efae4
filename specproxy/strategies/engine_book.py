"""What the engine's reports teach about a workload, and the priors that go back to it with the next request.

Counts belong to a set-up (fingerprint) and a workload, and forget slowly: one kind of text changes with its
users. A workload that was not seen yet starts from its kind at any temperature, then from nothing. What all
others have shown is no help: as a few guesses it shuts out drafters that are good on the new one, in simulation
at 2 to 4% of first requests, and as mere levels of chances it gains nothing that can be told from luck.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specproxy.records import AUTO, EnginePriors, EngineReport

__all__ = ["EngineBook", "Page"]

KEEP = 0.9  # of what is known, at each further request
LEAST = 0.05  # guesses below which a count is dropped
MOST_PAGES = 512  # those used longest ago are dropped
MOST_KEYS = 32  # positions or match lengths
MOST_PLANS = 64

Counts = list[list[float]]  # [accepted, tried] by draft position, or by match length


@dataclass(slots=True)
class Page:
    """What is known of one workload. `plans` counts steps by plan, `stopped` is the last reason to stop.

    `steps` counts those of `auto`, and `last_used` how many they were when a drafter was used last.
    """

    requests: float = 0.0
    positions: dict[str, Counts] = field(default_factory=dict)
    levels: dict[str, list[float]] = field(default_factory=dict)
    matches: Counts = field(default_factory=list)
    plans: dict[str, float] = field(default_factory=dict)
    stopped: str = ""
    steps: float = 0.0
    last_used: dict[str, float] = field(default_factory=dict)

    def learn(self, report: EngineReport) -> None:
        """Take in a finished request."""
        self.requests = KEEP * self.requests + 1
        if report.strategy == AUTO:
            self.steps += report.steps
        for drafter in report.drafters:
            if drafter.drafter != "ngram":
                counts = self.positions.setdefault(drafter.drafter, [])
                _add(counts, drafter.by_position)
                self.last_used[drafter.drafter] = self.steps
                if drafter.levels:
                    before = self.levels.get(drafter.drafter, [])
                    known = before if len(before) == len(drafter.levels) else [0.0] * len(drafter.levels)
                    pairs = zip(known, drafter.levels, strict=True)
                    self.levels[drafter.drafter] = [KEEP * old + new for old, new in pairs]
            else:
                _add(self.matches, drafter.by_match)
        for plan in self.plans:
            self.plans[plan] *= KEEP
        for plan, steps in report.plans:
            if plan in self.plans or len(self.plans) < MOST_PLANS:
                self.plans[plan] = self.plans.get(plan, 0.0) + steps
        self.plans = {plan: steps for plan, steps in self.plans.items() if steps >= LEAST}
        self.stopped = report.stopped_drafting


class EngineBook:
    """Pages by fingerprint and workload key (``kind/temperature``). Holds no clock."""

    def __init__(self) -> None:
        self._pages: dict[tuple[str, str], Page] = {}

    def learn(self, fingerprint: str, workload: str, report: EngineReport) -> None:
        """Take in what the engine reports on a request that it has finished."""
        key = (fingerprint, workload)
        page = self._pages.pop(key, None) or Page()
        page.learn(report)
        self._pages[key] = page  # the last one now
        while len(self._pages) > MOST_PAGES:
            del self._pages[next(iter(self._pages))]

    def priors(self, fingerprint: str, workload: str, request_id: str) -> EnginePriors:
        """What to tell the engine about a request of this workload; without counts where nothing is known."""
        own = self._pages.get((fingerprint, workload))
        page = own or self._alike(fingerprint, workload) or Page()
        return EnginePriors(
            request_id,
            workload,
            acceptance={name: _pairs(counts) for name, counts in page.positions.items() if counts},
            match_acceptance=_pairs(page.matches),
            levels={name: tuple(weights) for name, weights in page.levels.items()},
            steps=own.steps if own is not None else 0.0,
            last_used=dict(own.last_used) if own is not None else {},
        )

    def pages(self, fingerprint: str) -> dict[str, Page]:
        """By workload, what is known on one set-up."""
        return {key[1]: page for key, page in self._pages.items() if key[0] == fingerprint}

    def to_json(self) -> list[dict[str, Any]]:
        """Everything, as JSON-serialisable data."""
        return [
            {
                "fingerprint": fingerprint,
                "workload": workload,
                "requests": page.requests,
                "positions": page.positions,
                "levels": page.levels,
                "matches": page.matches,
                "plans": page.plans,
                "stopped": page.stopped,
                "steps": page.steps,
                "last_used": page.last_used,
            }
            for (fingerprint, workload), page in self._pages.items()
        ]

    def restore(self, data: Any) -> None:
        """Take in what `to_json` gave.

        Raises:
            ValueError: it is something else; nothing is changed.
        """
        try:
            pages = {
                (str(entry["fingerprint"]), str(entry["workload"])): Page(
                    float(entry["requests"]),
                    {str(name): _counts(counts) for name, counts in entry["positions"].items()},
                    {str(name): [float(each) for each in seen] for name, seen in entry["levels"].items()},
                    _counts(entry["matches"]),
                    {str(plan): float(steps) for plan, steps in entry["plans"].items()},
                    str(entry["stopped"]),
                    float(entry.get("steps", 0.0)),
                    {str(name): float(steps) for name, steps in entry.get("last_used", {}).items()},
                )
                for entry in data
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the engine's book: {error!r}") from None
        self._pages = pages

    def _alike(self, fingerprint: str, workload: str) -> Page | None:
        """The latest page of the same kind, whatever its temperature."""
        kind = workload.partition("/")[0]
        alike = (
            page
            for (owner, key), page in reversed(self._pages.items())
            if owner == fingerprint and key.partition("/")[0] == kind
        )
        return next(alike, None)


def _add(counts: Counts, seen: Sequence[tuple[int, int]]) -> None:
    for pair in counts:
        pair[0] *= KEEP
        pair[1] *= KEEP
    for key, (accepted, tried) in enumerate(seen[:MOST_KEYS]):
        if key == len(counts):
            counts.append([0.0, 0.0])
        counts[key][0] += accepted
        counts[key][1] += tried


def _pairs(counts: Counts) -> tuple[tuple[float, float], ...]:
    return tuple((accepted, tried) if tried >= LEAST else (0.0, 0.0) for accepted, tried in counts)


def _counts(data: Any) -> Counts:
    counts = [[float(accepted), float(tried)] for accepted, tried in data]
    if any(not 0 <= accepted <= tried for accepted, tried in counts):
        raise ValueError("more was accepted than tried")
    return counts
