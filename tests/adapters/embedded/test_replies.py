"""What replies are made of: every shortcut gives the bytes of the long way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specproxy.adapters.embedded import api_chat, api_completions
from specproxy.adapters.embedded.output import Delta, Kind, Part
from specproxy.adapters.embedded.replies import Frames, event

TEXTS = st.lists(st.tuples(st.integers(0, 2), st.text(min_size=1)), min_size=1)


@given(TEXTS)
def test_a_frame_gives_what_rendering_gives(texts: list[tuple[int, str]]) -> None:
    def render(index: int, text: str) -> bytes:
        return event({"index": index, "delta": {"content": text}, "model": 'm"\\'})

    frames = Frames(render)
    assert [frames.chunk(*each) for each in texts] == [render(*each) for each in texts]


@given(TEXTS)
def test_chunks_of_text_are_what_they_are_without_frames(texts: list[tuple[int, str]]) -> None:
    chat, completion = api_chat._Head("m"), api_completions._Head("m")
    chats, completions = api_chat._Writer(chat, False), api_completions._Writer(completion, False)
    for index in range(3):  # chats begin with an event of their own
        chats.part(Part(index, ()))
    for index, text in texts:
        part = Part(index, (Delta(Kind.CONTENT, text),), tokens=(1,))
        choice = {"finish_reason": None, "index": index, "delta": {"content": text}}
        assert chats.part(part) == event(chat.wrap("chat.completion.chunk", [choice]))
        whole = {"text": text, "index": index, "logprobs": None, "finish_reason": None}
        assert completions.part(part) == event(completion.wrap([whole]))
