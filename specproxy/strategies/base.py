"""The two protocols of strategies/: Policy (which lane) and Drafter (which tokens)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from specproxy.records import Decision, Observation, Situation

__all__ = ["Drafter", "Policy"]


@runtime_checkable
class Policy(Protocol):
    """Chooses a lane for each request, and learns from what came of it.

    Pure apart from its own state: no I/O, no clock (time comes in as `Situation.at` and
    `Observation.at`), no randomness of its own (`rng` comes in).
    """

    name: str

    def choose(self, situation: Situation, rng: np.random.Generator) -> Decision:
        """Choose one of ``situation.lanes``.

        Raises:
            LaneUnavailable: there is no lane to choose from, or the pinned strategy has none.
        """
        ...

    def learn_one(self, observation: Observation) -> None:
        """Take in one observation; those that teach nothing are ignored."""
        ...

    def dump(self) -> dict[str, Any]:
        """All state as JSON-serialisable data; `load` on a new policy gives the same decisions."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `dump` gave.

        Raises:
            ValueError: the data is not of this policy or of a newer format.
        """
        ...


@runtime_checkable
class Drafter(Protocol):
    """Guesses the next tokens of one sequence. The engine runs it live, replay runs it afterwards."""

    name: str

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a sequence with its prompt (token ids)."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in tokens that the target has settled on; amortised O(1) a token."""
        ...

    def draft(self, n_max: int) -> Sequence[int]:
        """Guess up to `n_max` tokens that follow; an empty sequence is no guess."""
        ...
