"""Reading responses from bytes in any pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.adapters.base import Headers
from specproxy.adapters.reader import MAX_HEAD_BYTES, ResponseReader
from tests.support.upstream import chunk, chunked

CHUNKED = b"HTTP/1.1 200 Very OK\r\nX-One: 1\r\nx-one: 2\r\nTransfer-Encoding: chunked\r\n\r\n"


def read(*pieces: bytes, bodiless: bool = False) -> ResponseReader:
    reader = ResponseReader()
    reader.begin(bodiless=bodiless)
    for piece in pieces:
        reader.feed(piece)
    return reader


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Data in pieces, cut at places that are taken modulo its length."""
    at = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(at)]


@given(
    parts=st.lists(st.binary(min_size=1, max_size=50), max_size=6),
    places=st.lists(st.integers(0, 10_000), max_size=12),
    trailer=st.booleans(),
)
def test_any_pieces_give_the_same_response(parts: list[bytes], places: list[int], trailer: bool) -> None:
    """However a chunked response is cut: same head, same bytes, same trailers, complete at the very end."""
    wire = CHUNKED + chunked(*parts, trailers=b"X-T: a\r\nx-t: b\r\n" if trailer else b"")
    reader = read()
    body: list[bytes] = []
    for piece in cut(wire, places):
        assert not reader.complete
        reader.feed(piece)
        body += reader.take_parts()
    assert reader.complete
    assert reader.reusable
    assert reader.error == ""
    assert b"".join(body) == b"".join(parts)
    assert reader.head is not None
    assert (reader.head.status, reader.head.reason) == (200, b"Very OK")
    assert reader.head.headers[:2] == ((b"X-One", b"1"), (b"x-one", b"2"))
    assert reader.trailers == (((b"X-T", b"a"), (b"x-t", b"b")) if trailer else ())


@given(st.lists(st.binary(max_size=200), max_size=8))
def test_junk_never_raises(pieces: list[bytes]) -> None:
    """Whatever comes, the reader only takes note."""
    reader = read(*pieces)
    assert not reader.complete or reader.head is not None


@given(junk=st.binary(min_size=1, max_size=60), places=st.lists(st.integers(0, 500), max_size=4))
def test_junk_behind_a_response_spoils_the_connection_only(junk: bytes, places: list[int]) -> None:
    """The response stays complete as it was; the connection is not used again."""
    whole = CHUNKED + chunked(b"abc")
    reader = read(whole, *cut(junk, places))
    assert reader.complete
    assert b"".join(reader.take_parts()) == b"abc"
    if junk.strip(b"\r\n"):
        assert not reader.reusable


def test_parts_keep_chunk_boundaries() -> None:
    """Chunks that arrive in one read stay apart."""
    reader = read(CHUNKED + chunk(b"one") + chunk(b"two"))
    assert reader.take_parts() == [b"one", b"two"]
    assert reader.take_parts() == []


@pytest.mark.parametrize("extra", [b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b""])
def test_head_responses_have_no_body(extra: bytes) -> None:
    """The answer to HEAD is complete with its empty line, whatever its headers promise."""
    reader = read(b"HTTP/1.1 200 OK\r\n" + extra + b"\r\n", bodiless=True)
    assert reader.complete
    assert reader.take_parts() == []


def test_a_connection_is_reused_after_head() -> None:
    """A promised body that HEAD does not send does not spoil the next response."""
    reader = read(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", bodiless=True)
    assert reader.reusable
    reader.begin(bodiless=False)
    reader.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
    assert reader.complete
    assert reader.take_parts() == [b"hi"]


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_statuses_without_a_body(status: bytes) -> None:
    """204 and 304 end with the head, even with a Content-Length."""
    reader = read(b"HTTP/1.1 " + status + b"\r\nContent-Length: 5\r\n\r\n")
    assert reader.complete
    assert reader.reusable


def test_interim_responses_are_skipped() -> None:
    """100 and 103 come before the response and are not it."""
    reader = read(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n")
    assert reader.head is None
    assert reader.heard
    assert not reader.complete
    reader.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    assert reader.complete
    assert reader.head is not None
    assert reader.head.headers == ((b"Content-Length", b"0"),)


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"])
def test_a_body_may_end_with_the_connection(head: bytes) -> None:
    """Without a length the end of the connection is the end."""
    reader = read(head + b"some")
    assert not reader.complete
    assert reader.eof()
    assert reader.complete
    assert reader.take_parts() == [b"some"]
    assert not reader.reusable


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc",
        CHUNKED + chunk(b"abc"),
        CHUNKED + chunk(b"abc") + b"0\r\n",
    ],
)
def test_an_early_end_is_no_end(wire: bytes) -> None:
    """A response cut short is never complete."""
    reader = read(wire)
    assert not reader.eof()


@pytest.mark.parametrize(
    "wire",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        CHUNKED + b"zz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n",
    ],
)
def test_what_is_not_http_is_an_error(wire: bytes) -> None:
    """Malformed responses are told apart from incomplete ones."""
    reader = read(wire)
    assert reader.error
    assert not reader.eof()


def test_what_came_before_a_fault_is_kept() -> None:
    """Bytes before a bad chunk are good."""
    reader = read(CHUNKED + chunk(b"abc") + b"zz\r\n")
    assert reader.take_parts() == [b"abc"]
    assert reader.error


@pytest.mark.parametrize("start", [b"HTTP/1.1 200 OK\r\n", CHUNKED + chunk(b"a") + b"0\r\n"])
def test_headers_and_trailers_without_end_are_an_error(start: bytes) -> None:
    """Memory does not grow with what a peer sends before or behind a body."""
    reader = read(start)
    line = b"X-%d: " + b"y" * 1000 + b"\r\n"
    for i in range(MAX_HEAD_BYTES // 1000):
        reader.feed(line % i)
    assert "headers" in reader.error


def test_a_long_body_in_one_chunk_is_no_error() -> None:
    """Only what is not body counts against the limit."""
    size = MAX_HEAD_BYTES * 3
    reader = read(CHUNKED + b"%x\r\n" % size)
    for _ in range(size // 1024):
        reader.feed(b"x" * 1024)
    reader.feed(b"\r\n0\r\n\r\n")
    assert reader.complete
    assert sum(map(len, reader.take_parts())) == size


def test_raw_bytes_of_headers_survive() -> None:
    """Odd bytes, empty values and spelling come through."""
    reader = read(b"HTTP/1.1 299 \xe9\r\nx-ODD: \xff\xe9\r\nX-Empty:\r\nX-Next: 1\r\nContent-Length: 0\r\n\r\n")
    expected: Headers = (
        (b"x-ODD", b"\xff\xe9"),
        (b"X-Empty", b""),
        (b"X-Next", b"1"),
        (b"Content-Length", b"0"),
    )
    assert reader.head is not None
    assert reader.head.headers == expected
    assert reader.head.reason == b"\xe9"
