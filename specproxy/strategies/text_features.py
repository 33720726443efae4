"""What can be read off a text in one cheap pass: instruction and material, code, numbers, cue words.

However long a text is, only windows of it are looked at closely: instructions stand at the beginning or at the
end, and a sample of lines tells code from prose. So the time depends on the windows, not on the text.
"""

from __future__ import annotations

import re

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
_CAPITAL_INSIDE, _CAMEL = re.compile(r"[a-z][A-Z]"), re.compile(r"\b[a-z]+[A-Z]\w+\b")
_IDENTIFIERS = (
    ("_", re.compile(r"\b[a-z]+_[a-z_]+\b")),
    ("(", re.compile(r"\b\w+\([\w, ]*\)")),
    (".", re.compile(r"\.(?:py|js|ts|c|h|cpp|java|go|rs|rb|sh)\b")),
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


class Reading:
    """A text, read. Cue words are those of its instruction, see `strategies.cues`.

    `chars` is the length of the whole text, `words` the number of words in its instruction, `material` what
    stands outside of fences and is not instruction. `counts` and `first` hold, by cue group, how many cues
    there are and how many words stand before the first. `gap` says that it holds the marks of a gap to fill.
    What few rules ask for is found out when they do.
    """

    __slots__ = ("_marked", "chars", "counts", "first", "gap", "has_code", "instruction", "material", "words")

    def __init__(self, text: str) -> None:
        kept = text if len(text) <= 2 * END else f"{text[:END]}\n{text[-END:]}"
        outside, fences = _split_fences(kept)
        instruction = self.instruction = _instruction(outside)
        lowered = instruction.lower()
        words = _WORD.findall(lowered)
        self.counts, self.first = _cues(instruction, lowered, words)
        self.words = len(words)
        self.chars = len(text)
        self.has_code = any(map(_is_code, fences)) or _code_share(outside) >= CODE
        self.material = max(0, len(text) - sum(map(len, fences)) - len(instruction))
        self.gap = ("<" in kept or "[" in kept) and any(mark in kept for mark in _GAP_MARKS)
        self._marked = "?" in instruction or "？" in instruction

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

    @property
    def lead(self) -> frozenset[str]:
        """Groups of cues among the first words."""
        return frozenset([group for group, position in self.first.items() if position < LEAD])

    @property
    def numbers(self) -> int:
        """How many numbers there are, years left out."""
        return len([number for number in _NUMBER.findall(self.instruction) if not _is_year(number)])

    @property
    def formula(self) -> bool:
        """Whether it holds a formula."""
        return _is_formula(self.instruction)

    @property
    def measures(self) -> bool:
        """Whether a number has a unit."""
        return (_MEASURE.search(self.instruction) or _MONEY.search(self.instruction)) is not None

    @property
    def asks(self) -> bool:
        """Whether it holds a question."""
        return self._marked or self.first.get("question", LEAD) == 0

    @property
    def edge_asks(self) -> bool:
        """Whether a line of the instruction ends in a question."""
        return self._marked and any(line.endswith(("?", "？")) for line in self.instruction.split("\n"))

    @property
    def addresses(self) -> bool:
        """Whether it begins with a question to the reader (do you …)."""
        return _SECOND_PERSON.match(self.instruction) is not None

    @property
    def states(self) -> bool:
        """Whether it begins with something of its own (I …)."""
        return _FIRST_PERSON.match(self.instruction) is not None

    @property
    def quotes(self) -> bool:
        """Whether it holds a quotation."""
        return _QUOTED.search(self.instruction) is not None

    @property
    def pair(self) -> bool:
        """Whether it holds a pair of language codes (EN->DE)."""
        text = self.instruction
        return _CAPITALS.search(text) is not None and _LANGUAGE_CODES.search(text) is not None


def read(text: str) -> Reading:
    """Read a text; the time does not grow with its length."""
    return Reading(text)


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


def _is_formula(instruction: str) -> bool:
    if _NUMBER.search(instruction) and (
        _FORMULA_OF_DIGITS.search(instruction) or _DIGIT_MATRIX.search(instruction)
    ):
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
    shapes = [shape for mark, shape in _IDENTIFIERS if mark in instruction]
    if _CAPITAL_INSIDE.search(instruction):
        shapes.append(_CAMEL)
    starts = [m.start() for shape in shapes if (m := shape.search(instruction))]
    if starts:
        found("tech", instruction, min(starts))
    return counts, first


def _code_share(text: str) -> float:
    """Share of lines that look like code, among the lines at both ends of a text that are not empty."""
    if text.count("\n") < 2:
        return 0.0
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
