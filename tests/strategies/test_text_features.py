"""What is read off a text, and that only its windows are looked at."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.strategies import text_features
from specproxy.strategies.text_features import END, SHORT, Reading, read

PYTHON = "import os\n\ndef walk(top):\n    for name in os.listdir(top):\n        print(name)\n    return None\n"
JAVASCRIPT = "const a = 1;\nfunction f(x) {\n  return x + a;\n}\nconsole.log(f(2));\n"
C = '#include <stdio.h>\nint main(void) {\n    printf("hi");\n    return 0;\n}\n'
HTML = "<div>\n<p>one</p>\n<p>two</p>\n</div>\n"
PROSE = (
    "The pond froze in January.\nNobody went skating; the ice was thin.\nIn March it was gone, and the ducks.\n"
)
LIST = "Please buy:\n- bread\n- butter\n- two onions (red)\n- milk\n"


@pytest.mark.parametrize("text", [PYTHON, JAVASCRIPT, C, HTML])
def test_code_is_seen_without_fences(text: str) -> None:
    """By its lines alone, with an instruction before or behind it too."""
    assert read(text).has_code
    assert read(f"Please fix this.\n\n{text}").has_code


@pytest.mark.parametrize("text", [PROSE, LIST, "", "\n\n\n", "x = 1"])
def test_prose_is_not_code(text: str) -> None:
    """Sentences, lists, and a lone formula are not."""
    assert not read(text).has_code


def test_fences_hold_code_by_tag_or_by_lines() -> None:
    """A fence around plain text is no code."""
    assert read("```js\nx\n```").has_code
    assert read(f"```\n{PYTHON}```").has_code
    assert not read(f"```\n{PROSE}```").has_code
    assert not read(f"```text\n{PROSE}```").has_code


def test_the_instruction_is_told_from_the_material() -> None:
    """Of a long text the first and the last line, of a short one what stands beside a long paragraph."""
    paragraph = "It was a long day in the harbour. " * 12
    assert read(f"Summarise.\n\n{paragraph}").instruction == "Summarise."
    assert read(f"{paragraph}\n\nWho left?").instruction == "Who left?"
    long = f"Summarise.\n\n{paragraph * 4}\n\nBe brief."
    assert read(long).instruction == "Summarise.\nBe brief."
    assert read(long).material == len(long) - len("Summarise.\nBe brief.")
    assert read(f"Summarise.\n\n{paragraph * 4}").instruction == "Summarise."
    one_line = read(f"Summarise: {paragraph * 4}And how did it end?")
    assert one_line.instruction.startswith("Summarise: It was")
    assert one_line.instruction.endswith("And how did it end?")
    assert len(one_line.instruction) < 400
    assert read("a" * SHORT).instruction == "a" * SHORT


def test_cues_and_where_they_stand() -> None:
    """Counts and positions by group; hyphenated words count by their parts, other scripts by phrases."""
    reading = read("Write a function, then write a poem.")
    assert reading.counts["create"] == 2
    assert reading.first["code"] == 2
    assert reading.before("code", "creative_form")
    assert not reading.before("creative_form", "code")
    assert not reading.before("math")
    assert "create" in reading.lead
    assert read("Ein JSON-Objekt bitte").has("json")
    assert read("请翻译这句话").has("translate")
    assert not read("").counts


@pytest.mark.parametrize(
    ("text", "numbers"), [("12 eggs and 3.5 kg", 2), ("in 1914 and 2024", 0), ("no. 12345", 1), ("9999", 1)]
)
def test_years_are_no_quantities(text: str, numbers: int) -> None:
    """Four digits that can be a year are not counted."""
    assert read(text).numbers == numbers


@pytest.mark.parametrize("text", ["3 * 4", "2x - 1 = 5", "f(x) = x^2", "what is 15% of 240?", "3 times 4"])
def test_formulas(text: str) -> None:
    """Arithmetic and algebra are recognised by shape."""
    assert read(text).formula
    assert not read("a walk in the park, 3 of us").formula


@pytest.mark.parametrize(
    "text", ["x = 3", "|y - 1| < 2", "plot f(x)", "\\frac{a}{b}", "∫ sin", "√a", "[[1 2]]", "the 2n of it"]
)
def test_formulas_of_names_and_marks(text: str) -> None:
    """Each shape counts by itself, whatever cheaper test stands before it."""
    assert read(text).formula


@pytest.mark.parametrize("text", ["costs $5", "5 km", "60 km/h", "20%"])
def test_measures(text: str) -> None:
    """A number beside its unit; neither counts alone."""
    assert read(text).measures
    assert not read("km and $ and 5 of them").measures


words_of_code = st.lists(st.sampled_from([*"aBz_(.), ", "py", "Go", "fooBar", "in", "EN", "->"]), max_size=12)


@given(words_of_code.map("".join))
def test_cheap_tests_hide_no_match(text: str) -> None:
    """What is looked for before a slower pattern is a part of whatever that pattern finds."""
    for mark, shape in text_features._IDENTIFIERS:
        assert mark in text or not shape.search(text)
    if text_features._CAMEL.search(text):
        assert text_features._CAPITAL_INSIDE.search(text)
    if text_features._SHORT_LANGUAGE.search(text):
        assert text_features._SHORT_NAME.search(text)
    if text_features._LANGUAGE_CODES.search(text):
        assert text_features._CAPITALS.search(text)


@pytest.mark.parametrize(
    "text", ["<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>", "<PRE> a <SUF>b <MID>", "[SUFFIX]b[PREFIX]a"]
)
def test_gap_marks(text: str) -> None:
    """The marks of code models mean a gap."""
    assert read(text).gap
    assert not read("a <b> c").gap


@given(st.text(alphabet="ab \n.?", max_size=50), st.text(alphabet="cd \n.{;", max_size=50))
def test_only_the_ends_are_looked_at(first: str, second: str) -> None:
    """Whatever stands in the middle of a long text, the reading is the same: so is its cost."""
    head, tail = "Please fix this.\n" + "word " * (END // 5), "word " * (END // 5) + "\nThank you?"
    width = max(len(first), len(second))
    one, other = (read(head + middle.ljust(width) * 5 + tail) for middle in (first, second))
    told = [name for name in dir(Reading) if not name.startswith("_") and name not in ("has", "before")]
    assert [getattr(one, name) for name in told] == [getattr(other, name) for name in told]


@given(st.text(max_size=300))
def test_any_text_can_be_read(text: str) -> None:
    """Never raises, and the parts are within the whole."""
    reading = read(text)
    assert reading.chars == len(text)
    assert 0 <= reading.material <= len(text)
    assert len(reading.instruction) <= max(len(text), SHORT)
