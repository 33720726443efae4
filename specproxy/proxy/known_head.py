"""A request head that has come before: clients say the same one again and again, but for the length of a body.

No I/O. What was parsed once, by a parser that is strict, is not parsed again where the bytes are the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from specproxy.proxy.inbound import ClientRequest, RequestBody

__all__ = ["KnownHead"]

_LONGEST = 8 * 1024  # bytes of a head that is remembered
_MOST_DIGITS = 15
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


class KnownHead:
    """The head of a request with a body whose length is told. Made by `of`."""

    __slots__ = ("_after", "_before", "_index", "_request")

    def __init__(self, before: bytes, after: bytes, request: ClientRequest, index: int) -> None:
        self._before = before  # the bytes before the length's digits
        self._after = after  # and those behind, with the empty line
        self._request = replace(request, body=RequestBody(lambda _: None))  # without the body that it came with
        self._index = index  # which header is the length

    @classmethod
    def of(cls, data: bytes, request: ClientRequest) -> KnownHead | None:
        """The head at the beginning of `data`, in which a parser has found this request.

        None for one that is not to be remembered: no length is told, the connection ends behind it, it is long,
        or it is not plainly one header a line.
        """
        headers = request.headers
        if request.fault is not None or request.http10 or not request.keep_alive:
            return None
        end = data.find(b"\r\n\r\n", 0, _LONGEST) + 4
        head = data[:end]
        lines = len(headers) + 2
        found = _LENGTH.findall(head)
        names = [name.lower() for name, _ in headers]
        if end < 4 or head.count(b"\n") != lines or head.count(b"\r\n") != lines or len(found) != 1:
            return None
        if names.count(b"content-length") != 1 or b"transfer-encoding" in names or b"upgrade" in names:
            return None
        place = _LENGTH.search(head)
        assert place is not None, "one was found"
        return cls(head[: place.start(1)], head[place.end(1) :], request, names.index(b"content-length"))

    def again(self, data: bytes, on_level: Callable[[int], None]) -> tuple[ClientRequest, int] | None:
        """The request at the beginning of `data`, if it has this head and is whole, and where the next begins.

        `on_level` is for its body.
        """
        before, after = self._before, self._after
        if not data.startswith(before):
            return None
        start = len(before)
        stop = data.find(b"\r", start, start + _MOST_DIGITS + 1)
        digits = data[start:stop]
        if stop < 0 or not digits.isdigit() or not data.startswith(after, stop):
            return None
        begin = stop + len(after)
        end = begin + int(digits)
        if end > len(data):
            return None
        was, at = self._request, self._index
        headers = (*was.headers[:at], (was.headers[at][0], digits), *was.headers[at + 1 :])
        body = RequestBody(on_level, data[begin:end])
        return ClientRequest(was.method, was.target, headers, body, peer=was.peer, notes=was.notes), end
