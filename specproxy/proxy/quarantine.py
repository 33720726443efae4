"""Lanes that were found to say something that plain would not have said: they are out of service until lifted.

A sentence is on a lane's id and fingerprint together, so it ends by itself when target, draft, build or flags
change, and holds again if they are put back.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from dataclasses import replace as changed
from typing import Any

from specproxy.errors import RequestError
from specproxy.records import Health, Lane, LaneStatus

__all__ = ["Quarantine", "Sentence", "held_back"]

MOST = 256  # sentences that are kept; the oldest go first
FORMAT = 1
_MASKED = (Health.READY, Health.STARTING, Health.UNHEALTHY)


@dataclass(frozen=True, slots=True)
class Sentence:
    """Since when a lane is out of service, and why."""

    lane: str
    fingerprint: str
    at: float
    reason: str


class Quarantine:
    """The sentences in force."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._sentences: dict[tuple[str, str], Sentence] = {}

    @property
    def is_empty(self) -> bool:
        """Whether every lane is in service."""
        return not self._sentences

    def put(self, lane: Lane, reason: str) -> None:
        """Take a lane out of service; a sentence that it has already gets the new reason."""
        key = (lane.id, lane.fingerprint)
        self._sentences.pop(key, None)
        self._sentences[key] = Sentence(*key, self._wall(), reason)
        while len(self._sentences) > MOST:
            del self._sentences[next(iter(self._sentences))]

    def lift(self, lane: Lane) -> bool:
        """Put a lane back into service; returns whether it was out of it."""
        return self._sentences.pop((lane.id, lane.fingerprint), None) is not None

    def of(self, lane: Lane) -> Sentence | None:
        """The sentence on a lane as it is now."""
        return self._sentences.get((lane.id, lane.fingerprint))

    def seen(self, status: LaneStatus) -> LaneStatus:
        """A lane's status with its sentence in it."""
        sentence = self.of(status.lane)
        if sentence is None or status.health not in _MASKED:
            return status
        return changed(status, health=Health.QUARANTINED, since=sentence.at, note=sentence.reason)

    def dump(self) -> dict[str, Any]:
        """All sentences as JSON-serialisable data, oldest first."""
        return {"format": FORMAT, "sentences": [asdict(sentence) for sentence in self._sentences.values()]}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `dump` gave.

        Raises:
            ValueError: the data is of another format, or damaged.
        """
        if state.get("format") != FORMAT:
            raise ValueError(f"quarantine has format {state.get('format')!r}, not {FORMAT}")
        try:
            found = [_sentence(item) for item in state["sentences"]]
        except (KeyError, TypeError, UnicodeError) as error:
            raise ValueError(f"quarantine is damaged: {error}") from error
        self._sentences = {(s.lane, s.fingerprint): s for s in found}

    def entries(self) -> dict[str, str]:
        """One text a sentence, by a key of its own: what several proxies share."""
        return {
            json.dumps(key): json.dumps(asdict(sentence), sort_keys=True)
            for key, sentence in self._sentences.items()
        }

    def replace(self, entries: Mapping[str, str]) -> None:
        """Have these sentences in force instead; what is none of ours is left out."""
        found = []
        for text in entries.values():
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                found.append(_sentence(json.loads(text)))
        self._sentences = {(s.lane, s.fingerprint): s for s in sorted(found, key=lambda s: s.at)}


def _sentence(item: Any) -> Sentence:
    """A sentence as `asdict` gave it; TypeError for anything else."""
    sentence = Sentence(**item)
    texts = (sentence.lane, sentence.fingerprint, sentence.reason)
    if not all(isinstance(text, str) for text in texts) or type(sentence.at) not in (int, float):
        raise TypeError(f"{item!r} is no sentence")
    "".join(texts).encode()  # UnicodeEncodeError, a ValueError, where one could be shown nowhere
    return sentence


def held_back(pin: str, statuses: Sequence[LaneStatus]) -> RequestError | None:
    """Why a pin (a lane's id or a strategy) cannot be followed, if what it names is in quarantine."""
    wanted = pin.strip().lower()
    held = [s for s in statuses if s.health is Health.QUARANTINED]
    found = next((s for s in held if wanted in (s.lane.id.lower(), s.lane.strategy.name)), None)
    if found is None:
        return None
    message = f"lane {found.lane.id} is in quarantine: {found.note}"
    hint = f"pin another, or `specproxy quarantine lift {found.lane.id}`"
    return RequestError(message, code="lane_quarantined", hint=hint)
