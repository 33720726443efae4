"""Facts from requests in every dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.proxy.dialects import openai, read_facts
from specproxy.records import Dialect, OutputForm, RequestFacts, Turn

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def facts(dialect: Dialect, **body: Any) -> RequestFacts:
    found = read_facts(dialect, json.dumps(body).encode())
    assert found is not None
    assert found.dialect is dialect
    return found


def chat(**body: Any) -> RequestFacts:
    return facts(Dialect.OPENAI_CHAT, **body)


def roles(found: RequestFacts) -> list[tuple[str, str]]:
    return [(turn.role, turn.text) for turn in found.turns]


@pytest.mark.parametrize("field", sorted(openai._PLAIN_FIELDS - {"model", "messages"}))
@pytest.mark.parametrize("value", [1, 2.5, True, "high", ["x"], {"type": "json_schema", "json": {}}], ids=str)
def test_a_plain_field_of_a_chat_asks_for_nothing_else(field: str, value: object) -> None:
    """Reading what else a request may ask for finds nothing where there are plain fields alone."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], field: value}
    assert chat(**body) == chat(**body, tools=[])


# --- OpenAI chat ---------------------------------------------------------------------------------


def test_chat_fields() -> None:
    """The plain fields of a chat request."""
    found = chat(
        model="m",
        stream=True,
        messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hello"}],
        temperature=0.2,
        max_tokens=9,
        seed=3,
        n=2,
        top_logprobs=0,
    )
    assert found == RequestFacts(
        Dialect.OPENAI_CHAT,
        model="m",
        stream=True,
        turns=(Turn("system", "be brief"), Turn("user", "hello")),
        temperature=0.2,
        max_tokens=9,
        seed=3,
        n=2,
    )


def test_chat_content_parts() -> None:
    """Text parts are joined, images and sound are counted, and their data is not text."""
    parts = [
        {"type": "text", "text": "what is"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "text", "text": "this"},
    ]
    found = chat(messages=[{"role": "user", "content": parts}])
    assert roles(found) == [("user", "what is\nthis")]
    assert (found.images, found.audio) == (1, 1)


def test_chat_tools_in_the_history() -> None:
    """Calls belong to the assistant's turn, results are turns of the tool."""
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
    found = chat(
        messages=[
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "a tree"},
        ],
        tools=[TOOL],
    )
    assert roles(found) == [("user", "look"), ("assistant", 'look {"at": "x"}'), ("tool", "a tree")]
    assert (found.tools, found.tool_choice) == (1, "auto")


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("none", "none"),
        ("auto", "auto"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "look"}}, "named"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}, "required"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "auto"),
        (None, "auto"),
        (7, "auto"),
    ],
)
def test_tool_choice(choice: object, expected: str) -> None:
    """Every way to say which tool may be called."""
    assert chat(messages=[], tools=[TOOL], tool_choice=choice).tool_choice == expected


def test_no_tools_no_choice() -> None:
    """Nothing can be chosen from nothing."""
    assert chat(messages=[], tool_choice="required").tool_choice == "none"
    assert chat(messages=[], functions=[{"name": "old"}], function_call={"name": "old"}).tool_choice == "named"


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({}, OutputForm.FREE),
        ({"response_format": {"type": "text"}}, OutputForm.FREE),
        ({"response_format": {"type": "json_object"}}, OutputForm.JSON_OBJECT),
        ({"response_format": {"type": "json_object", "schema": {"type": "object"}}}, OutputForm.JSON_SCHEMA),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, OutputForm.JSON_SCHEMA),
        ({"json_schema": {"type": "object"}}, OutputForm.JSON_SCHEMA),
        ({"guided_json": {"type": "object"}}, OutputForm.JSON_SCHEMA),
        ({"structured_outputs": {"json": {"type": "object"}}}, OutputForm.JSON_SCHEMA),
        ({"structured_outputs": {"regex": "a+"}}, OutputForm.GRAMMAR),
        ({"grammar": 'root ::= "a"'}, OutputForm.GRAMMAR),
        ({"grammar": ""}, OutputForm.FREE),
        ({"response_format": "json"}, OutputForm.FREE),
    ],
)
def test_output_form(fields: dict[str, Any], form: OutputForm) -> None:
    """What OpenAI, llama-server and vLLM call structured output."""
    assert chat(messages=[], **fields).output is form


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"draft_model": "tiny"}, ("draft_model",)),
        ({"num_draft_tokens": 4, "speculative.n_max": 0}, ("num_draft_tokens", "speculative.n_max")),
        ({"speculation": True}, ()),
    ],
)
def test_steering(fields: dict[str, Any], names: tuple[str, ...]) -> None:
    """Fields by which the client itself controls speculation are named."""
    assert chat(messages=[], **fields).steering == names


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, None),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"thinking_budget_tokens": 100}, True),
    ],
)
def test_thinking(fields: dict[str, Any], thinking: bool | None) -> None:
    """Each server has its own switch."""
    assert chat(messages=[], **fields).thinking is thinking


@pytest.mark.parametrize("name", ["thinking_budget_tokens", "thinking_budget"])
def test_a_limit_for_thoughts(name: str) -> None:
    """llama-server's field and mlx_vlm.server's, in chats and Responses; it binds the text as a form does."""
    for read in (chat, responses):
        found = read(**{name: 5})
        assert (found.thought_limit, found.is_bound) == (True, True)
        assert not read().is_bound


def test_limits_and_logprobs() -> None:
    """The newer limit wins, no limit is none, and any request for logprobs counts."""
    assert chat(messages=[], max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert chat(messages=[], max_tokens=-1).max_tokens is None
    assert chat(messages=[], max_tokens=0).max_tokens == 0
    assert chat(messages=[], logprobs=True).logprobs
    assert chat(messages=[], n_probs=2).logprobs
    assert not chat(messages=[], logprobs=False).logprobs


# --- OpenAI completions and responses ------------------------------------------------------------


def completions(**body: Any) -> RequestFacts:
    return facts(Dialect.OPENAI_COMPLETIONS, **body)


def test_completions() -> None:
    """A prompt is a string, strings, or token ids; `logprobs` is a number, of which 0 asks too."""
    assert roles(completions(prompt="Once")) == [("user", "Once")]
    assert roles(completions(prompt=["a", "b"])) == [("user", "a"), ("user", "b")]
    assert roles(completions(prompt=[1, 2, 3])) == []
    assert completions(prompt="a", logprobs=0).logprobs
    assert not completions(prompt="a").logprobs
    assert completions(prompt="a", best_of=3).n == 3


def test_completions_with_a_suffix_fill_a_gap() -> None:
    """The suffix is the last turn."""
    found = completions(prompt="def f(", suffix="return x")
    assert found.infill
    assert roles(found)[-1] == ("user", "return x")


@pytest.mark.parametrize(
    "prompt",
    [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|system|>\nBe brief.</s>\n<|user|>\nHello</s>\n<|assistant|>\n",
        "<s>Be brief. [INST] Hello [/INST]",
        "Be brief.\n### Instruction:\nHello\n### Response:\n",
    ],
    ids=["chatml", "llama3", "zephyr", "mistral", "alpaca"],
)
def test_templated_prompts_are_split(prompt: str) -> None:
    """Clients that apply the chat template themselves still tell who said what."""
    assert roles(completions(prompt=prompt)) == [("system", "Be brief."), ("user", "Hello")]


def responses(**body: Any) -> RequestFacts:
    return facts(Dialect.OPENAI_RESPONSES, **body)


def test_responses() -> None:
    """A string or items, instructions, a text format, and logprobs by `include`."""
    found = responses(
        instructions="be brief",
        input="hello",
        max_output_tokens=5,
        text={"format": {"type": "json_schema", "name": "n", "schema": {}}},
        include=["message.output_text.logprobs"],
        reasoning={"effort": "low"},
    )
    assert roles(found) == [("system", "be brief"), ("user", "hello")]
    assert found.max_tokens == 5
    assert found.output is OutputForm.JSON_SCHEMA
    assert found.logprobs
    assert found.thinking is True


def test_responses_items() -> None:
    """Messages, calls and their outputs are turns; images are counted."""
    found = responses(
        input=[
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "look"}, {"type": "input_image", "image_url": "x"}],
            },
            {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "1"},
            {"type": "function_call_output", "call_id": "1", "output": "a tree"},
            {"type": "reasoning", "summary": []},
        ],
        tools=[{"type": "function", "name": "look"}],
        tool_choice={"type": "function", "name": "look"},
    )
    assert roles(found) == [("user", "look"), ("assistant", "look {}"), ("tool", "a tree")]
    assert found.images == 1
    assert found.tool_choice == "named"


# --- Ollama --------------------------------------------------------------------------------------


def test_ollama_chat() -> None:
    """Streams unless told not to; sampling is in `options`; images are beside the text."""
    found = facts(
        Dialect.OLLAMA_CHAT,
        model="m",
        messages=[{"role": "user", "content": "hi", "images": ["AAAA", "BBBB"]}],
        options={"temperature": 0, "num_predict": 7, "seed": 1, "draft_num_predict": 3},
        think="high",
        format={"type": "object"},
        tools=[TOOL],
    )
    assert found.stream
    assert (found.temperature, found.max_tokens, found.seed) == (0.0, 7, 1)
    assert found.images == 2
    assert found.thinking is True
    assert found.output is OutputForm.JSON_SCHEMA
    assert found.steering == ("options.draft_num_predict",)
    assert (found.tools, found.tool_choice) == (1, "auto")


def test_ollama_generate() -> None:
    """System and prompt are turns; a suffix makes a gap; `format` "json" is an object."""
    found = facts(
        Dialect.OLLAMA_GENERATE,
        prompt="def f(",
        suffix="return",
        system="code",
        stream=False,
        format="json",
        think=False,
    )
    assert roles(found) == [("system", "code"), ("user", "def f("), ("user", "return")]
    assert not found.stream
    assert found.infill
    assert found.output is OutputForm.JSON_OBJECT
    assert found.thinking is False


def test_ollama_raw_prompts_are_split() -> None:
    """With `raw` the template is in the prompt."""
    prompt = "<start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\n"
    assert roles(facts(Dialect.OLLAMA_GENERATE, prompt=prompt, raw=True)) == [("user", "Hello")]
    assert roles(facts(Dialect.OLLAMA_GENERATE, prompt=prompt)) == [("user", prompt)]


# --- Anthropic -----------------------------------------------------------------------------------


def test_anthropic() -> None:
    """System text or blocks; tool results inside user messages become turns of the tool."""
    found = facts(
        Dialect.ANTHROPIC,
        system=[{"type": "text", "text": "be brief"}],
        messages=[
            {"role": "user", "content": "look"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {"at": 1}}],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "1",
                        "content": [{"type": "text", "text": "a tree"}],
                    },
                    {"type": "image", "source": {}},
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
        max_tokens=5,
        tools=[{"name": "look", "input_schema": {}}],
        tool_choice={"type": "any"},
        thinking={"type": "enabled", "budget_tokens": 100},
    )
    assert roles(found) == [
        ("system", "be brief"),
        ("user", "look"),
        ("assistant", 'look {"at":1}'),
        ("tool", "a tree"),
        ("user", "and?"),
    ]
    assert (found.max_tokens, found.images, found.tools, found.tool_choice) == (5, 1, 1, "required")
    assert (found.thinking, found.thought_limit) == (True, True)


@pytest.mark.parametrize(
    ("kind", "choice"), [("auto", "auto"), ("any", "required"), ("tool", "named"), ("none", "none")]
)
def test_anthropic_tool_choice(kind: str, choice: str) -> None:
    """The four kinds of choice."""
    found = facts(Dialect.ANTHROPIC, messages=[], tools=[{"name": "look"}], tool_choice={"type": kind})
    assert found.tool_choice == choice


# --- llama.cpp -----------------------------------------------------------------------------------


def test_llamacpp_completion() -> None:
    """Text, tokens or both; n_probs asks for logprobs; a schema or a grammar is a form."""
    found = facts(
        Dialect.LLAMACPP, prompt=[1, "then", 2, "now"], n_predict=4, n_probs=3, grammar='root ::= "x"'
    )
    assert roles(found) == [("user", "then"), ("user", "now")]
    assert (found.max_tokens, found.logprobs, found.output) == (4, True, OutputForm.GRAMMAR)


def test_llamacpp_media() -> None:
    """Media are counted in both forms that the server has had."""
    new = facts(Dialect.LLAMACPP, prompt={"prompt_string": "see <__media__>", "multimodal_data": ["AAAA"]})
    old = facts(Dialect.LLAMACPP, prompt="see [img-1]", image_data=[{"data": "AAAA", "id": 1}])
    assert (new.images, old.images) == (1, 1)
    assert roles(new) == [("user", "see <__media__>")]


def test_llamacpp_infill() -> None:
    """What stands around the gap are the last turns, other files come before."""
    found = facts(
        Dialect.LLAMACPP_INFILL,
        input_extra=[{"filename": "a.py", "text": "import os"}],
        input_prefix="def f(",
        input_suffix="return",
        prompt="",
    )
    assert found.infill
    assert roles(found) == [("system", "import os"), ("user", "def f("), ("user", "return")]


# --- anything ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"text"', b"1", b"\xff\xfe", b"{}x", b'{"a":NaN}']
)
@pytest.mark.parametrize("dialect", list(Dialect))
def test_no_facts_from_what_is_no_object(dialect: Dialect, body: bytes) -> None:
    """Such a body goes upstream untouched, whose error is the truth."""
    assert read_facts(dialect, body) is None


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4)
    ),
    max_leaves=12,
)
# fmt: off
NAMES = [
    "model", "stream", "messages", "prompt", "input", "instructions", "system", "options", "tools",
    "functions", "tool_choice", "response_format", "text", "format", "logprobs", "top_logprobs", "n",
    "n_probs", "max_tokens", "n_predict", "temperature", "seed", "suffix", "images", "think", "thinking",
    "raw", "include", "reasoning", "structured_outputs", "json_schema", "grammar", "input_prefix",
    "input_extra", "chat_template_kwargs", "output_config", "image_data", "best_of", "n_cmpl",
    "function_call",
]
INNER = [
    "role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "images", "input",
    "schema", "effort", "format", "mode",
]
# fmt: on
shaped = st.recursive(
    json_values,
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.sampled_from(INNER), children, max_size=5)
    ),
    max_leaves=10,
)


@given(st.sampled_from(list(Dialect)), st.dictionaries(st.sampled_from(NAMES), shaped, max_size=10))
def test_wrong_types_never_raise(dialect: Dialect, body: dict[str, Any]) -> None:
    """Whatever stands in known fields, there are facts, and they have their types."""
    found = read_facts(dialect, json.dumps(body).encode())
    if found is None:  # a lone surrogate is not UTF-8, so not JSON
        return
    assert all(
        isinstance(turn.text, str) and turn.role in {"system", "user", "assistant", "tool"}
        for turn in found.turns
    )
    assert found.n >= 1
    assert found.max_tokens is None or found.max_tokens >= 0
    assert found.tool_choice in {"none", "auto", "required", "named"}


@given(st.sampled_from(list(Dialect)), st.binary(max_size=200))
def test_any_bytes_never_raise(dialect: Dialect, body: bytes) -> None:
    """Bytes of any kind give facts or None."""
    read_facts(dialect, body)
