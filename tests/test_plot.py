"""Values with their intervals, as a picture."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from specproxy.plot import COLOURS, INK, Interval, write_intervals

Pixels = npt.NDArray[np.uint8]


def pixels(path: Path) -> Pixels:
    """What a PNG of one IDAT chunk without filters shows."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    at = data.index(b"IDAT")
    (length,) = struct.unpack(">I", data[at - 4 : at])
    rows = np.frombuffer(zlib.decompress(data[at + 4 : at + 4 + length]), np.uint8).reshape(height, -1)
    return rows[:, 1:].reshape(height, width, 3)


def longest(picture: Pixels, colour: tuple[int, int, int]) -> list[int]:
    """Pixels of a colour in each row of the picture that has any."""
    counts = (picture == np.array(colour, np.uint8)).all(axis=2).sum(axis=1)
    return [int(count) for count in counts if count]


def test_an_interval_is_as_long_as_it_says(tmp_path: Path) -> None:
    """Twice the interval is twice the bar; a value without one is a dot; the line at 1 crosses all rows."""
    rows = [
        Interval("ngram", "decode", 1.25, 1.0, 1.5),
        Interval("ngram", "end to end", 1.125, 1.0, 1.25),
        Interval("draft", "other", 1.0),
    ]
    write_intervals(tmp_path / "a.png", "speed", rows)
    picture = pixels(tmp_path / "a.png")
    wide, narrow = (max(longest(picture, colour)) for colour in COLOURS[:2])
    assert wide == pytest.approx(2 * narrow, abs=8)
    assert max(longest(picture, COLOURS[2])) <= 14  # the dot and its square in the legend
    ink = (picture == np.array(INK, np.uint8)).all(axis=2).sum(axis=0)
    assert ink.max() >= 40


def test_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    """Before a file is there."""
    with pytest.raises(ValueError, match="nothing"):
        write_intervals(tmp_path / "a.png", "speed", [])
    assert not (tmp_path / "a.png").exists()
