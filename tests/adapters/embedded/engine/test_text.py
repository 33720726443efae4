"""Text that may be sent: whole characters, never a part of a stop string."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specproxy.adapters.embedded.text import TextStream

ALPHABET = st.text(alphabet="abü🌍\n", max_size=40)


def pieces(raw: bytes, sizes: list[int]) -> list[bytes]:
    cut, at = [], 0
    for size in sizes:
        cut.append(raw[at : at + size])
        at += size
    return [*cut, raw[at:]]


@given(ALPHABET, st.lists(st.integers(0, 5), max_size=40))
def test_characters_come_whole(text: str, sizes: list[int]) -> None:
    stream = TextStream()
    out = [stream.push(piece) for piece in pieces(text.encode(), sizes)]
    assert "�" not in "".join(out)
    assert "".join(out) + stream.finish() == text


@given(ALPHABET, st.lists(st.integers(0, 5), max_size=40), st.lists(st.text("abü", min_size=1, max_size=4)))
def test_stop_strings_cut_the_text_where_the_first_one_is_complete(
    text: str, sizes: list[int], stops: list[str]
) -> None:
    stream, out, said = TextStream(stops), "", b""
    for piece in pieces(text.encode(), sizes):
        said += piece
        out += stream.push(piece)  # what has been given out cannot be taken back
        if stream.stopped_by:
            break
    out += stream.finish()
    known = said.decode("utf-8", "ignore")
    places = [known.index(stop) for stop in stops if stop in known]
    assert out == (known[: min(places)] if places else text)
    assert bool(stream.stopped_by) == bool(places)


def test_broken_bytes_become_the_replacement_character() -> None:
    stream = TextStream()
    assert stream.push(b"a\xff") == "a�"
    assert stream.push("é".encode()[:1]) == ""
    assert stream.finish() == "�"
