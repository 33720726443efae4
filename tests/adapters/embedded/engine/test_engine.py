"""The engine behind its thread: streams, cancellation, loading and unloading, errors."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import psutil
import pytest

from tests.support.calibrated import CalibratedPair, write_pair
from tests.support.embedded import GREEDY, request
from tests.support.loop_watch import watched_loop

# isort: split
from specproxy.adapters.embedded.batch import Batch
from specproxy.adapters.embedded.courier import QUEUE
from specproxy.adapters.embedded.engine import LlamaEngine
from specproxy.adapters.embedded.llama import Context, DecodeError
from specproxy.adapters.embedded.options import EngineOptions
from specproxy.adapters.embedded.types import Finished, GenerateRequest, TokenEvent
from specproxy.errors import BackendError, ConfigError, ModelFileError, PairError, RequestError
from specproxy.records import Strategy

pytestmark = pytest.mark.embedded


def options(pair: CalibratedPair) -> EngineOptions:
    return EngineOptions(model=pair.target, draft=pair.draft, context=512, threads=1)


@pytest.fixture
async def engine(pair: CalibratedPair) -> AsyncIterator[LlamaEngine]:
    """A started engine."""
    engine = LlamaEngine(options(pair))
    await engine.start()
    yield engine
    await engine.aclose()


async def collect(engine: LlamaEngine, work: GenerateRequest) -> tuple[list[int], Finished]:
    ids: list[int] = []
    async for event in engine.generate(work):
        if isinstance(event, Finished):
            return ids, event
        ids += event.tokens
    raise AssertionError("no end")


def prompt(engine: LlamaEngine, pair: CalibratedPair, region: str) -> list[int]:
    return engine.tokenize("please " + pair.marker(region))


async def test_requests_run_side_by_side(engine: LlamaEngine, pair: CalibratedPair) -> None:
    kinds = [("json", "mtp"), ("code", "draft"), ("edit", "ngram+mtp"), ("prose", "plain"), ("json", "auto")]
    results = await asyncio.gather(
        *(collect(engine, request(prompt(engine, pair, region), s, tokens=50)) for region, s in kinds)
    )
    for (region, _), (ids, end) in zip(kinds, results, strict=True):
        assert ids == pair.text_ids(region, 50)
        assert end.prompt_ms > 0
        assert end.predicted_ms > 0


async def test_card_says_what_can_run(engine: LlamaEngine, pair: CalibratedPair) -> None:
    card = engine.card
    assert [s.name for s in card.strategies] == [
        "plain",
        "ngram",
        "draft",
        "mtp",
        "ngram+draft",
        "ngram+mtp",
        "auto",
    ]
    assert (card.name, card.architecture, card.quantisation) == ("target", "glm4moe", "F16")
    assert (card.context, card.vocab, card.eos) == (512, len(pair.vocabulary), 2)
    assert card.size_bytes > 1_000_000
    assert set(card.memory) == {"weights", "kv", "states", "mtp", "draft"}
    assert card.memory["kv"] == 2 * 2 * 64 * 3 * 512 * 4  # K and V, F16, one head, blocks, tokens, sequences
    assert card.chat_template


async def test_tokens_and_back(engine: LlamaEngine) -> None:
    for text in ("ascii", "grüße🌍<|json:1|>", "", "a\x00\n"):
        ids = engine.tokenize(text, add_special=False)
        assert engine.detokenize(ids) == text.encode()
    assert engine.tokenize("a")[0] == engine.card.bos


async def test_closing_a_stream_frees_its_sequence(engine: LlamaEngine, pair: CalibratedPair) -> None:
    words = prompt(engine, pair, "json")
    for _ in range(engine.card.context and 9):  # more often than there are sequences
        async with aclosing(engine.generate(request(words, "mtp", tokens=400))) as stream:
            async for event in stream:
                assert isinstance(event, TokenEvent)
                break
    ids, _ = await asyncio.wait_for(collect(engine, request(words, "draft", tokens=30)), 10)
    assert ids == pair.text_ids("json", 30)


async def test_cancelling_a_task_that_waits_for_its_first_token(
    engine: LlamaEngine, pair: CalibratedPair
) -> None:
    words = prompt(engine, pair, "json")
    tasks = [asyncio.create_task(collect(engine, request(words, "mtp", tokens=400))) for _ in range(8)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    assert all(
        isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*tasks, return_exceptions=True)
    )
    ids, _ = await asyncio.wait_for(collect(engine, request(words, "plain", tokens=10)), 10)
    assert ids == pair.text_ids("json", 10)


async def test_a_slow_reader_holds_up_nobody_and_loses_nothing(
    engine: LlamaEngine, pair: CalibratedPair
) -> None:
    words = prompt(engine, pair, "json")
    tokens = 3 * QUEUE
    async with aclosing(engine.generate(request(words, "plain", tokens=tokens))) as stream:
        first = await anext(stream)
        assert isinstance(first, TokenEvent)
        for _ in range(3):  # meanwhile the slow one has run into its limit
            ids, _ = await collect(engine, request(prompt(engine, pair, "code"), "draft", tokens=200))
            assert ids == pair.text_ids("code", 200)
        got = list(first.tokens)
        async for event in stream:
            if isinstance(event, TokenEvent):
                got += event.tokens
    assert got == pair.text_ids("json", tokens)


async def test_refusals_come_before_the_first_item(engine: LlamaEngine) -> None:
    with pytest.raises(RequestError) as info:
        await collect(engine, request([5] * 600))
    assert info.value.code == "exceed_context_size_error"
    with pytest.raises(RequestError, match="grammar"):
        await collect(engine, request([5], sampling=replace(GREEDY, grammar="root ::= [")))


async def test_unloading_and_loading_again(engine: LlamaEngine, pair: CalibratedPair) -> None:
    words = prompt(engine, pair, "json")
    await engine.unload()
    assert not engine.loaded
    assert engine.tokenize("still works")
    ids, end = await collect(engine, request(words, "mtp", tokens=20))
    assert ids == pair.text_ids("json", 20)
    assert end.load_ms > 0
    assert (await collect(engine, request(words, "mtp", tokens=20)))[1].load_ms == 0


async def test_unloading_waits_for_running_requests(engine: LlamaEngine, pair: CalibratedPair) -> None:
    words = prompt(engine, pair, "json")
    async with aclosing(engine.generate(request(words, "plain", tokens=100))) as stream:
        got = list((await anext(stream)).tokens)  # type: ignore[union-attr]  # a token event comes first
        await engine.unload()
        async for event in stream:
            if isinstance(event, TokenEvent):
                got += event.tokens
    assert got == pair.text_ids("json", 100)


async def test_idle_engine_unloads(pair: CalibratedPair) -> None:
    engine = LlamaEngine(replace(options(pair), idle_unload_s=0.05))
    await engine.start()
    await collect(engine, request(prompt(engine, pair, "json"), tokens=2))
    async with asyncio.timeout(10):
        while engine.loaded:  # noqa: ASYNC110  # nothing tells of it, since nobody waits for it
            await asyncio.sleep(0.01)
    ids, _ = await collect(engine, request(prompt(engine, pair, "json"), tokens=10))
    assert ids == pair.text_ids("json", 10)
    await engine.aclose()


async def test_closing_ends_requests_with_an_error(pair: CalibratedPair) -> None:
    engine = LlamaEngine(options(pair))
    await engine.start()
    stream = engine.generate(request(prompt(engine, pair, "json"), "mtp", tokens=450))
    await anext(stream)
    await engine.aclose()
    last: Exception | None = None
    while last is None:
        try:
            await anext(stream)
        except BackendError as error:
            last = error
    assert "shutting down" in str(last)
    await engine.aclose()
    with pytest.raises(BackendError, match="not running"):
        await collect(engine, request([5]))
    assert not any(thread.name.startswith("specproxy ") for thread in threading.enumerate())


async def test_embeddings_tell_texts_apart(engine: LlamaEngine, pair: CalibratedPair) -> None:
    def ask(text: str) -> GenerateRequest:
        return request(engine.tokenize(text), tokens=0, want_embedding=True)

    vectors = [(await collect(engine, ask(t)))[1] for t in ("the city", "the city", "a number " * 20)]
    assert vectors[0].embedding == vectors[1].embedding != vectors[2].embedding
    assert sum(x * x for x in vectors[2].embedding) == pytest.approx(1)
    assert len(vectors[0].embedding) == engine.card.embedding
    for bad in ([5] * 600, []):
        with pytest.raises(RequestError):
            await collect(engine, request(bad, tokens=0, want_embedding=True))
    ids, _ = await collect(engine, request(prompt(engine, pair, "json"), "mtp", tokens=20))
    assert ids == pair.text_ids("json", 20)


async def test_the_event_loop_stays_free(engine: LlamaEngine, pair: CalibratedPair) -> None:
    words = prompt(engine, pair, "json")
    async with watched_loop() as longest:
        await asyncio.gather(
            *(collect(engine, request(words, s, tokens=60)) for s in ("mtp", "draft", "ngram"))
        )
    assert longest.seconds < 0.02


@pytest.mark.timeout(60)
async def test_memory_does_not_grow(engine: LlamaEngine, pair: CalibratedPair) -> None:
    words = prompt(engine, pair, "edit")
    work = [
        request(words, "ngram+mtp", tokens=30, sampling=replace(GREEDY, temperature=1.0, grammar=grammar))
        for grammar in (None, 'root ::= (" edit" [0-9]+)+')
    ]
    work.append(request(words, "draft", tokens=30, sampling=replace(GREEDY, repeat_penalty=1.2, logprobs=2)))

    async def rounds(count: int) -> int:
        for _ in range(count):
            await asyncio.gather(*(collect(engine, each) for each in work))
            async with aclosing(engine.generate(work[0])) as stream:
                await anext(stream)
        gc.collect()
        return int(psutil.Process().memory_info().rss)

    before = await rounds(8)
    after = await rounds(25)
    assert after - before < 4_000_000


@pytest.mark.parametrize("error", [DecodeError("planted", -3), RuntimeError("planted")])
async def test_a_failed_decode_ends_all_requests_and_the_next_one_works(
    engine: LlamaEngine, pair: CalibratedPair, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    words = prompt(engine, pair, "json")
    work = [asyncio.create_task(collect(engine, request(words, s, tokens=400))) for s in ("mtp", "plain")]
    async with aclosing(engine.generate(request(words, "plain", tokens=3))) as stream:
        await anext(stream)

    def faulty(self: Context, batch: Batch) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Context, "decode", faulty)
        results = await asyncio.gather(*work, return_exceptions=True)
    assert all(isinstance(r, BackendError) and "planted" in str(r) for r in results)
    ids, _ = await collect(engine, request(words, "mtp", tokens=30))
    assert ids == pair.text_ids("json", 30)


async def test_a_decode_that_hangs_shows_from_outside(
    engine: LlamaEngine, pair: CalibratedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, began, go_on = Context.decode, threading.Event(), threading.Event()

    def hanging(self: Context, batch: Batch) -> None:
        began.set()
        go_on.wait(10)
        decode(self, batch)

    assert engine.step_s == 0
    monkeypatch.setattr(Context, "decode", hanging)
    work = asyncio.create_task(collect(engine, request(prompt(engine, pair, "json"), tokens=2)))
    assert await asyncio.to_thread(began.wait, 10)
    first = engine.step_s
    assert 0 < first < engine.step_s < 10
    go_on.set()
    await work
    await engine.unload()  # the thread has come to the end of its last step
    assert engine.step_s == 0


# --- bad input ---------------------------------------------------------------------------------------------


async def fails(options: EngineOptions, kind: type[Exception], message: str) -> None:
    engine = LlamaEngine(options)
    with pytest.raises(kind, match=message):
        await engine.start()
    await engine.aclose()


async def test_files_that_cannot_be_loaded(pair: CalibratedPair, tmp_path: Path) -> None:
    no_model = tmp_path / "text.gguf"
    no_model.write_text("hello")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(pair.target.read_bytes()[:-100_000])
    alien = tmp_path / "alien.gguf"
    alien.write_bytes(pair.target.read_bytes().replace(b"glm4moe", b"glm4mox"))
    for path, message in (
        (tmp_path / "missing.gguf", "missing"),
        (no_model, "text.gguf"),
        (cut, "cut.gguf"),
        (alien, "glm4mox"),
    ):
        await fails(replace(options(pair), model=path, draft=None), ModelFileError, message)


async def test_pairs_and_options_that_do_not_fit(pair: CalibratedPair, tmp_path: Path) -> None:
    other = write_pair(tmp_path, regions=pair.regions[:2])
    await fails(replace(options(pair), draft=other.draft), PairError, "vocabulary")
    await fails(replace(options(pair), type_k="q9_9"), ConfigError, "q9_9")
    await fails(replace(options(pair), context=10**9), ModelFileError, r"needs \d+ MiB, and \d+ MiB are free")


async def test_a_model_without_a_head_refuses_mtp_by_name(pair: CalibratedPair) -> None:
    engine = LlamaEngine(replace(options(pair), model=pair.draft, draft=None))
    await engine.start()
    assert Strategy(("mtp",)) not in engine.card.strategies
    assert "head" in engine.card.refused["mtp"]
    with pytest.raises(RequestError, match=r"'mtp' cannot run on this model: .* head"):
        await collect(engine, request([5], "mtp"))
    await engine.aclose()


async def test_a_drafter_that_is_no_model_is_refused_by_name(pair: CalibratedPair, tmp_path: Path) -> None:
    sidecar = tmp_path / "eagle3.gguf"
    writer = gguf.GGUFWriter(sidecar, "eagle3")
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    engine = LlamaEngine(replace(options(pair), draft=sidecar))
    await engine.start()
    assert "draft-eagle3 cannot run in this engine" in engine.card.refused["draft"]
    assert "the target's inner layers" in engine.card.refused["draft"]
    assert "draft" not in engine.card.memory
    ids, _ = await collect(engine, request(prompt(engine, pair, "json"), "mtp", tokens=10))
    assert ids == pair.text_ids("json", 10)
    await engine.aclose()


async def test_without_the_private_calls_there_is_no_mtp(
    pair: CalibratedPair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from specproxy.adapters.embedded import llama

    monkeypatch.setattr(llama, "_nextn", object())
    with caplog.at_level(logging.WARNING):
        engine = LlamaEngine(options(pair))
        await engine.start()
    assert "llama_set_embeddings_nextn" in engine.card.refused["mtp"]
    assert "multi-token prediction" in caplog.text
    ids, _ = await collect(engine, request(prompt(engine, pair, "code"), "draft", tokens=20))
    assert ids == pair.text_ids("code", 20)
    await engine.aclose()
