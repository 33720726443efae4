"""Text and counters of the engine, whatever shares its steps. The models' texts are known beforehand."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import embedded
from tests.support.calibrated import CalibratedPair
from tests.support.embedded import GREEDY, ByHand, Reader, reference, request
from tests.support.random_model import write_random

# isort: split
from specproxy.adapters.embedded import drafters, runtime
from specproxy.adapters.embedded.batch import Batch
from specproxy.adapters.embedded.controller import PLAIN
from specproxy.adapters.embedded.llama import Context, ContextParams
from specproxy.adapters.embedded.scheduler import FEW_ROWS, MOST_ROWS
from specproxy.adapters.embedded.types import Sampling, TokenEvent
from specproxy.errors import RequestError, SpecproxyError

pytestmark = pytest.mark.embedded

STRATEGIES = ("plain", "ngram", "draft", "mtp", "ngram+draft", "ngram+mtp", "auto")
KNOWN = ("json", "code", "edit", "prose")
WARM = Sampling(temperature=1.0, seed=11)


@pytest.fixture(scope="module")
def calibrated(pair: CalibratedPair) -> Iterator[ByHand]:
    """An engine on the calibrated pair."""
    engine = ByHand(pair.target, pair.draft)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def random(noisy: tuple[Path, Path]) -> Iterator[ByHand]:
    """An engine on the random pair."""
    engine = ByHand(*noisy)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def empty(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test starts with empty caches."""
    yield
    for name in ("calibrated", "random"):
        if name in request.fixturenames:
            engine: ByHand = request.getfixturevalue(name)
            engine.scheduler.fail_all(SpecproxyError("test over"))
            engine.forget()


def prompt(engine: ByHand, pair: CalibratedPair, region: str, start: int = 0) -> list[int]:
    return engine.tokenize("please rewrite this " + pair.marker(region, start))


# --- what is said, and how much of it was guessed ------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("region", KNOWN)
def test_text_is_the_models_own(calibrated: ByHand, pair: CalibratedPair, region: str, strategy: str) -> None:
    (reader,) = calibrated.run(request(prompt(calibrated, pair, region), strategy, tokens=60))
    assert reader.text == pair.text(region, 60)
    assert reader.ids == pair.text_ids(region, 60)
    assert (reader.end.reason, reader.end.predicted_n) == ("length", 60)


@pytest.mark.parametrize("strategy", ["draft", "mtp"])
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("region", KNOWN)
def test_acceptance_is_the_known_one(
    calibrated: ByHand, pair: CalibratedPair, region: str, strategy: str, length: int
) -> None:
    (reader,) = calibrated.run(request(prompt(calibrated, pair, region), f"{strategy}:{length}", tokens=80))
    expected = pair.expect(region, strategy, 80, n_max=length)
    assert (reader.end.draft_n, reader.end.draft_n_accepted) == (expected.drafted, expected.accepted)


@pytest.mark.parametrize("model", ["pair", "sparing"])
def test_which_rows_a_head_makes_is_found_out(model: str, request: pytest.FixtureRequest) -> None:
    """Of all tokens, or of those with logits: taken for the other kind, the process ends or guesses are bad."""
    known: CalibratedPair = request.getfixturevalue(model)
    engine = ByHand(known.target)
    work = [embedded.request(prompt(engine, known, region), "mtp:3", tokens=80) for region in KNOWN]
    readers = engine.run(*work)
    expected = [known.expect(region, "mtp", 80) for region in KNOWN]
    assert [(r.end.draft_n, r.end.draft_n_accepted) for r in readers] == [
        (e.drafted, e.accepted) for e in expected
    ]
    assert [r.ids for r in readers] == [known.text_ids(region, 80) for region in KNOWN]
    engine.close()


def test_mtp_accepts_the_known_count_right_behind_a_prompt(calibrated: ByHand, pair: CalibratedPair) -> None:
    """The first guess's decode holds the prompt; the second goes on from the hidden row of its last token.

    With another token's row 13 of these 128 texts have fewer right guesses: their second word has a decoy.
    """
    for region, start in itertools.product(KNOWN, range(32)):
        calibrated.forget()
        (reader,) = calibrated.run(request(prompt(calibrated, pair, region, start), "mtp:3", tokens=12))
        expected = pair.expect(region, "mtp", 12, start=start, n_max=3)
        assert (reader.end.draft_n, reader.end.draft_n_accepted) == (expected.drafted, expected.accepted)


def test_the_head_goes_on_from_its_own_row_of_the_token_before(
    calibrated: ByHand, pair: CalibratedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else was in the decode: a prompt, tokens to be caught up with, another sequence."""
    head = calibrated.runtime.drafters["mtp"].context
    fed: dict[int, list[tuple[int, int, Any]]] = {0: [], 1: []}  # (token, position, row) by sequence
    decode = Context.decode

    def spy(self: Context, batch: Batch) -> None:
        if self is head:
            assert batch._rows is not None
            for i in range(batch.n):
                fed[int(batch._seq[i])].append(
                    (int(batch._token[i]), int(batch._pos[i]), batch._rows[i].copy())
                )
        decode(self, batch)

    monkeypatch.setattr(Context, "decode", spy)
    work = [request(prompt(calibrated, pair, region), "mtp:3", tokens=25) for region in ("json", "code")]
    calibrated.run(*work)
    monkeypatch.undo()
    alone = Context(calibrated.runtime.target, ContextParams(512, sequences=1, outputs=1, mtp=True))
    alone.want_hidden(True)
    batch = Batch(1, calibrated.runtime.target.n_embd)
    chained = 0
    for given in fed.values():
        alone.clear()
        own: dict[int, Any] = {}  # the head's own rows, each token decoded by itself
        for token, position, row in given:
            if position - 1 in own and not np.array_equal(row, rows_of_target(given, position)):
                np.testing.assert_allclose(row, own[position - 1], rtol=0.02, atol=0.02)
                chained += 1
            alone.drop(0, position)
            batch.clear()
            batch.add([token], position, 0, outputs=1, rows=row[None])
            alone.decode(batch)
            own[position] = alone.hidden(1)[0].copy()
    alone.close()
    assert chained > 20


def rows_of_target(given: list[tuple[int, int, Any]], position: int) -> Any:
    """The last row that was fed at a position: the target's, since what was chained is made again from it."""
    return next(row for _, at, row in reversed(given) if at == position)


def test_ngram_drafts_nothing_before_the_text_repeats_and_all_of_it_after(
    calibrated: ByHand, pair: CalibratedPair
) -> None:
    (reader,) = calibrated.run(request(prompt(calibrated, pair, "edit"), "ngram", tokens=60))
    period = 12
    # 12 words and 3 more until a place is found; the last token of each step comes for free
    assert reader.end.draft_n == reader.end.draft_n_accepted
    assert reader.end.draft_n >= (60 - period - 3) * 8 // 9 - 1


def test_report_adds_up(calibrated: ByHand, pair: CalibratedPair) -> None:
    (reader,) = calibrated.run(request(prompt(calibrated, pair, "edit"), "ngram+mtp", tokens=60))
    end, report = reader.end, reader.end.report
    assert report is not None
    assert sum(d.drafted for d in report.drafters) == end.draft_n
    assert sum(d.accepted for d in report.drafters) == end.draft_n_accepted
    assert sum(steps for steps, _ in report.widths.values()) == report.steps
    assert report.steps + end.draft_n_accepted + 1 == end.predicted_n
    for drafter in report.drafters:
        assert sum(hit for hit, _ in drafter.by_position) == drafter.accepted
    assert report.output_ids == tuple(pair.text_ids("edit", 60))


@pytest.mark.parametrize("strategy", ["plain", "ngram"])
def test_steps_that_nobody_plans_by_are_measured_now_and_then(
    calibrated: ByHand, pair: CalibratedPair, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """The first and each eighth behind it, where there is no drafter, each fourth where there is no draft, and
    all with a draft; what is reported counts all."""
    widths: list[int] = []
    monkeypatch.setattr(calibrated.scheduler.costs, "decoded", lambda width, *_: widths.append(width))
    work = request(prompt(calibrated, pair, "creative"), strategy, tokens=40, sampling=WARM)
    (reader,) = calibrated.run(work)
    assert reader.end.report is not None
    assert reader.end.report.steps + reader.end.draft_n_accepted == 39
    if strategy == "plain":
        assert widths == [1] * 5
    else:
        steps = {width: count for width, (count, _) in reader.end.report.widths.items()}
        plain = steps.pop(1)
        assert len(widths) - widths.count(1) == sum(steps.values())
        assert plain / 8 <= widths.count(1) <= plain / 2


@pytest.mark.parametrize("strategy", ["plain", "draft", "mtp", "ngram+mtp", "auto"])
def test_no_event_waits_for_a_decode(
    calibrated: ByHand, pair: CalibratedPair, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """Events are delivered behind each step, and before one ends with bringing the MTP cache in step."""
    reader, delivered, decode = Reader(), 0, Context.decode
    late = []

    def deliver() -> None:
        nonlocal delivered
        delivered = len(reader.events)

    def spy(self: Context, batch: Batch) -> None:
        late.append(len(reader.events) - delivered)
        decode(self, batch)

    monkeypatch.setattr(calibrated.scheduler, "_deliver", deliver)
    monkeypatch.setattr(Context, "decode", spy)
    calibrated.scheduler.submit(request(prompt(calibrated, pair, "edit"), strategy, tokens=60), reader)
    while calibrated.scheduler.step():
        deliver()
    assert reader.text == pair.text("edit", 60)
    assert late == [0] * len(late)
    assert len(late) >= 10


@pytest.mark.parametrize("strategy", ["plain", "ngram", "draft", "ngram+draft"])
@pytest.mark.parametrize("batch", [512, 16])
def test_random_text_equals_text_computed_from_scratch(
    noisy: tuple[Path, Path], strategy: str, batch: int
) -> None:
    engine = ByHand(*noisy, batch=batch)
    words = engine.tokenize("".join(f" w{i * i % 97}" for i in range(40)))
    expected = reference(noisy[0], words, 40)
    for strategies in ([strategy], [strategy] * 3, ["plain", strategy, "draft"]):
        for reader in engine.run(*[request(words, s, tokens=40) for s in strategies]):
            assert reader.ids == expected
    engine.close()


# --- sharing steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::5])
def test_text_does_not_depend_on_company_or_order(
    calibrated: ByHand, pair: CalibratedPair, order: tuple[int, ...]
) -> None:
    work = [("json", "mtp"), ("code", "draft"), ("edit", "ngram"), ("prose", "plain")]
    readers: dict[int, Reader] = {}
    for i in order:  # each comes while those before it are under way
        region, strategy = work[i]
        readers[i] = calibrated.submit(request(prompt(calibrated, pair, region, i), strategy, tokens=50))
        for _ in range(3):
            calibrated.scheduler.step()
    calibrated.finish()
    for i, (region, strategy) in enumerate(work):
        assert readers[i].ids == pair.text_ids(region, 50, i)
        if strategy in ("mtp", "draft"):
            expected = pair.expect(region, strategy, 50, start=i)
            assert readers[i].end.draft_n_accepted == expected.accepted


def test_more_requests_than_sequences_wait_their_turn(calibrated: ByHand, pair: CalibratedPair) -> None:
    kinds = [(region, strategy) for region in KNOWN for strategy in ("plain", "mtp", "draft")]
    work = [request(prompt(calibrated, pair, region, i), s, tokens=25) for i, (region, s) in enumerate(kinds)]
    for i, reader in enumerate(calibrated.run(*work)):
        assert reader.ids == pair.text_ids(kinds[i][0], 25, i)


def test_a_long_prompt_does_not_stop_others(pair: CalibratedPair) -> None:
    engine = ByHand(pair.target, pair.draft, context=2048, prefill_share=32)
    first = engine.submit(request(prompt(engine, pair, "json"), "mtp", tokens=200))
    engine.scheduler.step()
    long = engine.tokenize("the " * 600 + pair.marker("code"))
    second = engine.submit(request(long, "draft", tokens=20))
    while not second.events:
        before = len(first.ids)
        assert engine.scheduler.step()
        assert len(first.ids) > before or first.ended, "every step gives the other sequence tokens"
    engine.finish()
    assert second.ids == pair.text_ids("code", 20)
    assert first.ids == pair.text_ids("json", 200)
    engine.close()


def test_a_reader_that_is_behind_pauses_only_its_own_sequence(calibrated: ByHand, pair: CalibratedPair) -> None:
    slow = calibrated.submit(request(prompt(calibrated, pair, "json"), "mtp", tokens=40))
    fast = calibrated.submit(request(prompt(calibrated, pair, "code"), "draft", tokens=40))
    calibrated.scheduler.step()
    slow.full, seen = True, len(slow.ids)
    while not fast.ended:
        assert calibrated.scheduler.step()
    assert len(slow.ids) == seen
    assert not calibrated.scheduler.step(), "nothing can go on"
    slow.full = False
    calibrated.finish()
    assert slow.ids == pair.text_ids("json", 40)


# --- prefix cache ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_second_turn_reuses_the_first(calibrated: ByHand, pair: CalibratedPair, strategy: str) -> None:
    first = prompt(calibrated, pair, "json")
    (reader,) = calibrated.run(request(first, strategy, tokens=30))
    second = [*first, *reader.ids, *calibrated.tokenize("and now " + pair.marker("code", 3))[1:]]
    (again,) = calibrated.run(request(second, strategy, tokens=60))
    calibrated.forget()
    (fresh,) = calibrated.run(request(second, strategy, tokens=60))
    assert fresh.end.cached_n == 0
    assert again.ids == fresh.ids
    # the last step reached the caches of no drafter; auto's last steps may all have been plain
    assert again.end.cached_n >= len(first) + 30 - (FEW_ROWS + 1 if strategy == "auto" else 6)
    assert again.end.cached_n + again.end.prompt_n == len(second)
    if strategy != "auto":  # which goes by the time that steps take
        assert again.end.draft_n_accepted == fresh.end.draft_n_accepted


def test_a_head_that_may_not_pay_is_given_up(pair: CalibratedPair) -> None:
    """Its rows wait at first; the text is the same, the reply says why, and the next turn reuses it all."""
    engine = ByHand(pair.target, pair.draft, context=2048, parallel=1)
    first = prompt(engine, pair, "prose")
    reader = engine.submit(request(first, "auto", tokens=MOST_ROWS + 60))
    (sequence,) = engine.scheduler._waiting
    sequence.controller.keeps = lambda drafter: drafter != "mtp"  # type: ignore[method-assign]  # as on a fast model
    sequence.controller.plan = lambda view: PLAIN  # type: ignore[method-assign]  # so that all rows wait
    engine.finish()
    assert reader.ids == pair.text_ids("prose", MOST_ROWS + 60)
    assert reader.end.report is not None
    assert "mtp: keeping it in step takes more than it may gain" in reader.end.report.stopped_drafting
    second = [*first, *reader.ids, *engine.tokenize("and now " + pair.marker("code", 3))[1:]]
    (again,) = engine.run(request(second, "auto", tokens=8))
    assert again.end.cached_n >= len(first) + MOST_ROWS + 60 - 2
    engine.close()


def test_prefix_is_shared_with_a_sequence_that_runs(random: ByHand, noisy: tuple[Path, Path]) -> None:
    system = random.tokenize("".join(f" w{i}" for i in range(60)))
    one, two = [*system, 300, 301], [*system, 310, 311]
    running = random.submit(request(one, "draft", tokens=40))
    for _ in range(5):
        random.scheduler.step()
    other = random.submit(request(two, "draft", tokens=40))
    random.finish()
    assert other.end.cached_n == len(system)
    assert running.ids == reference(noisy[0], one, 40)
    assert other.ids == reference(noisy[0], two, 40)


@pytest.mark.parametrize("strategy", ["plain", "mtp"])
def test_the_same_prompt_again_is_processed_but_for_its_end(
    calibrated: ByHand, pair: CalibratedPair, strategy: str
) -> None:
    words = prompt(calibrated, pair, "json")
    calibrated.run(request(words, strategy, tokens=5))
    (again,) = calibrated.run(request(words, strategy, tokens=40))
    assert again.end.prompt_n <= 2
    assert again.ids == pair.text_ids("json", 40)


def test_a_full_cache_forgets_idle_sequences_first(pair: CalibratedPair) -> None:
    engine = ByHand(pair.target, context=256, parallel=1, cached=3)
    engine.runtime.cache_bytes = 0  # what is idle stays in the cache: there is no memory to park it in
    for i in range(6):
        marker = engine.vocabulary.tokenize(pair.marker("json", i), add_special=False)
        (reader,) = engine.run(request([*[300 + i] * 180, *marker], "ngram", tokens=30))
        assert reader.ids == pair.text_ids("json", 30, i)
        assert reader.end.cached_n == 0
    engine.close()


# --- planted faults: each has to show ------------------------------------------------------------------------


def check_all(engine: ByHand, pair: CalibratedPair, noisy: tuple[Path, Path] | None = None) -> None:
    """What the tests above look at, in short."""
    if noisy is not None:
        words = engine.tokenize(" w1 w5 w9 w77 w12")
        (reader,) = engine.run(request(words, "draft", tokens=30))
        assert reader.ids == reference(noisy[0], words, 30)
        assert reader.end.draft_n_accepted > 5
        return
    # behind the json text's first word from this start on stands a decoy
    work = [("json", "mtp", 2), ("code", "draft", 0), ("edit", "ngram", 0), ("prose", "plain", 0)]
    readers = engine.run(
        *[request(prompt(engine, pair, region, start), strategy, tokens=50) for region, strategy, start in work]
    )
    for (region, strategy, start), reader in zip(work, readers, strict=True):
        assert reader.ids == pair.text_ids(region, 50, start)
        if strategy in ("mtp", "draft"):
            expected = pair.expect(region, strategy, 50, start=start)
            assert (reader.end.draft_n, reader.end.draft_n_accepted) == (expected.drafted, expected.accepted)


def caught(engine: ByHand, pair: CalibratedPair, noisy: tuple[Path, Path] | None = None) -> None:
    with pytest.raises((AssertionError, SpecproxyError)):
        check_all(engine, pair, noisy)


def test_without_a_fault_nothing_shows(
    calibrated: ByHand, random: ByHand, pair: CalibratedPair, noisy: tuple[Path, Path]
) -> None:
    check_all(calibrated, pair)
    check_all(random, pair, noisy)


@pytest.mark.parametrize("shift", ["one position is left out", "positions turn round"])
def test_wrong_positions_show(
    random: ByHand,
    pair: CalibratedPair,
    noisy: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    shift: str,
) -> None:
    add = Batch.add

    def faulty(self: Batch, tokens: list[int], pos: int, seq: int, **more: Any) -> tuple[int, int]:
        at = add(self, tokens, pos + (pos > 6) * (shift == "one position is left out"), seq, **more)
        if shift == "positions turn round" and len(tokens) > 2:
            where = self._pos[at[0] : at[0] + len(tokens)]
            where[:] = where[::-1].copy()
        return at

    monkeypatch.setattr(Batch, "add", faulty)
    caught(random, pair, noisy)


@pytest.mark.parametrize("who", ["target", "draft", "mtp"])
def test_rejected_drafts_left_in_a_cache_show(
    calibrated: ByHand, pair: CalibratedPair, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    runtime, drop = calibrated.runtime, Context.drop
    faulty = runtime.context if who == "target" else runtime.drafters[who].context
    monkeypatch.setattr(Context, "drop", lambda self, seq, start: self is faulty or drop(self, seq, start))
    caught(calibrated, pair)


@pytest.mark.parametrize("fault", ["zero", "one late", "of another sequence", "own rows of the head"])
def test_wrong_hidden_rows_show(
    calibrated: ByHand, pair: CalibratedPair, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    hidden, target = Context.hidden, calibrated.runtime.context

    def faulty(self: Context, rows: int) -> Any:
        right = hidden(self, rows)
        if (self is target) == (fault == "own rows of the head"):
            return right
        if fault == "one late":
            return np.roll(right, 1, axis=0)
        return np.zeros_like(right) if fault != "of another sequence" else right[::-1]

    monkeypatch.setattr(Context, "hidden", faulty)
    caught(calibrated, pair)


@pytest.mark.parametrize("fault", ["logits of another row", "one sequence id for all", "draft rows swapped"])
def test_mixed_up_batches_show(
    calibrated: ByHand, pair: CalibratedPair, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    logits, add, target = Context.logits, Batch.add, calibrated.runtime.context

    def swapped(self: Context, rows: int) -> Any:
        right = logits(self, rows)
        return right[::-1] if (self is target) == (fault == "logits of another row") else right

    def same_id(self: Batch, tokens: list[int], pos: int, seq: int, **more: Any) -> tuple[int, int]:
        return add(self, tokens, pos, 0, **more)

    if fault == "one sequence id for all":
        monkeypatch.setattr(Batch, "add", same_id)
    else:
        monkeypatch.setattr(Context, "logits", swapped)
        if fault == "draft rows swapped":  # two sequences that draft with the same model at once
            readers = calibrated.run(
                *[request(prompt(calibrated, pair, region), "draft", tokens=40) for region in ("json", "code")]
            )
            accepted = [reader.end.draft_n_accepted for reader in readers]
            assert accepted != [pair.expect(region, "draft", 40).accepted for region in ("json", "code")]
            return
    caught(calibrated, pair)


def test_a_drafter_that_fails_costs_the_drafts_not_the_request(
    calibrated: ByHand, pair: CalibratedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, decode = calibrated.runtime.drafters["draft"].context, Context.decode

    def faulty(self: Context, batch: Batch) -> None:
        if self is broken:
            raise drafters.DecodeError("planted", -3)
        decode(self, batch)

    monkeypatch.setattr(Context, "decode", faulty)
    (reader,) = calibrated.run(request(prompt(calibrated, pair, "code"), "draft", tokens=30))
    assert reader.ids == pair.text_ids("code", 30)
    assert reader.end.report is not None
    assert "planted" in reader.end.report.stopped_drafting


# --- sampling, whichever strategy ran --------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@pytest.mark.parametrize(
    "sampling",
    [
        WARM,
        replace(WARM, top_k=0, top_p=1.0, min_p=0.0),
        replace(WARM, repeat_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
        replace(WARM, dry_multiplier=0.8, dry_allowed_length=1),
        replace(WARM, typical_p=0.7, logit_bias={300: 4.0}),
    ],
    ids=["default", "whole", "penalties", "dry", "typical"],
)
def test_a_seed_gives_one_text(
    calibrated: ByHand, pair: CalibratedPair, strategy: str, sampling: Sampling
) -> None:
    words = prompt(calibrated, pair, "creative")
    plain, guessed = (
        calibrated.run(request(words, s, tokens=60, sampling=sampling))[0] for s in ("plain", strategy)
    )
    assert guessed.ids == plain.ids
    if sampling is WARM:
        (other,) = calibrated.run(request(words, strategy, tokens=60, sampling=replace(sampling, seed=12)))
        assert other.ids != plain.ids


def test_without_a_seed_texts_differ(calibrated: ByHand, pair: CalibratedPair) -> None:
    work = request(prompt(calibrated, pair, "creative"), sampling=Sampling(temperature=1.0), tokens=40)
    one, two = calibrated.run(work, work)
    assert one.ids != two.ids


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_logprobs_are_the_targets_under_speculation(
    calibrated: ByHand, pair: CalibratedPair, strategy: str
) -> None:
    sampling = replace(GREEDY, logprobs=3)
    words = prompt(calibrated, pair, "edit")
    plain, guessed = (
        calibrated.run(request(words, s, tokens=40, sampling=sampling))[0] for s in ("plain", strategy)
    )
    one, two = (
        [lp for event in reader.events if isinstance(event, TokenEvent) for lp in event.logprobs]
        for reader in (plain, guessed)
    )
    assert [lp.token for lp in two] == pair.text_ids("edit", 40)
    for a, b in zip(one, two, strict=True):
        assert b.logprob == pytest.approx(a.logprob, abs=1e-3)
        assert b.top[0][0] == b.token
        assert len(b.top) == 3
        assert b.top[0][2] == pytest.approx(b.logprob)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_grammar_holds_and_ends_the_text(calibrated: ByHand, pair: CalibratedPair, strategy: str) -> None:
    grammar = 'root ::= "[" item ("," item)* "]"\nitem ::= [a-c] [0-9]{3}'
    sampling = replace(WARM, grammar=grammar)
    words = prompt(calibrated, pair, "prose")
    (reader,) = calibrated.run(request(words, strategy, tokens=150, sampling=sampling))
    if reader.end.reason == "stop":
        assert re.fullmatch(r"\[[a-c]\d{3}(,[a-c]\d{3})*\]", reader.text)
    else:
        assert re.match(r"\[([a-c]\d{3},)*", reader.text)
    (plain,) = calibrated.run(request(words, "plain", tokens=150, sampling=sampling))
    assert reader.ids == plain.ids


@pytest.mark.parametrize("strategy", ["plain", "mtp", "ngram"])
def test_a_grammar_that_allows_the_text_changes_nothing(
    calibrated: ByHand, pair: CalibratedPair, strategy: str
) -> None:
    sampling = replace(GREEDY, grammar='root ::= (" edit" [0-9]+)+')
    (reader,) = calibrated.run(
        request(prompt(calibrated, pair, "edit"), strategy, tokens=50, sampling=sampling)
    )
    assert reader.ids == pair.text_ids("edit", 50)
    expected = {"plain": 0, "mtp": pair.expect("edit", "mtp", 50).accepted}
    assert reader.end.draft_n_accepted == expected.get(strategy, reader.end.draft_n_accepted)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stop_strings_end_the_text_before_them(calibrated: ByHand, pair: CalibratedPair, strategy: str) -> None:
    whole = pair.text("code", 40)
    words = whole.split()
    stop = f"{words[7][-2:]} {words[8]}"
    sampling = replace(GREEDY, stop=("never said", stop))
    (reader,) = calibrated.run(
        request(prompt(calibrated, pair, "code"), strategy, tokens=40, sampling=sampling)
    )
    assert reader.text == whole[: whole.index(stop)]
    assert (reader.end.reason, reader.end.stop_text) == ("stop", stop)
    assert reader.end.predicted_n == 9
    for event in reader.events[:-1]:
        assert isinstance(event, TokenEvent)
        assert not event.text.endswith(stop[0] * 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stop_tokens_and_ignored_end_tokens(calibrated: ByHand, pair: CalibratedPair, strategy: str) -> None:
    ids = pair.text_ids("json", 30)
    sampling = replace(GREEDY, stop_tokens=(ids[20],))
    words = prompt(calibrated, pair, "json")
    (reader,) = calibrated.run(request(words, strategy, tokens=30, sampling=sampling))
    assert (reader.ids, reader.end.reason) == (ids[:20], "stop")
    end = calibrated.vocabulary.eos
    wants_end = replace(GREEDY, logit_bias={end: 1000.0})
    (ended,) = calibrated.run(request(words, strategy, tokens=30, sampling=wants_end))
    assert (ended.ids, ended.end.reason, ended.end.predicted_n) == ([], "stop", 1)
    (ignored,) = calibrated.run(
        request(words, strategy, tokens=30, sampling=replace(wants_end, ignore_eos=True))
    )
    assert ignored.ids == ids


def test_a_grammar_at_a_dead_end_ends_its_own_request_only(calibrated: ByHand, pair: CalibratedPair) -> None:
    cut = replace(
        GREEDY, grammar='root ::= "a" [\\U0010FFFF]', logit_bias=dict.fromkeys(range(3, 259), -np.inf)
    )
    words = prompt(calibrated, pair, "json")
    other = calibrated.submit(request(words, "mtp", tokens=30))
    stuck = calibrated.submit(request(words, "mtp", tokens=30, sampling=cut))
    calibrated.finish()
    with pytest.raises(SpecproxyError, match="grammar"):
        _ = stuck.end
    assert other.ids == pair.text_ids("json", 30)
    (after,) = calibrated.run(request(words, "mtp", tokens=30))
    assert after.ids == pair.text_ids("json", 30)


# --- limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_end_of_the_context_is_a_length(pair: CalibratedPair, strategy: str) -> None:
    engine = ByHand(pair.target, pair.draft, context=64, parallel=2)
    words = prompt(engine, pair, "json")
    (reader,) = engine.run(request(words, strategy, tokens=None))
    assert reader.end.reason == "length"
    assert len(words) + reader.end.predicted_n == 64
    assert reader.ids == pair.text_ids("json", 64 - len(words))
    engine.close()


def test_a_prompt_that_does_not_fit_is_refused(calibrated: ByHand) -> None:
    for count, refused in ((512, True), (511, False)):
        (reader,) = calibrated.run(request([5] * count, tokens=1))
        if refused:
            with pytest.raises(RequestError, match=r"request \(512 tokens\) exceeds .* \(512 tokens\)") as info:
                _ = reader.end
            assert (info.value.code, info.value.status) == ("exceed_context_size_error", 400)
        else:
            assert reader.end.predicted_n == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request([]), "empty"),
        (request([5, 10**6]), "not in the vocabulary"),
        (request([5], sampling=replace(GREEDY, grammar="root ::= (")), "grammar"),
        (request([5], sampling=replace(GREEDY, grammar="nothing here")), "grammar"),
        (request([5], sampling=replace(GREEDY, grammar="root ::= root")), "grammar"),
        (request([5], sampling=replace(GREEDY, logit_bias={10**6: 1.0})), "logit_bias"),
        (request([5], "eagle3"), "eagle3"),
    ],
)
def test_bad_requests_are_refused_and_harm_nobody(
    calibrated: ByHand, pair: CalibratedPair, bad: Any, message: str
) -> None:
    running = calibrated.submit(request(prompt(calibrated, pair, "json"), "mtp", tokens=20))
    calibrated.scheduler.step()
    reader = calibrated.submit(bad)
    with pytest.raises(RequestError, match=message):
        _ = reader.end
    calibrated.finish()
    assert running.ids == pair.text_ids("json", 20)


def test_no_tokens_wanted_processes_the_prompt(calibrated: ByHand, pair: CalibratedPair) -> None:
    words = prompt(calibrated, pair, "json")
    (reader,) = calibrated.run(request(words, "mtp", tokens=0))
    assert (reader.end.reason, reader.end.predicted_n, reader.ids) == ("length", 0, [])
    (after,) = calibrated.run(request(words, "mtp", tokens=30))
    assert after.end.prompt_n <= 2
    assert after.ids == pair.text_ids("json", 30)


# --- cancellation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("phase", ["waiting", "in the prompt", "first token", "decoding"])
def test_cancelling_frees_the_sequence_at_once(pair: CalibratedPair, strategy: str, phase: str) -> None:
    engine = ByHand(pair.target, pair.draft, parallel=2, batch=16, prefill_share=8)
    other = engine.submit(request(prompt(engine, pair, "code"), "draft", tokens=40))
    words = engine.tokenize("the " * 50 + pair.marker("json"))
    if phase == "waiting":
        engine.submit(request(prompt(engine, pair, "edit"), "ngram", tokens=40))
    victim = engine.submit(request(words, strategy, tokens=100))
    steps = {"waiting": 1, "in the prompt": 3}.get(phase)
    if steps:
        for _ in range(steps):
            engine.scheduler.step()
    else:
        while not victim.events or (phase == "decoding" and len(victim.ids) < 8):
            engine.scheduler.step()
    engine.scheduler.cancel(victim)
    said = len(victim.events)
    again = engine.submit(request(words, strategy, tokens=30))
    engine.finish()
    assert len(victim.events) == said
    assert other.ids == pair.text_ids("code", 40)
    assert again.ids == pair.text_ids("json", 30)
    if phase == "decoding":
        assert again.end.cached_n >= len(words) - 2, "what was processed is not lost"
    engine.close()


# --- recurrent targets ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a convolution state beside its KV cache, in which every token depends on all before it."""
    return write_random(tmp_path_factory.mktemp("hybrid") / "target.gguf", arch="lfm2")


@pytest.mark.parametrize("strategy", ["plain", "ngram", "draft", "ngram+draft"])
def test_a_hybrid_model_rolls_back_its_state(hybrid: Path, noisy: tuple[Path, Path], strategy: str) -> None:
    engine = ByHand(hybrid, noisy[0])  # a draft of another kind: nearly everything is rejected
    texts = [engine.tokenize("".join(f" w{(k + 3) * i % 11}" for i in range(40))) for k in range(3)]
    readers = engine.run(*[request(text, strategy, tokens=30) for text in texts])
    for text, reader in zip(texts, readers, strict=True):
        assert reader.ids == reference(hybrid, text, 30)
    if "draft" in strategy:
        assert all(reader.end.draft_n_accepted < reader.end.draft_n for reader in readers)
    again = [*texts[0], *readers[0].ids, 300]
    (second,) = engine.run(request(again, strategy, tokens=20))
    assert second.ids == reference(hybrid, again, 20)
    (repeated,) = engine.run(request(texts[1], strategy, tokens=20))
    assert repeated.ids == readers[1].ids[:20]
    engine.close()


@pytest.mark.parametrize("back", [1, 2, 4])
def test_a_hybrid_models_state_is_not_gone_on_from_where_another_prompt_parts(
    hybrid: Path, noisy: tuple[Path, Path], back: int
) -> None:
    """llama.cpp goes back as many positions as asked, but to a state that an earlier decode left there."""
    engine = ByHand(hybrid, noisy[0])
    words = engine.tokenize("".join(f" w{3 * i % 11}" for i in range(40)))
    (first,) = engine.run(request(words, tokens=20))
    held = [*words, *first.ids[:-1]]
    for parted in ([*held[:-back], 300, 301, 302], [*held[:-back]]):
        (second,) = engine.run(request(parted, tokens=20))
        assert second.ids == reference(hybrid, parted, 20)
    engine.close()


def test_a_hybrid_draft_is_refused_by_name(hybrid: Path, noisy: tuple[Path, Path]) -> None:
    engine = ByHand(noisy[0], hybrid)
    assert "recurrent" in engine.runtime.refused["draft"]
    with pytest.raises(RequestError, match="recurrent"):
        _ = engine.run(request([5], "draft"))[0].end
    engine.close()


def test_a_rollback_that_llama_cpp_does_not_support_is_refused(
    hybrid: Path, noisy: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "ContextParams", lambda **options: ContextParams(**options | {"states": 0}))
    engine = ByHand(hybrid, noisy[0])
    assert set(engine.runtime.refused) == {"ngram", "draft", "mtp", "auto"}
    words = engine.tokenize(" w1 w2 w3")
    (reader,) = engine.run(request(words, tokens=20))
    assert reader.ids == reference(hybrid, words, 20)
    for strategy in ("ngram", "auto"):
        with pytest.raises(RequestError, match="recurrent state"):
            _ = engine.run(request(words, strategy))[0].end
    engine.close()


@pytest.mark.parametrize("batch", [1, 7, 33, 512])
def test_text_does_not_depend_on_the_size_of_batches(noisy: tuple[Path, Path], batch: int) -> None:
    """A prompt in pieces, caught up with in pieces, is the same prompt."""
    engine = ByHand(*noisy, batch=batch, prefill_share=batch)
    texts = [engine.tokenize("".join(f" w{factor * i % 89}" for i in range(40))) for factor in (3, 5)]
    readers = engine.run(request(texts[0], "draft", tokens=20), request(texts[1], "ngram+draft", tokens=20))
    for text, reader in zip(texts, readers, strict=True):
        assert reader.ids == reference(noisy[0], text, 20)
    engine.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_cancelling_a_sequence_that_waits_for_its_reader(
    calibrated: ByHand, pair: CalibratedPair, strategy: str
) -> None:
    """It takes no part in steps, and is gone all the same."""
    words = prompt(calibrated, pair, "json")
    victim = calibrated.submit(request(words, strategy, tokens=100))
    while len(victim.ids) < 5:
        calibrated.scheduler.step()
    victim.full = True
    said = len(victim.events)
    assert not calibrated.scheduler.step(), "nobody else is there"
    calibrated.scheduler.cancel(victim)
    assert calibrated.scheduler.idle
    (again,) = calibrated.run(request(words, strategy, tokens=30))
    assert len(victim.events) == said
    assert again.ids == pair.text_ids("json", 30)
