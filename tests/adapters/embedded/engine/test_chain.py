"""Models with several prediction heads: guess k comes from head k, fed with what the heads before it made."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.calibrated import CalibratedPair, write_pair
from tests.support.deepseek4 import LANES, WIDTH, write_deepseek4
from tests.support.embedded import ByHand, reference, request
from tests.support.heads import counts, known, prompt
from tests.support.random_model import CHAINS, write_random

# isort: split
from specproxy.adapters.embedded import runtime
from specproxy.adapters.embedded.batch import Batch, Floats
from specproxy.adapters.embedded.controller import PLAIN, FixedController, Plan, StepView
from specproxy.adapters.embedded.drafters import ChainedDrafter, MtpChain, MtpHead
from specproxy.adapters.embedded.facts import MTP_CHAINS, memory_needs
from specproxy.adapters.embedded.llama import Context, ContextParams, DecodeError
from specproxy.adapters.embedded.options import EngineOptions
from specproxy.adapters.embedded.sequence import HiddenRows, Sequence
from specproxy.adapters.gguf_facts import read_facts
from specproxy.errors import SpecproxyError

pytestmark = pytest.mark.embedded

HEADS = 3
FEW = 32  # tokens in a decode; of more than 64, llama.cpp spoils some of deepseek4's hidden rows


@pytest.fixture(scope="module", params=[2, HEADS])
def chain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CalibratedPair:
    """A calibrated target with two heads or three, each with its own share of right guesses."""
    return write_pair(tmp_path_factory.mktemp("chain"), arch="step35", mtp_blocks=request.param)


@pytest.fixture
def engine(chain: CalibratedPair) -> Iterator[ByHand]:
    """An engine on it."""
    engine = ByHand(chain.target)
    yield engine
    engine.close()


@pytest.mark.parametrize("length", [1, 2, 3])
def test_each_head_accepts_its_known_share(engine: ByHand, chain: CalibratedPair, length: int) -> None:
    """No draft is longer than the chain: a head does not go on from its own rows."""
    assert engine.runtime.limits["mtp"] == chain.mtp_blocks
    for _ in range(2):
        assert counts(engine, chain, length) == known(chain, min(length, chain.mtp_blocks))
        engine.forget()


def test_one_sequence_or_many_and_one_that_goes_on(engine: ByHand, chain: CalibratedPair) -> None:
    """Lengths mixed in a decode, and a second request that finds its prefix in every head's cache."""
    words = prompt(engine, chain, "json")
    work = [request(words, f"mtp:{length}", tokens=60) for length in (1, 2, 2)]
    for reader, length in zip(engine.run(*work), (1, 2, 2), strict=True):
        expected = chain.expect("json", "mtp", 60, n_max=length)
        assert (reader.end.draft_n, reader.end.draft_n_accepted) == (expected.drafted, expected.accepted)
    again = [*words, *chain.text_ids("json", 40)]
    (reader,) = engine.run(request(again, "mtp:2", tokens=40))
    assert reader.end.cached_n > len(words)
    assert reader.ids == chain.text_ids("json", 80)[40:]
    assert reader.end.draft_n_accepted > 10


@pytest.mark.parametrize(
    "fault", ["the first head for all", "the next head", "rows of the target", "rows of another token"]
)
def test_a_wrong_head_or_row_shows(
    engine: ByHand, chain: CalibratedPair, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    drafter = engine.runtime.drafters["mtp"]
    contexts = list(drafter.contexts.values())
    hidden, add = Context.hidden, MtpChain._add

    def other(self: Context, rows: int) -> Floats:
        right = hidden(self, rows)
        return np.roll(right, 1, axis=0) if self in contexts else right

    def target_row(self: MtpChain, given: Any, head: int) -> int | None:
        given.rows[given.late :] = given.rows[given.late - 1]
        return add(self, given, head)

    if fault == "the first head for all":
        contexts[1].use_head(0)
    elif fault == "the next head":
        contexts[0].use_head(1)
    elif fault == "rows of the target":
        monkeypatch.setattr(MtpChain, "_add", target_row)
    else:
        monkeypatch.setattr(Context, "hidden", other)
    right, seen = known(chain, chain.mtp_blocks), counts(engine, chain, chain.mtp_blocks)
    assert seen != right
    assert sum(accepted for _, accepted in seen) < sum(accepted for _, accepted in right)


def test_a_head_that_fails_costs_the_drafts_not_the_request(
    engine: ByHand, chain: CalibratedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, last = engine.runtime.drafters["mtp"].contexts.values()
    decode = Context.decode

    def faulty(self: Context, batch: Batch) -> None:
        if self is last:
            raise DecodeError("planted", -3)
        decode(self, batch)

    monkeypatch.setattr(Context, "decode", faulty)
    (reader,) = engine.run(request(prompt(engine, chain, "code"), "mtp", tokens=30))
    assert reader.ids == chain.text_ids("code", 30)
    assert reader.end.report is not None
    assert "planted" in reader.end.report.stopped_drafting
    monkeypatch.undo()
    (after,) = engine.run(request(prompt(engine, chain, "code"), "mtp:2", tokens=30))
    expected = chain.expect("code", "mtp", 30, n_max=2)
    assert (after.end.draft_n, after.end.draft_n_accepted) == (expected.drafted, expected.accepted)


def test_every_heads_cache_is_parked_and_copied(engine: ByHand, chain: CalibratedPair) -> None:
    """A conversation that was idle comes back twice at once: out of memory, and as a copy of its prefix."""
    words = prompt(engine, chain, "json")
    again = request([*words, *chain.text_ids("json", 40)], "mtp:2", tokens=40)
    (fresh,) = engine.run(again)
    assert fresh.end.cached_n == 0
    engine.forget()
    engine.run(request(words, "mtp:2", tokens=60))
    engine.run(request(prompt(engine, chain, "code"), "mtp:2", tokens=20))
    assert engine.scheduler._slots.parked_bytes > 0
    for reader in engine.run(again, again):
        assert reader.end.cached_n > len(words)
        assert reader.ids == chain.text_ids("json", 80)[40:]
        assert (reader.end.draft_n, reader.end.draft_n_accepted) == (
            fresh.end.draft_n,
            fresh.end.draft_n_accepted,
        )


class Copying(FixedController):
    """Copies as many tokens as `copied`, and lets the heads go on behind them."""

    def __init__(self, copied: int) -> None:
        self.copied = copied

    def plan(self, view: StepView) -> Plan:
        """See `Controller`."""
        copied = self.copied
        return Plan("mtp", 2, "ngram", copied) if view.match_length and view.room > copied + 2 else PLAIN


@pytest.mark.parametrize("copied", [1, 2, 3, 4])
def test_heads_go_on_behind_a_copy_as_far_as_they_reach(
    engine: ByHand, chain: CalibratedPair, copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was copied is fed to the heads in place of their guesses; behind the last nothing follows."""
    asked: list[int] = []
    decode, heads = Context.decode, list(engine.runtime.drafters["mtp"].contexts.values())

    def spy(self: Context, batch: Batch) -> None:
        asked.extend([batch.n_out] * (self in heads and batch.n_out > 0))
        decode(self, batch)

    monkeypatch.setattr(Context, "decode", spy)
    reader = engine.submit(request(prompt(engine, chain, "edit"), "ngram+mtp", tokens=90))
    engine.scheduler._waiting[0].controller = Copying(copied)
    engine.finish()
    assert reader.ids == chain.text_ids("edit", 90)
    assert reader.end.report is not None
    if copied >= chain.mtp_blocks:
        assert not asked, "a head was asked for a guess that no head can make"
    seen = {each.drafter: each for each in reader.end.report.drafters}
    assert seen["ngram"].accepted == seen["ngram"].drafted > 20
    steps = seen["ngram"].drafted // copied
    reach = min(max(0, chain.mtp_blocks - copied), 2)
    assert ("mtp" in seen) == (reach > 0)
    if reach:
        assert steps * reach - 2 <= seen["mtp"].drafted <= steps * reach
        assert seen["mtp"].by_position[0][0] > 0.25 * seen["mtp"].by_position[0][1]


# --- against every head computed from scratch ----------------------------------------------------------


@dataclass
class Draft:
    """What was known when a draft was made, and the draft."""

    tokens: list[int]
    guesses: list[int]


class Scratch:
    """Target and heads in contexts of their own, which are emptied before every decode.

    A single head goes on from its own rows.
    """

    def __init__(self, engine: ByHand, heads: int = HEADS) -> None:
        self.model = engine.runtime.target
        self.context = Context(self.model, ContextParams(512, sequences=1, outputs=FEW, threads=1))
        self.context.want_hidden(True)
        self.heads = []
        for head in range(heads):
            context = Context(self.model, ContextParams(512, sequences=1, outputs=FEW, threads=1, mtp=True))
            context.use_head(head)
            context.want_hidden(True)  # every token gets logits here, so each has a row
            self.heads.append(context)

    def run(self, context: Context, tokens: list[int], rows: Floats | None) -> tuple[Floats, Floats]:
        """The last token's logits and all hidden rows."""
        batch = Batch(FEW, 0 if rows is None else self.model.n_embd)
        context.clear()
        made = []
        for at in range(0, len(tokens), FEW):
            part = tokens[at : at + FEW]
            batch.clear()
            batch.add(part, at, 0, outputs=len(part), rows=None if rows is None else rows[at : at + FEW])
            context.decode(batch)
            made.append(context.hidden(len(part)).copy())
        return context.logits(len(part))[-1].copy(), np.concatenate(made)

    def shortfall(self, draft: Draft) -> float:
        """How far the guesses' logits are below those of the guesses that come out here, at most."""
        tokens = list(draft.tokens)
        before = self.run(self.context, tokens[:-1], None)[1]
        rows = np.concatenate([np.zeros((1, self.model.n_embd), np.float32), before])
        worst = 0.0
        for head, guess in zip(itertools.cycle(self.heads), draft.guesses, strict=False):
            logits, made = self.run(head, tokens, rows)
            worst = max(worst, float(logits.max() - logits[guess]))
            tokens.append(guess)
            rows = np.concatenate([rows, made[-1:]])
        return worst

    def close(self) -> None:
        """Free everything."""
        for context in (self.context, *self.heads):
            context.close()


def drafts(
    engine: ByHand, monkeypatch: pytest.MonkeyPatch, kind: type[ChainedDrafter] = MtpChain
) -> tuple[list[Draft], int]:
    """All drafts of two conversations with two turns each, side by side; then one goes on in two ways at once.

    The drafts of one are short; the prompt of the other is longer than a decode, so that heads catch up first.
    Beside them: how many tokens of its prefix each of the two ways found in a cache.
    """
    made: list[Draft] = []
    propose = kind._propose

    def spy(self: ChainedDrafter, sequences: list[Sequence]) -> None:
        propose(self, sequences)
        made.extend(Draft(list(each.tokens), list(each.draft)) for each in sequences)

    monkeypatch.setattr(kind, "_propose", spy)
    turns = [engine.tokenize(text) for text in (" w1 w2 w3 w4 w5 w6 w7" * 8, " w300 w2 w17")]
    for _ in range(2):
        readers = engine.run(
            *[request(words, f"mtp:{n}", tokens=14) for words, n in zip(turns, (3, 2), strict=True)]
        )
        turns = [[*words, *r.ids[:9], 290] for words, r in zip(turns, readers, strict=True)]
    two_ways = [request([*turns[0], other], "mtp:3", tokens=8) for other in (291, 292)]
    cached = min(reader.end.cached_n for reader in engine.run(*two_ways))
    monkeypatch.undo()
    return made, cached


@pytest.fixture(scope="module", params=CHAINS)
def noisy_chain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: every head's guesses depend on all that its cache holds."""
    return write_random(tmp_path_factory.mktemp("noisy") / "chain.gguf", arch=request.param, mtp_blocks=HEADS)


def test_these_are_all_that_chain() -> None:
    assert set(CHAINS) == MTP_CHAINS


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fault", ["", "text without rows", "text of the first head", "guesses left"])
def test_every_guess_is_the_heads_own(noisy_chain: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Each head's cache must hold the text as that head sees it, whoever guessed before and beside it.

    Guesses that are left in a cache llama.cpp refuses, so that drafting ends; the others are wrong ones.
    """
    engine = ByHand(noisy_chain, batch=32)
    scratch = Scratch(engine)
    *_, last = engine.runtime.drafters["mtp"].contexts.values()
    decode = Context.decode

    def spoilt(self: Context, batch: Batch) -> None:
        if self is last and fault == "text without rows":
            assert batch._rows is not None
            batch._rows[: batch.n][batch._out[: batch.n] == 0] = 0
        elif self is last:
            self.use_head(0 if batch.n_out == 0 else HEADS - 1)
        decode(self, batch)

    with pytest.MonkeyPatch.context() as planted:
        if fault == "guesses left":
            planted.setattr(MtpChain, "drop", lambda *_: True)
        elif fault:
            planted.setattr(Context, "decode", spoilt)
        made, cached = drafts(engine, monkeypatch)
    complete = sum(len(draft.guesses) for draft in made) > 80
    assert complete == (cached > 50) == (fault != "guesses left")
    assert (max(scratch.shortfall(draft) for draft in made) < 0.05) == (fault in ("", "guesses left"))
    scratch.close()
    engine.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fault", ["", "a lane of the rows"])
def test_a_head_of_wide_rows_guesses_as_from_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """deepseek4: rows of all lanes of its residual stream, beside a cache that is cut by states alone."""
    model = write_deepseek4(tmp_path / "wide.gguf")
    engine = ByHand(model, batch=FEW, mtp_max=3)
    assert engine.runtime.target.n_embd == LANES * WIDTH
    assert engine.runtime.context.states > 0
    scratch = Scratch(engine, heads=1)
    take = HiddenRows.take

    def spoilt(self: HiddenRows, count: int) -> Floats:
        rows = take(self, count)
        rows[:, WIDTH : 2 * WIDTH] = 0
        return rows

    if fault:
        monkeypatch.setattr(HiddenRows, "take", spoilt)
    with pytest.MonkeyPatch.context() as spying:
        made, _ = drafts(engine, spying, MtpHead)
    assert sum(len(draft.guesses) for draft in made) > 80
    assert (max(scratch.shortfall(draft) for draft in made) < 0.05) == (not fault)
    scratch.close()
    engine.close()


@pytest.mark.parametrize("strategy", ["ngram", "mtp:1", "mtp:3"])
def test_text_of_compressed_caches_rolls_back(tmp_path: Path, strategy: str) -> None:
    """Beside each other and one behind the other, texts are what they are from scratch."""
    model = write_deepseek4(tmp_path / "wide.gguf")
    engine = ByHand(model)
    words = engine.tokenize(" w1 w2 w3 w4 w5 w6 w7" * 8)
    for _ in range(2):
        readers = engine.run(*[request([*words, last], strategy, tokens=16) for last in (290, 291)])
        for reader, last in zip(readers, (290, 291), strict=True):
            assert reader.ids == reference(model, [*words, last], 16)
        words = [*words, 290, *readers[0].ids[:9]]
    engine.close()


# --- what is refused, and what it costs ----------------------------------------------------------------


def test_chains_of_other_architectures_are_refused_by_name(
    pair: CalibratedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp would end the process: their graphs assert that there is one head."""
    read = runtime.read_facts
    monkeypatch.setattr(runtime, "read_facts", lambda path: replace(read(path), mtp_layers=3))
    engine = ByHand(pair.target)
    why = engine.runtime.refused["mtp"]
    assert "chains 3 prediction heads, and llama.cpp runs one alone for glm4moe" in why
    assert all(name in why for name in MTP_CHAINS)
    words = prompt(engine, pair, "json")
    with pytest.raises(SpecproxyError, match=r"'mtp' cannot run on this model: .* 3 prediction heads"):
        _ = engine.run(request(words, "mtp"))[0].end
    (reader,) = engine.run(request(words, "ngram", tokens=10))
    assert reader.ids == pair.text_ids("json", 10)
    engine.close()


def test_memory_counts_every_heads_cache(engine: ByHand, chain: CalibratedPair) -> None:
    """Each of the heads' contexts holds the layers of all heads."""
    facts = read_facts(chain.target)
    options = EngineOptions(chain.target, parallel=2)
    needs = memory_needs(facts, None, facts, options, context=256, states=0)
    layer = facts.kv_bytes_per_token // facts.block_count * 2 * 256
    assert needs["mtp"] == chain.mtp_blocks**2 * layer
    engine.run(request(prompt(engine, chain, "json"), "mtp", tokens=40))
    cells = engine.runtime.context.last_position(0) + 1
    for context in engine.runtime.drafters["mtp"].contexts.values():
        held = context.state_bytes(0) / (facts.kv_bytes_per_token // facts.block_count) / cells
        assert held == pytest.approx(chain.mtp_blocks, rel=0.15)
