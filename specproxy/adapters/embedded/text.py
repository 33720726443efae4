"""From tokens to text that may be sent: whole characters, and nothing that a stop string may still claim."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

__all__ = ["TextStream"]


class TextStream:
    """Collects the bytes of one sequence's tokens and gives out what is final.

    Args:
        stops: strings that end the text before them.

    Attributes:
        stopped_by: the stop string that was found, or an empty text.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._cut = False  # whether the decoder holds the beginning of a character
        self.stopped_by = ""

    def push(self, piece: bytes) -> str:
        """Take in a token's bytes; returns the text that became final. With `stopped_by` set it is the last."""
        text = self._decoded(piece)
        return self._release(self._held + text) if self._stops else text

    def finish(self) -> str:
        """What is left when the sequence ends without a stop string; cut characters become U+FFFD."""
        text = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        return "" if self.stopped_by else text

    def _decoded(self, piece: bytes) -> str:
        if not self._cut:
            try:
                return piece.decode()
            except UnicodeDecodeError:  # it ends in the middle of a character, as a rule
                pass
        text = self._decoder.decode(piece)
        self._cut = bool(self._decoder.getstate()[0])
        return text

    def _release(self, text: str) -> str:
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found, key=lambda hit: (hit[0], -len(hit[1])))
            self._held = ""
            return text[:at]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - held
        self._held = text[cut:]
        return text[:cut]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
