"""Classification by fields and by words, in every shape that a conversation has."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

import benchmarks.workload as workload
from specproxy.proxy.dialects import read_facts
from specproxy.records import Dialect, OutputForm, RequestFacts, TempBucket, Turn
from specproxy.strategies.classify import KINDS, classify, temp_bucket

CODE = """```python
def mean(values):
    total = 0
    for value in values:
        total += value
    return total
```"""
ARTICLE = (
    "The council met on Tuesday to discuss the new pool. Costs have risen from four to six million since "
    "the spring, mainly because the ground turned out to be wetter than the survey suggested. Two members "
    "asked for a cheaper plan without the tower. The mayor said that the tower was what children wanted "
    "most. A vote was put off until October, when a second survey will be ready. Until then the old pool "
    "stays open, although its roof leaks. Several swimmers brought buckets to the meeting as a protest, "
    "which everybody took with good humour. The committee will publish the figures next week, together "
    "with the minutes of its last meetings."
)


def asked(*texts: str, system: str = "", **fields: object) -> RequestFacts:
    """A chat; the last text is the user's, those before alternate."""
    turns = [Turn("system", system)] if system else []
    for index, text in enumerate(texts):
        turns.append(Turn("assistant" if (len(texts) - 1 - index) % 2 else "user", text))
    facts = RequestFacts(Dialect.OPENAI_CHAT, turns=tuple(turns))
    return dataclasses.replace(facts, **fields)  # type: ignore[arg-type]  # fields of RequestFacts


def kind(*texts: str, system: str = "", **fields: object) -> str:
    return classify(asked(*texts, system=system, **fields)).kind


# --- fields --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"output": OutputForm.JSON_SCHEMA}, "json_schema"),
        ({"output": OutputForm.GRAMMAR}, "json_schema"),
        ({"output": OutputForm.JSON_OBJECT}, "json"),
        ({"tools": 1, "tool_choice": "required"}, "tool_call"),
        ({"tools": 1, "tool_choice": "named"}, "tool_call"),
        ({"infill": True}, "infill"),
    ],
)
def test_fields_decide_before_words(fields: dict[str, object], expected: str) -> None:
    """A demanded form beats whatever the words say."""
    workload = classify(asked("Write a poem about the sea.", **fields))
    assert workload.kind == expected
    assert workload.signals[0].startswith("field:")


# --- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Write a Python function that merges intervals.", "code"),
        ("How do I sort a list in Go?", "code"),
        ("Write an SQL query that finds duplicate e-mail addresses.", "code"),
        ("Schreibe eine Funktion, die Primzahlen findet.", "code"),
        ("Escribe un programa que ordene nombres.", "code"),
        ("用Python写一个函数", "code"),
        ("Write a letter to the team about our Python code.", "prose"),
        ("Should I learn Rust or Haskell?", "prose"),
        ("Explain how garbage collection works in Java.", "prose"),
        (f"Rename total to result.\n{CODE}", "code_edit"),
        (f"{CODE}\n\nIt fails on an empty list.", "code_edit"),
        (f"Füge Typannotationen hinzu:\n{CODE}", "code_edit"),
        (f"Explain what this does.\n{CODE}", "prose"),
        (f"Write unit tests for this function.\n{CODE}", "code"),
        ("Translate into French: the shop is closed.", "translation"),
        ("Übersetze ins Englische: Der Zug fällt aus.", "translation"),
        ("Traduce al alemán: buenos días", "translation"),
        ("翻译成英文：今天天气很好。", "translation"),
        ("How do you say 'good luck' in Turkish?", "translation"),
        ("EN->DE: The parcel is late.", "translation"),
        ("Write a poem in German.", "creative"),
        (f"Summarise this:\n\n{ARTICLE}", "grounded"),
        (f"{ARTICLE}\n\nWhy was the vote put off?", "grounded"),
        (f"Fasse den Text zusammen.\n\n{ARTICLE}", "grounded"),
        (f"how much will it cost, in 2 lines of 5 words\n\n{ARTICLE}", "grounded"),
        ("A train covers 210 km in 3 hours. How fast is it?", "math"),
        ("Solve for x: 3x - 4 = 11", "math"),
        ("what's 15% of 240", "math"),
        ("Prove that the square root of 2 is irrational.", "math"),
        ("Return a JSON object with name and age of a baker.", "json"),
        ("Write a Python function that parses JSON.", "code"),
        ("Tell me a bedtime story about a hedgehog.", "creative"),
        ("Schreib ein Gedicht über den Herbst.", "creative"),
        ("写一首关于月亮的诗。", "creative"),
        ("Who wrote that song?", "prose"),
        ("Explain the water cycle.", "prose"),
        ("Write a formal letter to my landlord.", "prose"),
        ("Pourquoi le ciel est-il bleu ?", "prose"),
        ("hi there", "chat"),
        ("haha, thanks!", "chat"),
        ("do you like rain?", "chat"),
        ("<|fim_prefix|>def f(<|fim_suffix|>return x<|fim_middle|>", "infill"),
    ],
)
def test_words_of_one_turn(text: str, expected: str) -> None:
    """The plain cases, in several languages, and the near misses between kinds."""
    assert kind(text) == expected


def test_words_of_the_material_do_not_decide() -> None:
    """In a long text only its edges instruct: an article may be full of other kinds' words."""
    noise = " A function in Python, a poem, 12 equations: translate, solve, write code and JSON."
    assert kind(f"Summarise the following article.\n\n{ARTICLE}{noise * 20} {ARTICLE}") == "grounded"


# --- conversations -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("Write a mean function.", f"Here:\n{CODE}", "Now handle empty lists."), "code_edit"),
        (("Write a mean function.", f"Here:\n{CODE}", "that's still wrong"), "code_edit"),
        (("Write a mean function.", f"Here:\n{CODE}", "with numpy, please"), "code_edit"),
        (("Write a mean function.", f"Here:\n{CODE}", "even shorter"), "code_edit"),
        ((f"Read this.\n\n{ARTICLE}", "Done.", "What did the mayor say?"), "grounded"),
        (("Write a poem about the sea.", "Waves…", "Go on, and make it stranger."), "creative"),
        (("Translate 'good luck' into Polish.", "Powodzenia.", "and into Czech?"), "translation"),
        (("hello", "Hello! How can I help?", "just bored"), "chat"),
        (("Write a poem about the sea.", "Waves…", "Explain the tides to me."), "prose"),
    ],
)
def test_follow_ups(texts: tuple[str, ...], expected: str) -> None:
    """A short turn goes on with what was asked before; a turn with a cue of its own does not."""
    assert kind(*texts) == expected


@pytest.mark.parametrize(
    ("system", "text", "expected"),
    [
        ("You are a translator. Translate everything into Dutch.", "Put your name on the list.", "translation"),
        ("Answer with a JSON object.", "The capital of Peru", "json"),
        (f"Answer from this document only.\n\n{ARTICLE}", "How much does it cost?", "grounded"),
        ("You are a helpful assistant.", "Explain the tides.", "prose"),
    ],
)
def test_system_prompts(system: str, text: str, expected: str) -> None:
    """A short system prompt says what every turn is for; a document in it is what questions are about."""
    assert kind(text, system=system) == expected


def test_a_long_system_prompt_is_no_cue() -> None:
    """It names every kind of task."""
    system = "You are a chat program. " + "You may translate, write code, or answer in JSON. " * 40
    assert kind("What do bees do in winter?", system=system) == "prose"


# --- offered tools -------------------------------------------------------------------------------

AGENT = "You are a coding agent. Use your tools to work in the repository."
OFFERED = {"tools": 4, "tool_choice": "auto"}


@pytest.mark.parametrize(
    ("text", "system", "expected"),
    [
        ("Fix the failing test.", AGENT, "tool_call"),
        ("Why is the build so slow?", AGENT, "tool_call"),
        ("thanks!", AGENT, "chat"),
        ("What's the weather in Oslo tomorrow?", "", "tool_call"),
        ("Search the web for concerts.", "", "tool_call"),
        ("Rename the class Handler everywhere.", "", "tool_call"),
        (f"Rename total to result.\n{CODE}", "", "code_edit"),
        ("Write a poem about the sea.", AGENT, "creative"),
        ("Explain how rainbows form.", "", "prose"),
        ("Translate into French: good luck", "", "translation"),
        ("Write a Python function that merges intervals.", "", "code"),
    ],
)
def test_tools_that_are_merely_offered(text: str, system: str, expected: str) -> None:
    """They are called where words alone cannot do what is asked."""
    assert kind(text, system=system, **OFFERED) == expected


def test_an_agent_is_known_by_the_beginning_of_a_long_system_prompt() -> None:
    """Coding agents send thousands of characters of rules; few tools make no agent."""
    system = "You help with software engineering tasks.\n" + "Follow the style of the code.\n" * 500
    assert kind("Why is the build so slow?", system=system, **OFFERED) == "tool_call"
    assert kind("Why is the build so slow?", system=system, tools=1, tool_choice="auto") == "prose"


@pytest.mark.parametrize(
    ("dialect", "turns", "expected"),
    [
        (Dialect.OPENAI_COMPLETIONS, (Turn("user", CODE),), "code"),
        (Dialect.LLAMACPP, (Turn("user", CODE),), "code"),
        (Dialect.LLAMACPP, (Turn("system", "Be brief."), Turn("user", CODE)), "code_edit"),
        (Dialect.OPENAI_CHAT, (Turn("user", CODE),), "code_edit"),
    ],
)
def test_raw_prompts_are_gone_on_with(dialect: Dialect, turns: tuple[Turn, ...], expected: str) -> None:
    """Code without a word is continued where no chat template stands around it, and revised in a chat."""
    assert classify(RequestFacts(dialect, turns=turns)).kind == expected


def test_the_middle_of_a_tool_loop() -> None:
    """After a tool's result the next call is likely, and without tools it is an answer."""
    turns = (Turn("user", "What is in a.py?"), Turn("assistant", "read a.py"), Turn("tool", "import os"))
    facts = RequestFacts(Dialect.OPENAI_CHAT, turns=turns, **OFFERED)  # type: ignore[arg-type]  # two of its fields
    assert classify(facts).kind == "tool_call"
    assert classify(dataclasses.replace(facts, tools=0, tool_choice="none")).kind != "tool_call"


# --- temperature and flags -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "bucket"),
    [
        (None, TempBucket.WARM),
        (-1.0, TempBucket.GREEDY),
        (0.0, TempBucket.GREEDY),
        (0.01, TempBucket.COOL),
        (0.5, TempBucket.COOL),
        (0.8, TempBucket.WARM),
        (1.0, TempBucket.HOT),
        (2.0, TempBucket.HOT),
    ],
)
def test_temperature_buckets(temperature: float | None, bucket: TempBucket) -> None:
    """The edges of the buckets."""
    assert temp_bucket(temperature) is bucket
    assert classify(asked("hi", temperature=temperature)).temperature is bucket


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"images": 1}, "images"),
        ({"audio": 2}, "audio"),
        ({"n": 2}, "many"),
        ({"steering": ("draft_model",)}, "steering"),
        ({"thinking": True}, "thinking"),
    ],
)
def test_flags(fields: dict[str, object], flag: str) -> None:
    """Each hazard has its flag, and an ordinary request has none."""
    assert classify(asked("hi", **fields)).flags == {flag}
    assert classify(asked("hi", thinking=False)).flags == frozenset()


texts = st.one_of(
    st.text(max_size=120),
    st.lists(
        st.sampled_from(
            [*"```", "```", "\n", "json ", "write ", "def f():\n", "?", " 12 ", "翻译", "<PRE>", ARTICLE, CODE]
        )
    ).map("".join),
)
some_facts = st.builds(
    RequestFacts,
    dialect=st.sampled_from(list(Dialect)),
    turns=st.lists(
        st.builds(Turn, st.sampled_from(["system", "user", "assistant", "tool", "narrator"]), texts), max_size=5
    ).map(tuple),
    output=st.sampled_from(list(OutputForm)),
    tools=st.integers(0, 3),
    tool_choice=st.sampled_from(["none", "auto", "required", "named"]),
    infill=st.booleans(),
)


@given(some_facts, st.none() | st.floats(0, 2), st.integers(1, 9))
def test_the_kind_does_not_depend_on_sampling(
    facts: RequestFacts, temperature: float | None, seed: int
) -> None:
    """Any request has one of the kinds, says why, and sampling parameters change only the bucket."""
    found = classify(facts)
    assert found.kind in KINDS
    assert len(found.signals) == 1
    sampled = dataclasses.replace(facts, temperature=temperature, seed=seed, max_tokens=seed)
    assert classify(sampled).kind == found.kind
    assert classify(sampled).temperature is temp_bucket(temperature)


# --- as a whole ----------------------------------------------------------------------------------


def label_and_kind(label: str, request: dict[str, object]) -> tuple[str, str]:
    facts = read_facts(Dialect.OPENAI_CHAT, orjson.dumps(request))
    assert facts is not None
    return label, classify(facts).kind


@pytest.mark.parametrize("seed", [11, 12])
def test_generated_prompts(seed: int) -> None:
    """At least nine of ten are right in every kind, whatever the temperature."""
    rows = workload.build(600, seed, max_tokens=1, randomise_temperature=True)
    pairs = [label_and_kind(row.kind, row.request) for row in rows]
    for label in KINDS:
        of_kind = [predicted for true, predicted in pairs if true == label]
        assert len(of_kind) == 50
        assert sum(predicted == label for predicted in of_kind) >= 45, label


@pytest.mark.parametrize(("name", "share"), [("everyday", 0.95), ("heldout", 0.88)])
def test_hand_written_prompts(name: str, share: float) -> None:
    """The rules hold for prompts as people write them, those that no rule was taken from among them."""
    path = Path(workload.DATA) / f"{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    pairs = [label_and_kind(row["class"], row["request"]) for row in rows]
    assert sum(true == predicted for true, predicted in pairs) >= share * len(pairs)
