"""The log as a file: rotated, shared, and read while it is written."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from specproxy.logfile import RotatingFile, Tail, older


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "specproxy.log"


def numbers(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().splitlines()]


def test_it_is_its_owners_alone(path: Path) -> None:
    """It names workloads and times."""
    RotatingFile(path).write("1\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_is_bounded(path: Path) -> None:
    """The newest lines stay, whole, in the newest files."""
    file = RotatingFile(path, most=100, keep=2)
    for n in range(1000):
        file.write(f"{n:09d}\n")
    files = [older(path, n) for n in (2, 1, 0)]
    kept = [n for f in files if f.exists() for n in numbers(f)]
    assert kept == list(range(1000 - len(kept), 1000))
    assert 20 <= len(kept) <= 33
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "specproxy.log",
        "specproxy.log.1",
        "specproxy.log.2",
    ]


def test_two_may_write(path: Path) -> None:
    """When one rotates, the other goes on in the new file; nothing is lost between them."""
    one, other = (RotatingFile(path, most=60, keep=9) for _ in range(2))
    for n in range(40):
        (one if n % 3 else other).write(f"{n:05d}\n")
    kept = [n for k in range(9, -1, -1) if older(path, k).exists() for n in numbers(older(path, k))]
    assert kept == list(range(40))


def test_a_file_that_was_removed_is_made_again(path: Path) -> None:
    """As by somebody who tidies up."""
    file = RotatingFile(path)
    file.write("1\n")
    path.unlink()
    file.write("2\n")
    assert numbers(path) == [2]


def test_reading_while_it_is_written_and_rotated(path: Path) -> None:
    """Every line once, in order, none before it is whole."""
    file, tail = RotatingFile(path, most=30, keep=3), Tail(path)
    assert tail.new() == []
    seen = []
    for n in range(20):
        file.write(f"{n:05d}\n")
        seen += tail.new()
    assert [int(line) for line in seen] == list(range(20))
    with path.open("a") as half:
        half.write("000")
    assert tail.new() == []
    file.write("20\n")
    assert tail.new() == ["00020"]
    tail.close()


def test_earlier_files_are_read_in_order(path: Path) -> None:
    """Oldest first; those that are missing are skipped."""
    path.parent.mkdir()
    older(path, 1).write_text("3\n4\n")
    older(path, 3).write_text("1\n2\n")
    assert list(Tail(path).earlier()) == ["1", "2", "3", "4"]
