"""The dialect is told from method and path."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.proxy.dialects import dialect_of
from specproxy.records import Dialect

ROUTES = {
    "/v1/chat/completions": Dialect.OPENAI_CHAT,
    "/chat/completions": Dialect.OPENAI_CHAT,
    "/v1/completions": Dialect.OPENAI_COMPLETIONS,
    "/v1/responses": Dialect.OPENAI_RESPONSES,
    "/responses": Dialect.OPENAI_RESPONSES,
    "/api/chat": Dialect.OLLAMA_CHAT,
    "/api/generate": Dialect.OLLAMA_GENERATE,
    "/v1/messages": Dialect.ANTHROPIC,
    "/completion": Dialect.LLAMACPP,
    "/completions": Dialect.LLAMACPP,
    "/infill": Dialect.LLAMACPP_INFILL,
}


@pytest.mark.parametrize(("path", "dialect"), ROUTES.items())
@pytest.mark.parametrize("prefix", ["", "/api-prefix", "/a/b%2Fc"])
def test_routes_are_known_behind_any_prefix(path: str, dialect: Dialect, prefix: str) -> None:
    """The end of the path decides."""
    assert dialect_of("POST", prefix + path) is dialect


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/api/v0/chat/completions", Dialect.OPENAI_CHAT),
        ("/api/v0/completions", Dialect.OPENAI_COMPLETIONS),
        ("/openai/v1beta1/completions", Dialect.OPENAI_COMPLETIONS),
    ],
)
def test_version_segments_make_it_openai(path: str, dialect: Dialect) -> None:
    """Servers that number their OpenAI routes otherwise still speak OpenAI's dialect."""
    assert dialect_of("POST", path) is dialect


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1/models",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/api/embed",
        "/api/pull",
        "/v1/chat/completions/",
        "/tokenize",
        "/v1/responses/resp_1",
        "completions",
    ],
)
def test_everything_else_is_nobodys(path: str) -> None:
    """What does not generate text has no dialect."""
    assert dialect_of("POST", path) is None


@given(st.sampled_from(sorted(ROUTES)), st.sampled_from(["GET", "HEAD", "OPTIONS", "DELETE", "PUT", "post"]))
def test_only_post_generates(path: str, method: str) -> None:
    """A GET on a generating route is passed on as it is."""
    assert dialect_of(method, path) is None
