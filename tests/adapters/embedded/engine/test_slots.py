"""Idle sequences are parked outside the caches, and come back unharmed when a prompt begins like them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.calibrated import CalibratedPair
from tests.support.embedded import ByHand, reference, request
from tests.support.random_model import EMBD, write_random

# isort: split
from specproxy.adapters.embedded.llama import Context

pytestmark = pytest.mark.embedded


@pytest.fixture
def calibrated(pair: CalibratedPair) -> Iterator[ByHand]:
    """An engine on the calibrated pair."""
    engine = ByHand(pair.target, pair.draft)
    yield engine
    engine.close()


@pytest.fixture
def random(noisy: tuple[Path, Path]) -> Iterator[ByHand]:
    """An engine on the random pair, whose text depends on every cell and on its position."""
    engine = ByHand(*noisy)
    yield engine
    engine.close()


def cells(engine: ByHand) -> list[int]:
    """Ids of the sequences that have cells in the target's cache."""
    return [i for i in range(engine.runtime.slots) if engine.runtime.context.last_position(i) >= 0]


def words(engine: ByHand, factor: int) -> list[int]:
    return engine.tokenize("".join(f" w{factor * i % 89}" for i in range(50)))


def prompt(engine: ByHand, pair: CalibratedPair, region: str) -> list[int]:
    return engine.tokenize(
        f"please {'rewrite' if region == 'json' else 'explain'} this " * 4 + pair.marker(region)
    )


def test_only_what_runs_has_cells(random: ByHand) -> None:
    """After three conversations one after the other, the caches hold the last one alone."""
    for factor in (3, 5, 7):
        random.run(request(words(random, factor), "draft", tokens=10))
        assert len(cells(random)) == 1
    assert random.scheduler.parked_bytes > 0


def test_a_conversation_that_goes_on_stays_where_it_is(random: ByHand) -> None:
    """Nothing is copied for the one that was last."""
    text = words(random, 3)
    (first,) = random.run(request(text, "draft", tokens=10))
    (second,) = random.run(request([*text, *first.ids, 300], "draft", tokens=10))
    assert second.end.cached_n >= len(text) + 9
    assert random.scheduler.parked_bytes == 0


@pytest.mark.parametrize("strategy", ["plain", "ngram", "draft", "ngram+draft"])
def test_a_parked_conversation_goes_on_as_if_it_had_stayed(
    random: ByHand, noisy: tuple[Path, Path], strategy: str
) -> None:
    """Its prefix counts as cached, and the text is what the model says when all is computed from scratch."""
    first, other = words(random, 3), words(random, 5)
    (one,) = random.run(request(first, strategy, tokens=12))
    random.run(request(other, strategy, tokens=12))
    again = [*first, *one.ids, 300, 301]
    (back,) = random.run(request(again, strategy, tokens=30))
    assert back.end.cached_n >= len(first) + 11
    assert back.ids == reference(noisy[0], again, 30)


@pytest.mark.parametrize("strategy", ["draft", "mtp", "ngram+mtp"])
def test_drafters_come_back_too(calibrated: ByHand, pair: CalibratedPair, strategy: str) -> None:
    """Parked or not, a second turn reuses as much, says the same, and guesses as well."""

    def second_turn(engine: ByHand, *, between: bool) -> tuple[int, int, list[int]]:
        engine.forget()
        first = prompt(engine, pair, "json")
        (one,) = engine.run(request(first, strategy, tokens=20))
        if between:
            engine.run(request(prompt(engine, pair, "code"), strategy, tokens=20))
        text = [*first, *one.ids, *engine.tokenize("now " + pair.marker("prose", 2))[1:]]
        (two,) = engine.run(request(text, strategy, tokens=40))
        return two.end.cached_n, two.end.draft_n_accepted, two.ids

    assert second_turn(calibrated, between=True) == second_turn(calibrated, between=False)


def test_a_parked_prefix_serves_two_at_once(random: ByHand, noisy: tuple[Path, Path]) -> None:
    """The first takes it out, the second becomes another owner of its cells."""
    system, other = words(random, 3), words(random, 5)
    random.run(request(system, "plain", tokens=1))
    random.run(request(other, "plain", tokens=1))
    prompts = [[*system, 300], [*system, 310]]
    for text, reader in zip(
        prompts, random.run(*[request(text, "draft", tokens=20) for text in prompts]), strict=True
    ):
        assert reader.end.cached_n >= len(system) - 1
        assert reader.ids == reference(noisy[0], text, 20)


@pytest.mark.parametrize("strategy", ["plain", "draft"])
def test_the_beginning_of_what_is_parked_is_copied_beside_it(
    random: ByHand, noisy: tuple[Path, Path], strategy: str
) -> None:
    """A prompt that begins like something parked gets that part; what is parked stays for the next one."""
    system, other = words(random, 3), words(random, 5)
    first = [*system[:20], 300, *words(random, 11)]
    random.run(request(first, strategy, tokens=5))
    random.run(request(other, strategy, tokens=5))
    for last in (310, 320):
        text = [*system[:20], last, 301]
        (reader,) = random.run(request(text, strategy, tokens=12))
        assert reader.end.cached_n == 20
        assert reader.ids == reference(noisy[0], text, 12)
    (whole,) = random.run(request(first, strategy, tokens=12))
    assert whole.end.cached_n == len(first) - 1
    assert whole.ids == reference(noisy[0], first, 12)


def test_a_parked_beginning_keeps_the_head_in_step(calibrated: ByHand, pair: CalibratedPair) -> None:
    """The MTP cache's part is copied too: guesses are as good as from nothing."""
    start, tail = prompt(calibrated, pair, "json")[:-1], calibrated.tokenize(pair.marker("json", 3))[1:]
    long = [*start, *calibrated.tokenize(" and then some more words" * 8 + pair.marker("code"))[1:]]
    (fresh,) = calibrated.run(request([*start, *tail], "mtp", tokens=40))
    calibrated.forget()
    calibrated.run(request(long, "mtp", tokens=5))
    calibrated.run(request(calibrated.tokenize(pair.marker("prose")), "mtp", tokens=5))
    (copied,) = calibrated.run(request([*start, *tail], "mtp", tokens=40))
    assert copied.end.cached_n == len(start) - 1
    assert (copied.ids, copied.end.draft_n_accepted) == (fresh.ids, fresh.end.draft_n_accepted)


def test_a_few_words_of_something_long_are_not_worth_copying(random: ByHand) -> None:
    """They are processed again."""
    long = [*words(random, 3), *words(random, 5), *words(random, 7)]
    random.run(request(long, tokens=1))
    random.run(request(words(random, 11), tokens=1))
    (reader,) = random.run(request([*long[:3], 300, 310], tokens=5))
    assert reader.end.cached_n == 0


def test_parked_memory_is_bounded(random: ByHand) -> None:
    """What was parked first is forgotten first, and processed again when it is wanted."""
    oldest, middle, newest = (words(random, factor) for factor in (3, 5, 7))
    for text in (oldest, middle):
        random.run(request(text, tokens=1))
    random.runtime.cache_bytes = int(1.5 * random.scheduler.parked_bytes)
    random.run(request(newest, tokens=1))  # now `middle` is parked instead of `oldest`
    assert 0 < random.scheduler.parked_bytes <= random.runtime.cache_bytes
    (kept,) = random.run(request(middle, tokens=1))
    (lost,) = random.run(request(oldest, tokens=1))
    assert kept.end.cached_n == len(middle) - 1
    assert lost.end.cached_n <= 2, "no more than all of these prompts begin with"


def test_without_memory_to_park_in_cells_stay(random: ByHand) -> None:
    """The prefix can still be used."""
    random.runtime.cache_bytes = 0
    first = words(random, 3)
    random.run(request(first, tokens=1))
    random.run(request(words(random, 5), tokens=1))
    assert len(cells(random)) == 2
    (again,) = random.run(request(first, tokens=1))
    assert again.end.cached_n == len(first) - 1


@pytest.mark.parametrize("cache", ["target", "draft"])
def test_what_does_not_come_back_is_processed_again(
    random: ByHand, noisy: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    """A cache that takes its content back only in part is no reason for other text."""
    first = words(random, 3)
    random.run(request(first, "draft", tokens=5))
    random.run(request(words(random, 5), "draft", tokens=5))
    restore = Context.restore
    faulty = random.runtime.context if cache == "target" else random.runtime.drafters["draft"].context
    monkeypatch.setattr(
        Context, "restore", lambda self, seq, state: self is not faulty and restore(self, seq, state)
    )
    (again,) = random.run(request(first, "draft", tokens=20))
    assert again.ids == reference(noisy[0], first, 20)
    assert again.end.cached_n == (0 if cache == "target" else len(first) - 1)


@pytest.mark.parametrize("fault", ["another sequence's cells", "cells are zeroed"])
def test_cells_that_come_back_wrong_show(
    random: ByHand, noisy: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The tests above would see it."""
    first, other = words(random, 3), words(random, 5)
    random.run(request(first, tokens=1))
    random.run(request(other, tokens=1))
    restore = Context.restore

    def faulty(self: Context, seq: int, state: Any) -> bool:
        if fault == "cells are zeroed":
            state = state.copy()
            state[-EMBD * 20 :] = 0  # values of the last positions in the last layer
            assert restore(self, seq, state)
            return True
        random.runtime.context.share(0 if seq else 1, seq, len(first) - 1)
        return True

    monkeypatch.setattr(Context, "restore", faulty)
    (again,) = random.run(request(first, tokens=20))
    assert again.ids != reference(noisy[0], first, 20)


@pytest.mark.parametrize("fault", ["", "window unknown", "overwritten cells"])
def test_behind_a_window_nothing_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Layers that look back 24 tokens keep no more of a text that is parked, or whose cells others took.

    Prompts begin like each other for a while. Each gets the text that it gets with empty caches.
    """
    model = write_random(tmp_path / "windowed.gguf", arch="step35", mtp_blocks=1, window=24)
    engine, fresh = ByHand(model), ByHand(model)
    assert engine.runtime.target.window == 24
    if fault == "window unknown":
        engine.runtime.target.window = 0
    elif fault:
        monkeypatch.setattr(Context, "covers", lambda *_: True)
    draw = Random(1)
    bases = [[draw.randrange(260, 600) for _ in range(150)] for _ in range(3)]
    reused = wrong = 0
    for _ in range(30):
        begun = draw.choice(bases)[: draw.choice([10, 40, 90, 149, 150])]
        words = [*begun, *(draw.randrange(260, 600) for _ in range(draw.choice([1, 3, 20])))]
        asked = [request([*words, last], draw.choice(["plain", "mtp:2"]), tokens=6) for last in (300, 301)]
        for reader, each in zip(engine.run(*asked), asked, strict=True):
            reused += reader.end.cached_n
            fresh.forget()
            wrong += reader.ids != fresh.run(each)[0].ids
    assert reused > 1000
    assert wrong > 5 if fault else wrong < 3, wrong  # of 60; two tokens may be nearly even
    engine.close()
    fresh.close()
