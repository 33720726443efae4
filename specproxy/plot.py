"""Charts as PNG files, with numpy and zlib alone: panels of curves, and values with their intervals."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["Interval", "Line", "Panel", "write_intervals", "write_png"]

Pixels = npt.NDArray[np.uint8]

WIDTH, HEIGHT = 420, 280  # of a panel, pixels
LEFT, RIGHT, TOP, BOTTOM = 48, 24, 34, 40  # margins around its plot
LEGEND_ROW = 22
ROW, LETTER = 22, 8  # height of an interval's row, width of a letter
INK, GRID = (40, 40, 40), (222, 222, 222)
COLOURS = (
    (31, 119, 180),
    (255, 127, 14),
    (44, 160, 44),
    (214, 39, 40),
    (148, 103, 189),
    (140, 86, 75),
    (227, 119, 194),
    (127, 127, 127),
    (188, 189, 34),
    (23, 190, 207),
)

# A font of 3 by 5 pixels: five octal digits a letter, one for each row.
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,-+%:()_/'"
FONT = """
25755 65656 34443 65556 74647 74644 34553 55755 72227 11152 55655 44447 57755 65555 25552 65644 25563 65655
34216 72222 55557 55552 55775 55255 55222 71247 75557 26227 61247 61216 55711 74616 34757 71222 75757 75716
00002 00024 00700 02720 51245 02020 12221 42224 00007 11244 22000
"""
GLYPHS: Mapping[str, str] = dict(zip(LETTERS, FONT.split(), strict=True))


@dataclass(frozen=True, slots=True)
class Line:
    """One curve; `bold` is black and thick."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    bold: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart. Curves are cut off at `y_max`; ticks are at every fourth of the axes."""

    title: str
    lines: Sequence[Line]
    x_max: float
    y_max: float
    x_label: str = ""
    y_label: str = ""


def write_png(path: Path, panels: Sequence[Panel], columns: int = 3) -> None:
    """Draw the panels in rows of `columns`, with one legend for all of them.

    Raises:
        ValueError: there is no panel.
    """
    if not panels:
        raise ValueError("nothing to draw")
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    bold = {line.name for panel in panels for line in panel.lines if line.bold}
    plain = [name for name in names if name not in bold]
    colours = dict.fromkeys(bold, INK) | {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(plain)}
    each = max(1, columns * WIDTH // 230)
    legend = -(-len(names) // each) * LEGEND_ROW + 12
    canvas = np.full((rows * HEIGHT + legend, columns * WIDTH, 3), 255, np.uint8)
    for i, panel in enumerate(panels):
        row, column = divmod(i, columns)
        area = canvas[row * HEIGHT : (row + 1) * HEIGHT, column * WIDTH : (column + 1) * WIDTH]
        _draw_panel(area, panel, colours)
    for i, name in enumerate(names):
        x, y = 20 + (i % each) * 230, rows * HEIGHT + 6 + (i // each) * LEGEND_ROW
        canvas[y + 4 : y + 7, x : x + 22] = colours[name]
        _write(canvas, x + 30, y, name, INK)
    path.write_bytes(_encode(canvas))


@dataclass(frozen=True, slots=True)
class Interval:
    """One value with its interval (None: not known); rows of one `group` have one colour."""

    name: str
    group: str
    value: float
    low: float | None = None
    high: float | None = None


def write_intervals(path: Path, title: str, rows: Sequence[Interval], *, centre: float = 1.0) -> None:
    """Draw a row for each value: a dot, its interval as a bar, and a line at `centre`, with a legend.

    Raises:
        ValueError: there is no row.
    """
    if not rows:
        raise ValueError("nothing to draw")
    groups = list(dict.fromkeys(row.group for row in rows))
    colours = {group: COLOURS[i % len(COLOURS)] for i, group in enumerate(groups)}
    ends = [end for row in rows for end in (row.value, row.low, row.high) if end is not None]
    least, most = min(0.5, centre / 2, *ends), max(1.5, centre, *ends)
    left = 20 + LETTER * max(len(row.name) for row in rows)
    width = max(left + WIDTH + RIGHT, 40 + LETTER * len(title))
    bottom = TOP + ROW * len(rows)
    canvas = np.full((bottom + BOTTOM + LEGEND_ROW, width, 3), 255, np.uint8)

    def at(value: float) -> int:
        return left + round((value - least) / (most - least) * (WIDTH - 1))

    for quarter in range(5):
        value = least + (most - least) * quarter / 4
        canvas[TOP:bottom, at(value)] = GRID
        _write(canvas, at(value) - 14, bottom + 6, f"{value:.2f}", INK)
    canvas[TOP:bottom, at(centre) : at(centre) + 2] = INK
    for i, row in enumerate(rows):
        y = TOP + ROW * i + ROW // 2
        _write(canvas, 10, y - 5, row.name, INK)
        if row.low is not None and row.high is not None:
            canvas[y - 1 : y + 2, at(row.low) : at(row.high) + 1] = colours[row.group]
        canvas[y - 4 : y + 5, max(0, at(row.value) - 4) : at(row.value) + 5] = colours[row.group]
    for i, group in enumerate(groups):
        x, y = left + i * WIDTH // len(groups), bottom + BOTTOM
        canvas[y + 2 : y + 8, x : x + 14] = colours[group]
        _write(canvas, x + 20, y, group, INK)
    _write(canvas, 10, 10, title, INK)
    path.write_bytes(_encode(canvas))


def _draw_panel(area: Pixels, panel: Panel, colours: Mapping[str, tuple[int, int, int]]) -> None:
    x0, x1, y0, y1 = LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM, TOP
    for quarter in range(5):
        x, y = x0 + (x1 - x0) * quarter // 4, y0 + (y1 - y0) * quarter // 4
        area[y1:y0, x] = GRID
        area[y, x0:x1] = GRID
        for value, at in ((panel.x_max, (x - 8, y0 + 8)), (panel.y_max, (12, y - 5))):
            _write(area, *at, f"{value * quarter / 4:g}", INK)
    area[y0, x0:x1] = INK
    area[y1:y0, x0] = INK
    for line in sorted(panel.lines, key=lambda line: line.bold):
        xs = x0 + np.asarray(line.x) / panel.x_max * (x1 - x0)
        ys = y0 + np.asarray(line.y) / panel.y_max * (y1 - y0)
        _trace(area[: y0 + 1], xs, ys, colours[line.name], 3 if line.bold else 1, y1)
    _write(area, x0, 8, panel.title, INK)
    _write(area, x1 - 8 * len(panel.x_label), y0 + 24, panel.x_label, INK)
    _write(area, x1 - 8 * len(panel.y_label), 8, panel.y_label, INK)


def _trace(
    area: Pixels,
    xs: npt.NDArray[np.float64],
    ys: npt.NDArray[np.float64],
    colour: tuple[int, int, int],
    width: int,
    top: int,
) -> None:
    """A line through points, in steps of less than a pixel."""
    for i in range(len(xs) - 1):
        steps = 2 + int(2 * max(abs(xs[i + 1] - xs[i]), abs(ys[i + 1] - ys[i])))
        x = np.linspace(xs[i], xs[i + 1], steps).round().astype(int)
        y = np.linspace(ys[i], ys[i + 1], steps).round().astype(int)
        for shift in range(-(width // 2), width - width // 2):
            inside = (y + shift >= top) & (y + shift < area.shape[0]) & (x >= 0) & (x < area.shape[1])
            area[y[inside] + shift, x[inside]] = colour


def _write(area: Pixels, x: int, y: int, text: str, colour: tuple[int, int, int]) -> None:
    """Text in capitals, two pixels a dot; what the font lacks is left blank."""
    for letter in text.upper():
        for row, octal in enumerate(GLYPHS.get(letter, "00000")):
            for column in range(3):
                if int(octal, 8) & (4 >> column):
                    area[y + 2 * row : y + 2 * row + 2, x + 2 * column : x + 2 * column + 2] = colour
        x += 8


def _encode(canvas: Pixels) -> bytes:
    """A PNG file of RGB pixels."""
    height, width, _ = canvas.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), canvas.reshape(height, -1)], axis=1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body
