"""Labelled requests of every kind, made from our own texts: for the demo, the benchmarks and the classifier.

Every kind has several phrasings, in several languages where users write them, and several shapes (one message,
a system prompt, a conversation), so that no phrasing and no sampling parameter gives a kind away. Another seed
gives fresh prompts; within a mix no prompt is given twice, because a repeated prompt flatters n-gram drafting.
Functions for code edits are read from the standard library of the running Python.

    python -m benchmarks.workload --n 120 --seed 1 > mix.jsonl
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["Row", "build", "kinds"]

DATA = Path(__file__).parent / "data"
LONGEST_FILE = 40_000  # characters; enough functions remain, and the first mix is there within a second
TRIES = 200  # draws without a fresh prompt after which a kind counts as exhausted
TEMPERATURES = (0.0, 0.2, 0.4, 0.7, 0.8, 1.0, 1.2)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One labelled request: `kind` is its label, `request` an OpenAI chat request."""

    kind: str
    request: Json


# --- material ------------------------------------------------------------------------------------


@cache
def _data(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


@cache
def _passages() -> list[Json]:
    """Texts with a title and questions that they answer."""
    return [json.loads(line) for line in (DATA / "passages.jsonl").read_text(encoding="utf-8").splitlines()]


@cache
def _functions() -> list[str]:
    """Functions of 8 to 40 lines from the running Python's standard library, in the order of its files."""
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        if len(text) > LONGEST_FILE:
            continue
        lines = text.split("\n")
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef) or not node.args.args or not node.end_lineno:
                continue
            if 8 <= node.end_lineno - node.lineno <= 40:
                found.append(textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])))
    return found


def _slots(rng: random.Random) -> Json:
    """One random filling of every slot that the phrasings use."""
    words = _data("slots.json")
    schema, passage = rng.choice(_data("schemas.json")), rng.choice(_passages())
    person, other = rng.sample(words["people"], 2)
    one, two = rng.choice(words["pairs"])
    source = rng.choice(_functions())
    sentences = words["sentences"]
    return {
        "schema": schema,
        "record": schema["name"].replace("_", " "),
        "keys": ", ".join(list(schema["schema"]["properties"])[:4]),
        "number": rng.randint(10, 9999),
        "city": rng.choice(words["cities"]),
        "person": person,
        "other": other,
        "day": rng.choice(("today", "tomorrow", "on Friday", "this weekend")),
        "season": rng.choice(("spring", "summer", "autumn", "winter")),
        "language": rng.choice(words["code_languages"]),
        "task": rng.choice(words["code_tasks"]),
        "sql": rng.choice(words["sql_tasks"]),
        "shell": rng.choice(words["shell_tasks"]),
        "database": rng.choice(("PostgreSQL", "SQLite", "MySQL")),
        "edit": rng.choice(words["edits"]),
        "edit_de": rng.choice(words["edits_de"]),
        "edit_es": rng.choice(words["edits_es"]),
        "edit_fr": rng.choice(words["edits_fr"]),
        "source": source,
        "fenced": f"```python\n{source}\n```",
        "target": rng.choice(words["languages_en"]),
        "en": " ".join(rng.sample(sentences["en"], rng.randint(1, 3))),
        **{language: rng.choice(sentences[language]) for language in ("de", "fr", "es")},
        "thing": rng.choice(words["things"]),
        "topic": rng.choice(words["topics"]),
        "one": one,
        "two": two,
        "letter": rng.choice(words["letters"]),
        "words": rng.choice((100, 150, 200, 300)),
        "form": rng.choice(words["forms"]),
        "subject": rng.choice(words["subjects"]),
        **_numbers(rng),
        **_documents(rng, passage),
    }


def _numbers(rng: random.Random) -> dict[str, int]:
    a, b, c, d = rng.randint(3, 60), rng.randint(2, 19), rng.randint(20, 400), rng.randint(2, 9)
    return {"a": a, "b": b, "c": c, "d": d, "e": c * d, "f": b + d, "g": a + 2}


def _documents(rng: random.Random, passage: Json) -> dict[str, str]:
    """A passage, part of it, a question, and the passage among others as retrieval systems hand them over."""
    sentences = passage["text"].split(". ")
    start = rng.randrange(3)
    given = [passage, *rng.sample([p for p in _passages() if p is not passage], 2)]
    rng.shuffle(given)
    return {
        "title": passage["title"],
        "text": passage["text"],
        "part": ". ".join(sentences[start : start + rng.randint(5, 8)]).rstrip(".") + ".",
        "question": rng.choice(passage["questions"]),
        "documents": "\n\n".join(f"[{i}] {p['title']}\n{p['text']}" for i, p in enumerate(given, 1)),
        "length": rng.choice(("two sentences", "three bullet points", "fifty words", "one paragraph")),
    }


# --- one generator a kind ------------------------------------------------------------------------


def _said(text: str, *, system: str = "", before: Sequence[str] = (), **fields: Any) -> Json:
    """A chat request; `before` are earlier turns, user and assistant in turn."""
    messages = [{"role": "system", "content": system}] if system else []
    for index, turn in enumerate(before):
        messages.append({"role": "assistant" if index % 2 else "user", "content": turn})
    messages.append({"role": "user", "content": text})
    return {"messages": messages, **fields}


def _phrase(rng: random.Random, name: str, slots: Json) -> str:
    return str(rng.choice(_data("phrasings.json")[name]).format(**slots))


def _tool(name: str, description: str, parameters: Json) -> Json:
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def _strings(*names: str) -> Json:
    return {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names},
        "required": list(names),
    }


AGENT_TOOLS = [
    _tool("read_file", "Read a file of the workspace.", _strings("path")),
    _tool("edit_file", "Replace a piece of a file.", _strings("path", "old", "new")),
    _tool("run_command", "Run a shell command.", _strings("command")),
    _tool("search_files", "Search the workspace.", _strings("pattern")),
]
CHAT_TOOLS = [
    _tool("web_search", "Search the web.", _strings("query")),
    _tool("get_weather", "Weather of a place.", _strings("city")),
]
AGENT = "You are a coding agent working in the user's repository. Use the tools to do the work."
HELPFUL = ("", "", "You are a helpful assistant.")


def _json_schema(rng: random.Random) -> Json:
    slots = _slots(rng)
    form = {"name": slots["schema"]["name"], "schema": slots["schema"]["schema"]}
    text = _phrase(rng, "json_schema", slots)
    return _said(text, response_format={"type": "json_schema", "json_schema": form})


def _json(rng: random.Random) -> Json:
    text = _phrase(rng, "json", _slots(rng))
    return _said(text, response_format={"type": "json_object"}) if rng.random() < 0.5 else _said(text)


def _tool_call(rng: random.Random) -> Json:
    """Demanded calls, an agent's first step, its next step after a tool's result, and questions for a tool."""
    slots = _slots(rng)
    shape = rng.choice(("required", "named", "start", "step", "lookup"))
    if shape == "start":
        return _said(_phrase(rng, "agent_start", slots), system=AGENT, tools=AGENT_TOOLS)
    if shape == "step":
        return _agent_step(slots)
    if shape == "lookup":
        return _said(_phrase(rng, "lookup", slots), tools=CHAT_TOOLS, tool_choice="auto")
    name = f"create_{slots['schema']['name']}"
    choice = "required" if shape == "required" else {"type": "function", "function": {"name": name}}
    tools = [_tool(name, "Create one record.", slots["schema"]["schema"])]
    return _said(_phrase(rng, "tool_required", slots), tools=tools, tool_choice=choice)


def _agent_step(slots: Json) -> Json:
    path = f"src/module_{slots['number']}.py"
    call = {"name": "read_file", "arguments": json.dumps({"path": path})}
    request = _said(f"In {path}, {slots['edit']}.", system=AGENT, tools=AGENT_TOOLS)
    request["messages"] += [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": slots["source"]},
    ]
    return request


def _code(rng: random.Random) -> Json:
    system = rng.choice((*HELPFUL, "You are an expert programmer."))
    return _said(_phrase(rng, "code", _slots(rng)), system=system)


def _code_edit(rng: random.Random) -> Json:
    slots = _slots(rng)
    if rng.random() < 0.15:
        before = ["Show me the function that we talked about.", f"Here it is:\n\n{slots['fenced']}"]
        return _said(_phrase(rng, "code_edit_follow_up", slots), before=before)
    return _said(_phrase(rng, "code_edit", slots))


def _infill(rng: random.Random) -> Json:
    """A gap in code, in the marks of several models: the chat shape has no field for it."""
    words = _data("slots.json")
    before, after = rng.choice(list(zip(words["functions_fim"], words["tails_fim"], strict=True)))
    before = f"# file {rng.randint(1, 9999)}\n{before}"
    choices = (
        f"<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>",
        f"<PRE> {before} <SUF>{after} <MID>",
        f"<fim_prefix>{before}<fim_suffix>{after}<fim_middle>",
        f"[SUFFIX]{after}[PREFIX]{before}",
    )
    return _said(rng.choice(choices))


def _grounded(rng: random.Random) -> Json:
    slots = _slots(rng)
    shape = rng.random()
    if shape < 0.1:
        system = f"Answer from this document only.\n\n{slots['title']}\n\n{slots['text']}"
        return _said(slots["question"], system=system)
    if shape < 0.2:
        before = [
            f"Here is a text.\n\n{slots['text']}",
            "Thank you, I have read it. What would you like to know?",
        ]
        return _said(slots["question"], before=before)
    return _said(_phrase(rng, "grounded", slots))


def _translation(rng: random.Random) -> Json:
    slots = _slots(rng)
    if rng.random() < 0.15:
        system = f"You are a translator. Translate everything the user writes into {slots['target']}."
        return _said(slots["en"], system=system)
    return _said(_phrase(rng, "translation", slots))


def _math(rng: random.Random) -> Json:
    return _said(_phrase(rng, "math", _slots(rng)))


def _prose(rng: random.Random) -> Json:
    extra: Json = {"tools": CHAT_TOOLS} if rng.random() < 0.1 else {}
    return _said(_phrase(rng, "prose", _slots(rng)), system=rng.choice(HELPFUL), **extra)


def _creative(rng: random.Random) -> Json:
    slots = _slots(rng)
    if rng.random() < 0.1:
        before = [_phrase(rng, "creative", slots), f"Nobody in {slots['city']} remembered {slots['subject']}."]
        return _said(_phrase(rng, "creative_follow_up", slots), before=before)
    extra: Json = {"tools": CHAT_TOOLS} if rng.random() < 0.1 else {}
    return _said(_phrase(rng, "creative", slots), **extra)


def _chat(rng: random.Random) -> Json:
    talk, replies = _data("slots.json")["small_talk"], _data("slots.json")["small_replies"]
    if rng.random() < 0.5:
        return _said(rng.choice(talk), system=rng.choice((*HELPFUL, "You are a friendly companion.")))
    before: list[str] = []
    for _ in range(rng.randint(1, 3)):
        before += [rng.choice(talk), rng.choice(replies)]
    return _said(rng.choice(talk), before=before)


GENERATORS: dict[str, Callable[[random.Random], Json]] = {
    "json_schema": _json_schema,
    "json": _json,
    "tool_call": _tool_call,
    "code": _code,
    "code_edit": _code_edit,
    "infill": _infill,
    "grounded": _grounded,
    "translation": _translation,
    "math": _math,
    "prose": _prose,
    "creative": _creative,
    "chat": _chat,
}


# --- the mix -------------------------------------------------------------------------------------


def kinds() -> tuple[str, ...]:
    """Every kind that can be built."""
    return tuple(GENERATORS)


def build(
    n: int,
    seed: int,
    *,
    max_tokens: int,
    kinds: Sequence[str] | None = None,
    randomise_temperature: bool = False,
) -> list[Row]:
    """`n` labelled requests in equal shares of `kinds` (all by default), shuffled; no prompt comes twice.

    The temperature is 0, or random and independent of the kind. Fewer rows come back only if the kinds have no
    fresh prompts left.

    Raises:
        KeyError: an unknown kind.
    """
    rng = random.Random(seed)
    left = {name: GENERATORS[name] for name in kinds or GENERATORS}
    rows: list[Row] = []
    seen: set[str] = set()
    while len(rows) < n and left:
        for name, generate in list(left.items())[: n - len(rows)]:
            request = _fresh(generate, rng, seen)
            if request is None:
                del left[name]
                continue
            temperature = rng.choice(TEMPERATURES) if randomise_temperature else 0.0
            rows.append(Row(name, {**request, "temperature": temperature, "max_tokens": max_tokens}))
    rng.shuffle(rows)
    return rows


def _fresh(generate: Callable[[random.Random], Json], rng: random.Random, seen: set[str]) -> Json | None:
    for _ in range(TRIES):
        request = generate(rng)
        key = json.dumps(request["messages"])
        if key not in seen:
            seen.add(key)
            return request
    return None


def main() -> None:
    """Print a mix as JSON lines."""
    parser = argparse.ArgumentParser(description="Print labelled requests as JSON lines.")
    parser.add_argument("--n", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--kinds", nargs="*", choices=kinds(), default=None)
    parser.add_argument("--randomise-temperature", action="store_true")
    args = parser.parse_args()
    mix = build(
        args.n,
        args.seed,
        max_tokens=args.max_tokens,
        kinds=args.kinds,
        randomise_temperature=args.randomise_temperature,
    )
    for row in mix:
        print(json.dumps({"class": row.kind, "request": row.request}, ensure_ascii=False))


if __name__ == "__main__":
    main()
