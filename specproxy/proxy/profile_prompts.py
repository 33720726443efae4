"""Prompts of our own to measure lanes with: short, of every kind of text, and drawn anew each time.

A lane must not get a prompt twice: drafters that copy would copy the answer before. So names, numbers, topics
and identifiers are drawn, some thousand ways a kind at least.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["DRAWN", "draw"]

Json = dict[str, Any]

_NAMES = (
    "Adaeze", "Bertil", "Chiara", "Dmitri", "Eunice", "Farid", "Greta", "Hiro", "Ines", "Jonas", "Katya",
    "Liam", "Mirela", "Nuno", "Oksana", "Pavel", "Rosa", "Sunniva", "Tariq", "Ursula", "Vikram", "Zofia",
)  # fmt: skip
_TOWNS = (
    "Aalborg", "Bergamo", "Cadiz", "Dundee", "Esbjerg", "Fribourg", "Galway", "Heraklion", "Innsbruck", "Jaca",
    "Kotka", "Leiria", "Maribor", "Nancy", "Olomouc", "Pula", "Riga", "Salerno", "Tromso", "Uppsala", "Varna",
)  # fmt: skip
_THINGS = (
    "bicycles", "lanterns", "tiles", "violins", "kayaks", "clocks", "carpets", "telescopes", "boots", "kettles",
    "ladders", "maps", "anchors", "looms", "barrels", "mirrors", "sledges", "bells", "candles", "saddles",
)  # fmt: skip
_TOPICS = (
    "how tides come about", "why bread rises", "how a sundial works", "what a glacier leaves behind",
    "how bees find their way home", "why some metals rust", "how a lock on a canal works", "what soil is",
    "how paper is recycled", "why leaves change colour", "how a violin makes its sound", "what hay fever is",
    "how maps show height", "why the sea is salty", "how a thermostat works", "what makes a good compost",
)  # fmt: skip
_VERBS = ("count", "collect", "merge", "sort", "group", "filter", "scale", "shift", "pack", "split")
_NOUNS = ("rows", "prices", "samples", "events", "orders", "lengths", "weights", "scores", "readings", "marks")
_MOODS = ("a storm", "an old letter", "a missing key", "the last train", "a borrowed coat", "a silent bell")
_LANGUAGES = ("French", "Spanish", "German", "Italian", "Portuguese", "Dutch")
_FEELINGS = ("tired", "cheerful", "nervous", "bored", "proud", "a bit lost")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")


def _said(text: str, **fields: Any) -> Json:
    return {"messages": [{"role": "user", "content": text}], **fields}


def _record(rng: random.Random) -> tuple[str, Json]:
    """What a record is about, and its schema."""
    fields: Mapping[str, Json] = {
        "name": {"type": "string"},
        "town": {"type": "string"},
        "price": {"type": "number"},
        "quantity": {"type": "integer"},
        "in_stock": {"type": "boolean"},
        "weekday": {"type": "string", "enum": list(_DAYS)},
    }
    chosen = rng.sample(sorted(fields), 4)
    schema = {"type": "object", "properties": {key: fields[key] for key in chosen}, "required": chosen}
    about = (
        f"{rng.choice(_NAMES)} from {rng.choice(_TOWNS)} orders {rng.randint(2, 90)} {rng.choice(_THINGS)} "
        f"at {rng.randint(3, 400)}.{rng.randint(10, 99)} each, to be there on {rng.choice(_DAYS)}"
    )
    return about, schema


def _json_schema(rng: random.Random) -> Json:
    about, schema = _record(rng)
    form = {"type": "json_schema", "json_schema": {"name": "order", "schema": schema}}
    return _said(f"Write this down as JSON: {about}.", response_format=form)


def _json(rng: random.Random) -> Json:
    one, two = rng.sample(_THINGS, 2)
    ask = f"Give me a JSON array of {rng.randint(3, 6)} objects about {one} and {two} in {rng.choice(_TOWNS)}"
    return _said(f"{ask}, with the keys id, name, price and {rng.choice(_NOUNS)}. Only JSON, no other text.")


def _tool_call(rng: random.Random) -> Json:
    about, schema = _record(rng)
    tool = {"name": "add_order", "description": "Add one order.", "parameters": schema}
    tools = [{"type": "function", "function": tool}]
    return _said(f"Please enter it: {about}.", tools=tools, tool_choice="required")


def _code(rng: random.Random) -> Json:
    verb, noun, other = rng.choice(_VERBS), rng.choice(_NOUNS), rng.choice(_NOUNS)
    task = f"{verb}s a list of {noun} by their {other}, leaves out those below {rng.randint(2, 99)}"
    return _said(f"Write a Python function {verb}_{noun}_{rng.randint(2, 99)} that {task}, and returns a dict.")


def _code_edit(rng: random.Random) -> Json:
    verb, noun = rng.choice(_VERBS), rng.choice(_NOUNS)
    a, b, limit = rng.choice(_NOUNS), rng.randint(2, 9), rng.randint(10, 999)
    code = (
        f"def {verb}_{noun}(values, limit={limit}):\n"
        f"    result = []\n"
        f"    skipped = 0\n"
        f"    for index, value in enumerate(values):\n"
        f"        if value is None or value > limit:\n"
        f"            skipped += 1\n"
        f"            continue\n"
        f"        result.append((index, value * {b}))\n"
        f'    print("{noun}:", len(result), "skipped:", skipped)\n'
        f"    return result"
    )
    ask = f"Rename the parameter values to {a}_given, change nothing else, and give me the whole function."
    return _said(f"{ask}\n\n```python\n{code}\n```")


def _passage(rng: random.Random) -> str:
    """Some sentences with facts in them."""
    town, person, other = rng.choice(_TOWNS), *rng.sample(_NAMES, 2)
    year, thing = rng.randint(1840, 1990), rng.choice(_THINGS)
    return (
        f"The workshop for {thing} in {town} was founded in {year} by {person}, who had learned the trade "
        f"abroad. In its first year it had {rng.randint(3, 40)} workers and sold {rng.randint(200, 9000)} "
        f"pieces, mostly to merchants from {rng.choice(_TOWNS)}. After a fire in {year + rng.randint(3, 30)} "
        f"it was built again beside the river, where {other} added a school with {rng.randint(10, 90)} places. "
        f"Today it is a museum, which is open from {rng.choice(_DAYS)} to Sunday, and costs "
        f"{rng.randint(4, 19)} euros."
    )


def _grounded(rng: random.Random) -> Json:
    asks = (
        "Who founded the workshop, and when?",
        "What happened after the fire?",
        "Summarise the text in two sentences.",
        "When is it open, and what does it cost?",
    )
    return _said(f"Answer from this text only.\n\n{_passage(rng)}\n\n{rng.choice(asks)}")


def _translation(rng: random.Random) -> Json:
    one, two = rng.sample(_NAMES, 2)
    text = (
        f"On {rng.choice(_DAYS)} {one} took the early train to {rng.choice(_TOWNS)} with {rng.randint(2, 12)} "
        f"{rng.choice(_THINGS)}. {two} had promised to wait at the station, but there was nobody, so it was "
        f"{rng.randint(2, 11)} o'clock before they met."
    )
    return _said(f"Translate into {rng.choice(_LANGUAGES)}: {text}")


def _math(rng: random.Random) -> Json:
    name, thing, price = rng.choice(_NAMES), rng.choice(_THINGS), rng.randint(3, 80)
    text = (
        f"{name} buys {rng.randint(4, 60)} {thing} at {price} euros each, sells a third of them for "
        f"{price + rng.randint(2, 30)} euros each and the rest for {price + 1} euros each. How much is earned?"
    )
    return _said(f"{text} Show each step.")


def _prose(rng: random.Random) -> Json:
    ask = f"Explain {rng.choice(_TOPICS)} to {rng.choice(_NAMES)}, who is {rng.randint(9, 80)}"
    return _said(f"{ask} and lives in {rng.choice(_TOWNS)}. One paragraph.")


def _creative(rng: random.Random) -> Json:
    start = f"Begin a story in which {rng.choice(_NAMES)} finds {rng.choice(_THINGS)} in {rng.choice(_TOWNS)}"
    return _said(f"{start}, with {rng.choice(_MOODS)} in it, in the year {rng.randint(1700, 2090)}.")


def _chat(rng: random.Random) -> Json:
    """Short, as talk is."""
    talk = (
        f"Hi, I'm {rng.choice(_NAMES)} from {rng.choice(_TOWNS)}, {rng.randint(20, 90)}. How are you?",
        f"I'm {rng.choice(_FEELINGS)}, {rng.choice(_NAMES)}. I have {rng.randint(2, 90)} cats.",
        f"Do you like {rng.choice(_THINGS)}, {rng.choice(_NAMES)}? I have {rng.randint(2, 90)}.",
    )
    return _said(rng.choice(talk))


_GENERATORS: Mapping[str, Callable[[random.Random], Json]] = {
    "json_schema": _json_schema,
    "json": _json,
    "tool_call": _tool_call,
    "code": _code,
    "code_edit": _code_edit,
    "grounded": _grounded,
    "translation": _translation,
    "math": _math,
    "prose": _prose,
    "creative": _creative,
    "chat": _chat,
}
DRAWN = frozenset(_GENERATORS)
"""Kinds that prompts are drawn for. A gap in code has no shape that all servers know."""


def draw(kind: str, rng: random.Random) -> Json:
    """A chat request of a kind, as fields of OpenAI's API without a model."""
    return _GENERATORS[kind](rng)
