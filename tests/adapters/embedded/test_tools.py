"""Tools: formats told apart, calls read while they stream, grammars that make them correct."""

from __future__ import annotations

import json
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from specproxy.adapters.embedded.body import FieldError, Fields
from specproxy.adapters.embedded.chat import ChatFormat, Conversation
from specproxy.adapters.embedded.output import Delta, Kind
from specproxy.adapters.embedded.tool_reader import HermesReader, Llama3Reader
from specproxy.adapters.embedded.tools import HERMES, LLAMA3, NO_TOOLS, Toolbox, detect_format, openai_tools
from specproxy.errors import RequestError
from tests.support.fake_engine import FakeEngine
from tests.support.gbnf_sampler import Sampler

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object", "properties": {"city": {"type": "string", "maxLength": 6}}, "required": ["city"],
        },
    },
}  # fmt: skip
CLOCK = {"type": "function", "function": {"name": "clock"}}
LLAMA_TEMPLATE = '{{ messages[0].content }}{% if tools %}"parameters"<|python_tag|>{% endif %}'


def read(reader: HermesReader | Llama3Reader, text: str, cuts: list[int]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls of a text that comes in pieces."""
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    deltas: list[Delta] = []
    for a, b in pairwise(edges):
        deltas += reader.feed(text[a:b])
    deltas += reader.finish()
    content = "".join(d.text for d in deltas if d.kind is Kind.CONTENT)
    names = [d.name for d in deltas if d.kind is Kind.CALL]
    assert [d.call for d in deltas if d.kind is Kind.CALL] == list(range(len(names)))
    assert len({d.id for d in deltas if d.kind is Kind.CALL}) == len(names)
    arguments = [
        "".join(d.text for d in deltas if d.kind is Kind.ARGUMENTS and d.call == i) for i in range(len(names))
    ]
    return content, list(zip(names, arguments, strict=True))


CUTS = st.lists(st.integers(0, 200), max_size=10)
HERMES_CASES: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("Just text.", "Just text.", []),
    ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
    ('Let me see.\n<tool_call>{"name":"f","arguments":{}}</tool_call>', "Let me see.", [("f", "{}")]),
    (
        '<tool_call>\n{"name": "f", "arguments": {"s": "}]\\"{"}}\n</tool_call>\n<tool_call>\n'
        '{"name": "g", "arguments": {"x": [1, {"y": 2}]}}\n</tool_call>',
        "", [("f", '{"s": "}]\\"{"}'), ("g", '{"x": [1, {"y": 2}]}')],
    ),
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "")]),
    ('<tool_call>{"name": "f", "id": "7", "arguments": {}}</tool_call> ', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {"a"', "", [("f", '{"a"')]),
    ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
    ("<tool_call>[1]", "<tool_call>[1]", []),
    ('<tool_call>{"nam', '<tool_call>{"nam', []),
    ("a <tool b <tool_", "a <tool b <tool_", []),
    ('<tool_call>{"name": 3}', '<tool_call>{"name": 3}', []),
    ('<tool_call>{"name": "f", "arguments": {}}</tool_call>\n\nDone.', "Done.", [("f", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "calls"), HERMES_CASES)
@given(cuts=CUTS)
def test_hermes_calls_are_read_in_any_pieces(
    text: str, content: str, calls: list[tuple[str, str]], cuts: list[int]
) -> None:
    assert read(HermesReader(), text, cuts) == (content, calls)


LLAMA_CASES: list[tuple[str, str, list[tuple[str, str]]]] = [
    ('{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ('<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    ("Just text.", "Just text.", []),
    ('{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    ('{"a": 1}', '{"a": 1}', []),
    ("{broken", "{broken", []),
    ("<|python_tag|>f.call()", "<|python_tag|>f.call()", []),
    ("", "", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), LLAMA_CASES)
@given(cuts=CUTS)
def test_llama_3_calls_are_read_in_any_pieces(
    text: str, content: str, calls: list[tuple[str, str]], cuts: list[int]
) -> None:
    assert read(Llama3Reader(frozenset({"f", "g"})), text, cuts) == (content, calls)


def test_the_name_comes_first_and_arguments_stream() -> None:
    reader = HermesReader()
    deltas = list(reader.feed('<tool_call>{"name": "f", "arguments": {"text": "abc'))
    assert [d.kind for d in deltas] == [Kind.CALL, Kind.ARGUMENTS]
    assert deltas[1].text == '{"text": "abc'
    assert [d.text for d in reader.feed('def"}')] == ['def"}']


def box(**body: Any) -> Toolbox:
    return openai_tools(Fields({"tools": [WEATHER, CLOCK], **body}))


def grammar(toolbox: Toolbox, template: str | None = None) -> str | None:
    engine = FakeEngine(chat_template=template)
    conversation = Conversation([{"role": "user", "content": "Hi"}], tools=toolbox)
    return ChatFormat(engine.card, engine).prepare(conversation).grammar


def calls_of(text: str) -> list[dict[str, Any]]:
    content, calls = read(HermesReader(), text, [])
    assert content == ""
    return [{"name": name, "arguments": json.loads(arguments)} for name, arguments in calls]


def test_required_calls_are_correct_ones() -> None:
    text = grammar(box(tool_choice="required"))
    assert text
    seen = set()
    for seed in range(40):
        calls = calls_of(Sampler(text).sample(Random(seed)))
        assert calls
        for call in calls:
            seen.add(call["name"])
            if call["name"] == "weather":
                Draft202012Validator(WEATHER["function"]["parameters"]).validate(call["arguments"])  # type: ignore[index]  # a literal of mixed types
    assert seen == {"weather", "clock"}


def test_a_named_tool_is_the_only_one_and_called_once() -> None:
    text = grammar(box(tool_choice={"type": "function", "function": {"name": "clock"}}))
    assert text
    for seed in range(10):
        assert [call["name"] for call in calls_of(Sampler(text).sample(Random(seed)))] == ["clock"]


def test_without_parallel_calls_there_is_one() -> None:
    text = grammar(box(tool_choice="required", parallel_tool_calls=False))
    assert text
    assert {len(calls_of(Sampler(text).sample(Random(seed)))) for seed in range(20)} == {1}


def test_auto_leaves_text_free_but_makes_what_is_begun_correct() -> None:
    text = grammar(box())
    assert text
    for seed in range(30):
        drawn = Sampler(text).sample(Random(seed), depth=25)
        _, calls = read(HermesReader(), drawn, [])
        assert drawn.count("<tool_call>") == len(calls)


def test_llama_3_is_constrained_only_where_a_call_is_required() -> None:
    assert grammar(box(), LLAMA_TEMPLATE) is None
    text = grammar(box(tool_choice="required"), LLAMA_TEMPLATE)
    assert text
    _, calls = read(Llama3Reader(frozenset({"weather", "clock"})), Sampler(text).sample(Random(2)), [])
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, HERMES),
        ("{{ tools }}<tool_call>", HERMES),
        ("<|im_start|>{{ messages }}", HERMES),
        (LLAMA_TEMPLATE, LLAMA3),
        ('{{ tools }} "parameters" <|start_header_id|>', LLAMA3),
    ],
)
def test_formats_are_read_off_the_template(template: str | None, expected: object) -> None:
    assert detect_format(template) is expected


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{{ tools }}<tool_call><function=", "Qwen3-Coder"),
        ("{{ tools }}[TOOL_CALLS]", "Mistral"),
        ("{{ tools }}<|channel|>", "Harmony"),
        ("{{ tools }}<tool_call><arg_key>", "GLM"),
        ("{{ tools }}?", "not known"),
        ("plain", "no tools"),
    ],
)
def test_other_formats_are_refused_by_name(template: str, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        grammar(box(), template)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": 3}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_malformed_tools_are_refused_by_name(body: dict[str, Any], named: str) -> None:
    with pytest.raises(FieldError) as caught:
        box(**body)
    assert caught.value.param == named


def test_a_tool_whose_schema_cannot_be_kept_is_named() -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"if": {}}}}
    with pytest.raises(FieldError) as caught:
        grammar(box(tools=[WEATHER, bad], tool_choice="required"))
    assert caught.value.param == "tools[1].function.parameters"


def test_no_choice_means_no_tools() -> None:
    assert box(tool_choice="none") is NO_TOOLS
    assert openai_tools(Fields({})) is NO_TOOLS
