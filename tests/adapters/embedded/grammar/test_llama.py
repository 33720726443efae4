"""llama.cpp reads our grammars as we mean them."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from specproxy.adapters.embedded.grammar.schema import schema_to_gbnf
from tests.adapters.embedded.grammar.test_schema import SCHEMAS
from tests.support.calibrated import CalibratedPair
from tests.support.gbnf_sampler import Sampler

pytestmark = pytest.mark.embedded
BYTES = 3  # the token of byte 0 in calibrated models


@pytest.fixture(scope="module")
def vocabulary(pair: CalibratedPair) -> Iterator[object]:
    """A real vocabulary, whose tokens include every byte."""
    from specproxy.adapters.embedded.vocabulary import Vocabulary

    opened = Vocabulary(pair.target)
    yield opened
    opened.close()


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_the_grammar_writes_llama_cpp_accepts(name: str, vocabulary: object) -> None:
    from specproxy.adapters.embedded.grammar_sampler import Grammar
    from specproxy.adapters.embedded.vocabulary import Vocabulary

    assert isinstance(vocabulary, Vocabulary)
    gbnf = schema_to_gbnf(SCHEMAS[name])
    sampler = Sampler(gbnf)
    for seed in range(4):
        text = sampler.sample(Random(seed))
        state = Grammar(gbnf, vocabulary)
        try:
            for token in (BYTES + byte for byte in text.encode()):
                assert state.allows(token), text
                state.accept(token)
            assert state.allows(vocabulary.eos), text
        finally:
            state.close()


def test_what_does_not_fit_is_not_allowed(vocabulary: object) -> None:
    from specproxy.adapters.embedded.grammar_sampler import Grammar
    from specproxy.adapters.embedded.vocabulary import Vocabulary

    assert isinstance(vocabulary, Vocabulary)
    state = Grammar(schema_to_gbnf({"type": "integer", "minimum": 20, "maximum": 35}), vocabulary)
    three, six, five = (BYTES + byte for byte in b"365")
    state.accept(three)
    assert not state.allows(vocabulary.eos)
    assert not state.allows(six)
    assert state.allows(five)
    state.close()
