"""What a replay has taught a lane, as a text that proxies pass on to each other."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import NamedTuple

from specproxy.records import Control, Lane, Strategy
from specproxy.strategies.replay import Counts, ReplayResult

__all__ = ["Lesson"]

MOST_TOKENS = 10_000_000  # of one request; more is damage


class Lesson(NamedTuple):
    """What a lane's drafter would have done on a request. `source` is as in `Learner.learn_replay`."""

    lane: Lane
    result: ReplayResult
    source: str

    def to_text(self) -> str:
        """As JSON: of the lane only what learning looks at."""
        lane = self.lane
        who = [lane.id, lane.target, lane.fingerprint, lane.strategy.drafters, lane.strategy.n_max]
        return json.dumps({"lane": who, "source": self.source, **asdict(self.result)}, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Lesson:
        """Read what `to_text` wrote.

        Raises:
            ValueError: it is something else, or of another version.
        """
        try:
            data = json.loads(text)
            name, target, fingerprint, drafters, n_max = data.pop("lane")
            source = data.pop("source")
            result = ReplayResult(
                widths=tuple(map(_count, data.pop("widths"))),
                by_position=_counts(data.pop("by_position")),
                by_match=_counts(data.pop("by_match")),
                **{key: _count(n) for key, n in data.items()},
            )
            texts = (name, target, fingerprint, source, *drafters)
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a lesson: {error!r}") from None
        if not all(isinstance(each, str) for each in texts) or not (n_max is None or type(n_max) is int):
            raise ValueError("not a lesson: it names no lane")
        strategy = Strategy(tuple(drafters), n_max)
        return cls(Lane(name, "", target, strategy, Control.OBSERVE, fingerprint), result, source)


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MOST_TOKENS:
        raise ValueError(f"{value!r} is no count")
    return value


def _counts(pairs: list[list[int]]) -> Counts:
    return tuple((_count(hits), _count(tried)) for hits, tried in pairs)
