"""Chat templates as model files carry them, and the prompts that come of them."""

from __future__ import annotations

import pytest

from specproxy.adapters.embedded.chat import ChatFormat, Conversation, normal_message
from specproxy.adapters.embedded.forms import Form
from specproxy.adapters.embedded.templates import ChatTemplate
from specproxy.adapters.embedded.tools import Tool, Toolbox
from specproxy.errors import RequestError
from tests.support.fake_engine import BOS, FakeEngine

HI = [{"role": "user", "content": "Hi"}]
QWEN = """\
{%- if tools %}
<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call><|im_end|>
{% endif %}
{%- for m in messages %}
<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% else %}<think>
{% endif %}
{%- endif %}"""


def prepare(engine: FakeEngine, **conversation: object):
    return ChatFormat(engine.card, engine).prepare(Conversation(**{"messages": HI, **conversation}))  # type: ignore[arg-type]  # fields of the test's own choice


def test_chatml_stands_in_for_a_missing_template() -> None:
    template = ChatTemplate(None)
    assert template.fallback
    assert template.render(HI) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(HI, add_generation_prompt=False).endswith("<|im_end|>\n")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("  {% if true %}\n  y\n  {% endif %}\n", "  y\n"),
        ("{{ messages[0].content.split('i')[0] }}", "H"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ mood }}", "good"),
        ("{{ tools is none }}", "True"),
    ],
)
def test_templates_have_what_they_expect(source: str, expected: str) -> None:
    assert ChatTemplate(source, "<s>", "</s>").render(HI, extra={"mood": "good"}) == expected


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('roles must alternate') }}", "{{ 1 / 0 }}", "{{ messages[9].content }}", "{% if %}",
     "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ range(10**9) | list }}",
     "{{" * 1500, "{{ " + "(" * 1500 + "1" + ")" * 1500 + " }}"],
)  # fmt: skip
def test_what_a_template_cannot_do_is_a_refused_request(source: str) -> None:
    with pytest.raises(RequestError):
        ChatTemplate(source).render(HI)


def test_bos_is_never_doubled() -> None:
    assert prepare(FakeEngine(chat_template="{{ bos_token }}x")).prompt == (BOS, ord("x"))
    assert prepare(FakeEngine(chat_template="x")).prompt == (BOS, ord("x"))


def test_a_begun_answer_is_gone_on_with() -> None:
    messages = [*HI, {"role": "assistant", "content": "Well,"}]
    assert prepare(FakeEngine(), messages=messages).text.endswith("<|im_start|>assistant\nWell,")
    assert "Well,<|im_end|>" in prepare(FakeEngine(), messages=messages, prefill=False).text


def test_thinking_is_passed_on_and_an_open_tag_in_the_prompt_is_seen() -> None:
    engine = FakeEngine(chat_template=QWEN)
    on = prepare(engine).parser()
    assert [d.text for d in [*on.feed("hm</think>\n\nYes"), *on.finish()]] == ["hm", "Yes"]
    off = prepare(engine, thinking=False)
    assert off.text.endswith("</think>\n\n")
    assert [d.kind.value for d in off.parser().feed("Yes")] == ["content"]


def test_a_schema_lets_reasoning_stand_before_the_answer() -> None:
    from random import Random

    from tests.support.gbnf_sampler import Sampler

    form = Form(schema={"const": 7}, field="f")
    opened = prepare(FakeEngine(chat_template=QWEN), form=form).grammar
    free = prepare(FakeEngine(), form=form).grammar
    assert opened
    assert free
    assert Sampler(free).sample(Random(1)) == "7"
    text = Sampler(opened).sample(Random(1), depth=20)
    assert text.endswith("7")
    assert text.count("</think>") == 1


def test_tools_reach_the_template_or_are_described_to_it() -> None:
    tools = Toolbox((Tool("f", {"type": "object"}, "does f"),))
    assert '"name": "f"' in prepare(FakeEngine(chat_template=QWEN), tools=tools).text
    described = prepare(FakeEngine(), tools=tools).text
    assert described.startswith("<|im_start|>system\n")
    assert '"description": "does f"' in described
    history = [
        *HI,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "42"},
    ]
    text = prepare(FakeEngine(), messages=history, tools=tools).text
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in text
    assert "<tool_response>\n42\n</tool_response>" in text


def test_messages_are_brought_into_the_form_that_templates_expect() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": '{"a":[1]}'}}
    message = normal_message({"role": "assistant", "content": None, "tool_calls": [call]}, "m")
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": [1]}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert normal_message({"role": "developer", "content": parts}, "m") == {"role": "system", "content": "a\nb"}


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("x", "'m'"),
        ({"content": "x"}, "'m.role'"),
        ({"role": "user", "content": 3}, "'m.content'"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "'m.content[0]'"),
        ({"role": "assistant", "tool_calls": [{}]}, "'m.tool_calls[0].function'"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "arguments"),
    ],
)
def test_messages_that_are_none_are_refused_by_place(message: object, named: str) -> None:
    with pytest.raises(RequestError, match=named.replace("[", "\\[")):
        normal_message(message, "m")
