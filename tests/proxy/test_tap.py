"""What the tap reads beside a reply: shapes as the servers send them, errors, truncation, bounded memory.

The llama-server shapes were recorded from build 11549 in the xllamacpp wheel, and `tests.engine.test_tap_live`
holds them against the real one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.proxy.split import EVENT_LIMIT
from specproxy.proxy.tap import ReplyFacts, Tap
from specproxy.records import Dialect, TimingSource

SSE = ((b"Content-Type", b"text/event-stream; charset=utf-8"),)
NDJSON = ((b"Content-Type", b"application/x-ndjson"),)
JSON = ((b"content-type", b"application/json; charset=utf-8"),)

TIMINGS = {
    "cache_n": 59,
    "prompt_n": 2,
    "prompt_ms": 40.0,
    "predicted_n": 4,
    "predicted_ms": 90.0,
    "draft_n": 6,
    "draft_n_accepted": 5,
}


def sse(*objects: object, event: str = "") -> list[bytes]:
    """Events as llama-server writes them; a string is sent as it is."""
    name = f"event: {event}\n" if event else ""
    return [
        f"{name}data: {item if isinstance(item, str) else json.dumps(item, separators=(',', ':'))}\n\n".encode()
        for item in objects
    ]


def typed(*objects: dict[str, Any]) -> list[bytes]:
    """Events that are named after their type."""
    return [chunk for item in objects for chunk in sse(item, event=item["type"])]


def lines(*objects: dict[str, Any]) -> list[bytes]:
    return [json.dumps(item, separators=(",", ":")).encode() + b"\n" for item in objects]


def read(
    dialect: Dialect | None,
    chunks: Iterable[bytes],
    headers: tuple[tuple[bytes, bytes], ...] = SSE,
    *,
    status: int = 200,
    started: float | None = 0.0,
    tokens_per_event: float = 1.0,
) -> ReplyFacts:
    """Feed one chunk a second: the first at second 1, the end half a second after the last."""
    tap = Tap(dialect, tokens_per_event=tokens_per_event, started=started)
    tap.head(status, headers, 0.5)
    now = 0.5
    for second, chunk in enumerate(chunks, 1):
        now = float(second)
        tap.feed((chunk,), now)
    return tap.finish(now + 0.5)


def delta(content: str | None, finish: str | None = None, **extra: Any) -> dict[str, Any]:
    """A chunk of an OpenAI chat stream."""
    inner = {} if finish else ({"content": content} if content else {"role": "assistant", "content": None})
    return {
        "choices": [{"finish_reason": finish, "index": 0, "delta": inner}],
        "id": "chatcmpl-1",
        "model": "m",
        "object": "chat.completion.chunk",
        **extra,
    }


SERVER_FIGURES = {
    "prompt_tokens": 61,
    "cached_tokens": 59,
    "output_tokens": 4,
    "prefill_s": 0.04,
    "decode_s": 0.09,
    "draft_tokens": 6,
    "accepted_tokens": 5,
    "source": TimingSource.SERVER,
    "complete": True,
    "error": False,
    "weight": 1.0,
}


def assert_figures(got: ReplyFacts, **expected: Any) -> None:
    for name, value in expected.items():
        assert getattr(got, name) == (pytest.approx(value) if isinstance(value, float) else value), name


# --- llama-server --------------------------------------------------------------------------------


def test_chat_stream_with_timings_in_the_last_chunk() -> None:
    """Without include_usage the chunk with the finish reason has the timings."""
    chunks = sse(delta(None), delta("a"), delta("b"), delta(None, "stop", timings=TIMINGS), "[DONE]")
    assert_figures(read(Dialect.OPENAI_CHAT, chunks), **SERVER_FIGURES, ttft_at=2.0)


def test_chat_stream_with_timings_in_the_usage_chunk() -> None:
    """With include_usage they stand beside the usage, in a chunk without choices."""
    usage = {"completion_tokens": 4, "prompt_tokens": 61, "prompt_tokens_details": {"cached_tokens": 59}}
    last = {"choices": [], "usage": usage, "timings": TIMINGS}
    chunks = sse(delta(None), delta("a"), delta(None, "stop"), last, "[DONE]")
    assert_figures(read(Dialect.OPENAI_CHAT, chunks), **SERVER_FIGURES, ttft_at=2.0)


def test_chat_stream_with_progress_and_timings_in_every_chunk() -> None:
    """Progress on the prompt is no content, and the last timings count."""
    early = {**TIMINGS, "predicted_n": 0, "predicted_ms": 0.0}
    chunks = sse(
        delta(None, timings=early, prompt_progress={"total": 61, "cache": 59, "processed": 60, "time_ms": 1}),
        delta(None),
        delta("a", timings={**TIMINGS, "predicted_n": 1, "predicted_ms": 0.001}),
        delta("b", timings={**TIMINGS, "predicted_n": 2}),
        delta(None, "length", timings=TIMINGS),
        "[DONE]",
    )
    assert_figures(read(Dialect.OPENAI_CHAT, chunks), **SERVER_FIGURES, ttft_at=3.0)


def test_thoughts_and_tool_calls_are_content() -> None:
    """The first token may be a thought or the name of a tool."""
    thought = delta(None)
    thought["choices"][0]["delta"] = {"reasoning_content": "hm"}
    call = delta(None)
    call["choices"][0]["delta"] = {"tool_calls": [{"index": 0, "function": {"name": "look", "arguments": ""}}]}
    for first in (thought, call):
        got = read(Dialect.OPENAI_CHAT, sse(delta(None), first, delta("b"), delta(None, "stop"), "[DONE]"))
        assert got.ttft_at == 2.0


def test_chat_in_one_piece() -> None:
    """The document has the timings at its end."""
    document = {"choices": [{"message": {"content": "ab"}, "finish_reason": "stop"}], "timings": TIMINGS}
    got = read(Dialect.OPENAI_CHAT, [json.dumps(document).encode()], JSON)
    assert_figures(got, **SERVER_FIGURES, ttft_at=None)


def test_native_completion() -> None:
    """/completion ends with an object that has `stop` true; streamed or not it has the timings."""
    last = {"content": "", "stop": True, "generation_settings": {"stop": []}, "timings": TIMINGS}
    chunks = sse({"content": "a", "stop": False}, {"content": "b", "stop": False}, last)
    assert_figures(read(Dialect.LLAMACPP, chunks), **SERVER_FIGURES, ttft_at=1.0)
    assert_figures(read(Dialect.LLAMACPP, [json.dumps(last).encode()], JSON), **SERVER_FIGURES)


def test_a_final_object_that_is_longer_than_the_limit() -> None:
    """/completion repeats the prompt in its last object: its end is enough."""
    last = {
        "content": "",
        "stop": True,
        "prompt": 'say "usage":{} ' * EVENT_LIMIT,
        "timings": TIMINGS,
        "stop_type": "eos",
    }
    first, final = sse({"content": "a", "stop": False}, last)
    pieces = [final[i : i + 7000] for i in range(0, len(final), 7000)]
    assert_figures(read(Dialect.LLAMACPP, [first, *pieces]), **SERVER_FIGURES)


def test_responses_stream() -> None:
    """Timings stand beside `response` in response.completed."""
    response = {"status": "completed", "usage": {"input_tokens": 61, "output_tokens": 4}, "error": None}
    chunks = typed(
        {"type": "response.created", "response": {"status": "in_progress", "error": None}},
        {"type": "response.output_item.added", "item": {"content": []}},
        {"type": "response.output_text.delta", "delta": "a"},
        {"type": "response.output_text.delta", "delta": "b"},
        {"type": "response.output_text.done", "text": "ab"},
        {"type": "response.completed", "response": response, "timings": TIMINGS},
    )
    assert_figures(read(Dialect.OPENAI_RESPONSES, chunks), **SERVER_FIGURES, ttft_at=3.0)


def test_responses_stream_without_timings() -> None:
    """Then usage counts and the clock times, from the first delta to the end."""
    usage = {"input_tokens": 61, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 59}}
    chunks = typed(
        {"type": "response.output_text.delta", "delta": "a"},
        {"type": "response.output_text.delta", "delta": "b"},
        {"type": "response.incomplete", "response": {"usage": usage, "error": None}},
    )
    got = read(Dialect.OPENAI_RESPONSES, chunks)
    assert_figures(
        got, source=TimingSource.USAGE, decode_s=2.0, output_tokens=4, cached_tokens=59, complete=True
    )
    assert 0 < got.weight < 1


def test_messages_stream() -> None:
    """/v1/messages has usage alone: its running totals, and cached tokens counted apart."""
    chunks = typed(
        {
            "type": "message_start",
            "message": {"usage": {"cache_read_input_tokens": 59, "input_tokens": 2, "output_tokens": 0}},
        },
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "b"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 4}},
        {"type": "message_stop"},
    )
    got = read(Dialect.ANTHROPIC, chunks)
    assert_figures(
        got,
        prompt_tokens=61,
        cached_tokens=59,
        output_tokens=4,
        decode_s=3.0,
        prefill_s=None,
        ttft_at=3.0,
        source=TimingSource.USAGE,
        complete=True,
    )


@pytest.mark.parametrize(("prompt", "decode_s"), [(40, 1.5), (4000, None)])
def test_a_reply_in_one_piece_without_timings(prompt: int, decode_s: float | None) -> None:
    """Its duration stands for the decode time only where the prompt was short beside the output."""
    document = {
        "content": [{"type": "text", "text": "ab"}],
        "usage": {"input_tokens": prompt, "output_tokens": 200},
    }
    got = read(Dialect.ANTHROPIC, [json.dumps(document).encode()], JSON)
    assert_figures(got, source=TimingSource.USAGE, decode_s=decode_s, output_tokens=200, complete=True)
    assert got.weight == (0.0 if decode_s is None else 0.2)


def test_nothing_is_claimed_of_a_duration_that_is_unknown() -> None:
    """Without the instant at which the request was sent there is no duration."""
    document = {"usage": {"input_tokens": 4, "output_tokens": 200}}
    assert read(Dialect.ANTHROPIC, [json.dumps(document).encode()], JSON, started=None).decode_s is None


# --- Ollama --------------------------------------------------------------------------------------

OLLAMA_LAST = {
    "model": "m",
    "done": True,
    "done_reason": "stop",
    "total_duration": 5_000_000_000,
    "load_duration": 3_000_000_000,
    "prompt_eval_count": 61,
    "prompt_eval_duration": 40_000_000,
    "eval_count": 4,
    "eval_duration": 90_000_000,
}
OLLAMA_FIGURES = {
    "prompt_tokens": 61,
    "output_tokens": 4,
    "prefill_s": 0.04,
    "decode_s": 0.09,
    "load_s": 3.0,
    "source": TimingSource.SERVER,
    "complete": True,
    "weight": 1.0,
}


def test_ollama_chat_stream() -> None:
    """Lines, the last of which is done and has the durations in nanoseconds."""
    said = [
        {"model": "m", "message": {"role": "assistant", "content": text}, "done": False}
        for text in ("", "a", "b")
    ]
    got = read(
        Dialect.OLLAMA_CHAT,
        lines(*said, {**OLLAMA_LAST, "message": {"role": "assistant", "content": ""}}),
        NDJSON,
    )
    assert_figures(got, **OLLAMA_FIGURES, ttft_at=2.0)


def test_ollama_generate() -> None:
    """The same object alone or as the last line; `context` may be long, the figures stand behind it."""
    last = {"response": "ab", **OLLAMA_LAST}
    assert_figures(read(Dialect.OLLAMA_GENERATE, [json.dumps(last).encode()], JSON), **OLLAMA_FIGURES)
    long = {"response": "ab", "done": True, "context": list(range(30_000)), **OLLAMA_LAST}
    assert_figures(read(Dialect.OLLAMA_GENERATE, [json.dumps(long).encode()], JSON), **OLLAMA_FIGURES)
    assert_figures(read(Dialect.OLLAMA_GENERATE, lines(long), NDJSON), **OLLAMA_FIGURES)


def test_ollama_finding_a_resident_model_is_no_load() -> None:
    """`load_duration` is never zero; a few dozen milliseconds are the look-up of the runner."""
    last = {"response": "ab", **OLLAMA_LAST, "load_duration": 40_000_000}
    assert_figures(read(Dialect.OLLAMA_GENERATE, lines(last), NDJSON), **{**OLLAMA_FIGURES, "load_s": 0.0})


THOUGHT = {"message": {"role": "assistant", "content": "", "thinking": "hm"}, "done": False}
SAID = {"message": {"role": "assistant", "content": "a"}, "done": False}


@pytest.mark.parametrize(
    ("dialect", "kind", "objects", "thought"),
    [
        (Dialect.OLLAMA_CHAT, NDJSON, (THOUGHT, SAID, OLLAMA_LAST), True),
        (Dialect.OLLAMA_CHAT, NDJSON, (SAID, OLLAMA_LAST), False),
        (Dialect.OLLAMA_CHAT, JSON, ({**OLLAMA_LAST, **THOUGHT, "done": True},), True),
        (Dialect.OLLAMA_GENERATE, JSON, ({**OLLAMA_LAST, "response": "a", "thinking": "hm"},), True),
        (Dialect.OLLAMA_GENERATE, JSON, ({**OLLAMA_LAST, "response": "a", "thinking": ""},), False),
        (
            Dialect.OPENAI_CHAT,
            JSON,
            ({"system_fingerprint": "fp_ollama", "choices": [{"message": {"reasoning": "hm"}}]},),
            True,
        ),
        (Dialect.OPENAI_CHAT, JSON, ({"choices": [{"message": {"reasoning": "hm", "content": "a"}}]},), False),
        (Dialect.OPENAI_RESPONSES, JSON, ({"output": [{"id": "rs_resp_12", "type": "reasoning"}]},), True),
        (Dialect.OPENAI_RESPONSES, JSON, ({"output": [{"id": "rs_6a1f" * 9, "type": "reasoning"}]},), False),
        (Dialect.OPENAI_RESPONSES, JSON, ({"output": [{"id": "msg_12", "type": "message"}]},), False),
    ],
)
def test_thoughts_of_an_ollama_are_noticed(
    dialect: Dialect, kind: tuple[tuple[bytes, bytes], ...], objects: tuple[dict[str, Any], ...], thought: bool
) -> None:
    """On its own routes and on OpenAI's; other servers decode once, whatever they think."""
    chunks = [json.dumps(item, separators=(",", ":")).encode() + b"\n" for item in objects]
    assert read(dialect, chunks, kind).thought is thought


@pytest.mark.parametrize(
    ("item", "thought"), [("rs_481516", True), ("rs_0c4fe1a1b2", False), ("msg_42", False)]
)
def test_thoughts_of_an_ollama_in_a_stream_of_responses(item: str, thought: bool) -> None:
    """Its thoughts are numbered with up to six digits; other servers draw longer names."""
    kind = "reasoning_summary_text" if item.startswith("rs_") else "output_text"
    events = typed(
        {"type": "response.created", "response": {"id": "resp_815"}},
        {"type": "response.output_item.added", "item": {"id": item}},
        {"type": f"response.{kind}.delta", "item_id": item, "delta": "hm"},
        {"type": "response.completed", "response": {"usage": {"input_tokens": 1, "output_tokens": 9}}},
    )
    got = read(Dialect.OPENAI_RESPONSES, events)
    assert (got.thought, got.complete, got.output_tokens) == (thought, True, 9)


@pytest.mark.parametrize("kind", ["server_tool_use", "tool_use"])
def test_a_server_that_searched_has_decoded_several_times(kind: str) -> None:
    """Ollama runs web searches itself and asks the model again; a tool of the client's ends the answer."""
    usage = {"input_tokens": 2, "output_tokens": 40}
    block = {"type": kind, "id": "x", "name": "web_search", "input": {"query": "q"}}
    said = [{"type": "content_block_delta", "delta": {"type": "text_delta", "text": "ab"}}] * 9
    events = typed(
        {"type": "message_start", "message": {"usage": usage}},
        {"type": "content_block_start", "content_block": block},
        *said,
        {"type": "message_delta", "delta": {}, "usage": usage},
        {"type": "message_stop"},
    )
    document = {"type": "message", "content": [block, {"type": "text", "text": "ab"}], "usage": usage}
    replies = read(Dialect.ANTHROPIC, events), read(Dialect.ANTHROPIC, [json.dumps(document).encode()], JSON)
    assert [reply.complete for reply in replies] == [True, True]
    assert [reply.weight > 0 for reply in replies] == [kind == "tool_use"] * 2


def test_ollama_error_in_mid_stream() -> None:
    """Status 200 and a line with an error: the reply is no success."""
    got = read(
        Dialect.OLLAMA_CHAT,
        lines({"message": {"content": "a"}, "done": False}, {"error": "runner died"}),
        NDJSON,
    )
    assert_figures(got, error=True, complete=False, weight=0.0)


# --- others, as documented ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_vllm_may_tell_its_times(stream: bool) -> None:
    """With --enable-per-request-metrics, beside the usage; without usage there is nothing to divide by."""
    metrics = {"time_to_first_token_ms": 85.2, "generation_time_ms": 1240.5, "tokens_per_second": 103.2}
    usage = {"prompt_tokens": 42, "completion_tokens": 128, "total_tokens": 170}
    for told in ({"usage": usage, "metrics": metrics}, {"metrics": metrics}):
        if stream:
            got = read(
                Dialect.OPENAI_CHAT, sse(delta("a"), delta("b", "stop"), {"choices": [], **told}, "[DONE]")
            )
        else:
            choices = [{"message": {"content": "ab"}, "finish_reason": "stop"}]
            got = read(Dialect.OPENAI_CHAT, [json.dumps({"choices": choices, **told}).encode()], JSON)
        if "usage" in told:
            assert (got.source, got.weight, got.output_tokens) == (TimingSource.SERVER, 1.0, 128)
            assert (got.decode_s, got.prefill_s) == pytest.approx((1.2405, 0.0852))
        else:
            assert got.source is not TimingSource.SERVER


@pytest.mark.parametrize(
    "place",
    [
        {"stats": {"total_draft_tokens_count": 6, "accepted_draft_tokens_count": 5}},
        {"metrics": {"speculative_decoding": {"num_draft_tokens": 6, "num_accepted_draft_tokens": 5}}},
        {"sglext": {"spec_tokens_details": {"spec_num_proposed_drafts": 6, "spec_num_correct_drafts": 5}}},
    ],
    ids=["lmstudio", "vllm", "sglang"],
)
def test_draft_counts_of_other_servers(place: dict[str, Any]) -> None:
    """Each has its own place for them, in the last chunk; the clock gives the time."""
    last = {"choices": [], "usage": {"prompt_tokens": 61, "completion_tokens": 4}, **place}
    chunks = sse(delta("a"), delta("b"), delta(None, "stop"), last, "[DONE]")
    got = read(Dialect.OPENAI_CHAT, chunks)
    assert_figures(
        got, draft_tokens=6, accepted_tokens=5, output_tokens=4, source=TimingSource.USAGE, decode_s=2.0
    )


def test_lm_studio_counts_in_usage() -> None:
    """The other place that LM Studio has been seen to use."""
    usage = {"completion_tokens": 4, "total_draft_tokens_count": 6, "accepted_draft_tokens_count": 5}
    chunks = sse(delta("a"), delta("b"), delta(None, "stop", usage=usage), "[DONE]")
    assert_figures(read(Dialect.OPENAI_CHAT, chunks), draft_tokens=6, accepted_tokens=5)


def test_spaces_after_colons() -> None:
    """Servers in Python write JSON with spaces."""
    chunks = [
        f"data: {json.dumps(item)}\n\n".encode() for item in (delta("a"), delta("b"), delta(None, "stop"))
    ]
    assert_figures(read(Dialect.OPENAI_CHAT, chunks), complete=True, output_tokens=2, ttft_at=1.0)


# --- without figures, and broken ------------------------------------------------------------------


def test_a_stream_without_usage_is_estimated() -> None:
    """Content events times what a content event is known to hold, at a low weight."""
    chunks = sse(delta(None), delta("a"), delta("b"), delta("c"), delta(None, "stop"), "[DONE]")
    got = read(Dialect.OPENAI_CHAT, chunks, tokens_per_event=1.5)
    assert_figures(got, source=TimingSource.ESTIMATE, output_tokens=4, decode_s=3.0, ttft_at=2.0, complete=True)
    assert 0 < got.weight < 0.5


def test_tokens_that_came_at_once_have_no_decode_time() -> None:
    """A server that held back its text shows few events for many tokens: the clock knows nothing then."""
    chunks = sse(delta("a"), delta("b" * 400), delta(None, "stop", usage={"completion_tokens": 100}), "[DONE]")
    assert_figures(
        read(Dialect.OPENAI_CHAT, chunks), output_tokens=100, decode_s=None, weight=0.0, complete=True
    )


def test_several_answers_teach_nothing() -> None:
    """With n above 1, or a batch of prompts, steps are shared: counts and times do not go together."""
    second = delta(None, "stop", timings=TIMINGS)
    second["choices"][0]["index"] = 1
    streamed = read(
        Dialect.OPENAI_CHAT, sse(delta("a"), delta(None, "stop", timings=TIMINGS), second, "[DONE]")
    )
    document = {"choices": [{"index": 0}, {"index": 1}], "timings": TIMINGS}
    whole = read(Dialect.OPENAI_CHAT, [json.dumps(document).encode()], JSON)
    for got in (streamed, whole):
        assert_figures(got, complete=True, weight=0.0, draft_tokens=6)


def test_one_event_has_no_decode_time() -> None:
    """Between the only content and the end no further token came."""
    got = read(
        Dialect.OPENAI_CHAT, sse(delta("a"), delta(None, "stop", usage={"completion_tokens": 2}), "[DONE]")
    )
    assert_figures(got, output_tokens=2, decode_s=None, weight=0.0, complete=True)


def test_timings_are_not_mixed_with_usage() -> None:
    """A server's decode time goes with its own count, whatever the usage beside it counts."""
    usage = {"completion_tokens": 900, "prompt_tokens": 800}
    chunks = sse(delta("a"), delta(None, "stop", timings=TIMINGS), {"choices": [], "usage": usage}, "[DONE]")
    assert_figures(read(Dialect.OPENAI_CHAT, chunks), **SERVER_FIGURES)


def test_no_more_is_accepted_than_drafted() -> None:
    """Counters that do not fit each other are cut to what is possible."""
    timings = {**TIMINGS, "draft_n": 3, "draft_n_accepted": 7}
    got = read(Dialect.LLAMACPP, sse({"content": "", "stop": True, "timings": timings}))
    assert_figures(got, draft_tokens=3, accepted_tokens=3)


def test_pings_are_nothing() -> None:
    """Comment lines keep a connection alive; they are neither content nor an end."""
    chunks = [b": ping\n\n", *sse(delta("a")), b":\n\n", *sse(delta("b"), delta(None, "stop"), "[DONE]")]
    assert_figures(read(Dialect.OPENAI_CHAT, chunks), ttft_at=2.0, output_tokens=2, complete=True)


def test_text_that_quotes_the_marks() -> None:
    """What the model says cannot end or fail its own reply: quotes inside JSON strings are escaped."""
    said = 'print {"error": 1, "usage": 2, "done": true, "timings": {}, "finish_reason": "stop"}'
    for dialect, chunks in (
        (Dialect.OPENAI_CHAT, sse(delta(said), delta(said))),
        (Dialect.LLAMACPP, sse({"content": said + '"stop":true', "stop": False})),
    ):
        assert_figures(read(dialect, chunks), error=False, complete=False)


@pytest.mark.parametrize(
    ("dialect", "chunks"),
    [
        (Dialect.OPENAI_CHAT, sse(delta("a"), {"error": {"code": 500, "message": "no space in the KV cache"}})),
        (Dialect.OPENAI_CHAT, [*sse(delta("a")), b'error: {"code":500,"message":"old build"}\n\n']),
        (Dialect.ANTHROPIC, typed({"type": "error", "error": {"type": "overloaded_error", "message": "busy"}})),
        (Dialect.OPENAI_RESPONSES, typed({"type": "response.failed", "response": {"error": {"code": "x"}}})),
        (Dialect.OPENAI_RESPONSES, typed({"type": "error", "code": "server_error", "message": "x"})),
        (Dialect.LLAMACPP, sse({"error": {"message": "gone"}})),
    ],
)
def test_errors_in_mid_stream(dialect: Dialect, chunks: list[bytes]) -> None:
    """Every dialect has its way to fail after status 200."""
    assert_figures(read(dialect, chunks), error=True, complete=False, weight=0.0)


def test_error_statuses() -> None:
    """An error status is an error whatever the body says."""
    got = read(Dialect.OPENAI_CHAT, [b'{"error":{"message":"Loading model"}}'], JSON, status=503)
    assert_figures(got, error=True, complete=False, source=TimingSource.NONE)


@pytest.mark.parametrize("dialect", list(Dialect))
def test_a_reply_cut_short_is_not_complete(dialect: Dialect) -> None:
    """The transport may have ended well; the dialect's end did not come."""
    chunks = sse(
        delta("a"), {"type": "content_block_delta", "delta": {"text": "b"}}, {"content": "c", "stop": False}
    )
    assert_figures(read(dialect, chunks), complete=False, weight=0.0)


def test_a_document_cut_short_is_not_complete() -> None:
    """Half of an object is no reply."""
    whole = json.dumps({"choices": [], "timings": TIMINGS}).encode()
    assert_figures(read(Dialect.OPENAI_CHAT, [whole[:-3]], JSON), complete=False, error=False)


@pytest.mark.parametrize("coding", [b"gzip", b"br", b"zstd"])
def test_compressed_replies_give_wall_clock_only(coding: bytes) -> None:
    """They are not unpacked; whether they are complete is left to the transport."""
    got = read(Dialect.OPENAI_CHAT, [b"\x1f\x8b..", b"more"], (*SSE, (b"Content-Encoding", coding)))
    assert got == ReplyFacts(ttft_at=1.0, complete=True)


def test_unknown_routes_give_wall_clock_only() -> None:
    """Nothing is parsed where there is no dialect."""
    assert read(None, [b'{"timings":{}}'], JSON) == ReplyFacts(ttft_at=1.0, complete=True)


def test_a_large_document_takes_bounded_memory() -> None:
    """Of 30 MB with logprobs the end is kept, and the figures are in it."""
    tap = Tap(Dialect.OPENAI_CHAT, started=0.0)
    tap.head(200, JSON, 0.0)
    tap.feed((b'{"choices":[{"logprobs":[',), 0.1)
    for _ in range(500):
        tap.feed((b"-0.25," * 10_000,), 0.2)
        assert len(tap._document._kept) <= 2 * EVENT_LIMIT
    tap.feed((b'0]}],"timings":' + json.dumps(TIMINGS).encode() + b"}",), 0.3)
    assert_figures(tap.finish(0.4), **SERVER_FIGURES)


# --- anything -------------------------------------------------------------------------------------

PIECES = [
    *sse(
        delta("a"),
        delta(None, "stop", timings=TIMINGS),
        "[DONE]",
        {"timings": {"predicted_n": "x", "predicted_ms": []}},
    ),
    *lines(OLLAMA_LAST, {"eval_count": -1, "done": 1}, {"error": {}}),
    b'data: {"usage":{"completion_tokens":1e400}}\n\n',
    b'{"timings":[],"usage":3,"response":{"usage":7},"message":"x"}',
    b'"usage":{"' * 20,
    b"\r\n\r\n",
]


@given(
    st.sampled_from([*Dialect, None]),
    st.sampled_from([SSE, NDJSON, JSON, (), ((b"content-type", b"\xff;;"),)]),
    st.lists(st.one_of(st.sampled_from(PIECES), st.binary(max_size=40)), max_size=12),
    st.sampled_from([200, 204, 404, 500]),
)
def test_never_raises(
    dialect: Dialect | None, headers: tuple[tuple[bytes, bytes], ...], chunks: list[bytes], status: int
) -> None:
    """Any bytes in any dialect give facts within their bounds."""
    got = read(dialect, chunks, headers, status=status)
    assert 0 <= got.weight <= 1
    assert 0 <= got.accepted_tokens <= got.draft_tokens
    assert min(got.output_tokens, got.prompt_tokens, got.cached_tokens) >= 0
    assert got.decode_s is None or got.decode_s >= 0


@given(st.lists(st.integers(0, 10_000), max_size=10), st.booleans())
def test_figures_do_not_depend_on_the_cuts(places: list[int], with_usage: bool) -> None:
    """However the bytes arrive, counts and server times are the same."""
    extra = [{"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens": 61}, "timings": TIMINGS}]
    stream = b"".join(
        sse(delta("a"), delta("b"), delta(None, "stop"), *(extra if with_usage else []), "[DONE]")
    )
    cuts = sorted({min(place, len(stream)) for place in places})
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    got, whole = read(Dialect.OPENAI_CHAT, pieces), read(Dialect.OPENAI_CHAT, [stream])
    for name in ("output_tokens", "prompt_tokens", "draft_tokens", "complete", "error", "source"):
        assert getattr(got, name) == getattr(whole, name)
