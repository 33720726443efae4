"""Prediction heads in a file of their own: one that reads the target's cache, and ones that keep theirs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.assistant import copy_model, split_model, write_assistant, write_noisy_assistant
from tests.support.calibrated import CalibratedPair, write_pair
from tests.support.embedded import ByHand, request
from tests.support.heads import KNOWN, counts, known, prompt

# isort: split
from llama_cpp import llama_cpp

from specproxy.adapters.embedded import runtime
from specproxy.adapters.embedded.batch import Batch, Floats
from specproxy.adapters.embedded.drafters import ChainedDrafter
from specproxy.adapters.embedded.facts import MTP_GRAPHS
from specproxy.adapters.embedded.llama import Context, ContextParams, Model, ModelParams, NoRoomError
from specproxy.adapters.embedded.mtp_assistant import MtpAssistant
from specproxy.adapters.embedded.sequence import Sequence
from specproxy.adapters.embedded.types import Sampling
from specproxy.adapters.gguf_facts import MTP_ARCHITECTURES, read_facts
from specproxy.errors import PairError

pytestmark = pytest.mark.embedded


@pytest.fixture(scope="module")
def assisted(tmp_path_factory: pytest.TempPathFactory) -> CalibratedPair:
    """A gemma4 target and its assistant."""
    return write_assistant(tmp_path_factory.mktemp("assisted"))


@pytest.fixture
def engine(assisted: CalibratedPair) -> Iterator[ByHand]:
    """An engine on them."""
    engine = ByHand(assisted.target, assisted.draft)
    yield engine
    engine.close()


@pytest.mark.parametrize("length", [1, 2, 3, 6])
def test_an_assistant_accepts_its_known_share(engine: ByHand, assisted: CalibratedPair, length: int) -> None:
    """It goes on from its own rows as far as it is asked to."""
    assert "prediction head" in engine.runtime.refused["draft"]
    for _ in range(2):
        assert counts(engine, assisted, length) == known(assisted, length)
        engine.forget()


@pytest.mark.parametrize(
    "fault", ["row of another token", "the target's row again", "no cache", "another's cache"]
)
def test_a_wrong_row_or_cache_shows(
    engine: ByHand, assisted: CalibratedPair, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The text stays the same, but guesses that were right are wrong now."""
    add = MtpAssistant._add
    first: dict[int, Floats] = {}

    def planted(self: MtpAssistant, sequence: Sequence, token: int, row: Floats, outputs: int) -> int:
        slot = sequence.slot
        if fault == "row of another token":
            row = np.roll(row, 1, axis=1)
        elif fault == "the target's row again":
            row = first.setdefault(slot.n, row.copy())
            row = row * 0 if token == sequence.tokens[-1] else row
        else:
            seq = engine.runtime.slots - 1 if fault == "no cache" else (slot.id + 1) % 4
            self.batch.add([token], slot.n, seq, outputs=outputs, rows=row)
            return self.batch.n - 1
        return add(self, sequence, token, row, outputs)

    monkeypatch.setattr(MtpAssistant, "_add", planted)
    seen, right = counts(engine, assisted, 3), known(assisted, 3)
    assert sum(accepted for _, accepted in seen) < sum(accepted for _, accepted in right)


def test_every_guess_has_the_newest_tokens_position(
    engine: ByHand, assisted: CalibratedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one llama.cpp refuses, so that drafting ends; the request goes on."""
    add = MtpAssistant._add

    def further(self: MtpAssistant, sequence: Sequence, token: int, row: Floats, outputs: int) -> int:
        sequence.slot.n += len(sequence.draft)
        at = add(self, sequence, token, row, outputs)
        sequence.slot.n -= len(sequence.draft)
        return at

    monkeypatch.setattr(MtpAssistant, "_add", further)
    (reader,) = engine.run(request(prompt(engine, assisted, "json"), "mtp", tokens=30))
    assert reader.ids == assisted.text_ids("json", 30)
    assert reader.end.report is not None
    assert "mtp: llama_decode returned -1" in reader.end.report.stopped_drafting


def test_a_prefix_is_reused_as_far_as_the_target_has_it(engine: ByHand, assisted: CalibratedPair) -> None:
    """No head's cache limits it: a turn of plain decoding, parked meanwhile, is gone on from in two ways."""
    words = prompt(engine, assisted, "json")
    engine.run(request(words, "plain", tokens=60))
    engine.run(request(prompt(engine, assisted, "code"), "mtp", tokens=20))
    assert engine.scheduler._slots.parked_bytes > 0
    again = [*words, *assisted.text_ids("json", 40)]
    for reader in engine.run(request(again, "mtp", tokens=40), request(again, "mtp", tokens=40)):
        assert reader.end.cached_n == len(again) - 1
        assert reader.ids == assisted.text_ids("json", 80)[40:]
        assert reader.end.draft_n_accepted > 20


@pytest.mark.parametrize("at", [1, 2])
def test_a_full_cache_costs_a_draft_not_the_drafting(
    engine: ByHand, assisted: CalibratedPair, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """llama.cpp finds no room for the first guess, or for the second; the next step drafts again."""
    drafter, decode = engine.runtime.drafters["mtp"], Context.decode
    seen = 0

    def full(self: Context, batch: Batch) -> None:
        nonlocal seen
        seen += self is drafter.context
        if self is drafter.context and seen == at:
            raise NoRoomError("the KV cache is full", 1)
        decode(self, batch)

    monkeypatch.setattr(Context, "decode", full)
    (reader,) = engine.run(request(prompt(engine, assisted, "json"), "mtp:3", tokens=60))
    assert reader.ids == assisted.text_ids("json", 60)
    assert reader.end.report is not None
    assert reader.end.report.stopped_drafting == ""
    assert reader.end.draft_n_accepted > 30


def test_a_seeded_text_is_the_same_with_it(engine: ByHand, assisted: CalibratedPair) -> None:
    words = prompt(engine, assisted, "creative")
    sampling = Sampling(temperature=1.0, seed=3)
    texts = [
        engine.run(request(words, strategy, tokens=40, sampling=sampling))[0].ids
        for strategy in ("plain", "mtp:3")
    ]
    assert texts[0] == texts[1]


def test_auto_and_copies_go_on_with_it(engine: ByHand, assisted: CalibratedPair) -> None:
    """Steps without it leave nothing behind: the newest row is always at hand."""
    for strategy in ("auto", "ngram+mtp"):
        readers = engine.run(*[request(prompt(engine, assisted, r), strategy, tokens=200) for r in KNOWN])
        assert [reader.ids for reader in readers] == [assisted.text_ids(region, 200) for region in KNOWN]
        assert readers[0].end.report is not None
        drafters = {each.drafter: each for each in readers[0].end.report.drafters}
        assert drafters["mtp"].accepted > 0.8 * drafters["mtp"].drafted > 0


def test_memory_counts_its_weights_and_no_cache(engine: ByHand, assisted: CalibratedPair) -> None:
    facts = read_facts(assisted.draft)
    assert engine.runtime.memory["mtp"] == facts.weight_bytes
    assert facts.kv_bytes_per_token == 0


def test_an_assistant_of_another_target_is_refused(assisted: CalibratedPair, pair: CalibratedPair) -> None:
    """llama.cpp would read a cache of another kind."""
    with pytest.raises(
        PairError, match=r"made for a target of the architecture gemma4; target\.gguf is glm4moe"
    ):
        ByHand(pair.target, assisted.draft)


@pytest.mark.parametrize("architecture", sorted(MTP_ARCHITECTURES - MTP_GRAPHS))
def test_an_architecture_without_a_graph_here_is_refused_by_name(
    pair: CalibratedPair, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    read = runtime.read_facts
    monkeypatch.setattr(runtime, "read_facts", lambda path: replace(read(path), architecture=architecture))
    engine = ByHand(pair.target)
    assert engine.runtime.refused["mtp"].endswith(f"has no multi-token prediction for {architecture}")
    assert "mtp" not in engine.runtime.memory
    engine.close()


def test_the_graphs_are_those_of_the_library() -> None:
    """The names of their constructors are in it; a new version may bring others."""
    (library,) = (path for path in map(Path, llama_cpp._lib._name.split("\n")) if path.exists())
    names = set(re.findall(rb"llama_model_([a-z0-9_]+?)9graph_mtp", library.read_bytes()))
    if not names:
        pytest.skip("this build of the library has no names in it")
    plain = {name.decode().replace("_", "") for name in names}
    assert plain == {re.sub("[-_]", "", architecture) for architecture in MTP_GRAPHS}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attention.head_count_kv": 3}, "with 3 KV heads in its last layer; .* is 1"),
        ({"attention.key_length": 32}, "with keys of 32; .* is 64"),
        ({"attention.key_length_swa": 32}, "with keys of 32 in its windows; .* is 64"),
        ({"embedding_length_out": 256}, "that is 256 wide; .* is 128"),
    ],
)
def test_an_assistant_that_cannot_read_the_cache_is_refused(
    assisted: CalibratedPair, tmp_path: Path, change: dict[str, float], named: str
) -> None:
    """llama.cpp would end the process at an assertion."""
    other = tmp_path / "other.gguf"
    copy_model(assisted.draft, other, changes=change)
    with pytest.raises(PairError, match=f"other.gguf is made for a target {named}"):
        ByHand(assisted.target, other)


def test_a_head_that_cannot_be_loaded_costs_the_head_alone(assisted: CalibratedPair, tmp_path: Path) -> None:
    """The message names the file and what llama.cpp misses; the others run."""
    damaged = tmp_path / "damaged.gguf"
    copy_model(assisted.draft, damaged, without="nextn.post_projection.weight")
    engine = ByHand(assisted.target, damaged)
    assert "damaged.gguf cannot be loaded" in engine.runtime.refused["mtp"]
    assert "nextn.post_projection" in engine.runtime.refused["mtp"]
    (reader,) = engine.run(request(prompt(engine, assisted, "edit"), "ngram", tokens=60))
    assert reader.ids == assisted.text_ids("edit", 60)
    engine.close()


# --- against an assistant computed from scratch --------------------------------------------------------


@dataclass
class Draft:
    """What was known when a draft was made, and the draft."""

    tokens: list[int]
    guesses: list[int]


@pytest.mark.parametrize("fault", ["", "row", "sequence"])
def test_every_guess_is_the_assistants_own(
    assisted: CalibratedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """With random weights, a guess depends on the whole text behind it, positions and windows included.

    Another sequence, of another length, llama.cpp refuses, so that drafting ends.
    """
    noisy = write_noisy_assistant(assisted, tmp_path)
    engine = ByHand(noisy.target, noisy.draft, batch=32)
    made: list[Draft] = []
    propose, add = ChainedDrafter._propose, MtpAssistant._add

    def spy(self: ChainedDrafter, sequences: list[Sequence]) -> None:
        propose(self, sequences)
        made.extend(Draft(list(each.tokens), list(each.draft)) for each in sequences)

    def planted(self: MtpAssistant, sequence: Sequence, token: int, row: Floats, outputs: int) -> int:
        if fault == "sequence":
            sequence.slot.id ^= 1
        at = add(self, sequence, token, row * (0.5 if fault == "row" else 1), outputs)
        if fault == "sequence":
            sequence.slot.id ^= 1
        return at

    monkeypatch.setattr(ChainedDrafter, "_propose", spy)
    monkeypatch.setattr(MtpAssistant, "_add", planted)
    turns = [engine.tokenize(text) for text in (" give a list of words" * 12, " write some code")]
    for _ in range(2):
        readers = engine.run(*[request(words, "mtp:3", tokens=14) for words in turns])
        turns = [[*words, *r.ids[:9], 290] for words, r in zip(turns, readers, strict=True)]
    engine.run(*[request([*turns[0], other], "mtp:3", tokens=8) for other in (291, 292)])
    assert (sum(len(draft.guesses) for draft in made) > 80) == (fault != "sequence")
    if fault != "sequence":
        assert (_shortfalls(noisy, made) < 0.05) == (not fault)
    engine.close()


def _shortfalls(noisy: CalibratedPair, made: list[Draft]) -> float:
    """How far guesses' logits are below those of the guesses that come out with empty caches, at most."""
    target, draft = Model(noisy.target, ModelParams()), Model(noisy.draft, ModelParams(mtp=True))
    context = Context(target, ContextParams(512, sequences=1, outputs=512, threads=1))
    context.want_hidden(True)
    head = Context(draft, ContextParams(512, sequences=1, outputs=1, threads=1, mtp=True, other=context))
    head.want_hidden(True, of_outputs=True)
    whole, single = Batch(512), Batch(1, target.n_embd)
    worst = 0.0
    for each in made:
        *before, token = each.tokens
        context.clear()
        whole.clear()
        whole.add(before, 0, 0, outputs=1)
        context.decode(whole)
        row = context.hidden(len(before))[-1:].copy()
        for guess in each.guesses:
            single.clear()
            single.add([token], len(before), 0, outputs=1, rows=row)
            head.decode(single)
            logits = head.logits(1)[0]
            worst = max(worst, float(logits.max() - logits[guess]))
            token, row = guess, head.hidden(1).copy()
    for thing in (head, context, draft, target):
        thing.close()
    return worst


# --- heads that keep a cache ---------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["glm4moe", "step35"])
def parted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CalibratedPair:
    """A target whose one head is in a file of its own, or its two."""
    folder = tmp_path_factory.mktemp("parted")
    blocks = 2 if request.param == "step35" else 1
    whole = write_pair(folder / "whole", arch=request.param, mtp_blocks=blocks)
    parted = CalibratedPair(folder / "trunk.gguf", folder / "head.gguf", mtp_blocks=blocks)
    split_model(whole.target, parted.target, parted.draft)
    return parted


def test_heads_in_a_file_of_their_own_accept_their_known_share(parted: CalibratedPair) -> None:
    """With or without heads in the target's file too: those that were given run."""
    engine = ByHand(parted.target, parted.draft)
    length = 3 if parted.mtp_blocks == 1 else 2
    assert engine.runtime.target.mtp_heads == 0 or not read_facts(parted.target).mtp_layers
    for _ in range(2):
        assert counts(engine, parted, 3) == known(parted, length)
        engine.forget()
    head = read_facts(parted.draft)
    assert (head.sidecar_type, head.mtp_layers) == ("draft-mtp", parted.mtp_blocks)
    assert engine.runtime.memory["mtp"] > head.weight_bytes
    engine.close()


def test_heads_of_another_architecture_are_refused(parted: CalibratedPair, assisted: CalibratedPair) -> None:
    with pytest.raises(
        PairError, match=r"head\.gguf is made for a target of the architecture \w+; .* is gemma4"
    ):
        ByHand(assisted.target, parted.draft)
