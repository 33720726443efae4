"""What can be read off a text in one cheap pass: instruction and material, code, numbers, cue words.

However long a text is, only windows of it are looked at closely: instructions stand at the beginning or at the
end, and a sample of lines tells code from prose. So the time depends on the windows, not on the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from specproxy.strategies.cues import PHRASES, PHRASES_CJK, WORDS

__all__ = ["Reading", "read"]

SHORT = 700  # characters that are taken as instruction as a whole, long paragraphs aside
PARAGRAPH = 300  # characters of a paragraph that is material rather than instruction
EDGE = 260  # characters of the first and of the last line of a longer text
END = 8_000  # characters at each end in which fences and gap marks are looked for
LINES = 25  # lines at each end that are judged to be code or not
LINE = 160  # characters of a line that are looked at
OPENING = 80  # characters of a first line that runs on: more of it is material
LEAD = 5  # words at the beginning that may hold the imperative

CODE = 0.4  # share of lines that look like code from which on a text is code
INDENTED = 0.7  # what an indented line counts beside lines that are surely code
YEARS = range(1000, 2101)  # numbers of four digits that are years rather than quantities

# marks around a gap that is to be filled, as code models were trained on them
_GAP_MARKS = (
    "<|fim_prefix|>",
    "<fim_prefix>",
    "<PRE>",
    "[SUFFIX]",
    "<|fim_begin|>",
    "<|fim_hole|>",
    "<｜fim▁begin｜>",
)

# Latin, Greek and Cyrillic letters: other scripts write without spaces and are searched for phrases instead
_WORD = re.compile(r"[a-zà-ɏͰ-ӿ][a-zà-ɏͰ-ӿ0-9_+#'-]*")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_FORMULA_OF_DIGITS = re.compile(
    r"\d(?:\s*[*/^×÷=]\s*\d|[xyzn]\b|\s?% (?:of|von|de|di) \d| (?:times|plus|minus|mal|durch|por|fois|per) \d)"
)
_FORMULA_OF_NAMES = re.compile(r"\b[xyz]\s*[=+^]|\bf\(x\)|\|\s?[xyz]\s?[+-]")
_DIGIT_MATRIX = re.compile(r"\[\[\d")
_FORMULA_MARKS = ("\\frac", "\\int", "∫", "√")
_MEASURE = re.compile(r"\d\s?(?:m|cm|mm|km|kg|g|l|s|h|ft|mph|km/h|m/s|%|€|°)(?![\w])")
_MONEY = re.compile(r"[$€£]\d")
# shapes of identifiers, each behind a cheaper test without which it cannot match
_CAPITAL_INSIDE = re.compile(r"[a-z][A-Z]")
_IDENTIFIERS: tuple[tuple[Callable[[str], object], re.Pattern[str]], ...] = (
    (lambda text: "_" in text, re.compile(r"\b[a-z]+_[a-z_]+\b")),
    (_CAPITAL_INSIDE.search, re.compile(r"\b[a-z]+[A-Z]\w+\b")),
    (lambda text: "(" in text, re.compile(r"\b\w+\([\w, ]*\)")),
    (lambda text: "." in text, re.compile(r"\.(?:py|js|ts|c|h|cpp|java|go|rs|rb|sh)\b")),
)
_QUOTED = re.compile(r"[\"'“”„«‘][^\"'“”„«»‘’]{3,}[\"'”“»’]")
_CAPITALS = re.compile(r"[A-Z][A-Z]")
_LANGUAGE_CODES = re.compile(r"\b[A-Z]{2}\s?(?:->|→|>|to)\s?[A-Z]{2}\b")
# languages whose names are everyday words or letters
_SHORT_NAME = re.compile(r"(?:Go|C|R)\b")
_SHORT_LANGUAGE = re.compile(r"(?:\b(?:in|using|some|a|to|en|with)|用) ?(?:Go|C|R)\b(?!['’])|^(?:Go|C|R):")
_FIRST_PERSON = re.compile(r"(?:i|i'm|i've|my|we|that's|that|you|you're|no|ich|yo|je|j'ai)\b", re.IGNORECASE)
_SECOND_PERSON = re.compile(
    r"(?:(?:what|who|how|where|why)(?: are|'re)|do|are|have|did|were) you\b|can we talk\b", re.IGNORECASE
)

_CODE_STARTS = tuple(
    """
def |class |async def |func |fn |function |public |private |protected |static |import |#include|package |
return |return;|elif |try:|try {|except |finally|raise |throw |const |let |var |int |void |SELECT |INSERT |
UPDATE |CREATE |self.|this.|print(|console.|//|/*|#!|@|} |) |<?php|<!DOCTYPE|<html|<div
""".replace("\n", "").split("|")
)
_CODE_ENDS = (";", "{", "}", "):", "({", "});", "],", "),", "else:", "/>")
_CODE_SHAPES = re.compile(
    r"from [\w.]+ import |[\w.\[\]'\"]+ ?[-+*/|:]?= ?\S|[\w.]+\([^()]*\)$|(?:if|for|while|with) .*:$"
    r"|(?:if|for|while) \(|</?(?:div|span|p|a|ul|li|table|tr|td|body|head|script|style|form|input|h\d)[ >]"
)
_TAGS_OF_TEXT = frozenset({"", "text", "txt", "markdown", "md", "plaintext"})


class Reading(NamedTuple):
    """A text, read. Cue words are those of its instruction, see `strategies.cues`.

    `chars` is the length of the whole text, `material` what stands outside of fences and is not instruction.
    `counts` and `first` hold, by cue group, how many cues there are and how many words stand before the first;
    `lead` holds the groups that begin within the first words. `numbers` leaves out years; `measures` says that
    one has a unit. A text `asks` if it holds a question, `edge_asks` if a line of the instruction ends in one;
    it `addresses` the reader (do you …) or `states` something of its own (I …) if it begins so. `quotes` says
    that it holds a quotation, `pair` language codes (EN->DE), `gap` the marks of a gap to fill.
    """

    chars: int
    instruction: str
    counts: Mapping[str, int]
    first: Mapping[str, int]
    lead: frozenset[str]
    words: int
    numbers: int
    formula: bool
    measures: bool
    asks: bool
    edge_asks: bool
    addresses: bool
    states: bool
    quotes: bool
    pair: bool
    has_code: bool
    material: int
    gap: bool

    def has(self, *groups: str) -> bool:
        """Whether the instruction holds a cue of any of these groups."""
        return not self.counts.keys().isdisjoint(groups)

    def before(self, group: str, *others: str) -> bool:
        """Whether the first cue of a group stands before those of the others."""
        first = self.first
        if group not in first:
            return False
        position = first[group]
        return position <= self.words and all(position < first[other] for other in others if other in first)


def read(text: str) -> Reading:
    """Read a text; the time does not grow with its length."""
    kept = text if len(text) <= 2 * END else f"{text[:END]}\n{text[-END:]}"
    outside, fences = _split_fences(kept)
    instruction = _instruction(outside)
    lowered = instruction.lower()
    words = _WORD.findall(lowered)
    counts, first = _cues(instruction, lowered, words)
    numbers = _NUMBER.findall(instruction)
    marked = "?" in instruction or "？" in instruction
    return Reading(
        chars=len(text),
        instruction=instruction,
        counts=counts,
        first=first,
        lead=frozenset([group for group, position in first.items() if position < LEAD]),
        words=len(words),
        numbers=len([number for number in numbers if not _is_year(number)]),
        formula=_is_formula(instruction, bool(numbers)),
        measures=bool(numbers) and (_MEASURE.search(instruction) or _MONEY.search(instruction)) is not None,
        asks=marked or first.get("question", LEAD) == 0,
        edge_asks=marked and any(line.endswith(("?", "？")) for line in instruction.split("\n")),
        addresses=_SECOND_PERSON.match(instruction) is not None,
        states=_FIRST_PERSON.match(instruction) is not None,
        quotes=_QUOTED.search(instruction) is not None,
        pair=_CAPITALS.search(instruction) is not None and _LANGUAGE_CODES.search(instruction) is not None,
        has_code=any(_is_code(fence) for fence in fences) or _code_share(outside) >= CODE,
        material=max(0, len(text) - sum(map(len, fences)) - len(instruction)),
        gap=("<" in kept or "[" in kept) and any(mark in kept for mark in _GAP_MARKS),
    )


def _split_fences(text: str) -> tuple[str, list[str]]:
    """Text outside of triple-backtick fences, and what is in them (with their tag lines)."""
    if "```" not in text:
        return text, []
    pieces = text.split("```")
    return "\n".join(pieces[0::2]), pieces[1::2]


def _is_code(fence: str) -> bool:
    tag, _, body = fence.partition("\n")
    return tag.strip().lower() not in _TAGS_OF_TEXT or _code_share(body) >= CODE


def _instruction(text: str) -> str:
    """The part of a text that says what to do.

    That is all of a short text but for long paragraphs beside short ones, and the first and the last line of
    a longer text, cut.
    """
    text = text.strip()
    if len(text) <= SHORT:
        short = [part for part in text.split("\n\n") if len(part) < PARAGRAPH]
        return "\n".join(short) or text
    first = text[:EDGE].partition("\n")[0]
    if len(first) == EDGE:
        first = first[:OPENING]
    last = text[-EDGE:].rpartition("\n")[2]
    if len(last) == EDGE and len(first) < OPENING:
        last = ""
    return f"{first}\n{last}".rstrip()


def _is_year(number: str) -> bool:
    return len(number) == 4 and number.isdigit() and int(number) in YEARS


def _is_formula(instruction: str, digits: bool) -> bool:
    """Whether there is a formula in the text, which has digits or has none."""
    if digits and (_FORMULA_OF_DIGITS.search(instruction) or _DIGIT_MATRIX.search(instruction)):
        return True
    if any(mark in instruction for mark in _FORMULA_MARKS):
        return True
    signs = any(sign in instruction for sign in "=+^|(")
    return signs and _FORMULA_OF_NAMES.search(instruction) is not None


def _cues(instruction: str, lowered: str, words: list[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Cues by group: how many, and where the first is."""
    counts: dict[str, int] = {}
    first: dict[str, int] = {}
    lookup = WORDS.get
    for position, word in enumerate(words):
        groups = lookup(word)
        if groups is None:
            if "-" not in word:
                continue
            groups = tuple(group for part in word.split("-") for group in lookup(part, ()))
        for group in groups:
            if group in counts:
                counts[group] += 1
            else:
                counts[group], first[group] = 1, position

    def found(group: str, text: str, at: int) -> None:
        position = text.count(" ", 0, at)
        counts[group] = counts.get(group, 0) + 1
        first[group] = min(position, first.get(group, position))

    for phrase, group in PHRASES if lowered.isascii() else PHRASES + PHRASES_CJK:
        if phrase in lowered:
            found(group, lowered, lowered.find(phrase))
    if _SHORT_NAME.search(instruction) and (named := _SHORT_LANGUAGE.search(instruction)):
        found("programming_language", instruction, named.start())
    starts = [m.start() for may, shape in _IDENTIFIERS if may(instruction) and (m := shape.search(instruction))]
    if starts:
        found("tech", instruction, min(starts))
    return counts, first


def _code_share(text: str) -> float:
    """Share of lines that look like code, among the lines at both ends of a text that are not empty."""
    lines = [line[:LINE] for line in _sample(text) if line.strip()]
    if len(lines) < 3:
        return 0.0
    sure = [_is_code_line(line.strip()) for line in lines]
    if sum(sure) < 2:
        return 0.0
    score = sum(
        1.0 if code else INDENTED if line.startswith(("    ", "\t", "  ")) else 0.0
        for line, code in zip(lines, sure, strict=True)
    )
    return score / len(lines)


def _sample(text: str) -> list[str]:
    if len(text) <= 2 * LINES * LINE:
        lines = text.split("\n")
        return lines if len(lines) <= 2 * LINES else lines[:LINES] + lines[-LINES:]
    half = LINES * LINE
    return text[:half].split("\n")[:LINES] + text[-half:].split("\n")[-LINES:]


def _is_code_line(line: str) -> bool:
    return line.startswith(_CODE_STARTS) or line.endswith(_CODE_ENDS) or _CODE_SHAPES.match(line) is not None
