"""Splitters give the same events however a stream is cut, and their memory is bounded."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.proxy.split import LineSplitter, SseSplitter, Tail, event_data

LIMIT = 40

text = st.binary(max_size=60).map(lambda b: b.replace(b"\r", b"").replace(b"\n", b""))
field = st.builds(
    lambda name, value: name + value, st.sampled_from([b"data: ", b"data:", b"event: ", b": ", b"id:"]), text
)
line_end = st.sampled_from([b"\n", b"\r\n", b"\r"])
sse_stream = st.lists(st.one_of(field, st.just(b""), text), max_size=20).flatmap(
    lambda lines: st.builds(lambda end: b"".join(line + end for line in lines), line_end)
)
any_stream = st.one_of(
    sse_stream, st.binary(max_size=300), st.lists(st.sampled_from([b"\r", b"\n", b"a"])).map(b"".join)
)


@st.composite
def cut(draw: st.DrawFn, stream: st.SearchStrategy[bytes]) -> tuple[bytes, list[bytes]]:
    """A stream, and the same stream in pieces (some of them empty)."""
    whole = draw(stream)
    places = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    ends = [*places, len(whole)]
    return whole, [whole[a:b] for a, b in zip([0, *places], ends, strict=True)]


def events(splitter: SseSplitter | LineSplitter, pieces: list[bytes]) -> list[bytes]:
    found = [event for piece in pieces for event in splitter.feed(piece)]
    return found + splitter.end()


@given(cut(any_stream))
def test_sse_events_do_not_depend_on_the_cuts(stream: tuple[bytes, list[bytes]]) -> None:
    """Any chunking of any bytes gives the events of the uncut stream, also of events too long to keep."""
    whole, pieces = stream
    assert b"".join(pieces) == whole
    assert events(SseSplitter(LIMIT), pieces) == events(SseSplitter(LIMIT), [whole])


@given(cut(any_stream))
def test_lines_do_not_depend_on_the_cuts(stream: tuple[bytes, list[bytes]]) -> None:
    """The same for lines."""
    whole, pieces = stream
    assert events(LineSplitter(LIMIT), pieces) == events(LineSplitter(LIMIT), [whole])


@pytest.mark.parametrize("ends", [[b"\n"], [b"\r\n"], [b"\r"], [b"\n", b"\r\n"], [b"\n", b"\n", b"\r"]])
def test_every_cut_of_a_stream_with_long_events(ends: list[bytes]) -> None:
    """Wherever it is cut, within a line end or an event that is too long, the events are the same."""
    lines = [
        b"data: short",
        b"",
        b"event: x",
        b"data: " + b"long " * 12,
        b"",
        b"",
        b": ping",
        b"",
        b"x" * LIMIT,
        b"",
    ]
    stream = b"".join(line + end for line, end in zip(lines, itertools.cycle(ends), strict=False))
    for splitter in (SseSplitter, LineSplitter):
        whole = events(splitter(LIMIT), [stream])
        for place in range(len(stream) + 1):
            assert events(splitter(LIMIT), [stream[:place], stream[place:]]) == whole
        assert events(splitter(LIMIT), [stream[i : i + 1] for i in range(len(stream))]) == whole


@given(st.lists(st.lists(field, min_size=1, max_size=4), max_size=8), line_end)
def test_every_line_end_separates_the_same_events(blocks: list[list[bytes]], end: bytes) -> None:
    """LF, CRLF and CR are line ends; events come out with LF."""
    stream = b"".join(b"".join(line + end for line in block) + end for block in blocks)
    assert events(SseSplitter(10**6), [stream]) == [b"\n".join(block) for block in blocks]


@given(st.lists(text.filter(bool), max_size=8), st.sampled_from([b"\n", b"\r\n"]))
def test_lines_come_out_as_written(lines: list[bytes], end: bytes) -> None:
    """A line is all that stands before its line end."""
    assert events(LineSplitter(10**6), [b"".join(line + end for line in lines)]) == lines


@given(cut(st.binary(max_size=300)))
def test_tail_keeps_the_end(stream: tuple[bytes, list[bytes]]) -> None:
    """A tail is the end of the document, and knows whether it is all of it."""
    whole, pieces = stream
    tail = Tail(LIMIT)
    for piece in pieces:
        tail.feed(piece)
    assert tail.end() == whole[-LIMIT:]
    assert tail.whole == (len(whole) <= LIMIT)


@pytest.mark.parametrize("splitter", [SseSplitter(1000), LineSplitter(1000)])
def test_an_endless_line_takes_bounded_memory(splitter: SseSplitter | LineSplitter) -> None:
    """Of a line that never ends only its end is kept, and it is one event at last."""
    for _ in range(200):
        assert splitter.feed(b"x" * 999) == []
        assert len(splitter._rest) <= 1001
    assert splitter.feed(b"END\n\n") == [b"x" * 997 + b"END"]


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: {}", b"{}"),
        (b"data:{}", b"{}"),
        (b"data:  x", b" x"),
        (b"event: message_stop\ndata: {}", b"{}"),
        (b"data: a\ndata: b", b"a\nb"),
        (b": ping", b""),
        (b"id: 1", b""),
        (b'error: {"message": "gone"}', b'{"message": "gone"}'),
        (b"", b""),
    ],
)
def test_data_of_an_event(event: bytes, data: bytes) -> None:
    """Data lines are joined, one leading space is dropped, comments and other fields have no data."""
    assert event_data(event) == data
