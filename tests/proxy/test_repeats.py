"""Recognising prompts that were seen before."""

from __future__ import annotations

from specproxy.proxy.repeats import RepeatMemory
from specproxy.records import Turn


def test_a_prompt_is_known_the_second_time() -> None:
    """`add` says whether it was known; `knows` only looks."""
    memory = RepeatMemory()
    digest = memory.digest("m", [Turn("user", "hello")])
    assert not memory.knows(digest)
    assert not memory.add(digest)
    assert memory.knows(digest)
    assert memory.add(digest)


def test_what_makes_a_prompt_another_one() -> None:
    """Model, roles, texts and where one turn ends all count."""
    memory = RepeatMemory()
    prompts = [
        ("m", [Turn("user", "ab")]),
        ("n", [Turn("user", "ab")]),
        ("m", [Turn("system", "ab")]),
        ("m", [Turn("user", "a"), Turn("user", "b")]),
        ("m", [Turn("user", "a\0user\0001\0b")]),
        ("m", []),
    ]
    assert len({memory.digest(target, turns) for target, turns in prompts}) == len(prompts)


def test_digests_need_the_key() -> None:
    """Another process cannot test whether a prompt was seen here."""
    turns = [Turn("user", "secret")]
    assert RepeatMemory(key=b"a" * 32).digest("m", turns) == RepeatMemory(key=b"a" * 32).digest("m", turns)
    assert RepeatMemory().digest("m", turns) != RepeatMemory().digest("m", turns)


def test_any_text_can_be_hashed() -> None:
    """Lone surrogates come in through JSON escapes."""
    memory = RepeatMemory()
    assert memory.digest("\ud800", [Turn("\ud800", "\udfff")])


def test_memory_is_bounded_and_keeps_the_latest() -> None:
    """The prompt that was not seen for longest is forgotten first."""
    memory = RepeatMemory(capacity=2)
    a, b, c = (memory.digest("m", [Turn("user", text)]) for text in "abc")
    memory.add(a)
    memory.add(b)
    memory.add(a)
    memory.add(c)
    assert len(memory) == 2
    assert memory.knows(a)
    assert not memory.knows(b)
