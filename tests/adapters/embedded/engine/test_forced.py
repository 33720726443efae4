"""Forced tokens are drafted for free, illegal ones are cut, and the text stays what it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from specproxy.adapters.embedded.grammar.schema import schema_to_gbnf
from tests.adapters.embedded.grammar.test_schema import SCHEMAS
from tests.support.calibrated import CalibratedPair
from tests.support.embedded import GREEDY, ByHand, Reader, Sampling, request

# isort: split
from specproxy.adapters.embedded.controller import PLAIN, FixedController, Plan, StepView
from specproxy.adapters.embedded.costs import StepCosts
from specproxy.adapters.embedded.forced import ForcedDrafter, Spelling
from specproxy.adapters.embedded.grammar_sampler import Grammar

pytestmark = pytest.mark.embedded

ROOT = Path(__file__).resolve().parents[4]
REAL = {
    each["name"]: each["schema"] for each in orjson.loads((ROOT / "benchmarks/data/schemas.json").read_bytes())
}
SEEDED = Sampling(temperature=1.0, seed=5)
KEYS = schema_to_gbnf(
    {
        "type": "object",
        "properties": {"identifier": {"type": "boolean"}, "description": {"type": "string"}},
        "required": ["identifier", "description"],
    }
)


@pytest.fixture(scope="module")
def random(noisy: tuple[Path, Path]) -> Iterator[ByHand]:
    """An engine on a model of random weights that spells in bytes."""
    engine = ByHand(*noisy)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def calibrated(pair: CalibratedPair) -> Iterator[ByHand]:
    """An engine on the calibrated pair."""
    engine = ByHand(pair.target, pair.draft)
    yield engine
    engine.close()


def say(engine: ByHand, strategy: str, sampling: Sampling, tokens: int = 80) -> Reader:
    (reader,) = engine.run(request([5, 300, 301], strategy, tokens=tokens, sampling=sampling))
    return reader


def counts(reader: Reader) -> dict[str, Any]:
    assert reader.end.report is not None
    return {drafter.drafter: drafter for drafter in reader.end.report.drafters}


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", [*SCHEMAS, *REAL])
def test_the_text_is_the_same_with_forced_tokens_drafted(random: ByHand, name: str, sampling: Sampling) -> None:
    sampling = replace(sampling, grammar=schema_to_gbnf((SCHEMAS | REAL)[name]))
    plain, auto = (say(random, strategy, sampling, tokens=50) for strategy in ("plain", "auto"))
    assert auto.ids == plain.ids
    assert auto.end.reason == plain.end.reason


class Steady(StepCosts):
    """Costs of steps that nothing which happens here changes: wide ones are nearly free."""

    def __init__(self) -> None:
        super().__init__()
        for width, seconds in ((1, 0.010), (4, 0.011), (8, 0.012), (16, 0.014)):
            super().decoded(width, seconds)

    def decoded(self, width: int, seconds: float, context: int = 0) -> None:
        """Learn nothing."""


def test_forced_tokens_save_steps(random: ByHand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and punctuation come several to a step."""
    monkeypatch.setattr(random.scheduler, "costs", Steady())
    auto = say(random, "auto", replace(GREEDY, grammar=KEYS))
    forced = counts(auto)["forced"]
    assert forced.accepted > 12, "half of two keys at least"
    assert forced.accepted >= 0.9 * forced.drafted
    assert auto.end.report is not None
    assert auto.end.report.steps < auto.end.predicted_n - forced.accepted + 1


def test_what_is_forced(random: ByHand) -> None:
    """Up to the next choice, as far as asked; nothing where there is a choice."""
    grammar = Grammar('root ::= "{\\"key\\":" ("true" | "false") "}"', random.vocabulary)
    spelling = Spelling(random.vocabulary)
    drafter = ForcedDrafter(grammar, spelling)

    def text(tokens: list[int]) -> bytes:
        return b"".join(map(random.vocabulary.piece, tokens))

    def settle(said: str) -> None:
        for token in random.vocabulary.tokenize(said, add_special=False):
            grammar.accept(token)
            drafter.extend([token])

    assert text(drafter.draft(40)) == b'{"key":'
    assert text(drafter.draft(3)) == b'{"k'
    settle('{"k')
    assert text(drafter.draft(40)) == b'ey":'
    settle('ey":')
    assert drafter.draft(40) == []
    settle("t")
    assert text(drafter.draft(40)) == b"rue}"
    assert drafter.draft(40)[-1] == random.vocabulary.eos
    settle("rue}")
    assert drafter.draft(40) == [random.vocabulary.eos]
    grammar.close()


def test_a_character_of_several_bytes_is_forced_as_a_whole(random: ByHand) -> None:
    grammar = Grammar('root ::= "süß" [0-9]', random.vocabulary)
    drafter = ForcedDrafter(grammar, Spelling(random.vocabulary))
    assert b"".join(map(random.vocabulary.piece, drafter.draft(16))) == "süß".encode()
    grammar.close()


def test_forced_text_is_spelt_with_the_tokenizers_words(calibrated: ByHand) -> None:
    """Few tokens, not a byte each, and without the space that some tokenizers put first."""
    vocabulary = calibrated.vocabulary
    grammar = Grammar('root ::= " please rewrite this text" [0-9]', vocabulary)
    drafter = ForcedDrafter(grammar, Spelling(vocabulary))
    assert drafter.draft(16) == vocabulary.tokenize(" please rewrite this text", add_special=False)
    assert len(drafter.draft(16)) == 4
    grammar.close()


def test_looking_ahead_moves_nothing(random: ByHand) -> None:
    """The grammar itself stays where the text stands."""
    grammar = Grammar('root ::= "abc" [0-9]', random.vocabulary)
    a, b = random.vocabulary.tokenize("ab", add_special=False)
    assert grammar.legal_start([a, b]) == 2
    assert grammar.legal_start([a, a]) == 1
    assert grammar.legal_start([b]) == 0
    ForcedDrafter(grammar, Spelling(random.vocabulary)).draft(3)
    assert grammar.allows(a)
    assert not grammar.allows(b)
    grammar.close()


@pytest.mark.parametrize("drafter", ["mtp", "draft"])
def test_drafts_are_cut_at_their_first_illegal_token(
    calibrated: ByHand, pair: CalibratedPair, drafter: str
) -> None:
    """The drafters' wrong guesses are words that the grammar does not have: none of them is verified."""
    prompt = calibrated.tokenize("please rewrite this " + pair.marker("edit", 0))
    grammar = 'root ::= (" edit" [0-9]+)+'
    free, bound = calibrated.run(
        request(prompt, drafter), request(prompt, drafter, sampling=replace(GREEDY, grammar=grammar))
    )
    assert bound.ids == free.ids
    assert bound.end.draft_n_accepted == bound.end.draft_n
    assert free.end.draft_n_accepted < free.end.draft_n
    seen, seen_free = counts(bound)[drafter], counts(free)[drafter]
    assert seen.by_position[0] == seen_free.by_position[0], "a cut guess is a wrong guess"


class Chain(FixedController):
    """Copies where it can, and lets another drafter go on behind the copy in the same step."""

    def __init__(self, drafter: str) -> None:
        self.drafter = drafter

    def plan(self, view: StepView) -> Plan:
        """See `Controller`."""
        room = view.room - 3
        return Plan(self.drafter, min(2, room), "ngram", 3) if view.match_length and room > 0 else PLAIN


@pytest.mark.parametrize("drafter", ["mtp", "draft"])
def test_a_chain_changes_nothing_but_the_speed(calibrated: ByHand, pair: CalibratedPair, drafter: str) -> None:
    """Behind the copy, which is right here, the drafter is right as well: its cache has no fault."""
    prompt = calibrated.tokenize("please rewrite this " + pair.marker("edit", 0))
    reader = calibrated.submit(request(prompt, f"ngram+{drafter}", tokens=90))
    calibrated.scheduler._waiting[0].controller = Chain(drafter)
    calibrated.finish()
    assert reader.ids == pair.text_ids("edit", 90)
    seen = counts(reader)
    assert seen["ngram"].accepted == seen["ngram"].drafted > 20
    first, tried = seen[drafter].by_position[0]
    assert tried > 8
    assert first / tried > 0.25
