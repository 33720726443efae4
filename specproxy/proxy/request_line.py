"""Request lines that are HTTP although the parser knows them for none: it is told others in their place."""

from __future__ import annotations

import re

__all__ = ["is_usual", "may_go_on", "stand_in"]

# Request lines that llhttp takes as they are, which is nearly all.
_USUAL_LINE = re.compile(rb"(?:GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS) [!-~]+ HTTP/1\.[01]\r\n")
# And those that are HTTP (RFC 9112), although it may know the method or the target's bytes for none.
_TOKEN_START = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]|$")
_ANY_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([!-~\x80-\xff]+) (HTTP/1\.[01]\r\n)")


def is_usual(data: bytes) -> bool:
    """Whether it begins with a whole line that the parser takes."""
    return _USUAL_LINE.match(data) is not None


def may_go_on(data: bytes) -> bool:
    """Whether it is the beginning of a line, which may become one."""
    return b"\n" not in data and _TOKEN_START.match(data) is not None


def stand_in(data: bytes) -> tuple[bytes, tuple[bytes, bytes] | None]:
    """What to tell the parser, and the method and target that it is not told (None where it is told all)."""
    line = _ANY_LINE.match(data)
    if line is None or line[1] == b"CONNECT" or is_usual(data):
        return data, None
    return b"POST / " + line[3] + data[line.end() :], (line[1], line[2])
