"""Which lane probably has a prompt's beginning in its cache."""

from __future__ import annotations

import dataclasses

from specproxy.proxy.prefixes import PrefixMemory
from specproxy.records import Control, Health, LaneStatus, Turn
from specproxy.strategies.prefix import BLOCK_CHARS, BLOCK_TOKENS
from tests.support.proxy import lane

ASKED = Turn("user", "Explain this file. " * 40)
STATUSES = tuple(LaneStatus(lane("b", name), Health.READY, since=1.0) for name in ("plain", "ngram"))
PLAIN, NGRAM = (status.lane for status in STATUSES)


def test_a_conversation_is_found_where_it_ran() -> None:
    """Its next request begins with the last one's prompt, in whole blocks, on that lane only."""
    memory = PrefixMemory()
    memory.note(NGRAM, memory.blocks([ASKED]))
    longer = memory.blocks([ASKED, Turn("assistant", "It sorts."), Turn("user", "Why? " * 200)])
    whole = len(f"user\0{ASKED.text}") // BLOCK_CHARS * BLOCK_TOKENS
    assert memory.hits(longer, STATUSES) == {NGRAM.id: whole}


def test_who_says_it_is_part_of_the_prompt() -> None:
    """The same text in another role is rendered otherwise."""
    memory = PrefixMemory()
    memory.note(PLAIN, memory.blocks([ASKED]))
    assert memory.hits(memory.blocks([Turn("system", ASKED.text)]), STATUSES) == {}


def test_a_short_prompt_is_not_looked_up() -> None:
    """Less than a block saves nothing."""
    memory = PrefixMemory()
    blocks = memory.blocks([Turn("user", "hi")])
    memory.note(PLAIN, blocks)
    assert (blocks, memory.hits(blocks, STATUSES)) == ((), {})


def test_a_lane_that_came_up_anew_has_lost_its_cache() -> None:
    """Its health began later than what is remembered; the other lane keeps its own."""
    memory = PrefixMemory()
    blocks = memory.blocks([ASKED])
    assert memory.hits(blocks, STATUSES) == {}
    for known in (PLAIN, NGRAM):
        memory.note(known, blocks)
    restarted = (dataclasses.replace(STATUSES[0], since=2.0), STATUSES[1])
    assert list(memory.hits(blocks, restarted)) == [NGRAM.id]
    memory.note(PLAIN, blocks)
    assert list(memory.hits(blocks, restarted)) == [PLAIN.id, NGRAM.id]


def test_lanes_that_differ_by_a_request_field_share_a_cache() -> None:
    """The engine has one prefix cache, whatever the strategy."""
    shared = tuple(
        dataclasses.replace(s, lane=dataclasses.replace(s.lane, control=Control.REQUEST)) for s in STATUSES
    )
    memory = PrefixMemory()
    blocks = memory.blocks([ASKED])
    memory.note(shared[0].lane, blocks)
    assert set(memory.hits(blocks, shared)) == {PLAIN.id, NGRAM.id}


def test_hashes_need_the_key() -> None:
    """Another process cannot test what was asked here."""
    assert PrefixMemory(b"a" * 32).blocks([ASKED]) == PrefixMemory(b"a" * 32).blocks([ASKED])
    assert PrefixMemory().blocks([ASKED]) != PrefixMemory().blocks([ASKED])
