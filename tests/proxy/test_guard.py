"""Who is let in: tokens, and the Host check against DNS rebinding."""

from __future__ import annotations

import base64
import socket

import pytest

from specproxy.errors import RequestError
from specproxy.proxy.guard import Guard


def status(guard: Guard, **headers: str) -> int:
    """200 where the guard lets these headers pass, else the status it answers with."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    lower = {name.lower(): value for name, value in named.items()}

    class Headers(dict[str, str]):
        def get(self, name: str, default: object = None) -> object:  # type: ignore[override]  # regardless of case
            return lower.get(name.lower(), default)

    try:
        guard.check(Headers())
    except RequestError as error:
        return error.status
    return 200


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8484", "127.0.0.1", "localhost", "LOCALHOST:1", "localhost.", "[::1]:8484", "[::1]",
        "192.168.1.2:80", "app.localhost", "host.docker.internal:8484", socket.gethostname(),
    ],
)  # fmt: skip
def test_hosts_that_are_ours(host: str) -> None:
    """Addresses and names that no stranger can own pass."""
    assert status(Guard(), Host=host) == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8484", "localhost.evil.example", "127.0.0.1.evil.example", "", "a:b:c"],
)
def test_foreign_hosts_are_refused(host: str) -> None:
    """A name that somebody else can point at 127.0.0.1 is refused with 403."""
    assert status(Guard(), Host=host) == 403


def test_no_host_at_all_is_refused() -> None:
    """HTTP/1.0 without Host proves nothing."""
    assert status(Guard()) == 403


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:3000", "http://127.0.0.1", "https://[::1]:8", "http://app.localhost", "app://obsidian.md",
        "vscode-webview://1a2b", "chrome-extension://abc", "tauri://localhost",
    ],
)  # fmt: skip
def test_origins_that_may_call(origin: str) -> None:
    """Pages of this machine, and apps and extensions with a scheme of their own."""
    assert status(Guard(), Host="127.0.0.1", Origin=origin) == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://evil.example:11434", "null", "", "http://", "https:"]
)
def test_foreign_origins_are_refused(origin: str) -> None:
    """A page of another site must not make the model work, or pull and delete models."""
    assert status(Guard(), Host="127.0.0.1", Origin=origin) == 403


def test_configured_origins_may_call() -> None:
    """An origin in the settings passes, its neighbours don't; * lets all pass."""
    guard = Guard(origins=["https://Chat.example/"])
    assert status(guard, Host="localhost", Origin="https://chat.example") == 200
    assert status(guard, Host="localhost", Origin="https://chat.example.org") == 403
    assert status(Guard(origins=["*"]), Host="localhost", Origin="https://x.example") == 200


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"any:{password}".encode()).decode()


@pytest.mark.parametrize(
    "headers",
    [{"X_Specproxy_Token": "s3cret"}, {"Authorization": "Bearer s3cret"}, {"Authorization": basic("s3cret")}],
)
def test_the_token_is_taken_in_three_ways(headers: dict[str, str]) -> None:
    """Own header, bearer and basic; then Host does not matter."""
    assert status(Guard("s3cret"), Host="anything.example", **headers) == 200


@pytest.mark.parametrize("headers", [{"X_Specproxy_Token": "s3cret"}, {"Authorization": "Bearer s3cret"}])
def test_a_page_that_knows_the_token_may_call(headers: dict[str, str]) -> None:
    """It had to be told; no browser adds these headers by itself."""
    assert status(Guard("s3cret"), Host="anything.example", Origin="https://x.example", **headers) == 200


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("https://evil.example", 403),
        ("null", 403),
        ("", 403),
        ("http://proxy.example", 403),  # another port is another site
        ("http://proxy.example:8484", 200),
        ("http://Proxy.example:8484", 200),
        ("http://127.0.0.1:3000", 200),
        ("https://chat.example", 200),
    ],
)
def test_a_password_that_the_browser_adds_is_no_permission(origin: str, expected: int) -> None:
    """It comes with requests of foreign pages too, so only our own page and those that are allowed may call."""
    guard = Guard("s3cret", origins=["https://chat.example"])
    given = {"Host": "proxy.example:8484", "Authorization": basic("s3cret"), "Origin": origin}
    assert status(guard, **given) == expected
    assert status(guard, **given, X_Specproxy_Token="s3cret") == 200


def test_an_origin_without_host_is_not_our_own() -> None:
    """Nothing equals nothing only by accident."""
    assert status(Guard("s3cret"), Authorization=basic("s3cret"), Origin="null") == 403


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"X_Specproxy_Token": "s3cre"},
        {"X_Specproxy_Token": ""},
        {"Authorization": "Bearer s3cretx"},
        {"Authorization": "s3cret"},
        {"Authorization": "Basic !!!"},
        {"Authorization": basic("other")},
        {"Authorization": "Bearer \udcff"},
    ],
)
def test_anything_else_is_401(headers: dict[str, str]) -> None:
    """Missing, wrong and malformed tokens are refused, on loopback too."""
    assert status(Guard("s3cret"), Host="127.0.0.1", **headers) == 401


@pytest.mark.parametrize("origin", ["https://[", "http://[::1", "//", "http://a]b"])
def test_an_origin_that_is_no_url_is_foreign(origin: str) -> None:
    """403 as for any other stranger, not an error of ours."""
    assert status(Guard(), Host="localhost", Origin=origin) == 403
