"""The client's name for a model comes back in the reply, and nothing else changes."""

from __future__ import annotations

import json

import pytest

from specproxy.proxy.rename import Renamer

STREAM = b'data: {"choices":[],"model":"m-ngram","x":1}\n\ndata: {"model": "m-ngram"}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("cut", range(1, 45))
def test_wherever_it_is_cut(cut: int) -> None:
    """A name that is spread over pieces is replaced as any other; nothing is lost."""
    renamer = Renamer("m-ngram", "m")
    pieces = [STREAM[i : i + cut] for i in range(0, len(STREAM), cut)]
    out = b"".join(part for piece in pieces for part in renamer.feed([piece])) + renamer.end()
    assert out == STREAM.replace(b"m-ngram", b"m")


def test_whole_events_stay_pieces() -> None:
    """Nothing is joined, and nothing is held where no name begins."""
    events = [b'data: {"model":"a"}\n\n', b'data: {"n":1}\n\n']
    renamer = Renamer("a", "b")
    assert renamer.feed(events) == [b'data: {"model":"b"}\n\n', events[1]]
    assert renamer.end() == b""


def test_a_stream_that_ends_in_mid_name_is_passed_on() -> None:
    """What was kept back is not lost."""
    renamer = Renamer("abc", "x")
    assert renamer.feed([b'{"model":"ab']) == [b"{"]
    assert renamer.end() == b'"model":"ab'


@pytest.mark.parametrize("name", ["m", "m/x:8b", 'odd"name', "größe", "a.b*c"])
def test_any_name(name: str) -> None:
    """Names are compared as JSON writes them, not as patterns."""
    body = json.dumps({"model": name, "n": 1}, ensure_ascii=False).encode()
    assert json.loads(b"".join(Renamer(name, 'new"').feed([body]))) == {"model": 'new"', "n": 1}


def test_what_the_model_says_stays() -> None:
    """A text that quotes the field has its quotes escaped; other fields and longer names are others."""
    said = json.dumps(
        {"content": '{"model":"a"}', "my_model": "a", "model": "ab"}, separators=(",", ":")
    ).encode()
    assert b"".join(Renamer("a", "b").feed([said])) == said
