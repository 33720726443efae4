"""Reasoning told from the answer, however the text is cut into pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.adapters.embedded.reasoning import ReasoningSplitter, Tags, tags_of

TAGS = Tags("<think>", "</think>")


def split(text: str, cuts: list[int], *, opened: bool = False) -> tuple[str, str]:
    """Reasoning and answer of a text that comes in pieces."""
    splitter = ReasoningSplitter(TAGS, opened=opened)
    found = {"reasoning": "", "content": ""}
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    for a, b in pairwise(edges):
        for kind, piece in splitter.feed(text[a:b]):
            assert piece
            found[kind] += piece
    for kind, piece in splitter.finish():
        found[kind] += piece
    return found["reasoning"], found["content"]


CASES = [
    ("<think>\nhm, so\n</think>\n\nYes.", False, "hm, so", "Yes."),
    ("\n <think>a</think>b", False, "a", "b"),
    ("hm </think> Yes <think>no</think>", True, "hm", "Yes <think>no</think>"),
    ("Yes.", False, "", "Yes."),
    ("  Yes.", False, "", "  Yes."),
    ("<thin air>", False, "", "<thin air>"),
    ("<think>never ends  ", False, "never ends", ""),
    ("<think></think>Yes", False, "", "Yes"),
    ("a </thin </think>b", True, "a </thin", "b"),
    ("x < y</think> z \n", True, "x < y", "z \n"),
    ("<think>a\n\nb</think>", False, "a\n\nb", ""),
]


@pytest.mark.parametrize(("text", "opened", "reasoning", "content"), CASES)
@given(cuts=st.lists(st.integers(0, 60), max_size=8))
def test_pieces_make_no_difference(
    text: str, opened: bool, reasoning: str, content: str, cuts: list[int]
) -> None:
    assert split(text, cuts, opened=opened) == (reasoning, content)


def test_an_answer_streams_at_once_where_no_tag_can_follow() -> None:
    splitter = ReasoningSplitter(TAGS)
    assert list(splitter.feed("Y")) == [("content", "Y")]
    assert list(splitter.feed("es <th")) == [("content", "es <th")]


def test_reasoning_streams_but_for_a_possible_tag() -> None:
    splitter = ReasoningSplitter(TAGS, opened=True)
    assert list(splitter.feed("so </th")) == [("reasoning", "so")]
    assert list(splitter.feed("us")) == [("reasoning", " </thus")]


def test_templates_give_their_tags_away() -> None:
    assert tags_of("…</think>…") == TAGS
    assert tags_of("[THINK] [/THINK]") == Tags("[THINK]", "[/THINK]")
    assert tags_of("nothing") is None
    assert tags_of(None) is None
