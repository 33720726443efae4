"""Lanes that are made to err: a wrong token is accepted where it never should have been."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from specproxy.cli.lane_client import Prompt, Said
from specproxy.cli.verify_run import Speaker

__all__ = ["BadAccepts"]


@dataclass
class BadAccepts:
    """Speaks for real lanes, and for one called `liar`: plain's own text up to some token, then the runner-up
    in its place (or, with `rank`, a token further down), and from there on whatever the model goes on with.

    Prompts are to be raw ones. `forced` holds, for each prompt's text, by how many nats plain led the token
    that was taken instead; None where no token could be (its bytes are no text by themselves).
    """

    speaker: Speaker
    plain: str
    rng: np.random.Generator
    rank: int = 1
    forced: dict[str, float | None] = field(default_factory=dict)
    _said: dict[str, Said] = field(default_factory=dict)

    def say(self, lane: str, model: str, prompt: Prompt, *, logprobs: bool = False) -> Said:
        """As a `Speaker` does."""
        if lane != "liar":
            return self.speaker.say(lane, model, prompt, logprobs=logprobs)
        text = str(prompt.body["prompt"])
        if text not in self._said:
            self._said[text] = self._lie(model, prompt, text)
        return self._said[text]

    def _lie(self, model: str, prompt: Prompt, text: str) -> Said:
        honest = self.speaker.say(self.plain, model, prompt, logprobs=True)
        self.forced[text] = None
        for at in self.rng.permutation(len(honest.positions)):
            position = honest.positions[at]
            others = sorted((t for t in position.top if t[0] != position.text), key=lambda t: -t[1])
            if len(others) < self.rank:
                continue
            wrong, logprob = others[self.rank - 1]
            begun = b"".join(p.text for p in honest.positions[:at]) + wrong
            try:
                start = begun.decode()
            except UnicodeDecodeError:
                continue
            self.forced[text] = position.logprob - logprob
            rest = Prompt(prompt.path, {**prompt.body, "prompt": text + start})
            return Said(
                begun + (self.speaker.say(self.plain, model, rest).text if wrong else b""), honest.tokens
            )
        return honest
