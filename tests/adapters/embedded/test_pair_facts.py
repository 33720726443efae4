"""What is said about a target and its draft before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specproxy.adapters.embedded.pair_facts import describe
from specproxy.adapters.gguf_facts import ModelFacts, read_facts
from specproxy.errors import PairError
from tests.support.calibrated import CalibratedPair, Region, write_pair


@pytest.fixture(scope="module")
def facts(pair: CalibratedPair) -> tuple[ModelFacts, ModelFacts]:
    """Facts of the calibrated target and of its draft."""
    return read_facts(pair.target), read_facts(pair.draft)


def test_target_and_draft_are_described(facts: tuple[ModelFacts, ModelFacts]) -> None:
    """Architecture, size and head of the target; share, family and tokenizer of the draft."""
    text = "\n".join(describe(*facts))
    assert "target.gguf: glm4moe, F16" in text
    assert "dense" in text
    assert "Multi-token prediction: one head" in text
    share = facts[1].weight_bytes / facts[0].weight_bytes
    assert f"{share:.0%} of the target's" in text
    assert "the same tokenizer" in text


def test_without_a_draft_only_the_target_is(facts: tuple[ModelFacts, ModelFacts]) -> None:
    """No sentence about a file that was not given."""
    assert not any("Draft" in line for line in describe(facts[0], None))


@pytest.mark.parametrize(("used", "warned"), [(2, True), (16, False)])
def test_experts_are_counted_and_few_of_many_are_warned_of(
    facts: tuple[ModelFacts, ModelFacts], used: int, warned: bool
) -> None:
    """Where each token reads a few of many experts, a batch of guesses reads more of them."""
    lines = describe(replace(facts[0], expert_count=32, expert_used_count=used), None)
    assert f"{used} of 32 experts a token" in lines[0]
    assert any("gains less" in line for line in lines) is warned


def test_recurrent_state_and_chained_heads_are_named(facts: tuple[ModelFacts, ModelFacts]) -> None:
    """Both decide which strategies can run."""
    text = "\n".join(describe(replace(facts[0], recurrent=True, state_bytes=3 << 20, mtp_layers=3), None))
    assert "3 chained heads" in text
    assert "recurrent state of 3.0 MiB" in text


def test_a_large_draft_is_warned_of_last(facts: tuple[ModelFacts, ModelFacts]) -> None:
    """The warning follows the facts that it is drawn from."""
    lines = describe(facts[0], replace(facts[1], weight_bytes=facts[0].weight_bytes // 2))
    assert "hardly be worth its time" in lines[-1]


def test_a_draft_with_another_vocabulary_is_refused(
    facts: tuple[ModelFacts, ModelFacts], tmp_path: Path
) -> None:
    """As it would be when loading, but before."""
    other = write_pair(tmp_path, regions=(Region("other", 20, mtp=0.5, draft=0.5),))
    with pytest.raises(PairError, match="cannot draft"):
        describe(facts[0], read_facts(other.draft))
