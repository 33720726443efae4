"""The log as a file: JSON lines in the state directory, a few MB at most, readable by their owner alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["LOG_FILE", "RotatingFile", "Tail", "older"]

LOG_FILE = "specproxy.log"
KEEP = 3  # older files beside the one that is written


class RotatingFile:
    """Appends to `path`. Beyond `most` bytes it becomes ``path.1``, and what was that becomes ``path.2``.

    Several processes may write to one path: whoever finds that another has rotated it goes on in the new file.
    """

    def __init__(self, path: Path, *, most: int = 5_000_000, keep: int = KEEP) -> None:
        self.path = path
        self._most = most
        self._keep = keep
        self._descriptor = -1

    def open(self) -> None:
        """Be ready to write.

        Raises:
            OSError: the file cannot be made or written.
        """
        if self._descriptor < 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, text: str) -> None:
        """Append whole lines.

        Raises:
            OSError: the disk is full, or the file cannot be written any more.
        """
        if self._descriptor >= 0 and not self._is_ours():
            self.close()
        self.open()
        data = text.encode("utf-8", "replace")
        while data:
            data = data[os.write(self._descriptor, data) :]
        if os.fstat(self._descriptor).st_size > self._most:
            self._rotate()

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Let go of the file; writing opens it again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _is_ours(self) -> bool:
        """Whether the file under this name is still the one that is open."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def _rotate(self) -> None:
        self.close()
        for number in range(self._keep, 0, -1):
            source = older(self.path, number - 1)
            if source.exists():
                source.replace(older(self.path, number))


def older(path: Path, number: int) -> Path:
    """The file that was written `number` rotations ago; 0 is the one that is written now."""
    return path.with_name(f"{path.name}.{number}") if number else path


class Tail:
    """Lines of a log that others write and rotate."""

    def __init__(self, path: Path, *, keep: int = KEEP) -> None:
        self._path = path
        self._keep = keep
        self._file: BinaryIO | None = None
        self._rest = b""

    def earlier(self) -> Iterator[str]:
        """All lines of the older files, oldest first.

        Raises:
            OSError: one cannot be read.
        """
        for number in range(self._keep, 0, -1):
            try:
                text = older(self._path, number).read_text(encoding="utf-8", errors="replace")
            except FileNotFoundError:
                continue
            yield from text.splitlines()

    def new(self) -> list[str]:
        """Whole lines that have come since the last call, first those of a file that was rotated meanwhile."""
        lines = self._whole()
        if not self._is_current() and self._path.exists():
            self.close()
            self._file, self._rest = self._path.open("rb"), b""
            lines += self._whole()
        return lines

    def close(self) -> None:
        """Let go of the file; looking for new lines opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _whole(self) -> list[str]:
        if self._file is None:
            return []
        data = self._rest + self._file.read()
        whole, _, self._rest = data.rpartition(b"\n")
        return whole.decode("utf-8", "replace").splitlines() if whole else []

    def _is_current(self) -> bool:
        if self._file is None:
            return False
        try:
            now = os.stat(self._path)
        except FileNotFoundError:
            return False
        open_file = os.fstat(self._file.fileno())
        return os.path.samestat(now, open_file) and now.st_size >= self._file.tell()
