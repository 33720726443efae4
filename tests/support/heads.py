"""What prediction heads of calibrated models have to draft, and what they did."""

from __future__ import annotations

from tests.support.calibrated import CalibratedPair
from tests.support.embedded import ByHand, request

__all__ = ["KNOWN", "counts", "known", "prompt"]

KNOWN = ("json", "code", "edit", "prose")
LENGTH = 80  # tokens of a text


def prompt(engine: ByHand, pair: CalibratedPair, region: str, start: int = 0) -> list[int]:
    return engine.tokenize("please rewrite this " + pair.marker(region, start))


def counts(engine: ByHand, pair: CalibratedPair, length: int) -> list[tuple[int, int]]:
    """Guesses, and those that were right, of all regions at once; the text has to be the model's own."""
    work = [request(prompt(engine, pair, region), f"mtp:{length}", tokens=LENGTH) for region in KNOWN]
    readers = engine.run(*work)
    assert [reader.ids for reader in readers] == [pair.text_ids(region, LENGTH) for region in KNOWN]
    return [(reader.end.draft_n, reader.end.draft_n_accepted) for reader in readers]


def known(pair: CalibratedPair, length: int) -> list[tuple[int, int]]:
    """The same by walking through the text."""
    expected = [pair.expect(region, "mtp", LENGTH, n_max=length) for region in KNOWN]
    return [(each.drafted, each.accepted) for each in expected]
