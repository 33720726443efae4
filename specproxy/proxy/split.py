"""Incremental readers that observe a stream: server-sent events, JSON lines, documents. They never alter bytes.

Any chunking of a stream gives the same events. Memory is bounded: of an event longer than the limit only its
end is kept, which is where servers put usage and timings.
"""

from __future__ import annotations

__all__ = ["EVENT_LIMIT", "LineSplitter", "SseSplitter", "Tail", "event_data"]

EVENT_LIMIT = 1 << 16


class LineSplitter:
    """Splits newline-delimited JSON into lines without their line ends; empty lines are left out."""

    def __init__(self, limit: int = EVENT_LIMIT) -> None:
        self._limit = limit
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Lines that `data` completes."""
        if self._rest:
            data = self._rest + data
        lines = data.split(b"\n")
        # one byte more than the limit: the carriage return of a line end that is not complete yet
        self._rest = lines.pop()[-self._limit - 1 :]
        return [tail for line in lines if (tail := line.removesuffix(b"\r")[-self._limit :])]

    def end(self) -> list[bytes]:
        """The last line, if the stream ended without a line end."""
        line, self._rest = self._rest.removesuffix(b"\r")[-self._limit :], b""
        return [line] if line else []


class SseSplitter:
    """Splits a stream of server-sent events into events, each the bytes between two empty lines.

    Line ends may be LF, CRLF or CR, as the HTML standard has it; events come out with LF. An event may be a
    comment alone (a ping).
    """

    def __init__(self, limit: int = EVENT_LIMIT) -> None:
        self._limit = limit
        self._rest = b""
        self._after_cr = False

    def feed(self, data: bytes) -> list[bytes]:
        """Events that `data` completes."""
        if self._after_cr or b"\r" in data:
            data = self._normalise(data)
        if self._rest:
            data = self._rest + data
        events = data.split(b"\n\n")
        # one byte more than the limit: the first of the two line ends may already be there
        self._rest = events.pop()[-self._limit - 1 :]
        return [tail for event in events if (tail := self._trim(event))]

    def end(self) -> list[bytes]:
        """The last event, if the stream ended without an empty line."""
        event, self._rest = self._trim(self._rest.removesuffix(b"\n")), b""
        return [event] if event else []

    def _trim(self, event: bytes) -> bytes:
        return event[-self._limit :].lstrip(b"\n")

    def _normalise(self, data: bytes) -> bytes:
        if not data:
            return data
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
            self._after_cr = False
        if data:
            self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


class Tail:
    """The last `limit` bytes of a document; `whole` says that they are all of it."""

    def __init__(self, limit: int = EVENT_LIMIT) -> None:
        self._limit = limit
        self._kept = bytearray()
        self.whole = True

    def feed(self, data: bytes) -> None:
        """Take in the next bytes; amortised, every byte is copied twice at most."""
        self._kept += data[-self._limit :]
        self.whole = self.whole and len(data) <= self._limit
        if len(self._kept) > 2 * self._limit:
            del self._kept[: -self._limit]
            self.whole = False

    def end(self) -> bytes:
        """What is kept."""
        self.whole = self.whole and len(self._kept) <= self._limit
        return bytes(self._kept[-self._limit :])


def event_data(event: bytes) -> bytes:
    """The data of an event: its `data:` lines joined by line feeds, empty for a comment.

    Lines with the field name `error` count as data, which is how old llama-server builds report errors.
    """
    if event.startswith(b"data:") and b"\n" not in event:
        return event[5:].removeprefix(b" ")
    lines = []
    for line in event.split(b"\n"):
        name, _, value = line.partition(b":")
        if name in (b"data", b"error"):
            lines.append(value.removeprefix(b" "))
    return b"\n".join(lines)
