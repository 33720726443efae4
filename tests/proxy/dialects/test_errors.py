"""Errors are answered in the client's dialect."""

from __future__ import annotations

import json

import pytest

from specproxy.errors import LaneUnavailable, RequestError, UpstreamConnectError
from specproxy.proxy.dialects import render_error
from specproxy.records import Dialect

DOWN = UpstreamConnectError("nothing answers at http://127.0.0.1:8080", hint="is it running?")
SAID = "nothing answers at http://127.0.0.1:8080 (is it running?)"


def body(dialect: Dialect | None, path: str, status: int = 502) -> object:
    got, headers, data = render_error(dialect, path, DOWN, status)
    assert got == status
    assert dict(headers)[b"Content-Type"] == b"application/json"
    return json.loads(data)


OPENAI = {"error": {"message": SAID, "type": "server_error", "code": "UpstreamConnectError", "param": None}}
OLLAMA = {"error": SAID}
ANTHROPIC = {"type": "error", "error": {"type": "api_error", "message": SAID}}
LLAMACPP = {"error": {"code": 502, "message": SAID, "type": "server_error"}}


@pytest.mark.parametrize(
    ("dialect", "shape"),
    [
        (Dialect.OPENAI_CHAT, OPENAI),
        (Dialect.OPENAI_COMPLETIONS, OPENAI),
        (Dialect.OPENAI_RESPONSES, OPENAI),
        (Dialect.OLLAMA_CHAT, OLLAMA),
        (Dialect.OLLAMA_GENERATE, OLLAMA),
        (Dialect.ANTHROPIC, ANTHROPIC),
        (Dialect.LLAMACPP, LLAMACPP),
        (Dialect.LLAMACPP_INFILL, LLAMACPP),
    ],
)
def test_the_dialect_gives_the_shape(dialect: Dialect, shape: object) -> None:
    """Every dialect has a shape of its own, whatever the path says."""
    assert body(dialect, "/api/whatever") == shape


def test_every_dialect_has_a_shape() -> None:
    """No dialect is forgotten: the message is in every rendering."""
    for dialect in Dialect:
        assert SAID in json.dumps(body(dialect, "/"))


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/api/tags", OLLAMA),
        ("/v1/messages/count_tokens", ANTHROPIC),
        ("/v1/models", OPENAI),
        ("/", OPENAI),
    ],
)
def test_the_path_decides_where_there_is_no_dialect(path: str, shape: object) -> None:
    """Routes that generate nothing are answered as their server would answer."""
    assert body(None, path) == shape


def test_request_errors_carry_their_code() -> None:
    """What the client did wrong is named."""
    error = RequestError("no strategy 'warp'", code="unknown_strategy")
    _, _, data = render_error(Dialect.OPENAI_CHAT, "/v1/chat/completions", error, 400)
    assert json.loads(data)["error"]["code"] == "unknown_strategy"
    assert json.loads(data)["error"]["type"] == "invalid_request_error"


def test_only_unavailable_says_when_to_try_again() -> None:
    """A 503 will pass, a 502 may not."""
    for status, expected in ((503, True), (502, False), (400, False)):
        _, headers, _ = render_error(None, "/", LaneUnavailable("all lanes are starting"), status)
        assert (b"Retry-After" in dict(headers)) is expected
