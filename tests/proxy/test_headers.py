"""Which headers go on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.adapters.base import Headers
from specproxy.proxy.headers import header_value, read_inbound, response_headers


def test_a_request_is_sorted_out() -> None:
    """End-to-end headers stay as they are; the rest is noted."""
    inbound = read_inbound(
        (
            (b"hOST", b"x"),
            (b"X-One", b"1"),
            (b"Content-length", b"12"),
            (b"EXPECT", b"100-Continue"),
            (b"X-Specproxy-Strategy", b" ngram "),
            (b"x-specproxy-token", b"t"),
            (b"X-Specproxy-Verify", b"1"),
            (b"Content-Encoding", b"gzip"),
            (b"x-one", b"2"),
        )
    )
    assert inbound.headers == ((b"X-One", b"1"), (b"Content-Encoding", b"gzip"), (b"x-one", b"2"))
    assert inbound.pin == "ngram"
    assert inbound.expects_continue
    assert inbound.encoded
    assert inbound.verifying


def test_other_expectations_go_on() -> None:
    """What we cannot meet is the upstream's to refuse."""
    inbound = read_inbound(((b"Expect", b"the-unexpected"),))
    assert inbound.headers == ((b"Expect", b"the-unexpected"),)
    assert not inbound.expects_continue


@pytest.mark.parametrize("read", [lambda raw: read_inbound(raw).headers, response_headers])
def test_connection_names_headers_of_its_hop(read: object) -> None:
    """They end here, wherever they stand; but nothing that frames or describes the body can be named away."""
    raw: Headers = (
        (b"X-Hop", b"1"),
        (b"Connection", b"close, x-hop ,Content-Type"),
        (b"connection", b"X-OTHER"),
        (b"Content-Type", b"a/b"),
        (b"x-other", b"2"),
        (b"X-Stays", b"3"),
    )
    assert read(raw) == ((b"Content-Type", b"a/b"), (b"X-Stays", b"3"))  # type: ignore[operator]  # one of two functions


@given(st.text(), st.integers(0, 40))
def test_any_text_becomes_one_line(text: str, limit: int) -> None:
    """A reason cannot break out of its header."""
    value = header_value(text, limit)
    assert len(value) <= limit
    assert all(0x20 <= byte <= 0x7E for byte in value)


def test_plain_text_is_kept() -> None:
    """What is ASCII already stays; the rest is replaced, not dropped."""
    assert header_value("explore: ngram 1.2x") == b"explore: ngram 1.2x"
    assert header_value("naïve\r\nX: ±5") == b"na?ve  X: ?5"
