"""LM Studio: the request field ``draft_model`` chooses a draft model, and replies count its tokens."""

from __future__ import annotations

from typing import ClassVar

from specproxy.adapters.openai_compat import OPENAI, OpenAiBackend
from specproxy.records import Control, Dialect, Lane, Strategy

__all__ = ["LmStudioBackend"]


class LmStudioBackend(OpenAiBackend):
    """Plain, and a lane for each draft model. It loads a draft itself when it is first named.

    Drafted and accepted tokens come in ``stats`` or ``usage`` of the reply, by version.
    """

    kind: ClassVar[str] = "lmstudio"
    dialects: ClassVar[frozenset[Dialect]] = OPENAI | {Dialect.ANTHROPIC}
    lists_all: ClassVar[bool] = True

    def make_lanes(self) -> list[Lane]:
        drafting = [
            self.lane(
                Strategy(("draft",)),
                Control.REQUEST,
                (("draft_model", draft),),
                suffix=self.suffix(draft),
            )
            for draft in self.spec.drafts
        ]
        return [self.lane(self.spec.strategy, Control.REQUEST), *drafting]
