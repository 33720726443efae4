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


def test_configured_names_pass() -> None:
    """A name that the operator listens on counts as ours."""
    assert status(Guard(names=frozenset({"gpu.example"})), Host="gpu.example") == 200


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"any:{password}".encode()).decode()


@pytest.mark.parametrize(
    "headers",
    [{"X_Specproxy_Token": "s3cret"}, {"Authorization": "Bearer s3cret"}, {"Authorization": basic("s3cret")}],
)
def test_the_token_is_taken_in_three_ways(headers: dict[str, str]) -> None:
    """Own header, bearer and basic; then Host does not matter."""
    assert status(Guard("s3cret"), Host="anything.example", **headers) == 200


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
