"""The conformance run tells a change on the way from what no two runs have in common."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.conformance_cases import curl_cases, ollama_cases, openai_cases
from benchmarks.conformance_compare import Reply, compare, parse
from benchmarks.conformance_fake import fake_ollama

BODY = b'{"id":"chatcmpl-1","created":5,"text":"red","timings":{"predicted_ms":1.5}}'
HEADERS = (("Content-Type", "application/json"), ("Content-Length", str(len(BODY))))
REPLY = Reply(200, HEADERS, parse(BODY, "application/json"), BODY)


def changed(**fields: object) -> Reply:
    """The reply with other fields in its body."""
    return replace(REPLY, body={**REPLY.body, **fields}, raw=b"other bytes")


def test_equal_bytes_are_identical_whatever_the_proxy_adds() -> None:
    added = (*HEADERS, ("X-Specproxy-Lane", "plain"), ("Server-Timing", "specproxy;dur=1"))
    assert compare(REPLY, replace(REPLY, headers=added)).outcome == "identical"


@pytest.mark.parametrize(
    ("field", "value"),
    [("id", "chatcmpl-2"), ("created", 6), ("timings", {"predicted_ms": 2.5}), ("text", "red")],
)
def test_times_and_drawn_ids_are_explained(field: str, value: object) -> None:
    """The same text in other bytes is none of them."""
    outcome = compare(REPLY, changed(**{field: value})).outcome
    assert outcome == ("different" if field == "text" else "explained")


@pytest.mark.parametrize(
    "other",
    [
        changed(text="blue"),
        changed(extra=1),
        changed(created="6"),
        replace(REPLY, status=502),
        replace(REPLY, headers=HEADERS[::-1]),
        replace(REPLY, headers=(("Content-Type", "text/plain"), HEADERS[1])),
        replace(REPLY, headers=(*HEADERS, ("Via", "1.1 proxy"))),
        Reply(0, body="nothing came"),
    ],
)
def test_everything_else_is_different(other: Reply) -> None:
    verdict = compare(REPLY, other)
    assert (verdict.outcome, bool(verdict.notes)) == ("different", True)


def test_no_reply_is_never_identical() -> None:
    assert compare(Reply(0), Reply(0)).outcome == "different"


def test_a_lost_event_of_a_stream_is_different() -> None:
    stream = b'data: {"n": 1}\n\ndata: {"n": 2}\n\ndata: [DONE]\n\n'
    short = stream.replace(b'data: {"n": 2}\n\n', b"")
    one, other = (Reply(200, (), parse(data, "text/event-stream"), data) for data in (stream, short))
    assert compare(one, other).outcome == "different"


def test_the_fake_ollama_answers_every_case() -> None:
    """Streams and chunks, that is: they differ from themselves by times and ids only, and can be read."""
    cases = [*curl_cases("ollama", "m"), *openai_cases("m"), *ollama_cases("m")]
    assert len(cases) >= 100
    with fake_ollama("m") as url:
        for case in cases:
            if "stream" not in case.name and "chunks" not in case.name:
                continue  # the others are of less use here, and would take seconds
            verdict = compare(case.run(url), case.run(url))
            assert verdict.outcome != "different", (case.name, verdict.notes)
